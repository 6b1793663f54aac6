"""The loop: what is asked when, the balance of experts, and a few steps of a small model."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.model import spec_from_config
from jaxwafer.train import tasks
from jaxwafer.train.loop import BALANCE, CONFIG, STAGES, WIDTH, Curriculum, Stage, balanced, matched, train

# Of every kind of layer one.
SMALL = CONFIG | {
    "num_hidden_layers": 3,
    "num_experts": 4,
    "linear_attn_config": CONFIG["linear_attn_config"] | {"full_attn_layers": [3], "kda_layers": [1, 2]},
}
BIAS = "block_sparse_moe.gate.e_score_correction_bias"


def largest(batch) -> int:
    """Of the pairs in the rows of a recall."""
    return max((row.tolist().index(tasks.ID["?"]) - 1) // 2 for row in batch.tokens)


def test_recalls_grow_when_they_are_right_and_no_further_than_the_stage():
    rng, curriculum, stage = np.random.default_rng(0), Curriculum(), STAGES[0]
    assert largest(curriculum.batches(rng, stage)[1]) <= 5
    for _ in range(50):
        curriculum.update(0.5)
    assert largest(curriculum.batches(rng, stage)[1]) <= 5
    for _ in range(100):
        curriculum.update(1.0)
    assert 30 < largest(curriculum.batches(rng, stage)[1]) <= stage.pairs == 40
    assert curriculum.batches(rng, stage)[0].tokens.shape == (sum(stage.short.values()), WIDTH)


def test_the_largest_prompts_fit_their_rows():
    for task in STAGES[0].short:
        prompts, answers = tasks.rows(np.random.default_rng(0), task, 1, tasks.SIZES[task][1])
        assert prompts.shape[1] + answers.shape[1] <= WIDTH
    assert all(1 + 2 * stage.pairs + 3 <= stage.width for stage in STAGES)
    assert STAGES[-1].pairs == tasks.SIZES["recall"][1]


def test_busy_experts_are_biased_down_and_idle_ones_up():
    spec = spec_from_config(dict(SMALL))
    params = {f"model.layers.{n}": {BIAS: jnp.zeros(4), "other": jnp.ones(2)} for n in (1, 2)}
    found = balanced(spec, params, jnp.array([[4.0, 0.0, 2.0, 2.0], [1.0, 1.0, 1.0, 5.0]]))
    np.testing.assert_allclose(found["model.layers.1"][BIAS], BALANCE * np.array([-1, 1, 0, 0]))
    np.testing.assert_allclose(found["model.layers.2"][BIAS], BALANCE * np.array([1, 1, 1, -1]))
    assert found["model.layers.1"]["other"] is params["model.layers.1"]["other"]


def test_queries_begin_as_keys():
    weights = {"self_attn.q_proj.weight": jnp.zeros(3), "self_attn.k_proj.weight": jnp.arange(3.0)}
    latent = {"self_attn.q_proj.weight": jnp.ones(3)}
    found = matched({"a": weights, "b": latent, "c": jnp.ones(1)})
    np.testing.assert_array_equal(found["a"]["self_attn.q_proj.weight"], [0, 1, 2])
    np.testing.assert_array_equal(found["b"]["self_attn.q_proj.weight"], [1, 1, 1])


def test_steps_over_sixteen_devices_learn_the_end_of_an_answer():
    """Thirty steps are enough to know that something ends; the same seed takes the same steps."""
    stages = (Stage(steps=30, short={"copy": 16, "sort": 16}, recall=16, width=32, pairs=8),)
    losses = [metrics["loss"] for metrics, _ in train(SMALL, stages, 0)]
    assert losses[0] == pytest.approx(2 * np.log(len(tasks.VOCABULARY)), abs=1.0)
    assert losses[-1] < 0.75 * losses[0]
