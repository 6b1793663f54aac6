"""The quantised matmul alone, in every weight format, as a share of a raw read of memory measured beside it.

A stack of matrices larger than the last-level cache is multiplied one after another inside one jitted loop, as a decode
step does it. The ceiling is `jaxwafer.roofline.ceiling.read_ceiling`, before and after each measurement.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jaxwafer.checkpoint.huge_pages import copied
from jaxwafer.mesh import make_mesh, parse_mesh
from jaxwafer.ops.operations import Operations
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import quantize
from jaxwafer.quant.formats import FORMATS
from jaxwafer.roofline.ceiling import read_ceiling

STACK_BYTES = 192 << 20


def stack(name: str, outputs: int, inputs: int) -> QuantizedArray:
    """Random matrices of one format, so many that a read of one finds nothing of it in a cache."""
    matrix = np.random.default_rng(0).standard_normal((1, outputs, inputs)).astype(np.float32)
    one = quantize(matrix, FORMATS[name])
    copies = max(2, STACK_BYTES // one.nbytes)
    return jax.tree.map(lambda part: jax.device_put(copied(np.repeat(np.asarray(part), copies, axis=0))), one)


def rate(held: QuantizedArray, rows: int, activations: str, repetitions: int) -> list[float]:
    """Bytes of weights per second, of each repetition."""
    platform = jax.devices()[0].platform
    ops = Operations(platform, activations == "int8")
    count, _, width = held.values.shape
    inputs = width * (2 if held.format.packed else 1)

    @jax.jit
    def run(held, x):
        def once(layer, x):
            # The next product needs an element of the last one's result, so none can be left out.
            return x + 1e-30 * ops.matmul(x, held, layer)[0, 0]

        return jax.lax.fori_loop(0, count, once, x)

    x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, inputs)), jnp.float32)
    jax.block_until_ready(run(held, x))
    rates = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        jax.block_until_ready(run(held, x))
        rates.append(held.nbytes / (time.perf_counter() - begin))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=["int4", "int4-min", "mxfp4", "int8-g32", "fp8", "bf16"],
                        choices=sorted(FORMATS))  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=int, default=[1], help="rows of x")
    parser.add_argument("--activations", nargs="+", default=["int8", "float"], choices=["int8", "float"])
    parser.add_argument("--outputs", type=int, default=6144)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--repetitions", type=int, default=7)
    args = parser.parse_args()
    if min(*args.rows, args.outputs, args.inputs, args.repetitions) < 1 or args.inputs % 32:
        parser.error("sizes are at least 1, and --inputs a multiple of 32")
    mesh = make_mesh(parse_mesh("1x1"))
    table = Table(title=f"matmul of {args.outputs} x {args.inputs}: GB/s of weights, median", title_justify="left")
    for name in ("weights", "rows", "activations", "GB/s", "a raw read", "share"):
        table.add_column(name, justify="left" if name in ("weights", "activations") else "right")
    for name in args.formats:
        held = stack(name, args.outputs, args.inputs)
        for rows in args.rows:
            for activations in args.activations:
                before = read_ceiling(mesh)
                found = statistics.median(rate(held, rows, activations, args.repetitions))
                ceiling = (before + read_ceiling(mesh)) / 2
                table.add_row(name, str(rows), activations, f"{found / 1e9:.1f}", f"{ceiling / 1e9:.1f}",
                              f"{found / ceiling:.0%}")  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()
