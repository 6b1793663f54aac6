"""Devices as wafers × cores."""

import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from jaxwafer.errors import UserError
from jaxwafer.mesh import MeshShape, make_mesh, parse_mesh


@pytest.mark.parametrize("text, wafers, cores", [("1x1", 1, 1), ("4x2", 4, 2), ("2x16", 2, 16), (" 3x5 ", 3, 5)])
def test_wafers_come_before_cores(text, wafers, cores):
    shape = parse_mesh(text)
    assert (shape.wafers, shape.cores, shape.platform, shape.devices) == (wafers, cores, None, wafers * cores)
    assert str(shape) == text.strip()


@pytest.mark.parametrize("text", ["0x4", "4x0", "-1x2", "2x-2"])
def test_sizes_below_one_are_refused(text):
    with pytest.raises(UserError, match=f"--mesh {text}: wafers and cores must be at least 1"):
        parse_mesh(text)


@pytest.mark.parametrize("text", ["", "4", "4x", "x2", "4x2x1", "4*2", "4.0x2", "no-such", "no-such.toml"])
def test_what_is_no_mesh_is_refused_with_what_one_looks_like(text):
    with pytest.raises(UserError, match="is neither WxC .*, a TOML file nor one of: .*cpu-4x2"):
        parse_mesh(text)


def test_a_toml_file_gives_sizes_and_platform(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[mesh]\nwafers = 3\ncores = 2\nplatform = "cpu"\n')
    assert parse_mesh(str(path)) == MeshShape(3, 2, "cpu")
    path.write_text("[mesh]\nwafers = 3\ncores = 2\n")
    assert parse_mesh(str(path)) == MeshShape(3, 2, None)


def test_a_mesh_of_the_repository_goes_by_its_name():
    assert parse_mesh("cpu-4x2") == MeshShape(4, 2, "cpu")
    for name in ("cpu-4x2", "cpu-5x3"):
        assert parse_mesh(name).devices > 1


def test_a_name_that_is_no_mesh_lists_those_there_are():
    with pytest.raises(UserError, match="one of: cpu-4x2, cpu-5x3$"):
        parse_mesh("wse-4")
    with pytest.raises(UserError, match=r"has no \[mesh\] table"):
        parse_mesh("wse-3")


@pytest.mark.parametrize(
    "text, message",
    [
        ("wafers = 3", "has no [mesh] table with wafers and cores"),
        ("mesh = 3", "has no [mesh] table with wafers and cores"),
        ("[mesh]\nwafers = 3", "[mesh] wafers and cores must be whole numbers"),
        ('[mesh]\nwafers = "3"\ncores = 1', "[mesh] wafers and cores must be whole numbers"),
        ("[mesh]\nwafers = true\ncores = 1", "[mesh] wafers and cores must be whole numbers"),
        ("[mesh]\nwafers = 0\ncores = 1", "wafers and cores must be at least 1"),
        ("[mesh]\nwafers = 1\ncores = 1\nplatform = 5", "[mesh] platform must be a text"),
        ("[mesh\n", "not a TOML file"),
        (b"\xff\xfe", "not a TOML file"),
    ],
)
def test_a_toml_file_that_says_no_mesh_is_refused_by_name(tmp_path, text, message):
    path = tmp_path / "bad.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError) as error:
        parse_mesh(str(path))
    assert str(error.value).startswith(str(path)) and message in str(error.value)


@pytest.mark.parametrize("wafers, cores", [(1, 1), (4, 2), (2, 4), (5, 3), (16, 1)])
def test_the_order_of_the_devices_is_the_order_given(wafers, cores):
    got = make_mesh(MeshShape(wafers, cores))
    assert got.axis_names == ("wafer", "core") and got.devices.shape == (wafers, cores)
    expected = np.array(jax.devices()[: wafers * cores]).reshape(wafers, cores)
    assert (got.devices == expected).all()


@pytest.mark.parametrize("wafers, cores", [(17, 1), (4, 5), (1000, 1000)])
def test_more_devices_than_there_are_is_refused_with_both_numbers(wafers, cores):
    with pytest.raises(UserError, match=f"mesh {wafers}x{cores} needs {wafers * cores} devices, but there are 16 cpu"):
        make_mesh(MeshShape(wafers, cores))


@pytest.mark.parametrize("platform", ["cuda", "nonsense"])
def test_a_platform_that_is_not_here_is_refused_not_replaced(platform):
    before = jax.config.jax_platforms
    with pytest.raises(UserError, match=f"no {platform} devices"):
        make_mesh(MeshShape(1, 1, platform))
    assert jax.config.jax_platforms == before


def test_an_installed_libtpu_says_nothing_where_there_is_no_tpu():
    """Nor does any other backend that JAX tries before the CPU."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith(("JAX", "TPU"))}
    code = "from jaxwafer.mesh import find_devices; find_devices()"
    run = subprocess.run([sys.executable, "-c", code], env=ours, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
