"""Plans as files."""

import json

import pytest

from jaxwafer.errors import UserError
from jaxwafer.partition.evaluate import evaluate
from jaxwafer.partition.file import document, read_partition
from jaxwafer.partition.plan import Visit, routed, uniform
from jaxwafer.partition.problem import Proposal

from .problems import layer, problem


@pytest.mark.parametrize(
    "partition", [uniform(3, 2), routed((Visit(0, (0,)), Visit(1, (1,)), Visit(0, (2,))), 2)], ids=["ring", "revisits"]
)
def test_a_partition_is_read_as_it_was_written(tmp_path, partition):
    plan = evaluate(problem([layer(20, token=1)] * 3, cores=2), Proposal(partition=partition), "own")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document(plan, (plan,), {"regions": "no fabric"})))
    assert read_partition(path) == (partition, 2)
    found = json.loads(path.read_text())
    assert found["refused"] == {"regions": "no fabric"} and len(found["sweep"]) == 100
    assert found["plan"]["capacity"]["requests"] == plan.requests
    assert found["plan"]["memory"][0]["weights"] == 40


@pytest.mark.parametrize(
    "text, message",
    [
        ("{", "is no plan that jaxwafer plan --json wrote: Input data was truncated"),
        ("{}", "missing required field `plan`"),
        ('{"plan": {"layers": [[0]], "cores": "2"}}', "plan.cores: Expected `int`, got `str`"),
        ('{"plan": {"layers": [], "cores": 1}}', "a plan has at least one wafer and one core"),
        ('{"plan": {"layers": [[0]], "cores": 0}}', "a plan has at least one wafer and one core"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_partition(path)
    with pytest.raises(UserError, match="cannot read --partition .*: No such file"):
        read_partition(tmp_path / "none.json")
