"""Random weights for any config."""

import numpy as np
import pytest
from support import config

from jaxwafer.checkpoint.random import RandomCheckpoint
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config


def test_there_is_a_tensor_for_every_declared_weight():
    source = RandomCheckpoint(config())
    sizes = [int(np.prod(source.shape(name))) for name in source.names()]
    assert sum(sizes) == spec_from_config(config()).parameters
    assert source.shape("model.layers.4.self_attn.q_proj.weight") == (96, 48)


def test_a_tensor_depends_on_its_name_and_the_seed_alone():
    name = "model.layers.0.mlp.up_proj.weight"
    one, again = (np.asarray(RandomCheckpoint(config()).read(name).values) for _ in range(2))
    other = np.asarray(RandomCheckpoint(config(), seed=1).read(name).values)
    np.testing.assert_array_equal(one, again)
    assert one.dtype == np.float32 and not np.array_equal(one, other)
    assert one.std() == pytest.approx(48**-0.5, rel=0.05)
    norm = np.asarray(RandomCheckpoint(config()).read("model.norm.weight").values)
    assert norm.mean() == pytest.approx(1, abs=0.1)


def test_what_is_not_there_is_named():
    with pytest.raises(UserError, match="the config declares no tensor model.nothing"):
        RandomCheckpoint(config()).read("model.nothing")
    tokenizer = RandomCheckpoint(config()).tokenizer()
    assert tokenizer.encode("5 17") == [5, 17] and tokenizer.decode([5, 17]) == "5 17"
    with pytest.raises(UserError, match="takes token ids, such as '5 17', not 'hello'"):
        tokenizer.encode("hello")
