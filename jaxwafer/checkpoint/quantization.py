"""`quantization_config` of a Hugging Face config.json: which matrices are quantised, and how.

Read by the rules of its writer: compressed-tensors (`targets`, `ignore`), DeepSeek's and Qwen's `fp8` and gpt-oss's
`mxfp4` (`modules_to_not_convert`). What would change the maths and is not built is refused by name.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxwafer.errors import UserError
from jaxwafer.quant import formats
from jaxwafer.quant.formats import FORMATS, Format

GROUP_SIZES = (32, 64, 128)
# Fields that say nothing about the weights' values.
CT_FIELDS = frozenset(
    """quant_method format config_groups ignore kv_cache_scheme quantization_status global_compression_ratio version
    sparsity_config transform_config run_compressed""".split()
)
FP8_FIELDS = frozenset(
    """quant_method activation_scheme fmt scale_fmt weight_block_size modules_to_not_convert ignored_layers
    kv_cache_scheme""".split()
)
MXFP4_FIELDS = frozenset(("quant_method", "modules_to_not_convert", "dequantize"))


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """kind: "int4", "int8", "mxfp4" or "fp8". group, rows: inputs and outputs that share a scale, None for all."""

    kind: str
    group: int | None
    rows: int | None = 1
    zero: bool = False

    def format(self, scale: str) -> Format:
        """The format of a matrix whose scales are of the dtype `scale`, as far as there is a choice."""
        if self.kind == "int4":
            return formats.int4(self.group, scale, zero=self.zero)
        if self.kind == "int8" and self.group:
            return FORMATS["int8-g32"]
        if self.kind == "mxfp4" or self.group is None:
            return FORMATS[self.kind]
        return formats.fp8(self.group)


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """schemes: (targets, scheme) of each group. ignore: patterns of modules left as they are. matches: whether a
    pattern means a module, by the writer's rule. dynamic: activations should be quantised too, as they come."""

    schemes: tuple[tuple[tuple[str, ...], Scheme], ...]
    ignore: tuple[str, ...]
    matches: Callable[[str, str], bool]
    dynamic: bool

    def scheme(self, module: str) -> Scheme | None:
        """The scheme of a linear module, were it quantised: that of the first group whose targets name it, or all."""
        everything = (s for targets, s in self.schemes if "Linear" in targets)
        return self.named(module) or next(everything, None)

    def named(self, module: str) -> Scheme | None:
        """The scheme of a module that a target names."""
        return next((s for targets, s in self.schemes if any(self.matches(t, module) for t in targets)), None)

    def planned(self, module: str) -> Scheme | None:
        """The scheme of a linear module as far as the config alone can tell; None where it stays as it is."""
        return None if any(self.matches(p, module) for p in self.ignore) else self.scheme(module)


def read_quantization(fields: Any, where: Path) -> Quantization:
    """From the value of `quantization_config`; what is not supported is a UserError that names it."""
    reader = _Reader(fields if isinstance(fields, dict) else {}, where)
    method = reader.fields.get("quant_method")
    readers = {"compressed-tensors": reader.compressed_tensors, "fp8": reader.fp8, "mxfp4": reader.mxfp4}
    if not isinstance(method, str) or method not in readers:
        raise reader.refused(f"is not supported (supported: {', '.join(map(repr, readers))})")
    return readers[method]()


