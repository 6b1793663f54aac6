"""What is read off compiled programs, on texts written by hand and on a small program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxwafer.roofline.compiled import collectives, copies, read

TEXT = """\
%fused_computation.1 (param_0: bf16[2,64]) -> bf16[64,2] {
  %inside = bf16[2,64]{1,0} copy(%param_0)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %sum.1 = f32[4,8]{1,0:T(8,128)} all-reduce(%x), channel_id=1
  %sum.2 = f32[4,8]{1,0:T(8,128)} all-reduce(%y), channel_id=2
  %hop = (bf16[1,16]{1,0}, bf16[1,16]{1,0}, u32[], u32[]) collective-permute-start(%z), channel_id=3
  %hop.done = bf16[1,16]{1,0} collective-permute-done(%hop)
  %kept = u8[3,5,7]{0,2,1:T(8,128)(4,1)} copy(%cache)
  %prefetch = u8[3,5,7]{2,1,0:T(8,128)(4,1)S(1)} copy(%cache)
  %other = f32[3,5,7]{2,1,0} copy(%something)
  ROOT %copy_fusion = bf16[64,2]{1,0} fusion(%weight), kind=kLoop, calls=%fused_computation.1
}
"""


def on(shape, dtype, spec=PartitionSpec()):
    mesh = Mesh(np.array(jax.devices()[:2]), ("core",))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))


def test_collectives_are_counted_by_kind_and_size():
    assert collectives(TEXT) == {("all-reduce", 128): 2, ("collective-permute", 32): 1}


def test_whole_copies_are_those_of_a_shard_in_main_memory_and_outside_of_fusions():
    kept = {
        "cache": {"k": on((3, 10, 7), jnp.uint8, PartitionSpec(None, "core"))},
        "weights": on((2, 64), jnp.bfloat16),
    }
    assert copies(TEXT, kept) == {"cache.k": 1, "weights.": 1}


def test_memory_of_a_program_that_writes_in_place():
    x = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    found = read(compiled, {})
    assert (found.arguments, found.outputs, found.aliased) == (65536, 65536, 65536)
    assert found.peak == 65536 + found.temporaries + found.code
    assert found.accessed == 2 * 65536 and found.flops == 256 * 64
    assert (found.collectives, found.copies) == ({}, {})
