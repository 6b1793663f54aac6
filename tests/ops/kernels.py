"""Kernels of platforms that are not here: what they take, interpreted, or lowered for one."""

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.bits import stored_as
from jaxwafer.ops.gpu_kernel import KERNEL
from jaxwafer.ops.pages import Pages


def interpreted(backend: str) -> AbstractContextManager:
    """Where programs traced in it interpret the Pallas kernels of a backend."""
    if backend == "gpu":
        return mock.patch.object(pl, "pallas_call", partial(pl.pallas_call, interpret=True))
    return pltpu.force_tpu_interpret_mode() if backend == "tpu" else nullcontext()


def as_bits(pages: Pages) -> Pages:
    """The cache as the engine keeps it."""
    return pages.replace(values=pages.values.view(stored_as(pages.values.dtype)))


def lowered_for_cuda(function, *arguments) -> str:
    """The module of a jitted function of arguments that may be shapes, lowered for an H200."""
    unchecked = [jax.export.DisabledSafetyCheck.custom_call(KERNEL)]
    lower = jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=unchecked)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("core",), abstract_device=device)):
        return lower(*arguments).mlir_module()
