"""Plans of real models, against what is published of them and what can be worked out by hand."""

from dataclasses import replace

import jax.numpy as jnp
import pytest
from hub_folder import write_checkpoint
from support import checkpoint

import jaxwafer
from jaxwafer import planner
from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.errors import UserError
from jaxwafer.hardware import figures, read_hardware
from jaxwafer.partition.evaluate import evaluate
from jaxwafer.partition.needs import Layer, Model
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.partition.problem import Problem, Proposal
from jaxwafer.partition.target import needed_bandwidth

LONG = 262_144


@pytest.fixture(scope="module")
def k3() -> Model:
    return planner.open_model("kimi-k3", kv_cache="fp8")


def solve(model: Model, strategy: str, hardware: str = "wse-3t", **fields) -> list:
    problem = Problem(model=model, device=read_hardware(hardware), **({"context": LONG} | fields))
    return list(planner.solve(problem, strategy).plans)


def test_the_articles_arithmetic():
    """3T parameters of 4 bits over 93 layers, of which 24 keep 576 bytes a token, on wafers of 44 GB."""
    size = 1_500_000_000_000 // 93
    full = Layer(kind="full", weights=size, token=576, active=2.0 * size)
    linear = Layer(kind="linear", weights=size, active=2.0 * size)
    layers = tuple(full if n % 4 == 3 or n == 92 else linear for n in range(93))
    (plan,) = solve(Model(name="article", layers=layers, hidden=0), "packed", requests=184)
    assert size / 1e9 == pytest.approx(16.13, abs=0.005) and 44 - size / 1e9 == pytest.approx(27.87, abs=0.005)
    alone = [w for w in plan.wafers if w.kinds == "1 full"]
    assert (plan.partition.wafers, len(alone), plan.requests) == (59, 24, 184)
    assert sum(w.kinds == "2 linear" for w in plan.wafers) == 34
    with pytest.raises(UserError, match=r"with 185 requests of 262144 tokens, but a wafer of 1 x WSE-3T has 44.00 GB"):
        solve(Model(name="article", layers=layers, hidden=0), "packed", requests=185)


def test_what_kimi_k3_weighs(k3):
    assert k3.parameters / 1e12 == pytest.approx(2.779, abs=0.0006)
    dense, linear, full = k3.layers[0], k3.layers[1], k3.layers[3]
    assert [layer.weights / 1e9 for layer in (linear, full, dense)] == pytest.approx([16.99, 16.57, 2.34], abs=0.005)
    assert (full.token, full.state, linear.token) == (576, 0, 0)
    assert linear.state / 1e6 == pytest.approx(6.51, abs=0.005)
    assert (k3.embedding / 1e9, k3.head / 1e9) == pytest.approx((2.35, 2.35), abs=0.005)
    problem = Problem(model=k3, device=read_hardware("wse-3t"), context=LONG)
    assert problem.lower_bound == 36


def test_kimi_k3_two_layers_a_wafer(k3):
    """Contiguous pairs, and full-attention layers alone, contiguous or packed."""
    pairs, alone, *faster = solve(k3, "kv-aware", most_layers=2)
    assert all(p.requests == 181 and p.speed.each > alone.speed.each for p in faster)
    assert (pairs.partition.wafers, pairs.requests, pairs.changes) == (47, 66, 47)
    assert (alone.partition.wafers, alone.requests, alone.changes) == (70, 181, 70)
    (packed,) = solve(k3, "packed", most_layers=2, requests=181)
    assert (packed.partition.wafers, packed.requests, packed.changes) == (59, 181, 70)
    assert packed.capacity.binds == "KV" and packed.capacity.state_limit == 769
    assert packed.capacity.crossover == pytest.approx(62_000, rel=0.005)
    (head,) = solve(k3, "packed", most_layers=2, requests=166, vocabulary="ends")
    assert (head.partition.wafers, head.requests, head.capacity.wafer) == (59, 166, 58)


def test_kimi_k3_takes_one_wafer_less_where_its_small_first_layer_is_a_third(k3):
    packed, contiguous = solve(k3, "packed"), solve(k3, "kv-aware")
    assert [(p.partition.wafers, p.requests) for p in packed] == [(46, 66), (58, 181)]
    assert [(p.partition.wafers, p.requests) for p in contiguous][:3] == [(46, 35), (47, 66), (69, 181)]
    assert max(map(len, packed[1].partition.layers)) == 3


