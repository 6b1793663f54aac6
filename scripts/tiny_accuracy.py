"""The accuracy of tiny-kimi-linear by weight format, KV cache, activations and mesh, as a Markdown table.

    scripts/tiny_accuracy --count 100

Every row is an engine of its own that answers the same held-out prompts. It takes minutes, most of them compilation.
"""

from dataclasses import dataclass

import tyro

import jaxwafer
from jaxwafer.cli.held_out import examples, grade
from jaxwafer.cli.run import use_compilation_cache
from jaxwafer.mesh import parse_mesh, reserve
from jaxwafer.train import tasks

FORMATS = ("native", "f32", "bf16", "fp8", "int8", "mixed", "int4")
# (weights, KV cache, activations, mesh)
ROWS = (
    *((weights, "f32", "f32", "1x1") for weights in FORMATS),
    ("native", "bf16", "f32", "1x1"),
    ("native", "fp8", "f32", "1x1"),
    ("native", "bf16", "bf16", "1x1"),
    ("native", "f32", "int8", "1x1"),
    ("native", "f32", "f32", "4x2"),
    ("native", "bf16", "f32", "3x2"),
    ("native", "fp8", "int8", "4x2"),
    ("native", "bf16", "bf16", "4x2"),
    ("mixed", "fp8", "bf16", "4x2"),
    ("int4", "fp8", "bf16", "4x2"),
)


@dataclass
class Accuracy:
    """Print a row for each combination as it is known."""

    count: int = 100
    """held-out prompts of each task"""
    micro_batch: int = 25
    """requests that travel together"""

    def run(self) -> None:
        use_compilation_cache()
        asked = examples(self.count)
        longest = max(len(e.prompt.split()) + len(e.answer.split()) + 1 for e in asked)
        print("| weights | KV cache | activations | mesh | " + " | ".join(tasks.TASKS) + " |")
        print("|---|---|---|---|" + "---|" * len(tasks.TASKS))
        reserve(parse_mesh(mesh) for *_, mesh in ROWS)
        for weights, kv_cache, activations, mesh in ROWS:
            types = {"dtype": "f32", "activations": "int8"} if activations == "int8" else {"dtype": activations}
            engine = jaxwafer.load(
                "tiny-kimi-linear", mesh=mesh, weights=weights, kv_cache=kv_cache, max_context=longest,
                micro_batch=self.micro_batch, micro_batches=parse_mesh(mesh).wafers, prefill_chunk=64, **types,
            )  # fmt: skip
            samplings = [jaxwafer.Sampling(max_new_tokens=len(e.answer.split()) + 1) for e in asked]
            requests = [engine.submit(e.prompt, s) for e, s in zip(asked, samplings, strict=True)]
            while engine.queue.busy:
                engine.step()
            shares = (f"{g['right'] / g['of']:.1%}" for g in grade(requests, asked).values())
            print(f"| {weights} | {kv_cache} | {activations} | {mesh} | " + " | ".join(shares) + " |", flush=True)


if __name__ == "__main__":
    tyro.cli(Accuracy).run()
