"""Numbers and speed on a GPU, in one JSON file: products, experts and attention in every weight format and KV format
against plain JAX on the same device, the greedy tokens of the bundled models against the CPU's, and the bench. Under
five minutes.

    scripts/gpu_check [--json gpu.json] [--platform gpu]
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from jaxwafer.bench.measure import Point, measure
from jaxwafer.checkpoint.cards import card
from jaxwafer.checkpoint.open import open_checkpoint, open_config
from jaxwafer.checkpoint.random import RandomCheckpoint
from jaxwafer.cli.bench import as_row
from jaxwafer.cli.run import use_compilation_cache, write_json
from jaxwafer.engine import Engine
from jaxwafer.errors import UserError
from jaxwafer.mesh import find_devices
from jaxwafer.model.mlp import Activation
from jaxwafer.ops.activation import activate
from jaxwafer.ops.attention import api as attention_api
from jaxwafer.ops.bits import stored_as, to_bits
from jaxwafer.ops.expert_matmul import api as expert_api
from jaxwafer.ops.matmul import api as matmul_api
from jaxwafer.ops.pages import Pages, to_fp8
from jaxwafer.ops.step import Step
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.quant.array import dequantize
from jaxwafer.quant.convert import quantize
from jaxwafer.quant.formats import FORMATS

SMOLLM2, LARGE = "smollm2-135m-instruct", "qwen3-0.6b"
PROMPTS = ("The capital of France is", "Water boils at")
# What sums of products in float32 may differ by, of the sum of their magnitudes; and what attention may, of the largest
# value, by the type of queries: weights are rounded to it.
TOLERANCE = 1e-5
ATTENTION = {"float32": 1e-5, "bfloat16": 2**-8}
# Of each KV format the type of queries that meets it.
QUERIES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.bfloat16}
# Kind of attention → kv heads, queries of each, elements of a key, elements of a value.
KINDS = {"heads": (8, 4, 128, 128), "latent": (1, 64, 576, 512)}
TURNS = 50


@dataclass
class GpuCheck:
    """Check the GPU's numbers against plain JAX and the CPU's tokens, and measure its speed."""

    json: Path = Path("gpu_check.json")
    """where to write the results"""
    platform: str = "gpu"
    """what to check; "cpu" tries this script itself"""

    def run(self) -> bool:
        begin = time.perf_counter()
        # The CPU too, for the tokens to compare with.
        first = "cuda" if self.platform == "gpu" else self.platform
        jax.config.update("jax_platforms", first if first == "cpu" else f"{first},cpu")
        device = find_devices()[0]
        if device.platform != self.platform:
            raise UserError(f"JAX finds no {self.platform} here, only {device.platform}: pip install 'jaxwafer[cuda]'")
        use_compilation_cache()
        results = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "matmul": [matmul(name, self.platform, rows) for name in FORMATS for rows in (1, 17)],
            "experts": [row for name in FORMATS for row in experts(name, self.platform)],
            "attention": [
                attention(kind, kv, self.platform, requests, tokens)
                for kind in KINDS
                for kv in QUERIES
                for requests, tokens in ((1, 16_384), (16, 2_000))
            ],
            "tokens": tokens(self.platform),
            "bench": bench(),
        }
        numbers = [row for name in ("matmul", "experts", "attention") for row in results[name]]
        good = all(row["within"] for row in numbers) and all(t["equal"] for t in results["tokens"])
        results |= {"passed": good, "seconds": time.perf_counter() - begin}
        write_json(self.json, results)
        for m in numbers:
            print(f"{m['case']:44} {m['backend']:9} {m['gbytes_per_s']:8.1f} GB/s  "
                  f"{'within' if m['within'] else 'OUTSIDE'} the tolerance")  # fmt: skip
        for t in results["tokens"]:
            print(f"{t['model']}, {t['kv_cache']} KV: {'the same tokens' if t['equal'] else 'OTHER TOKENS'}")
        for b in results["bench"]:
            print(f"{b['requests']} requests: {b['decode_tokens_per_s']:.1f} tok/s, MBU {b['mbu']:.1%}")
        print(f"{'passed' if good else 'FAILED'} in {results['seconds']:.0f} s; {self.json}")
        return good


def compared(case: str, backend: str, run: Callable, arguments: tuple, bound: np.ndarray | float,
             nbytes: float) -> dict:  # fmt: skip
    """run(backend, *arguments) against that of the reference, which may differ by `bound`, and how fast it goes through
    `nbytes`."""
    chosen, plain = (jax.jit(lambda *a, name=name: run(name, *a)) for name in (backend, "reference"))
    found, wanted = (np.asarray(f(*arguments), np.float64) for f in (chosen, plain))
    begin = time.perf_counter()
    for _ in range(TURNS):
        last = chosen(*arguments)
    last.block_until_ready()
    seconds = (time.perf_counter() - begin) / TURNS
    error = np.abs(found - wanted)
    return {
        "case": case, "backend": backend, "gbytes_per_s": nbytes / seconds / 1e9,
        "error": float(np.max(error / np.maximum(bound, 1e-30))), "within": bool((error <= bound).all()),
    }  # fmt: skip


def matmul(name: str, platform: str, rows: int, size: int = 2048) -> dict:
    """One format, `size` outputs of as many inputs: the chosen backend against plain JAX, and its speed."""
    rng = np.random.default_rng(0)
    weight = jax.device_put(quantize(rng.standard_normal((2, size, size), np.float32), FORMATS[name]))
    x = jnp.asarray(rng.standard_normal((rows, size)), jnp.float32)
    backend = matmul_api.choose(x.dtype, [weight.format], platform)
    bound = np.abs(np.asarray(x)) @ np.abs(np.asarray(dequantize(weight[1], jnp.float32))).T

    def run(backend: str, x: jax.Array, weight) -> jax.Array:
        return matmul_api.matmul(x, weight, 1, backend=backend)

    return compared(f"matmul {name}, {rows} rows", backend, run, (x, weight), TOLERANCE * bound, weight.nbytes / 2)


def experts(name: str, platform: str, size: int = 1024) -> list[dict]:
    """One format, 4 of 8 experts for each of 6 rows, some of them of another device: the product, and gate and up with
    what joins them, by matrices of `size` outputs and inputs."""
    rng = np.random.default_rng(0)
    held, rows, each = 8, 6, 4
    weight = jax.device_put(quantize(rng.standard_normal((1, held, size, size), np.float32), FORMATS[name]))
    x = jnp.asarray(rng.standard_normal((rows, size)), jnp.float32)
    chosen = jnp.asarray(rng.integers(-1, held, rows * each), jnp.int32)
    backend = expert_api.choose(x.dtype, weight.format, platform)
    silu = Activation(name="silu")

    def product(backend: str, x: jax.Array, weight) -> jax.Array:
        return expert_api.expert_matmul(jnp.repeat(x, each, axis=0), weight, 0, chosen, of=held, backend=backend)

    def joined(backend: str, x: jax.Array, weight) -> jax.Array:
        return expert_api.gated(x, weight, weight, 0, chosen, activation=silu, of=held, backend=backend)

    def magnitudes(x: jax.Array, weight) -> jax.Array:
        wide = jnp.abs(dequantize(weight[0], jnp.float32))[:, :, :size]
        return jnp.einsum("rk,rnk->rn", jnp.repeat(jnp.abs(x), each, axis=0), wide[chosen], precision="highest")

    bound = TOLERANCE * np.asarray(jax.jit(magnitudes)(x, weight))
    plain = np.asarray(jax.jit(lambda x, w: product("reference", x, w))(x, weight))
    nbytes = weight.nbytes / held * len(set(np.asarray(chosen).tolist()) - {-1})
    # The slope of silu(p)·p is below 2.2·|p|.
    steep = 2.2 * bound * (np.abs(plain) + bound) + TOLERANCE * np.abs(np.asarray(activate(silu, plain, plain)))
    return [
        compared(f"experts {name}", backend, product, (x, weight), bound, nbytes),
        compared(f"gate and up {name}", backend, joined, (x, weight), steep, 2 * nbytes),
    ]


def attention(kind: str, kv: str, platform: str, requests: int, tokens: int) -> dict:
    """Decoding of requests with `tokens` tokens in the cache: the chosen backend against plain JAX, and its speed."""
    rng = np.random.default_rng(0)
    heads, group, dim, width = KINDS[kind]
    dtype, block = QUERIES[kv], 32
    columns = -(-tokens // block)
    table = jnp.asarray(rng.permutation(requests * columns).reshape(requests, columns), jnp.int32)
    each = jnp.full((requests,), 1, jnp.int32)
    step = Step(start=each * (tokens - 1), count=each, table=table, slot=each)
    keys, values = (pages(kv, seed, (1, requests * columns, block, heads, dim)) for seed in (0, 1))
    # Scores far enough apart that a softmax is of few tokens, and a wrong one shows.
    q = 4 * jax.random.normal(jax.random.key(2), (requests, 1, heads, group, dim))
    scale = dim**-0.5

    def run(backend: str, q: jax.Array, keys: Pages, values: Pages) -> jax.Array:
        if kind == "heads":
            return attention_api.paged_attention(q, keys, values, 0, step, scale=scale, backend=backend)
        first = jnp.zeros((), jnp.int32)
        _, total, mixed = attention_api.latent_attention(
            q[:, :, 0], keys, 0, step, rank=width, scale=scale, first=first, backend=backend
        )
        return mixed / total[..., None]

    backend = attention_api.choose(dtype, platform)
    row = sum(a[0, 0, 0].nbytes for a in (keys.values, keys.exponent) if a is not None)
    nbytes = requests * tokens * row * (2 if kind == "heads" else 1)
    # No number of a normal distribution is larger than 6 here.
    bound = 6 * ATTENTION[jnp.dtype(dtype).name]
    case = f"attention by {kind}, {kv} KV, {requests} of {tokens:,} tokens"
    return compared(case, backend, run, (q.astype(dtype), keys, values), bound, nbytes)


def pages(kv: str, seed: int, shape: tuple[int, ...]) -> Pages:
    """A cache [layers, blocks, block, heads, dim] of normal numbers."""
    rows, exponent = jax.random.normal(jax.random.key(seed), shape), None
    if kv == "fp8":
        rows, exponent = to_fp8(rows)
    narrow = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}[kv]
    return Pages(values=to_bits(rows, stored_as(narrow)), exponent=exponent)


def tokens(platform: str) -> list[dict]:
    """Greedy tokens of SmolLM2, where it has been fetched, against those of a CPU in float32."""
    found = []
    if not card(SMOLLM2).ready:
        print(f"{SMOLLM2} is left out: jaxwafer fetch {SMOLLM2}", file=sys.stderr)
        return found
    for kv in ("f32", "bf16"):
        here, cpu = (greedy(p, kv) for p in (platform, "cpu"))
        found.append({"model": SMOLLM2, "kv_cache": kv, "equal": here == cpu, "tokens": here})
    return found


def greedy(platform: str, kv: str) -> list[list[int]]:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        mesh = Path(folder) / "mesh.toml"
        mesh.write_text(f'[mesh]\nwafers = 1\ncores = 1\nplatform = "{platform}"\n')
        options = Options(
            mesh=str(mesh), dtype="f32", kv_cache=kv, activations="float", max_context=64, prefill_chunk=32
        )
        machine = Engine(open_checkpoint(SMOLLM2), options)
    for prompt in PROMPTS:
        events = machine.generate([prompt], Sampling(max_new_tokens=24, ignore_eos=True))
        found.append([t for event in events for t in event.tokens])
    return found


def bench() -> list[dict]:
    """A model of 0.6 billion random int4 weights, one request and eight."""
    rows = []
    for requests in (1, 8):
        point = Point(mesh="1x1", requests=requests, micro_batch=requests, prompt=128, new=128)
        options = Options(weights="int4", kv_cache="fp8", max_context=256, micro_batch=requests, micro_batches=1)
        machine = Engine(RandomCheckpoint(open_config(LARGE)), options)
        rows.append(as_row(measure(machine, point, 3), None))
    return rows


if __name__ == "__main__":
    try:
        sys.exit(0 if tyro.cli(GpuCheck).run() else 1)
    except UserError as error:
        sys.exit(f"gpu_check: {error}")
