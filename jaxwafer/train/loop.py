"""The training of the bundled checkpoint: its config, curriculum, optimiser and step."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxwafer.model import spec_from_config
from jaxwafer.model.mlp import MoE
from jaxwafer.model.spec import ModelSpec
from jaxwafer.train import tasks
from jaxwafer.train.model import CHUNK, KimiLinear
from jaxwafer.train.muon import optimizer
from jaxwafer.train.quantize import rounded
from jaxwafer.train.tasks import Batch

CONFIG = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": len(tasks.VOCABULARY),
    "hidden_size": 96,
    "num_hidden_layers": 8,
    "intermediate_size": 192,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "model_max_length": 2048,
    "tie_word_embeddings": False,
    "use_cache": True,
    "pad_token_id": tasks.PAD,
    "bos_token_id": None,
    "eos_token_id": tasks.EOS,
    "linear_attn_config": {
        "full_attn_layers": [4, 8],
        "kda_layers": [1, 2, 3, 5, 6, 7],
        "head_dim": 32,
        "num_heads": 3,
        "short_conv_kernel_size": 4,
    },
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 12,
    "v_head_dim": 32,
    "mla_use_nope": True,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_experts": 32,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 32,
    "num_shared_experts": 2,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "routed_scaling_factor": 1.0,
    "num_expert_group": 1,
    "topk_group": 1,
    "use_grouped_topk": True,
}


WIDTH = 32  # of the short tasks' rows
QUANTIZE_FROM = 400  # the step from which weights are rounded as the file will hold them
MUON_RATE, ADAM_RATE, WEIGHT_DECAY = 0.02, 3e-3, 0.01
# Of the balance between experts: what a step adds to, or takes from, an expert's bias (DeepSeek-V3, arXiv 2412.19437).
BALANCE, ROUTER_LOSS = 5e-3, 1e-4


@dataclass(frozen=True)
class Stage:
    """steps: of this stage. short: rows of each task but recall. recall: rows of recall, of `width` tokens and at most
    `pairs` pairs."""

    steps: int
    short: dict[str, int]
    recall: int
    width: int
    pairs: int


ROWS = {"copy": 6, "reverse": 10, "sort": 14, "modulo": 18}
STAGES = (
    Stage(steps=600, short=ROWS, recall=8, width=128, pairs=40),
    Stage(steps=900, short=ROWS, recall=6, width=384, pairs=160),
)


class Curriculum:
    """The largest size of each task for now: of the short ones by step, of recall by recent success."""

    EASY, GROWN = 0.4, 300  # the share of the largest sizes to begin with, and the step from which all are asked
    PAIRS, MEMORY, HIGH, GROWTH = 5.0, 0.8, 0.85, 1.04

    def __init__(self):
        self.pairs, self.right, self.steps = self.PAIRS, 0.0, 0

    def update(self, recalled: float) -> None:
        """recalled: the share of the last step's recalls that were right."""
        self.steps += 1
        self.right = self.MEMORY * self.right + (1 - self.MEMORY) * recalled
        if self.right > self.HIGH:
            self.pairs *= self.GROWTH

    def batches(self, rng: np.random.Generator, stage: Stage) -> tuple[Batch, Batch]:
        """The next batch of the short tasks, and that of recall."""
        self.pairs = min(self.pairs, stage.pairs)
        share = min(1.0, self.EASY + (1 - self.EASY) * self.steps / self.GROWN)
        largest = {task: round(share * tasks.SIZES[task][1]) for task in stage.short}
        short = tasks.short_batch(rng, stage.short, WIDTH, largest)
        pairs = tasks.SIZES["recall"][0], round(self.pairs)
        return short, tasks.recall_batch(rng, stage.recall, stage.width, pairs)


def loss(model: KimiLinear, params: dict, quantize: jax.Array, short: tuple, recall: tuple):
    """Cross-entropy of answers, short tasks and recall alike; and (load of experts, whether each short row's answers
    are all right, share of recalls that are)."""
    weights = rounded(params, quantize)
    total, loads, hits = 0.0, 0.0, []
    for tokens, targets in (short, recall):
        logits, load, size = model.apply({"params": weights}, tokens)
        asked = targets != tasks.PAD
        each = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        total = total + jnp.sum(jnp.where(asked, each, 0.0)) / jnp.sum(asked) + ROUTER_LOSS * jnp.mean(size)
        loads = loads + load
        hits.append((jnp.argmax(logits, axis=-1) == targets, asked))
    right = jnp.all(hits[0][0] | ~hits[0][1], axis=1).astype(jnp.float32)
    values = hits[1][1] & (recall[1] != tasks.EOS)
    recalled = jnp.sum(hits[1][0] & values) / jnp.sum(values)
    return total, (loads, right, recalled)


