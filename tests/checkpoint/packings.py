"""The published layouts of quantised matrices, packed element by element, with nothing of the package's own packing.

Each function returns ({end of the name: tensor}, the matrix in float64, by the layout's equation).
"""

import ml_dtypes
import numpy as np

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def words(numbers, axis: int) -> np.ndarray:
    """4-bit numbers to int32 words, element i in bits 4·(i mod 8) of word i // 8 along `axis`."""
    rows = np.moveaxis(np.asarray(numbers), axis, -1)
    out = np.zeros((*rows.shape[:-1], -(-rows.shape[-1] // 8)), np.uint64)
    for i in range(rows.shape[-1]):
        out[..., i // 8] |= rows[..., i].astype(np.uint64) << np.uint64(4 * (i % 8))
    return np.moveaxis(out.astype(np.uint32).view(np.int32), -1, axis)


def int4(rng, outputs: int, inputs: int, group: int, dtype, *, zero: bool = False):
    groups = -(-inputs // group)
    u = rng.integers(0, 16, (outputs, inputs))
    scale = (rng.uniform(0.5, 1.5, (outputs, groups)) / np.sqrt(inputs) / 4).astype(dtype)
    points = rng.integers(0, 16, (outputs, groups)) if zero else np.full((outputs, groups), 8)
    tensors = {
        "weight_packed": words(u, 1),
        "weight_scale": scale,
        "weight_shape": np.array([outputs, inputs], np.int64),
    }
    if zero:
        tensors["weight_zero_point"] = words(points, 0)
    matrix = np.zeros((outputs, inputs))
    for n in range(outputs):
        for k in range(inputs):
            matrix[n, k] = (u[n, k] - points[n, k // group]) * float(scale[n, k // group])
    return tensors, matrix


def mxfp4(rng, outputs: int, inputs: int):
    """compressed-tensors: bytes of two neighbours, the even one low."""
    nibbles = rng.integers(0, 16, (outputs, inputs))
    exponent = rng.integers(122, 126, (outputs, inputs // 32)).astype(np.uint8)
    packed = np.zeros((outputs, inputs // 2), np.uint8)
    matrix = np.zeros((outputs, inputs))
    for n in range(outputs):
        for k in range(inputs):
            packed[n, k // 2] |= nibbles[n, k] << (4 * (k % 2))
            sign = -1.0 if nibbles[n, k] & 8 else 1.0
            matrix[n, k] = sign * E2M1[nibbles[n, k] & 7] * 2.0 ** (int(exponent[n, k // 32]) - 127)
    return {"weight_packed": packed, "weight_scale": exponent}, matrix


def gpt_oss(rng, experts: int, outputs: int, inputs: int):
    """MXFP4 of a stack of experts."""
    each = [mxfp4(rng, outputs, inputs) for _ in range(experts)]
    blocks = np.stack([t["weight_packed"].reshape(outputs, inputs // 32, 16) for t, _ in each])
    scales = np.stack([t["weight_scale"] for t, _ in each])
    return {"blocks": blocks, "scales": scales}, np.stack([m for _, m in each])


def e4m3(rng, outputs: int, inputs: int) -> np.ndarray:
    return rng.standard_normal((outputs, inputs)).astype(ml_dtypes.float8_e4m3fn)


def fp8(rng, outputs: int, inputs: int, rows: int | None, columns: int | None, *, end: str, dtype=np.float32):
    """A scale for blocks of `rows` × `columns`; None for all."""
    rows, columns = rows or outputs, columns or inputs
    weight = e4m3(rng, outputs, inputs)
    shape = -(-outputs // rows), -(-inputs // columns)
    scale = (rng.uniform(0.5, 1.5, shape) / np.sqrt(inputs)).astype(dtype)
    matrix = np.zeros((outputs, inputs))
    for n in range(outputs):
        for k in range(inputs):
            matrix[n, k] = float(weight[n, k]) * float(scale[n // rows, k // columns])
    return {"weight": weight, end: scale}, matrix


def compressed(form: str, **weights) -> dict:
    """A compressed-tensors quantization_config."""
    base = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": base | weights, "input_activations": None},
        },
        "ignore": ["lm_head", "re:.*self_attn.*"],
        "kv_cache_scheme": None,
        "quantization_status": "compressed",
    }


FP8 = {"num_bits": 8, "type": "float", "group_size": None}

# name → (quantization_config, a function (rng, outputs, inputs) → (tensors, matrix), the format it is read in)
LAYOUTS = {
    "int4 group 32 bf16": (
        compressed("pack-quantized"), lambda r, n, k: int4(r, n, k, 32, ml_dtypes.bfloat16), "int4-g32-bf16"),
    "int4 group 32 f16": (
        compressed("pack-quantized"), lambda r, n, k: int4(r, n, k, 32, np.float16), "int4"),
    "int4 group 64 bf16": (
        compressed("pack-quantized", group_size=64), lambda r, n, k: int4(r, n, k, 64, ml_dtypes.bfloat16),
        "int4-g64-bf16"),
    "int4 group 128 f32": (
        compressed("pack-quantized", group_size=128), lambda r, n, k: int4(r, n, k, 128, np.float32), "int4-g128-f32"),
    "int4 group 32 asymmetric": (
        compressed("pack-quantized", symmetric=False),
        lambda r, n, k: int4(r, n, k, 32, ml_dtypes.bfloat16, zero=True), "int4-g32-bf16-zero"),
    "mxfp4": (
        compressed("mxfp4-pack-quantized", type="float"), mxfp4, "mxfp4"),
    "fp8 a channel": (
        compressed("float-quantized", strategy="channel", **FP8),
        lambda r, n, k: fp8(r, n, k, 1, None, end="weight_scale", dtype=ml_dtypes.bfloat16), "fp8"),
    "fp8 a tensor": (
        compressed("float-quantized", strategy="tensor", **FP8),
        lambda r, n, k: fp8(r, n, k, None, None, end="weight_scale"), "fp8"),
    "fp8 a block": (
        compressed("float-quantized", strategy="block", block_structure=[64, 32], **FP8),
        lambda r, n, k: fp8(r, n, k, 64, 32, end="weight_scale"), "fp8-g32"),
    "DeepSeek fp8": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda r, n, k: fp8(r, n, k, 128, 128, end="weight_scale_inv"), "fp8-g128"),
}  # fmt: skip
