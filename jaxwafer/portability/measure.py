"""What a platform makes of the cases, and what it does in its own way."""

from dataclasses import dataclass

import jax
import numpy as np

from jaxwafer.engine import Engine
from jaxwafer.mesh import make_mesh, parse_mesh
from jaxwafer.ops.backends import implementations
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.portability.cases import Case, StoredCheckpoint
from jaxwafer.roofline.ceiling import read_ceiling
from jaxwafer.roofline.compiled import Compiled, read
from jaxwafer.roofline.report import counted, operations

PROMPTS = [[5, 17, 3, 200], [99, 4], list(range(30, 60))]
SCORED = [(37 * i + 11) % 256 for i in range(40)]
NEW = 12


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one case. tokens: greedy, of each prompt. logprobs: of a fixed text's tokens. backends: {operation: (backend,
    reason)}. mbu: counted bytes/s of decoding over the streaming read of the same devices. compile_s: of all programs.
    aliased, cache: bytes of donated caches that are written in place, and of the caches, on a device."""

    tokens: list[list[int]]
    logprobs: list[float]
    backends: dict[str, tuple[str, str]]
    mbu: float
    compile_s: float
    aliased: int
    cache: int


def run_case(case: Case, ceiling: float) -> Outcome:
    """ceiling: bytes/s of a streaming read on the case's mesh."""
    options = Options(mesh=case.mesh, dtype="f32", kv_cache="f32", max_context=64, block=8, prefill_chunk=32,
                      micro_batch=2, micro_batches=2)  # fmt: skip
    engine = Engine(StoredCheckpoint(case), options)
    sampling = Sampling(max_new_tokens=NEW, ignore_eos=True)
    requests = [engine.submit(prompt, sampling) for prompt in PROMPTS]
    while engine.queue.busy:
        engine.step()
    rate = counted(engine).bytes / engine.stats.decode_seconds
    logprobs = engine.score(SCORED)
    found = engine.programs.pipeline.ops.report(
        engine.programs.pipeline.dtype, engine.placement.formats, engine.placement.expert_formats,
        operations(engine.spec),
    )  # fmt: skip
    program: Compiled = read(engine.programs.decode(filters=False), {})
    return Outcome(
        tokens=[request.tokens for request in requests],
        logprobs=np.asarray(logprobs, np.float64).tolist(),
        backends={name: (b["backend"], b["reason"]) for name, b in found.items()},
        mbu=rate / ceiling,
        compile_s=engine.programs.seconds,
        aliased=program.aliased,
        cache=engine.cache_shape.allocated_bytes // engine.placement.cores,
    )


def run_cases(chosen: list[Case], note=lambda text: None) -> dict[str, Outcome]:
    """Every case on JAX's default platform. Products of float32 are of full precision on every platform."""
    found, ceilings = {}, {}
    with jax.default_matmul_precision("highest"):
        # As many devices as the largest mesh needs, before JAX has looked at any.
        for mesh in sorted({case.mesh for case in chosen}, key=lambda m: -parse_mesh(m).devices):
            ceilings[mesh] = read_ceiling(make_mesh(parse_mesh(mesh)), repetitions=2)
        for number, case in enumerate(chosen, 1):
            note(f"case {number} of {len(chosen)}: {case.name}")
            found[case.name] = run_case(case, ceilings[case.mesh])
    return found


def platform_facts() -> dict:
    """What JAX's default platform is like: its devices in order, its memories, and operations without a kernel."""
    devices = jax.devices()
    first = devices[0]
    return {
        "platform": first.platform,
        "device_kind": first.device_kind,
        "devices": [str(getattr(d, "coords", d.id)) for d in devices],
        "memories": [memory.kind for memory in first.addressable_memories()],
        "default_memory": first.default_memory().kind,
        "reference": sorted(n for n, o in implementations(first.platform).items() if o["backend"] == "reference"),
        "jax": jax.__version__,
    }
