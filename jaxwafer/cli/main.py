"""The command line: one file a command, and what all of them share."""

import contextlib
import dataclasses
import difflib
import io
import itertools
import os
import re
import signal
import sys
import threading
import typing
import warnings
from typing import Annotated

from jaxwafer.cli.supervise import supervised
from jaxwafer.errors import UserError

# What the parser says, as a pattern, and what is plainer.
PLAINER = {
    r": invalid literal for int\(\) with base 10:": " should be a whole number, not",
    r": could not convert string to float:": " should be a number, not",
    r": Exceeds the limit \(\d+ digits\).*": " has too many digits",
    r"\. Expected 1 values\.": "",
    r"^Error parsing ": "",
}


def run() -> None:
    """`main` as a process of its own; with --distributed in a child of it."""
    status = supervised(main) if "--distributed" in sys.argv[1:] else main()
    if status == 130:
        # A device may still be at work, which the interpreter would pull from under it as it ends.
        os._exit(status)
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Run a command. Bad input is one line on stderr and status 2, the loss of another process of the run the same with
    status 3; Ctrl-C is status 130."""
    try:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # What a terminal's encoding cannot show is no reason to stop.
            sys.stdout.reconfigure(errors="replace")
        with warnings.catch_warnings(), _hooked():
            warnings.showwarning = _note
            parse(sys.argv[1:] if argv is None else argv).run()
        if sys.stdout is not None:
            sys.stdout.flush()
        return 0
    except UserError as error:
        return _say(error, error.status)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader went away, as `| head` does.
        _discard_output()
        return 141
    except OSError as error:
        # What is read or written by name has messages of its own: this is the output, a cache or an impossible name.
        _discard_output()
        return _say(f"{error.filename or 'cannot write the output'}: {error.strerror or error}", 2)


def load_commands() -> dict[str, type]:
    """The dataclass of each command. Importing them takes seconds, in which Ctrl-C must be heard.

    It ends the process at once: compiled modules make other errors of a KeyboardInterrupt that reaches them half-way.
    """
    before = signal.getsignal(signal.SIGINT)
    ours = before is signal.default_int_handler and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGINT, lambda *_: os._exit(_say("interrupted", 130)))
    try:
        return _import_commands()
    finally:
        if ours:
            signal.signal(signal.SIGINT, before)


def _import_commands() -> dict[str, type]:
    from jaxwafer.cli.bench import Bench
    from jaxwafer.cli.calibrate import Calibrate
    from jaxwafer.cli.compile import Compile
    from jaxwafer.cli.convert import Convert
    from jaxwafer.cli.decode import Decode
    from jaxwafer.cli.devices import Devices
    from jaxwafer.cli.fetch import Fetch
    from jaxwafer.cli.inspect import Inspect
    from jaxwafer.cli.plan import Plan
    from jaxwafer.cli.score import Score

    return {
        "decode": Decode, "fetch": Fetch, "inspect": Inspect, "plan": Plan, "calibrate": Calibrate,
        "devices": Devices, "score": Score, "compile": Compile, "bench": Bench,
        "convert": Convert,
    }  # fmt: skip


def parse(argv: list[str]):
    """The command's dataclass; a bad command line is a UserError of one line."""
    table = load_commands()
    check_names(argv, table)
    import tyro

    union = typing.Union[  # noqa: UP007, made from the table
        tuple(Annotated[c, tyro.conf.subcommand(name, prefix_name=False)] for name, c in table.items())
    ]
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                union, prog="jaxwafer", args=argv, config=(tyro.conf.FlagCreatePairsOff,),
                description="Decode language models on a mesh of wafers and cores.",
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
    raise UserError(f"{_reason(printed.getvalue(), argv[0], table[argv[0]])} (see: jaxwafer {argv[0]} --help)")


def check_names(argv: list[str], table: dict[str, type]) -> None:
    """Commands and flags that there are not are UserErrors that name the nearest there is."""
    if not argv or argv[0] not in table:
        if argv and (argv[0] in ("-h", "--help") or argv[0].startswith("--tyro-")):
            return
        what = f"there is no command {argv[0]!r}" if argv else "no command given"
        raise UserError(f"{what}; choose one of {', '.join(table)} (see: jaxwafer --help)")
    known = ["--help", *("--" + f.name.replace("_", "-") for f in dataclasses.fields(table[argv[0]]))]
    for word in argv[1:]:
        flag = word.split("=")[0].replace("_", "-")
        if word.startswith("--") and flag not in known:
            nearest = difflib.get_close_matches(flag, known, 1)
            hint = f"; perhaps {nearest[0]}" if nearest else ""
            raise UserError(f"{argv[0]} has no flag {flag}{hint} (see: jaxwafer {argv[0]} --help)")


def _reason(printed: str, name: str, command: type) -> str:
    """What the parser found wrong, from the box that it printed."""
    required = [f.name for f in dataclasses.fields(command) if f.default is f.default_factory is dataclasses.MISSING]
    if "Missing from" in printed or "'model'" in printed:
        return f"{name} needs " + " and ".join(f"--{n}" if n != "model" else "MODEL" for n in required)
    lines = [line.strip(" │╭╮╰╯") for line in printed.splitlines()]
    parts = [list(part) for rule, part in itertools.groupby(lines, lambda x: x and not x.strip("-─")) if not rule]
    text = " ".join(itertools.takewhile(bool, parts[1] if len(parts) > 1 else lines)) or "bad command line"
    for pattern, plainer in PLAINER.items():
        text = re.sub(pattern, plainer, text)
    return text[:1].lower() + text[1:]


def _discard_output() -> None:
    """Send what is left to nowhere, so that the interpreter does not fail over it once more as it ends."""
    with contextlib.suppress(io.UnsupportedOperation):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _note(message: object, *_) -> None:
    """A warning as one line, without the place in the code that it came from."""
    _say(message, 0)


@contextlib.contextmanager
def _hooked():
    """With `_unraisable` in place."""
    before, sys.unraisablehook = sys.unraisablehook, _unraisable
    try:
        yield
    finally:
        sys.unraisablehook = before


def _unraisable(error) -> None:
    """Send Ctrl-C once more where a callback, such as JAX's at garbage collection, was interrupted and lost it."""
    if error.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    else:
        sys.__unraisablehook__(error)


def _say(message: object, status: int) -> int:
    print(f"jaxwafer: {' '.join(str(message).split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    run()
