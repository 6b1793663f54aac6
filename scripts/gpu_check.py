"""Numbers and speed on a GPU, in one JSON file: every weight format and KV format against plain JAX on the same device,
the greedy tokens of the bundled models against the CPU's, and the bench. Under five minutes.

    scripts/gpu_check [--json gpu.json] [--platform gpu]
"""

import sys
import tempfile
import time
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
from jaxwafer.ops.matmul import api, reference
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.quant.array import dequantize
from jaxwafer.quant.convert import quantize
from jaxwafer.quant.formats import FORMATS

SMOLLM2, LARGE = "smollm2-135m-instruct", "qwen3-0.6b"
PROMPTS = ("The capital of France is", "Water boils at")
# What sums of products in float32 may differ by, of the sum of their magnitudes.
TOLERANCE = 1e-5


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
            "tokens": tokens(self.platform),
            "bench": bench(),
        }
        good = all(m["within"] for m in results["matmul"]) and all(t["equal"] for t in results["tokens"])
        results |= {"passed": good, "seconds": time.perf_counter() - begin}
        write_json(self.json, results)
        for m in results["matmul"]:
            print(f"{m['format']:22} {m['rows']:3} rows  {m['backend']:9} {m['gbytes_per_s']:8.1f} GB/s  "
                  f"{'within' if m['within'] else 'OUTSIDE'} the tolerance")  # fmt: skip
        for t in results["tokens"]:
            print(f"{t['model']}, {t['kv_cache']} KV: {'the same tokens' if t['equal'] else 'OTHER TOKENS'}")
        for b in results["bench"]:
            print(f"{b['requests']} requests: {b['decode_tokens_per_s']:.1f} tok/s, MBU {b['mbu']:.1%}")
        print(f"{'passed' if good else 'FAILED'} in {results['seconds']:.0f} s; {self.json}")
        return good


def matmul(name: str, platform: str, rows: int) -> dict:
    """One format, 2048 outputs of 2048 inputs: the chosen backend against plain JAX, and its speed."""
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((2, 2048, 2048), np.float32)
    weight = jax.device_put(quantize(matrix, FORMATS[name]))
    x = jnp.asarray(rng.standard_normal((rows, 2048)), jnp.float32)
    backend = api.choose(x.dtype, [weight.format], platform)
    product = jax.jit(lambda x, weight: api.matmul(x, weight, 1, backend=backend))
    found = np.asarray(product(x, weight))
    wanted = np.asarray(jax.jit(lambda x, w: reference.matmul(x, w, jnp.int32(1), False))(x, weight))
    bound = np.abs(np.asarray(x)) @ np.abs(np.asarray(dequantize(weight[1], jnp.float32))).T
    turns = 50
    begin = time.perf_counter()
    for _ in range(turns):
        last = product(x, weight)
    last.block_until_ready()
    seconds = (time.perf_counter() - begin) / turns
    return {
        "format": name, "rows": rows, "backend": backend, "gbytes_per_s": weight.nbytes / 2 / seconds / 1e9,
        "error": float(np.max(np.abs(found - wanted) / bound)),
        "within": bool((np.abs(found - wanted) <= TOLERANCE * bound).all()),
    }  # fmt: skip


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
