"""What a program says of itself once it is lowered, before any compiler of its platform has seen it."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import jax

# The result's type follows the operation, behind the region that says how to reduce where there is one.
COLLECTIVE = re.compile(
    r'stablehlo\.(all_reduce|all_gather|reduce_scatter|collective_permute|all_to_all)"?\(.*?\) -> tensor<([^>]*)>', re.S
)
KERNEL = re.compile(r"stablehlo\.custom_call @(?:\"([^\"]+)\"|([\w$.]+))")


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """module_bytes: of the StableHLO module as `jax.export` keeps it. collectives: (kind, bytes of the result on a
    device) → how often in the text, where the body of a loop stands once. kernels: how often each target of a custom
    call stands in it."""

    module_bytes: int
    collectives: dict[tuple[str, int], int]
    kernels: dict[str, int]


def read_exported(exported: jax.export.Exported, kernels: set[str]) -> Lowered:
    """kernels: the targets of custom calls that are worth a word."""
    text = exported.mlir_module()
    called = Counter(quoted or plain for quoted, plain in KERNEL.findall(text))
    return Lowered(
        module_bytes=len(exported.mlir_module_serialized),
        collectives=collectives(text),
        kernels={target: times for target, times in called.items() if target in kernels},
    )


def collectives(text: str) -> dict[tuple[str, int], int]:
    """(kind as HLO names it, bytes of the result on a device) → how often it stands in a StableHLO text."""
    found: Counter[tuple[str, int]] = Counter()
    for kind, tensor in COLLECTIVE.findall(text):
        *dims, dtype = tensor.split("x")
        bits = int(re.search(r"\d+", dtype)[0])
        found[kind.replace("_", "-"), math.prod(map(int, dims)) * bits // 8] += 1
    return dict(found)
