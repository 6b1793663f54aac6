"""Fitting constants to measured rows."""

import msgspec
import pytest

from jaxwafer.errors import UserError
from jaxwafer.hardware import Constants, read_hardware
from jaxwafer.partition.calibrate import Row, calibrate, read_rows
from jaxwafer.planner import open_model


def models(row: Row):
    return open_model(row.model, weights=row.weights, kv_cache=row.kv_cache)


def rows_of(name: str) -> tuple[Row, ...]:
    return tuple(r for r in read_rows() if r.hardware == name)


@pytest.fixture(scope="module")
def v5e():
    return calibrate(read_hardware("tpu-v5e"), rows_of("tpu-v5e"), models)


def test_llama_70b_on_16_chips_is_predicted_within_a_tenth(v5e):
    assert len(v5e.scores) == 9 and {s.row.model for s in v5e.scores} == {"llama-3.1-70b"}
    assert v5e.left_out_error < 0.10 < v5e.roof_error
    assert v5e.left_out_error == pytest.approx(sum(abs(s.predicted / s.row.tokens_per_s - 1) for s in v5e.scores) / 9)


@pytest.mark.parametrize("name", ["tpu-v5e", "wse-3"])
def test_the_shipped_constants_are_the_fitted_ones(name, v5e):
    device = read_hardware(name)
    found = v5e if name == "tpu-v5e" else calibrate(device, rows_of(name), models)
    for field in ("bandwidth_efficiency", "link_efficiency", "collective_s", "overhead", "left_out_error"):
        fitted, shipped = getattr(found.constants, field), getattr(device.constants, field)
        assert shipped == pytest.approx(fitted, rel=0.01, abs=1e-8), field
    assert device.constants.basis == found.constants.basis


def test_rows_of_an_unknown_set_up_do_not_change_the_fit(v5e):
    fit = tuple(r for r in rows_of("tpu-v5e") if r.use == "fit")
    alone = calibrate(read_hardware("tpu-v5e"), fit, models)
    assert msgspec.structs.replace(alone.constants, date="") == msgspec.structs.replace(v5e.constants, date="")
    assert not alone.compared and len(v5e.compared) == 2


def test_constants_that_made_the_rows_are_found():
    """Rows made by the model itself: the fit must give their constants back, and predict each without it."""
    device = read_hardware("wse-3")
    made = []
    for row in (r for r in rows_of("wse-3") if r.use == "fit"):
        exact = msgspec.structs.replace(device, constants=Constants(basis="made", date="", overhead=3.0))
        # With nothing to fit, rows are compared under the constants as they are.
        compared = calibrate(exact, (msgspec.structs.replace(row, use="compare"),), models).compared[0]
        made.append(msgspec.structs.replace(row, tokens_per_s=compared.predicted))
    found = calibrate(device, tuple(made), models)
    assert found.constants.overhead == pytest.approx(3.0, rel=1e-4) and found.left_out_error < 1e-4


def test_every_row_has_a_source_a_date_and_a_model_here():
    for row in read_rows():
        assert row.source and row.date[:3] == "202" and open_model(row.model).layers
        assert row.use == "fit" or row.note


def test_too_few_rows_and_files_that_are_none(tmp_path):
    few = tuple(r for r in rows_of("tpu-v5e") if r.use == "fit")[:3]
    with pytest.raises(UserError, match="3 rows of TPU v5e with a known set-up are too few for 3 constants"):
        calibrate(read_hardware("tpu-v5e"), few, models)
    path = tmp_path / "r.toml"
    path.write_text("[[row]]\nmodel = 3\n")
    with pytest.raises(UserError, match="r.toml has no measured rows as they should be: "):
        read_rows(path)
    with pytest.raises(UserError, match="cannot read --rows .*none.toml: No such file"):
        read_rows(tmp_path / "none.toml")
