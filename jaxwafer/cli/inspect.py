"""`jaxwafer inspect`: what a model is made of and what it weighs."""

from collections import Counter
from dataclasses import dataclass, fields, is_dataclass

import jax.numpy as jnp
import tyro
from rich.table import Table

from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.checkpoint.open import has_weights, open_config, open_formats
from jaxwafer.cli.run import print_table
from jaxwafer.model import spec_from_config
from jaxwafer.model.rope import Rope
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.quant.fields import KV_DTYPES
from jaxwafer.roofline.table import amount


@dataclass
class Inspect:
    """Print layers, kinds, parameters, bytes by format, KV a token and state a request; works from a config alone."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, a config.json or a GGUF file"""
    weights: str = "native"
    """the weight policy to count bytes for (see decode)"""

    def run(self) -> None:
        spec = spec_from_config(open_config(self.model))
        formats = open_formats(self.model, spec.native, self.weights)
        source = "as in the checkpoint" if has_weights(self.model) else "by the config alone"
        placement = place(spec, uniform(len(spec.layers), 1), formats, cores=1)
        table = Table(title=f"{self.model} ({spec.family})", title_justify="left")
        table.add_column("")
        table.add_column("value", justify="right")
        table.add_column("")
        table.add_row("layers", str(len(spec.layers)), f"hidden {spec.hidden}, context {spec.max_context}")
        for stack in (*placement.mixers, *placement.mlps):
            count = sum(map(len, stack.layers))
            table.add_row(f"  {type(stack.kind).__name__}", f"{count} layers", describe(stack.kind))
            table.add_row("", amount(placement.layer_bytes(stack), "B"), "a layer")
        table.add_row("vocabulary", str(spec.vocab), "head is the embedding" if spec.tied else "head of its own")
        table.add_row("parameters", amount(spec.parameters, ""), f"{spec.parameters:,}")
        active = spec.active_parameters
        table.add_row("active parameters", amount(active, ""), f"{active:,} that a token needs")
        table.add_section()
        by_format: Counter[str] = Counter()
        for stack in placement.stacks:
            for storage in stack.weights.values():
                by_format[storage.format.name] += sum(map(len, stack.layers)) * storage.wafer_bytes(1, 1)
        for storage in placement.globals.values():
            by_format[storage.format.name] += storage.wafer_bytes(1, 1)
        for name, nbytes in by_format.most_common():
            table.add_row(f"weights {name}", amount(nbytes, "B"), f"{nbytes:,} bytes")
        table.add_row(
            "weights", amount(placement.weight_bytes(0), "B"), f"{placement.weight_bytes(0):,} bytes, {source}"
        )
        table.add_section()
        for name in KV_DTYPES:
            cache = CacheShape(placement=placement, format=KVFormat(name=name), block=1, blocks=1)
            table.add_row(
                f"KV a token, {name}", amount(cache.wafer_token_bytes(0), "B"), f"{cache.wafer_token_bytes(0):,} bytes"
            )
        dtype = jnp.dtype(jnp.bfloat16)
        cache = CacheShape(placement=placement, format=KVFormat(name="bf16"), block=1, blocks=1, dtype=dtype)
        state = cache.wafer_state_bytes(0)
        table.add_row("state a request", amount(state, "B"), f"{state:,} bytes, past inputs in {dtype}")
        print_table(table)


# Fields that are no sizes, or stand elsewhere in the table.
UNNAMED = frozenset("hidden eps rope prefix names router_name shared_names".split())


def describe(kind) -> str:
    """A kind's sizes and what differs from its defaults, such as "heads 9, kv_heads 3"."""
    shown = []
    for f in fields(kind):
        value = getattr(kind, f.name)
        if f.name in UNNAMED or value == f.default:
            continue
        if value is True:
            shown.append(f.name)
        elif is_dataclass(value):
            shown.append(f"{f.name} ({describe(value)})")
        else:
            shown.append(f"{f.name} {value}")
    rope = getattr(kind, "rope", None)
    if isinstance(rope, Rope):
        scaling = f", {type(rope.scaling).__name__}" if rope.scaling else ""
        shown.append(f"RoPE theta {rope.theta:g} on {rope.dims}{scaling}")
    return ", ".join(shown)
