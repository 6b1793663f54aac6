"""A run of several processes under supervision.

JAX aborts a process whose partners are gone, which no handler in it can turn into a message. So the work runs in a
child, and what the child dies of is said here in one line.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable

# The front of a line of XLA's log: its level, month and day, time, thread and place.
LOG = re.compile(r"[IWEF]\d{4} \d\d:\d\d:[\d.]+ +\d+ \S+\] ")
FAILED = 3


def supervised(work: Callable[[], int]) -> int:
    """The status of `work`, run in a child process; 3 where it was cut off because another process is missing.

    The child's stderr goes through here, less what Gloo says of its connections. From an error in XLA's log on it is
    held back, in case it aborts.
    """
    (errors, errors_in), (alive, alive_in) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(errors)
        os.close(alive_in)
        _become_child(errors_in, alive)
        status = 1
        try:
            status = work()
        except Exception:
            traceback.print_exc()
        finally:
            # No shutdown at exit: after a failure it would wait for partners that wait for this process.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)
    os.close(errors_in)
    os.close(alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child too
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    held: list[bytes] = []
    with os.fdopen(errors, "rb") as lines:
        for line in lines:
            if held or LOG.match(line.decode(errors="replace")) and line[:1] in b"EF":
                held.append(line)
            elif not line.startswith(b"[Gloo]"):
                sys.stderr.buffer.write(line)
                sys.stderr.flush()
    _, ended = os.waitpid(child, 0)
    if os.WIFEXITED(ended):
        # A run that ended with a message of its own needs no other.
        if os.WEXITSTATUS(ended) < 2:
            sys.stderr.buffer.write(b"".join(held))
        return os.WEXITSTATUS(ended)
    if os.WTERMSIG(ended) != signal.SIGABRT:
        return 128 + os.WTERMSIG(ended)
    print(f"jaxwafer: {reason(b''.join(held).decode(errors='replace'))}", file=sys.stderr)
    return FAILED


def reason(log: str) -> str:
    """What XLA aborted of, from the end of its log."""
    if "RegisterTask" in log:
        return "not all processes of the run arrived in time: start them all, or raise --timeout"
    if dead := re.search(r"stopped sending heartbeats\):\s*((?:\S*\d+\s)+)", log):
        numbers = re.findall(r"\d+", dead[1])
        which = f"process {numbers[0]}" if len(numbers) == 1 else f"processes {', '.join(numbers)}"
        return f"{which} of the run died or stopped answering; its own output may say why"
    if "PollForError" in log or "heartbeat" in log.lower():
        return "process 0 of the run died or stopped answering; its own output may say why"
    first = next((line for line in log.splitlines() if line.strip()), "no reason given")
    return f"the process was aborted: {LOG.sub('', first)}"


def _become_child(errors: int, alive: int) -> None:
    """Errors go to the supervisor, and this process ends with it. What libraries print to stdout goes to stderr."""
    os.dup2(errors, 2)
    os.close(errors)
    sys.stdout.flush()
    lines = 1 if sys.stdout.line_buffering else -1
    sys.stdout = os.fdopen(os.dup(1), "w", lines, encoding=sys.stdout.encoding)
    os.dup2(2, 1)
    # Read returns when the supervisor's end is closed.
    threading.Thread(target=lambda: (os.read(alive, 1), os._exit(FAILED)), daemon=True).start()
