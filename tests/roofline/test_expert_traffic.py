"""Counted bytes of experts: those that were read, and no others."""

import numpy as np
import pytest
from support import config

from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.model import spec_from_config
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.quant.formats import FORMATS, choose
from jaxwafer.roofline.counters import Counts, decode_traffic, imbalance

# 7 experts over 2 cores: the eighth is padding.
FIELDS = config(architectures=["Qwen3MoeForCausalLM"], num_experts=7, num_experts_per_tok=3, moe_intermediate_size=20,
                num_hidden_layers=4)  # fmt: skip
EXPERT = 3 * 20 * 48 * 2


def cache(cores: int) -> CacheShape:
    def formats(_, weight):
        return choose("bf16", weight.role, FORMATS["bf16"])

    placement = place(spec_from_config(FIELDS), uniform(4, 2), formats, cores=cores)
    return CacheShape(placement=placement, format=KVFormat(name="bf16"), block=8, blocks=4)


def counts(experts, ticks=(0, 0)) -> Counts:
    zero = np.zeros((2, 1))
    return Counts(busy_ticks=np.array(ticks)[:, None], tokens=zero, kv_rows=zero, experts=np.array(experts)[:, None])


@pytest.mark.parametrize("cores", [1, 2])
def test_an_experts_bytes_are_counted_as_often_as_it_was_read(cores):
    traffic = decode_traffic(cache(cores), 4, counts([5.0, 2.0]))
    assert traffic.weights["bf16"] == 7 * EXPERT
    assert traffic.padding == 0


def test_a_wafer_whose_requests_choose_more_experts_is_the_busier_one():
    place = cache(1).placement
    (stack,) = place.mlps
    rest = 2 * (place.layer_bytes(place.mixers[0]) + place.layer_bytes(stack) - 7 * EXPERT)
    loads = rest + EXPERT * np.array([6.0, 12.0])
    assert imbalance(cache(1), counts([60.0, 120.0], ticks=(10, 10))) == pytest.approx(loads[1] / loads.mean())
