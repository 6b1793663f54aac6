"""The script that runs Kimi K3's packed plan, on the first nine layers."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).parents[2] / "scripts" / "wafers59.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("wafers59", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_whole_plan_has_59_wafers_and_70_visits(script):
    partition = script.packed(93)
    assert (partition.wafers, len(partition.visits)) == (59, 70)
    passes = np.bincount([v.wafer for v in partition.visits])
    assert passes.max() == 2 and np.sum(passes == 2) == 11


def test_the_small_config_keeps_the_list_of_layers(script):
    linear = script.small_config(9)["text_config"]["linear_attn_config"]
    assert (linear["full_attn_layers"], linear["kda_layers"]) == ([4, 8], [1, 2, 3, 5, 6, 7, 9])


def test_nine_layers_run_with_a_revisit_and_give_the_tokens_of_one_wafer(script, tmp_path):
    partition = script.packed(9)
    # K K | K | M | K K | K | M | K: the third and seventh layers share a wafer.
    assert (partition.wafers, len(partition.visits)) == (6, 7)
    many = script.run(9, partition, 3)
    np.testing.assert_array_equal(many.busy, many.trace >= 0)
    # Once the pipeline is full every wafer works in every round, each in a tick on a micro-batch of its own.
    period = 2
    full = many.busy[4 * period : -4 * period]
    assert full.reshape(-1, period, 6).any(axis=1).all()
    for tick in many.trace:
        held = tick[tick >= 0]
        assert len(set(held)) == len(held)
    alone = script.run(9, script.Partition((tuple(range(9)),)), 3, micro_batches=len(many.tokens))
    assert alone.tokens == many.tokens and len({tuple(t) for t in many.tokens}) > 1
    script.draw(tmp_path / "p.png", many, partition)
    assert (tmp_path / "p.png").read_bytes()[:4] == b"\x89PNG"
