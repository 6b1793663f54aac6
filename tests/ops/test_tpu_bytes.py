"""What products, caches and states move on a TPU that is not here, by XLA's count. Skipped without libtpu.

Of a Pallas kernel XLA counts what it says of itself; what shows here is that nothing is copied to and from it.
"""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

from jaxwafer.mesh import MeshShape
from jaxwafer.ops.append import tpu as append_tpu
from jaxwafer.ops.attention import tpu as attention_tpu
from jaxwafer.ops.delta_rule import tpu as delta_rule_tpu
from jaxwafer.ops.matmul import tpu
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step
from jaxwafer.pipeline.programs import TPU_OPTIONS
from jaxwafer.quant.array import assemble
from jaxwafer.quant.formats import FORMATS
from jaxwafer.quant.storage import held_as
from jaxwafer.roofline.compiled import Compiled, read
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


def looped(target: str, update, cache, x, *rest) -> Compiled:
    """`update(cache, x, layer, *rest)` → (cache, x) of every layer in every tick; the cache is donated, and its layout
    left to the compiler. All arrays are abstract."""
    mesh = tpu_target(target, MeshShape(1, 1)).mesh
    sharding = SingleDeviceSharding(mesh.devices.flat[0])
    cache = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), cache)
    formats = jax.tree.map(lambda _: Format(Layout.AUTO, sharding), cache)

    def ticks(cache, x, number, *rest):
        def tick(_, carry):
            return jax.lax.fori_loop(0, DEPTH, lambda layer, carry: update(*carry, layer, *rest), carry)

        return jax.lax.fori_loop(0, number, tick, (cache, x))

    options = {"in_shardings": (formats, *[sharding] * (2 + len(rest))), "out_shardings": (formats, sharding)}
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(ticks, **options, donate_argnums=0).lower(cache, x, whole(), *rest)
    return read(lowered.compile(TPU_OPTIONS), {"cache": cache})


def whole(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def float32(*shape: int):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@pytest.mark.parametrize("target", ["v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("heads, dim", [(1, 576), (2, 128), (8, 128)])
@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.uint16])
@pytest.mark.parametrize("tokens", [1, 40])
def test_rows_are_written_where_attention_reads_them(target, heads, dim, dtype, tokens):
    """Keys and values, or a latent row, of two requests: nothing else of the cache moves in decoding, and a prompt's
    rows are written in place too."""
    batch, block, columns = 2, 32, 64
    shape = DEPTH, batch * columns, block, heads
    exponent = jax.ShapeDtypeStruct(shape, jnp.int8) if dtype == jnp.uint8 else None
    pages = Pages(values=jax.ShapeDtypeStruct((*shape, dim), dtype), exponent=exponent)

    def update(cache, x, layer, step):
        rows = jnp.broadcast_to(x, (batch, tokens, heads, dim))
        cache = tuple(append_tpu.append(part, layer, *step.rows(tokens, block), rows) for part in cache)
        if tokens > 1:
            return cache, x
        if heads > 1:
            q = jnp.broadcast_to(x[..., None, :], (batch, 1, heads, 4, dim))
            seen = attention_tpu.paged_attention(q, *cache, layer, step, scale=0.1, window=None, sinks=None)
        else:
            q = jnp.broadcast_to(x, (batch, 1, 16, dim))
            found = attention_tpu.latent_attention(q, *cache, layer, step, rank=512, scale=0.1, first=jnp.int32(0))
            seen = found[2]
        return cache, x + jnp.sum(seen)

    step = Step(start=whole(batch), count=whole(batch), table=whole(batch, columns), slot=whole(batch))
    found = looped(target, update, (pages,) if heads == 1 else (pages, pages), float32(batch, 1, 1, dim), step)
    assert not found.copies
    assert found.temporaries < 0.2 * found.aliased


@pytest.mark.parametrize("target", ["v5e:2x2", "tpu7x:2x2x1"])
@pytest.mark.parametrize("channels", [True, False], ids=["a channel", "a head"])
def test_a_step_reads_and_writes_its_state_once(target, channels):
    batch, heads, width = 4, 16, 128
    state = State(values=float32(DEPTH, 16, heads, width, width))

    def update(state, x, layer, g, beta, slot, start):
        out, state = delta_rule_tpu.recur(x, x, x, g, beta, state, layer, slot, start)
        return state, x + out

    g = float32(batch, 1, heads, width if channels else 1)
    rest = g, float32(batch, 1, heads), whole(batch), whole(batch)
    found = looped(target, update, state, float32(batch, 1, heads, width), *rest)
    assert not found.copies
    assert found.accessed <= 1.2 * 2 * batch * heads * width * width * 4
