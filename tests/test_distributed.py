"""Runs of two and four processes on this machine against the textbook's tokens, and runs with processes missing."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hub_folder import write_checkpoint
from support import checkpoint, greedy

from jaxwafer.distributed import Cluster, from_leader, leads, processes
from jaxwafer.errors import UserError

WORKER = Path(__file__).with_name("distributed_worker.py")
ROOT = WORKER.parent.parent
PROMPTS, COUNT = [[5, 17, 3], [99, 4]], 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("distributed") / "m", checkpoint())


@pytest.fixture(scope="module")
def expected():
    return [greedy(checkpoint(), ids, COUNT) for ids in PROMPTS]


def free_port(least: int = 0) -> int:
    """A port that nobody listens on, at least `least` where that is not 0."""
    while True:
        with socket.socket() as found:
            try:
                found.bind(("localhost", least))
                return found.getsockname()[1]
            except OSError:
                least += 1


def start(folder: Path, number: int, *argv: str, environment: dict | None = None) -> subprocess.Popen:
    """Process `number` of a run; its report goes to r<number>.json beside the folder."""
    prompts = [w for ids in PROMPTS for w in ("--prompt", " ".join(f"t{i}" for i in ids))]
    words = ["decode", folder.name, *prompts, "--dtype", "f32", "--kv-cache", "f32", "--max-new-tokens", str(COUNT),
             "--json", f"r{number}.json", "--distributed", *argv]  # fmt: skip
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.Popen(
        [sys.executable, str(WORKER), *words], cwd=folder.parent, env=os.environ | paths | (environment or {}),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def finish(running: list[subprocess.Popen]) -> list[tuple[int, str, str]]:
    """(status, stdout, stderr) of each, none left behind."""
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(running, outputs, strict=True)]


def flags(port: int, count: int, number: int) -> list[str]:
    return ["--coordinator", f"localhost:{port}", "--processes", str(count), "--process", str(number)]


@pytest.mark.parametrize("count, mesh", [(2, "1x2"), (4, "2x2")], ids=["cores", "wafers and cores"])
def test_several_processes_give_the_tokens_of_one(folder, expected, count, mesh):
    port = free_port()
    done = finish([start(folder, i, "--mesh", mesh, *flags(port, count, i)) for i in range(count)])
    assert [status for status, _, _ in done] == [0] * count, done
    report = json.loads((folder.parent / "r0.json").read_text())
    assert [output["tokens"] for output in report["outputs"]] == expected
    assert "m on " + mesh in done[0][1] and done[0][2] == ""
    # The others are silent and write nothing.
    assert [out + err for _, out, err in done[1:]] == [""] * (count - 1)
    assert sorted(p.name for p in folder.parent.glob("r*.json")) == ["r0.json"]
    # Tallies come from every wafer: two requests on two wafers never wait, but for the first and the last tick.
    assert report["roofline"]["ticks"] > 0 and 0 <= report["roofline"]["bubble_fraction"] < 0.5


def test_slurm_says_who_is_who_and_each_process_reads_its_own_wafers_alone(folder, expected):
    # The port that JAX takes from Slurm is 61440 and the job's number modulo 4096.
    job = free_port(61440 + os.getpid() % 3000) - 61440
    slurm = {"SLURM_JOB_ID": str(job), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    running = []
    for i in range(2):
        own = {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i), "READS": f"reads{i}"}
        running.append(start(folder, i, "--mesh", "2x1", environment=slurm | own))
    done = finish(running)
    assert [status for status, _, _ in done] == [0, 0], done
    report = json.loads((folder.parent / "r0.json").read_text())
    assert [output["tokens"] for output in report["outputs"]] == expected
    layers = []
    for i in range(2):
        read = (folder.parent / f"reads{i}").read_text().split()
        assert len(set(read)) == len(read)
        layers.append({int(n) for name in read for n in re.findall(r"layers\.(\d+)\.", name)})
    # Five layers: wafer 0 has three of them.
    assert layers == [{0, 1, 2}, {3, 4}]


def test_a_process_that_dies_ends_the_run_with_one_line(folder):
    port, running, dies = free_port(), [], 1
    for i in range(2):
        environment = {"DIES_AFTER": "1"} if i == dies else None
        running.append(start(folder, i, "--mesh", "2x1", "--max-new-tokens", "100", "--ignore-eos", "--timeout", "6",
                             *flags(port, 2, i), environment=environment))  # fmt: skip
    done = finish(running)
    assert done[dies][0] == 9
    status, _, err = done[1 - dies]
    assert status == 3
    assert re.fullmatch(r"jaxwafer: .*process.* of the run died or stopped answering.*\n", err), err


def test_a_process_that_never_arrives_ends_the_run_with_one_line(folder):
    ((status, out, err),) = finish([start(folder, 0, "--mesh", "2x1", "--timeout", "3", *flags(free_port(), 2, 0))])
    assert (status, out) == (3, "")
    assert err == "jaxwafer: not all processes of the run arrived in time: start them all, or raise --timeout\n"


def test_without_flags_and_without_a_cluster_it_says_what_to_give(folder):
    ((status, out, err),) = finish([start(folder, 0)])
    assert (status, out) == (2, "")
    assert err.startswith("jaxwafer: --distributed finds no Slurm") and err.count("\n") == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"coordinator": "a:1"}, "belong together"),
        ({"processes": 2, "process": 0}, "belong together"),
        ({"coordinator": "a", "processes": 2, "process": 0}, "should be HOST:PORT, not 'a'"),
        ({"coordinator": "a:0", "processes": 2, "process": 0}, "should be HOST:PORT"),
        ({"coordinator": "a:1", "processes": 2, "process": 2}, "from 0 to 1 of --processes 2, not 2"),
        ({"timeout": 0}, "at least 1 second, not 0"),
    ],
)
def test_bad_flags_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        Cluster(**fields)


def test_one_process_leads_itself():
    assert processes() == 1 and leads()
    assert from_leader(3.0) == 3.0
