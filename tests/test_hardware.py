"""What devices can do, and where each figure is from."""

import pytest

from jaxwafer.errors import UserError
from jaxwafer.hardware import figures, hardware_names, read_hardware

GOOD = """
[hardware]
name = "x"
kind = "gpu"
memory_bytes = 8e9
memory_bytes_per_s = 1e12
hop_s = 1e-6
hop_bytes_per_s = 1e10
core_bytes_per_s = 1e10
domain = 4
[hardware.flops]
bf16 = 1e14
[sources]
memory_bytes = "a"
memory_bytes_per_s = "a"
hop_s = "a"
hop_bytes_per_s = "a"
core_bytes_per_s = "a"
domain = "a"
"flops.bf16" = "a"
[constants]
basis = "none"
date = "2026-01-01"
"""


def test_every_file_is_read_and_every_figure_has_a_source_with_a_date():
    names = hardware_names()
    assert {"wse-2", "wse-3", "wse-3t", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu7x", "h100", "h200", "b200",
            "mi300x", "groq-lpu"} <= set(names)  # fmt: skip
    for name in names:
        found = read_hardware(name)
        for figure in figures(found.hardware):
            assert "202" in found.sources[figure], (name, figure)


def test_figures_are_those_of_their_sources():
    wafer, chip = read_hardware("wse-3").hardware, read_hardware("tpu7x").hardware
    assert (wafer.memory_bytes, wafer.memory_bytes_per_s, wafer.fabric.cores) == (44e9, 21e15, 900_000)
    # 0.74 FLOP/B, as is published of WSE-3.
    assert wafer.flops_per_s("bf16") / wafer.memory_bytes_per_s == pytest.approx(0.74, abs=0.01)
    assert (chip.memory_bytes, chip.memory_bytes_per_s, chip.flops_per_s("fp8")) == (192e9, 7.38e12, 4.614e15)


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("memory_bytes = 8e9\n", "", "missing required field `memory_bytes`"),
        ("memory_bytes = 8e9", "memory_bytes = -8e9", "> 0.0"),
        ("memory_bytes = 8e9", "memory_bytes = inf", "< 1e"),
        ("memory_bytes = 8e9", "memory_bytes = nan", "> 0.0"),
        ("bf16 = 1e14", "bf16 = 0", "> 0.0"),
        ("domain = 4", "domain = 4.5", "Expected `int`"),
        ("domain = 4", "colour = 1", "unknown field `colour`"),
        ("hop_s = 1e-6", "hop_s = 1e-6\npower_w = 700", "the figure 'power_w' has no source"),
        ('"flops.bf16" = "a"', '"flops.bf16" = " "', "the figure 'flops.bf16' has no source"),
        ("[hardware]", "[hardware", "does not describe hardware"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line(tmp_path, old, new, message):
    path = tmp_path / "x.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        read_hardware(str(path))
    assert message in str(error.value) and "x.toml" in str(error.value) and "\n" not in str(error.value)


def test_a_file_of_ones_own_is_taken(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(GOOD)
    assert read_hardware(str(path)).hardware.memory_bytes == 8e9
    with pytest.raises(UserError, match="x has no rate for fp8 arithmetic; choose one of bf16"):
        read_hardware(str(path)).hardware.flops_per_s("fp8")
    with pytest.raises(UserError, match="there is no hardware 'wse-9'; give a TOML file, this-machine or one of: b200"):
        read_hardware("wse-9")
