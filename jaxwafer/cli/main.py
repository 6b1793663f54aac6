"""The command line: one file a command, and what all of them share."""

import contextlib
import dataclasses
import io
import os
import sys
import typing
from typing import Annotated

import tyro

from jaxwafer.cli.decode import Decode
from jaxwafer.cli.devices import Devices
from jaxwafer.cli.fetch import Fetch
from jaxwafer.cli.inspect import Inspect
from jaxwafer.cli.score import Score
from jaxwafer.errors import UserError

COMMANDS = {"decode": Decode, "fetch": Fetch, "inspect": Inspect, "devices": Devices, "score": Score}

Command = typing.Union[  # noqa: UP007, made from the table
    tuple(Annotated[c, tyro.conf.subcommand(name, prefix_name=False)] for name, c in COMMANDS.items())
]


def main(argv: list[str] | None = None) -> int:
    """Run a command. Bad input is one line on stderr and status 2; Ctrl-C is status 130."""
    try:
        command = parse(sys.argv[1:] if argv is None else argv)
        command.run()
        return 0
    except UserError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:
        # The reader went away, as `| head` does; stdout must not be flushed into it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


def parse(argv: list[str]):
    """The command's dataclass; a bad command line is a UserError of one line."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            return tyro.cli(
                Command, prog="jaxwafer", args=argv, config=(tyro.conf.FlagCreatePairsOff,),
                description="Decode language models on a mesh of wafers and cores.",
            )  # fmt: skip
    except SystemExit as stop:
        if not stop.code:
            raise
    words = [line.strip(" │╭╮╰╯─") for line in printed.getvalue().splitlines()]
    message = next((w for w in words[1:] if w), "bad command line")
    raise UserError(
        f"{message} (see: jaxwafer {' '.join(argv[:1]) if argv[:1] and argv[0] in COMMANDS else ''} --help)"
    )


def _say(message: object, status: int) -> int:
    print(f"jaxwafer: {' '.join(str(message).split())}", file=sys.stderr)
    return status


def flags(command) -> dict:
    """A command's fields by name."""
    return {f.name: getattr(command, f.name) for f in dataclasses.fields(command)}


if __name__ == "__main__":
    sys.exit(main())