def make_step(model: KimiLinear, optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh):
    """A jitted step, each device taking its share of the rows: (params, state, quantize, short, recall) → …"""

    def step(params, state, quantize, short, recall):
        (value, aux), grads = jax.value_and_grad(partial(loss, model), has_aux=True)(params, quantize, short, recall)
        grads, value = jax.lax.pmean((grads, value), "data")
        loads, right, recalled = aux
        loads, recalled = jax.lax.psum(loads, "data"), jax.lax.pmean(recalled, "data")
        updates, state = optimizer.update(grads, state, params)
        params = balanced(model.spec, optax.apply_updates(params, updates), loads)
        return params, state, value, right, recalled, loads

    same, rows = PartitionSpec(), PartitionSpec("data")
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(same, same, same, rows, rows), out_specs=(same, same, same, rows, same, same),
        check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped, donate_argnums=(0, 1))


def matched(params: dict) -> dict:
    """Queries begin as keys are, so that a token finds what is kept under it."""
    same = {"self_attn.q_proj.weight": "self_attn.k_proj.weight"}
    return {
        module: weights | {q: jnp.copy(weights[k]) for q, k in same.items() if k in weights}
        if isinstance(weights, dict)
        else weights
        for module, weights in params.items()
    }


def balanced(spec: ModelSpec, params: dict, loads: jax.Array) -> dict:
    """Biases of experts that had less than their share of tokens raised, of the others lowered."""
    mixtures = [number for number, layer in enumerate(spec.layers) if isinstance(layer.mlp, MoE)]
    found = dict(params)
    for number, load in zip(mixtures, loads, strict=True):
        module = f"model.layers.{number}"
        (bias,) = (w.hub for w in spec.layers[number].mlp.weights() if w.name == "router_bias")
        change = BALANCE * jnp.sign(jnp.mean(load) - load)
        found[module] = params[module] | {bias: params[module][bias] + change}
    return found


def train(config: dict, stages: tuple[Stage, ...], seed: int) -> Iterator[tuple[dict[str, float], dict]]:
    """(metrics, parameters) after each step, until the next takes the parameters' place.

    Metrics: loss, the share of rows of each short task, and of recalls, that are right, the most pairs, and the
    busiest expert's load in multiples of the mean.
    """
    model, steps = KimiLinear(spec_from_config(dict(config))), sum(stage.steps for stage in stages)
    muon, adam = (
        optax.warmup_cosine_decay_schedule(0.0, rate, min(100, steps // 10), steps, 0.02 * rate)
        for rate in (MUON_RATE, ADAM_RATE)
    )
    made = optimizer(muon, adam, WEIGHT_DECAY)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, CHUNK), jnp.int32))["params"]
    params = matched(params)
    mesh = jax.make_mesh((len(jax.devices()),), ("data",))
    rows, same = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    params, state = jax.device_put((params, jax.jit(made.init)(params)), same)
    step = make_step(model, made, mesh)
    rng, curriculum = np.random.default_rng(seed), Curriculum()
    for number, stage in enumerate(each for each in stages for _ in range(each.steps)):
        short, recall = curriculum.batches(rng, stage)
        # Rows of every task on every device.
        mixed = np.arange(len(short.tokens)).reshape(mesh.size, -1, order="F").reshape(-1)
        data = jax.device_put(((short.tokens[mixed], short.targets[mixed]), (recall.tokens, recall.targets)), rows)
        quantize = jnp.float32(number >= QUANTIZE_FROM)
        params, state, value, right, recalled, loads = step(params, state, quantize, *data)
        ends = np.cumsum(list(stage.short.values()))[:-1]
        by_task = [float(part.mean()) for part in np.split(np.asarray(right)[np.argsort(mixed)], ends)]
        hits = dict(zip(stage.short, by_task, strict=True)) | {"recall": float(recalled)}
        curriculum.update(hits["recall"])
        busiest = float(jnp.max(loads / jnp.mean(loads, axis=1, keepdims=True)))
        yield {"loss": float(value), **hits, "pairs": min(curriculum.pairs, stage.pairs), "busiest": busiest}, params