def test_packing_finds_the_most_requests_on_the_wafers_there_are(k3):
    (plan,) = solve(k3, "packed", wafers=59, most_layers=2)
    assert (plan.partition.wafers, plan.requests, plan.changes) == (59, 181, 70)
    (plan,) = solve(k3, "packed", wafers=58, most_layers=2)
    assert plan.partition.wafers == 58 and plan.requests == 66


def test_a_strategy_that_overfills_a_wafer_is_refused(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from jaxwafer.partition.plan import uniform\n"
        "from jaxwafer.partition.problem import Proposal\n"
        "def propose(problem):\n    return [Proposal(partition=uniform(problem.count, 3))]\n"
    )
    with pytest.raises(UserError, match="own.py puts more on wafer 0 of 3 than it holds with 1 requests of 81"):
        planner.plan("llama-3.1-70b", "wse-3", strategy=str(path))


def test_below_the_cross_over_state_binds(k3):
    plan = solve(k3, "packed", most_layers=2, requests=181)[0]
    at, proposal = plan.capacity.crossover, Proposal(partition=plan.partition)
    below, above = (evaluate(replace(plan.problem, context=n), proposal, "").capacity for n in (at - 1, at))
    assert (below.binds, below.requests) == ("state", 769) and above.binds == "KV"


def test_llama_70b_on_four_wafers_of_twenty_layers():
    model = planner.open_model("llama-3.1-70b")
    (plan,) = solve(model, "minmax", "wse-3", context=8192)
    assert [len(layers) for layers in plan.partition.layers] == [20] * 4
    # 1000 tokens/s move every weight but the embedding's a thousand times a second.
    assert needed_bandwidth(plan.problem, 1000) == pytest.approx(140e12, rel=0.02)
    assert plan.speed.bandwidth_roof > 1000
    with pytest.raises(UserError, match=r"nothing reaches 1000 tokens/s: .* bound by memory; .* move 142 TB/s"):
        planner.plan("llama-3.1-70b", "h200", target_tokens_per_second=1000)


def test_llama_405b_does_not_fit_twelve_wafers():
    model = planner.open_model("llama-3.1-405b")
    with pytest.raises(UserError, match="12 wafers hold 528.0 GB, but .* takes 81.* GB .*: at least 19 wafers"):
        solve(model, "minmax", "wse-3", context=8192, wafers=12)
    with pytest.raises(UserError, match="19 wafers are enough for the bytes .* whole layers .* 21 wafers are"):
        solve(model, "minmax", "wse-3", context=8192, wafers=19)


@pytest.mark.parametrize(
    "name, wafers, measured, ratio", [("llama-3.1-8b", 1, 1800.0, 5.0), ("llama-3.1-70b", 4, 450.0, 5.1)]
)
def test_measured_rates_of_2024_are_five_times_the_physical_floor(name, wafers, measured, ratio):
    device = planner.with_figures(read_hardware("wse-3"), ("overhead=1",))
    problem = Problem(model=planner.open_model(name), device=device, context=1)
    share = wafers / problem.count
    proposal = Proposal(partition=uniform(problem.count, wafers), shares=(share,) * problem.count)
    floor = 1 / evaluate(problem, proposal, "floor").speed.estimate
    assert 1 / measured / floor == pytest.approx(ratio, rel=0.05)


@pytest.mark.parametrize("name", ["kimi-k3", "gpt-oss-20b", "qwen3-next-80b-a3b-thinking", "llama-3.1-8b"])
@pytest.mark.parametrize("cores", [1, 2])
def test_the_engines_bytes_are_the_placements(name, cores):
    model = planner.open_model(name, kv_cache="fp8")
    problem = Problem(model=model, device=read_hardware("wse-3t"), context=1000, cores=cores)
    plan = planner.solve(problem, "minmax").best
    placed = place(model.spec, plan.partition, model.formats, cores=cores)
    cache = CacheShape(placement=placed, format=KVFormat(name="fp8"), block=32, blocks=1, dtype=jnp.dtype(jnp.bfloat16))
    own = plan.stored
    assert own.weights == placed.allocated_bytes
    assert own.weights_own == tuple(placed.weight_bytes(w) for w in range(placed.wafers))
    assert 32 * own.token + own.state == cache.allocated_bytes
    needed = sum(w.weights + w.vocabulary for w in plan.wafers)
    assert needed == model.weights <= sum(own.weights_own) <= placed.wafers * own.weights
    assert own.padding == placed.wafers * own.weights - sum(own.weights_own)


