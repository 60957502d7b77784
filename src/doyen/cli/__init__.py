"""The command line: finds the command, imports its module and no other, and turns what it raises
into one calm line and an exit code.

A command is a module with `configure(parser)`, which adds its arguments, and `run(args) -> int`,
which does it and returns the exit code. Every command has `--json`, added here. What a command
needs beyond the standard library it imports itself, when it runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import doyen
from doyen.cli._output import Exit
from doyen.errors import (
    ConfigError,
    DoyenError,
    LeadershipLost,
    NotElected,
    SessionClosed,
    StoreError,
)

__all__ = ["COMMANDS", "main"]

COMMANDS = {
    "run": "run a command while this process leads, and end it when it no longer does",
    "leader": "say who leads an election",
    "watch": "follow who leads an election",
    "up": "start a few candidates on this machine, to play with",
    "verify": "prove from audit logs that there never were two leaders",
}
"""Each is the module of that name in this package."""

EPILOG = """\
exit codes:
  0    done
  1    the answer is no: nobody leads, or verify found a violation
  2    wrong usage or configuration; nothing was done
  69   the store cannot be used or reached
  75   not elected in time, or leadership lost: trying again may help
  130  interrupted (128 + the signal's number)
  `doyen run` otherwise returns the code of the command it ran.

environment:
  DOYEN_STORE    the store, where --store is not given
  DOYEN_DEBUG=1  show the traceback of an error
"""

_CODES: list[tuple[type[DoyenError], Exit]] = [
    (ConfigError, Exit.USAGE),
    (StoreError, Exit.UNAVAILABLE),
    (SessionClosed, Exit.UNAVAILABLE),
    (NotElected, Exit.TRY_AGAIN),
    (LeadershipLost, Exit.TRY_AGAIN),
    (DoyenError, Exit.NO),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Help and wrong usage end in `SystemExit`."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    try:
        # Options of `doyen` itself take no values, so the first word is the command.
        name = next((word for word in arguments if not word.startswith("-")), None)
        command = _load(name) if name in COMMANDS else None
        parser = _parser(name, command)
        args = parser.parse_args(arguments)
        if command is None:
            parser.print_help()
            return Exit.USAGE
        code: int = command.run(args)
        sys.stdout.flush()
        return code
    except DoyenError as error:
        if os.environ.get("DOYEN_DEBUG") == "1":
            traceback.print_exc()
        words = " ".join(str(error).split()) or type(error).__name__
        print(f"doyen: {words}", file=sys.stderr)
        return next(code for kind, code in _CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Python would complain once more while flushing at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE


def _load(name: str) -> ModuleType:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"the command {name!r} is not part of this installation") from error


def _parser(name: str | None, command: ModuleType | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="doyen",
        description="Leader election: one leader at a time, and everyone knows who.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"doyen {doyen.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for each, summary in COMMANDS.items():
        described = f"{summary[0].upper()}{summary[1:]}."
        subparser = commands.add_parser(
            each, help=summary, description=described, allow_abbrev=False
        )
        if each == name and command is not None:
            command.configure(subparser)
            subparser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser
