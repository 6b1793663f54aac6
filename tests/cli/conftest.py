"""A tiny checkpoint in a folder of its own, and the command line in this process."""

import pytest
from checkpoint.conftest import write_gguf  # noqa: F401, a fixture
from hub_folder import write_checkpoint
from support import checkpoint

from jaxwafer.cli.main import main


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A Hugging Face folder "m" in the working directory, which is the test's own."""
    monkeypatch.chdir(tmp_path)
    return write_checkpoint(tmp_path / "m", checkpoint())


@pytest.fixture
def jaxwafer(capsys, monkeypatch):
    """Runs a command in this process: (status, stdout, stderr)."""
    # A command points JAX at the user's cache of compiled programs; the tests keep theirs.
    monkeypatch.setattr("jaxwafer.cli.run.use_compilation_cache", lambda: None)
    # Ceilings of this machine are measured elsewhere, and take seconds.
    monkeypatch.setattr("jaxwafer.roofline.report.read_ceiling", lambda mesh: 1e9)
    monkeypatch.setattr("jaxwafer.roofline.report.compute_ceiling", lambda mesh, dtype: 1e12)
    monkeypatch.setattr("jaxwafer.roofline.report.tick_latency", lambda mesh, **_: 1e-5)
    monkeypatch.setattr("jaxwafer.roofline.report.stream_ceiling", lambda mesh: 1e9)

    def run(*argv: str) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            status = main([str(word) for word in argv])
        except SystemExit as stop:  # --help
            status = stop.code
        out, err = capsys.readouterr()
        return status, out, err

    return run


@pytest.fixture
def refused(jaxwafer):
    """Runs a command that must be refused in one line on stderr, with nothing on stdout; the line."""

    def run(*argv: str) -> str:
        status, out, err = jaxwafer(*argv)
        assert (status, out) == (2, "")
        assert err.startswith("jaxwafer: ") and err.endswith("\n") and err.count("\n") == 1
        return err.removeprefix("jaxwafer: ").strip()

    return run