def test_what_the_engine_cannot_run_is_planned_and_says_so():
    plan = planner.plan("qwen3-32b-fp8", "h200", strategy="minmax", cores=3).best
    assert plan.requests > 0 and plan.stored is None
    assert plan.refusal.startswith("mlp.down_proj.weight: axis 'mlp' of 25600 over 3 cores gives 8544 inputs a core")


def test_a_checkpoint_is_planned_by_the_formats_that_it_has(tmp_path):
    folder = write_checkpoint(tmp_path / "m", checkpoint())
    model = planner.open_model(folder)
    assert model.weights == 4 * model.parameters == sum(t.nbytes for t in checkpoint().tensors.values())
    assert planner.open_model(folder / "config.json").weights == model.weights


def test_plans_are_the_same_from_python():
    result = jaxwafer.plan("llama-3.1-70b", "wse-3", strategy="minmax,first-fit", requests=4)
    assert result.best in result.plans and result.best.partition.wafers == 4
    with pytest.raises(AttributeError):
        result.best.cores = 3


def test_power_and_price_give_tokens_a_megawatt_and_a_dollar():
    plan = planner.plan("qwen3-8b", "h200", strategy="minmax", figures=("usd_per_hour=3.6", "power_w=1000")).best
    assert plan.tokens_per_s_per_mw == pytest.approx(plan.speed.total * 1000)
    assert plan.usd_per_million_tokens == pytest.approx(3.6 / 3600 / plan.speed.total * 1e6)
    assert planner.plan("qwen3-8b", "tpu7x", strategy="minmax").best.tokens_per_s_per_mw is None


@pytest.mark.parametrize(
    "figure, message",
    [
        ("hop_s", "'hop_s' should be NAME=NUMBER"),
        ("hop_s=fast", "should be NAME=NUMBER"),
        ("speed=3", "there is no figure 'speed'; there are memory_bytes, "),
        ("name=3", "there is no figure 'name'"),
        (
            "flops=1e15",
            r"'flops'; there are memory_bytes, memory_bytes_per_s, flops.bf16, hop_s.*, fabric.cores",
        ),
        ("memory_bytes=-1", "--set memory_bytes=-1: Expected `float`"),
        ("overhead=0.5", "--set overhead=0.5: Expected `float` >= 1.0"),
    ],
)
def test_figures_set_by_hand(figure, message):
    with pytest.raises(UserError, match=message):
        planner.with_figures(read_hardware("wse-3"), (figure,))
    device = planner.with_figures(read_hardware("wse-3"), ("hop_s=28e-6", "flops.bf16=1e15", "fabric.cores=100"))
    assert (device.hardware.hop_s, device.hardware.flops["bf16"], device.hardware.fabric.cores) == (28e-6, 1e15, 100)
    assert device.sources["hop_s"] == "set by hand"


def test_a_target_is_reached_with_fewest_devices():
    """GLM-4.6 moves 69 GB a token: a chip of 7.38 TB/s gives 107 tokens/s of them, and four chips hold it."""
    plan = planner.plan("glm-4.6", "tpu7x", target_tokens_per_second=100).best
    assert plan.devices == 4 and plan.speed.estimate >= 100
    faster = planner.plan("glm-4.6", "tpu7x", target_tokens_per_second=300).best
    assert faster.speed.estimate >= 300 and faster.cores > plan.cores


def test_targets_that_cannot_be(k3):
    problem = Problem(model=k3, device=read_hardware("wse-3t"), context=LONG, wafers=59)
    with pytest.raises(UserError, match="do not give --wafers or --cores"):
        planner.solve(problem, "minmax", 100)
    with pytest.raises(UserError, match="must be a positive number, not -1"):
        planner.plan("qwen3-8b", "h200", target_tokens_per_second=-1)


def test_this_machine_is_measured(monkeypatch):
    monkeypatch.setattr(planner, "read_ceiling", lambda mesh: 2e10)
    monkeypatch.setattr(planner, "compute_ceiling", lambda mesh, dtype: 5e10)
    monkeypatch.setattr(planner, "tick_latency", lambda mesh, **_: 3e-6)
    plan = planner.plan("smollm2-135m", strategy="minmax", weights="native").best
    device = plan.problem.device
    assert (device.hardware.memory_bytes_per_s, device.hardware.hop_s) == (2e10, 3e-6)
    assert plan.speed.bandwidth_roof == pytest.approx(1 / needed_bandwidth(plan.problem, 1 / 2e10))
    assert set(figures(device.hardware)) == set(device.sources)
    assert all(s.startswith("measured on cpu on 20") for s in device.sources.values())
