"""What one layer's products move on a TPU that is not here, by XLA's count. Skipped without libtpu.

Of a Pallas kernel XLA counts what it says of itself; what shows here is that nothing is copied to and from it.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxwafer.mesh import MeshShape
from jaxwafer.ops.matmul import tpu
from jaxwafer.pipeline.programs import TPU_OPTIONS
from jaxwafer.quant.array import assemble
from jaxwafer.quant.formats import FORMATS
from jaxwafer.quant.storage import held_as
from jaxwafer.topology import tpu_target

pytestmark = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="no libtpu here; pip install 'jaxwafer[tpu]'"
)
# [outputs, inputs] of the matrices of a layer of Llama 3.1 8B over two cores.
LAYER = [(2048, 4096), (512, 4096), (512, 4096), (4096, 2048), (7168, 4096), (7168, 4096), (4096, 7168)]
ROWS, DEPTH = 8, 4


def abstract(name: str, outputs: int, inputs: int):
    form = FORMATS[name]
    parts = {"values": (form.row_bytes(inputs), form.numpy)}
    for part in ("scale", "zero", "minimum"):
        if part == "scale" or getattr(form, part):
            dtype = "uint8" if part == "zero" else held_as(part, form.scale_numpy, "tpu")
            parts[part] = (form.groups(inputs), dtype)
    return assemble(
        {part: jax.ShapeDtypeStruct((DEPTH, outputs, width), dtype) for part, (width, dtype) in parts.items()}, form
    )


@pytest.mark.parametrize("target", ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("name", ["int4", "int4-min", "mxfp4", "fp8", "fp8-g128", "int8"])
def test_one_layers_products_move_little_more_than_its_weights(name, target):
    mesh = tpu_target(target, MeshShape(1, 1)).mesh
    sharding = SingleDeviceSharding(mesh.devices.flat[0])
    weights = [abstract(name, *shape) for shape in LAYER]
    rows = [jax.ShapeDtypeStruct((ROWS, inputs), jnp.bfloat16) for _, inputs in LAYER]
    index = jax.ShapeDtypeStruct((), jnp.int32)
    formats = jax.tree.map(lambda _: Format(Layout.AUTO, sharding), weights)

    def products(rows, weights, index):
        return [tpu.matmul(x, weight, index, False) for x, weight in zip(rows, weights, strict=True)]

    jitted = jax.jit(products, in_shardings=(sharding, formats, sharding), out_shardings=sharding)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        compiled = jitted.lower(rows, weights, index).compile(TPU_OPTIONS)
    stored = sum(leaf.size // DEPTH * leaf.dtype.itemsize for leaf in jax.tree.leaves(weights))
    ratio = compiled.cost_analysis()["bytes accessed"] / stored
    assert 1 <= ratio <= 1.15
