"""What becomes of a child under supervision."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxwafer.cli.supervise import reason

ROOT = Path(__file__).parents[2]
FATAL = "F1130 22:00:30.755064   22402 client.h:80] Terminating process because"
DEAD = """E1130 22:00:30.754344 22391 coordination_service.cc:1549] Use error polling: UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):
{}
The tasks have crashed. Check the task logs for an earlier error
"""  # noqa: E501


def child(work: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a supervised function with the body `work`."""
    begin = "import os, sys\nfrom jaxwafer.cli.supervise import supervised"
    code = f"{begin}\ndef work():\n {work}\nsys.exit(supervised(work))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    return done.returncode, done.stdout, done.stderr


def test_output_errors_and_status_pass_through():
    assert child("print('text'); print('note', file=sys.stderr); return 2") == (2, "text\n", "note\n")


def test_what_libraries_print_to_stdout_goes_to_stderr_and_gloos_connections_nowhere():
    work = "os.write(1, b'library\\n[Gloo] Rank 0 is connected\\n'); print('text'); return 0"
    assert child(work) == (0, "text\n", "library\n")


def test_an_abort_is_one_line():
    work = f"os.write(2, {FATAL.encode()!r} + b' of\\nRPC: /x/RegisterTask\\n  @ 0x7f\\n'); os.abort()"
    status, out, err = child(work)
    assert (status, out) == (3, "")
    assert err == "jaxwafer: not all processes of the run arrived in time: start them all, or raise --timeout\n"


def test_an_exception_keeps_its_traceback():
    status, out, err = child("raise ValueError('why')")
    assert (status, out) == (1, "") and err.startswith("Traceback") and err.endswith("ValueError: why\n")


def test_a_signal_gives_the_shells_status():
    assert child("os.kill(os.getpid(), 15)") == (143, "", "")


def test_the_child_ends_with_its_supervisor():
    """The test would hang on the child's end of the pipe if it lived on."""
    assert child("os.kill(os.getppid(), 9); import threading; threading.Event().wait()") == (-9, "", "")


@pytest.mark.parametrize(
    "log, line",
    [
        (DEAD.format("1"), "process 1 of the run died or stopped answering; its own output may say why"),
        (DEAD.format("1\n3"), "processes 1, 3 of the run died or stopped answering; its own output may say why"),
        ("F1130 22:00:30.7 2 client.h:80] RPC: /xla/PollForError",
         "process 0 of the run died or stopped answering; its own output may say why"),
        (FATAL, "the process was aborted: Terminating process because"),
    ],
)  # fmt: skip
def test_the_line_names_who_is_missing(log, line):
    assert reason(log) == line