class _Reader:
    def __init__(self, fields: dict, where: Path):
        self.fields, self.where = fields, where

    def refused(self, why: str) -> UserError:
        named = (self.fields[k] for k in ("quant_method", "format") if self.fields.get(k) is not None)
        return UserError(f"{self.where}: quantization_config {' '.join(f'{n!r:.60}' for n in named)} {why}")

    def compressed_tensors(self) -> Quantization:
        self._known(CT_FIELDS)
        for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
            if self.fields.get(name):
                raise self.refused(f"with a {name} is not supported")
        groups = self.fields.get("config_groups")
        if not groups or not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
            raise self.refused("has no config_groups")
        schemes, dynamic = [], False
        for group in groups.values():
            if group.get("output_activations") is not None:
                raise self.refused("with output_activations is not supported")
            inputs = group.get("input_activations")
            if inputs is not None and not (isinstance(inputs, dict) and inputs.get("dynamic") is True):
                raise self.refused("with static input_activations is not supported")
            dynamic |= inputs is not None
            schemes.append((self._names(group.get("targets"), "targets"), self._ct_scheme(group)))
        ignore = self._names(self.fields.get("ignore") or [], "ignore")
        return Quantization(schemes=tuple(schemes), ignore=ignore, matches=_ct_matches, dynamic=dynamic)

    def _ct_scheme(self, group: dict) -> Scheme:
        weights = group.get("weights")
        form = group.get("format") or self.fields.get("format")
        if not isinstance(weights, dict):
            raise self.refused("has a group without weights")
        if weights.get("dynamic") or weights.get("actorder") not in (None, False, "static", "weight"):
            raise self.refused(f"with actorder {weights.get('actorder')!r} or dynamic weights is not supported")
        bits, kind, strategy, size, symmetric = (
            weights.get(k) for k in ("num_bits", "type", "strategy", "group_size", "symmetric")
        )
        said = f"{form!r} weights of {bits} bits, {kind}, {strategy}"
        if (form, bits, kind, strategy) == ("pack-quantized", 4, "int", "group") and size in GROUP_SIZES:
            return Scheme(kind="int4", group=size, zero=not symmetric)
        if (form, bits, kind, strategy, size) == ("mxfp4-pack-quantized", 4, "float", "group", 32) and symmetric:
            return Scheme(kind="mxfp4", group=32)
        if (form, bits, kind) == ("int-quantized", 8, "int") and symmetric:
            if strategy == "channel" or (strategy, size) == ("group", 32):
                return Scheme(kind="int8", group=32 if strategy == "group" else None)
        if (form, bits, kind) == ("float-quantized", 8, "float") and symmetric:
            shared = {"tensor": (None, None), "channel": (1, None)}
            if strategy in shared:
                rows, inputs = shared[strategy]
                return Scheme(kind="fp8", group=inputs, rows=rows)
            if strategy == "block":
                rows, inputs = self._block(weights.get("block_structure"), "block_structure")
                return Scheme(kind="fp8", group=inputs, rows=rows)
        raise self.refused(
            f"is not supported with {said}, group_size {size}, symmetric {symmetric} (supported: 'pack-quantized' "
            f"4-bit int in groups of {', '.join(map(str, GROUP_SIZES))}, 'mxfp4-pack-quantized', symmetric "
            "'float-quantized' 8-bit float per tensor, channel or block, 'int-quantized' 8-bit int per channel or in "
            "groups of 32)"
        )

    def fp8(self) -> Quantization:
        self._known(FP8_FIELDS)
        if self.fields.get("activation_scheme", "dynamic") != "dynamic":
            raise self.refused(f"with activation_scheme {self.fields['activation_scheme']!r} is not supported")
        if self.fields.get("kv_cache_scheme"):
            raise self.refused("with a kv_cache_scheme is not supported")
        if self.fields.get("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise self.refused(f"with fmt {self.fields['fmt']!r} is not supported")
        size = self.fields.get("weight_block_size")
        rows, group = (None, None) if size is None else self._block(size, "weight_block_size")
        return self._transformers(Scheme(kind="fp8", group=group, rows=rows), dynamic=True)

    def mxfp4(self) -> Quantization:
        self._known(MXFP4_FIELDS)
        return self._transformers(Scheme(kind="mxfp4", group=32), dynamic=False)

    def _transformers(self, scheme: Scheme, *, dynamic: bool) -> Quantization:
        names = ("modules_to_not_convert", "ignored_layers")
        ignore = [n for field in names for n in self._names(self.fields.get(field) or [], field)]
        return Quantization(
            schemes=((("Linear",), scheme),), ignore=tuple(ignore), matches=_transformers_matches, dynamic=dynamic
        )

    def _block(self, size: Any, name: str) -> tuple[int, int]:
        """(outputs, inputs) of a block."""
        if not isinstance(size, list) or len(size) != 2 or not all(type(n) is int and 0 < n <= 1024 for n in size):
            raise self.refused(f"with {name} {size!r} is not supported (it should be two numbers)")
        return size[0], size[1]

    def _names(self, value: Any, name: str) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self.refused(f"should have a list of names as {name!r}, not {value!r:.60}")
        for pattern in value:
            try:
                re.compile(pattern.removeprefix("re:"))
            except re.error:
                raise self.refused(f"has {pattern!r} in {name!r}, which is no regular expression") from None
        return tuple(value)

    def _known(self, names: frozenset[str]) -> None:
        unknown = sorted(k for k, v in self.fields.items() if k not in names and v is not None)
        if unknown:
            raise self.refused(f"has the field {unknown[0]!r}, which is not understood; refusing")


def _ct_matches(pattern: str, module: str) -> bool:
    """A name, or after "re:" a regular expression for its beginning."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return pattern == module


def _transformers_matches(pattern: str, module: str) -> bool:
    """A regular expression for the beginning of a name, or the end of one."""
    return re.match(pattern, module) is not None or module.endswith(pattern)
