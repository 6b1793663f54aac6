"""What XLA says of a compiled program: memory, bytes, collectives, and copies of what should stay in place."""

import math
import re
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")
BITS = {
    "pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64,
    "f4e2m1fn": 4, "f8e4m3fn": 8, "f8e5m2": 8, "f8e8m0fnu": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64,
}  # fmt: skip
SHAPE = re.compile(rf"\b({'|'.join(BITS)})\[([0-9,]*)\](\{{[^}}]*\}})?")
# "%name = shape opcode(": the shape may be a tuple.
INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([a-z-]+)\(")


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """Of one program, on one device; bytes.

    arguments, outputs: of the program, of which `aliased` outputs are arguments written in place. temporaries: XLA's
    scratch space. accessed, flops: XLA's own counts, in which the body of a loop counts once and a branch as its most
    expensive. collectives: (kind, bytes) → how often in the text. copies: what was copied whole → how often.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    accessed: float
    flops: float
    collectives: dict[tuple[str, int], int]
    copies: dict[str, int]

    @property
    def peak(self) -> int:
        """Bytes that the program needs at once, at most."""
        return self.arguments + self.outputs - self.aliased + self.temporaries + self.code


def read(compiled, kept: dict[str, object]) -> Compiled:
    """kept: name → tree of the abstract global arrays that no program should copy, with their shardings."""
    memory = compiled.memory_analysis()
    costs = compiled.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    text = compiled.as_text()
    return Compiled(
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        accessed=float(costs.get("bytes accessed", math.nan)),
        flops=float(costs.get("flops", math.nan)),
        collectives=collectives(text),
        copies=copies(text, kept),
    )


def collectives(text: str) -> dict[tuple[str, int], int]:
    """(kind, bytes of the result on a device) → how often it stands in an HLO text."""
    found: Counter[tuple[str, int]] = Counter()
    for _, shape, opcode in _instructions(text):
        kind = opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            parts = SHAPE.findall(shape)
            if opcode.endswith("-start") and len(parts) > 1:
                # The started form's result is a tuple: what goes in, what comes out, and handles.
                parts = [part for part in parts if part[:2] != ("u32", "")]
                parts = parts[len(parts) // 2 :]
            found[kind, sum(_bytes(dtype, dims) for dtype, dims, _ in parts)] += 1
    return dict(found)


def copies(text: str, kept: dict[str, object]) -> dict[str, int]:
    """What of `kept` an HLO text copies whole in the device's main memory → how often.

    Told by type and number of elements, whatever the order of the axes; a copy into fast memory (space 1) is a
    prefetch, and none.
    """
    shards = {}
    for name, tree in kept.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            size = math.prod(leaf.sharding.shard_shape(leaf.shape))
            key = jnp.dtype(leaf.dtype), size
            label = f"{name}.{jax.tree_util.keystr(path, simple=True, separator='.')}"
            shards.setdefault(key, label)
    found: Counter[str] = Counter()
    for name, shape, opcode in _instructions(text):
        copying = opcode in ("copy", "copy-start", "transpose") or (opcode == "fusion" and "copy" in name)
        match = SHAPE.search(shape)
        if not copying or not match or "S(1)" in (match[3] or ""):
            continue
        size = math.prod(map(int, filter(None, match[2].split(","))))
        for (dtype, count), label in shards.items():
            if count == size and dtype.itemsize * 8 == BITS[match[1]] and size > 1:
                found[label] += 1
                break
    return dict(found)


def _instructions(text: str):
    """(name, shape, opcode) of every instruction but those inside of fusions."""
    fused = False
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            fused = line.lstrip("%").startswith("fused_") or "fused_computation" in line.split("(")[0]
        elif not fused and (match := INSTRUCTION.match(line)):
            yield match[1], match[2], match[3]


def _bytes(dtype: str, dims: str) -> int:
    return BITS[dtype] * math.prod(map(int, filter(None, dims.split(",")))) // 8
