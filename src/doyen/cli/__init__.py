"""The command line: finds the command, imports its module and no other, and turns what it raises
into one calm line and an exit code.

A command is a module with `configure(parser)`, which adds its arguments and its manual, and
`run(args) -> int`, which does it and returns the exit code. Every command has `--json`, added here.
What a command needs beyond the standard library it imports itself, when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import doyen
from doyen.cli._manual import Manual, manual
from doyen.cli._output import Exit
from doyen.errors import (
    ConfigError,
    DoyenError,
    LeadershipLost,
    NotElected,
    SessionClosed,
    StoreError,
)

__all__ = ["COMMANDS", "main", "parsers"]

COMMANDS = {
    "run": "run a command while this process leads, and end it when it no longer does",
    "leader": "say who leads an election",
    "watch": "follow who leads an election",
    "line": "show who leads an election and who waits, in order",
    "resign": "have the leader of an election let go",
    "transfer": "have the leader of an election hand over to a candidate",
    "serve": "run one node of a quorum, a store of doyen's own",
    "cluster": "look at a quorum of nodes, change it, back it up",
    "lab": "run simulated clusters: every protocol, every fault, from one seed",
    "up": "start a few candidates on this machine, to play with",
    "doctor": "examine a store and a configuration: latency, margins, worst case, known dangers",
    "verify": "prove from audit logs that there never were two leaders",
    "completion": "print the completion script for a shell",
    "help": "explain a command",
}
"""Each is the module of that name in this package."""

MANUAL = """\
exit codes:
  0    done
  1    the answer is no: nobody leads or waits, an order was not carried out,
       doctor found a problem, verify or up found a violation
  2    wrong usage or configuration; nothing was done
  69   the store cannot be used or reached
  70   the disk of a node failed, and it stopped at once
  71   the system refused something, such as to write standard output
  75   not elected in time, or leadership lost: trying again may help
  130  interrupted (128 + the signal's number)
  `doyen run` otherwise returns the code of the command it ran.

environment:
  DOYEN_STORE    the store, where --store is not given
  DOYEN_NODE_…   settings of a node: see doyen help serve
  DOYEN_DEBUG=1  show the traceback of an error

examples:
  # in several terminals: one of them works, the others wait
  doyen run billing -- python worker.py
  # who leads, and who is next
  doyen line billing --watch
  # what a command does, its options, its exit codes
  doyen help transfer
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
    _open_standard_streams()
    try:
        # Options of `doyen` itself take no values, so the first word is the command.
        name = next((word for word in arguments if not word.startswith("-")), None)
        command = _load(name) if name in COMMANDS else None
        parser, _ = parsers(*([name] if name in COMMANDS else []))
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
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if os.environ.get("DOYEN_DEBUG") == "1":
            traceback.print_exc()
        print(f"doyen: the system refused: {error}", file=sys.stderr)
        _discard_output()
        return Exit.SYSTEM


def _open_standard_streams() -> None:
    """A closed one's number would go to the next file that is opened: to a lease's, perhaps, into
    which the command would then print."""
    for descriptor, stream in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, stream) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            os.set_inheritable(descriptor, True)
            setattr(sys, stream, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))
    out = sys.stdout
    if isinstance(out, io.TextIOWrapper) and out.errors in ("strict", "surrogateescape"):
        # A terminal that has no ✓ gets \u2713, and nobody a traceback.
        out.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Python would complain once more while flushing at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load(name: str) -> ModuleType:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"the command {name!r} is not part of this installation") from error


def parsers(*names: str) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `doyen`, and those of its commands; of these, only the ones that are named
    know their arguments, since knowing them takes importing them."""
    parser = argparse.ArgumentParser(
        prog="doyen",
        description="Leader election: one leader at a time, and everyone knows who.",
        formatter_class=Manual,
        allow_abbrev=False,
    )
    manual(parser, MANUAL)
    parser.add_argument("--version", action="version", version=f"doyen {doyen.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers = {}
    for each, summary in COMMANDS.items():
        described = f"{summary[0].upper()}{summary[1:]}."
        subparser = subparsers[each] = commands.add_parser(
            each, help=summary, description=described, formatter_class=Manual, allow_abbrev=False
        )
        if each in names:
            _load(each).configure(subparser)
            subparser.add_argument("--json", action="store_true", help="print JSON for programs")
    return parser, subparsers
