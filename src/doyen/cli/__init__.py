"""The command line: imports the module of the command, runs it, and turns errors into one line of
text and an exit code.

The module of a command has `configure(parser)`, which adds its arguments, `run(args) -> int`, which
returns the exit code, and its manual. It may have `check_arguments(parser, arguments)`, to explain
what the parser would misunderstand. Every command has `--json`, which is added here. A command
imports what it needs beyond the standard library only when it runs.

The part of a manual before the exit codes is printed before the options, the rest after them.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
import textwrap
import traceback
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

import doyen
from doyen.cli._output import Exit
from doyen.errors import (
    ConfigError,
    DoyenError,
    LeadershipLost,
    NotElected,
    SessionClosed,
    StoreError,
    did_you_mean,
)

COMMANDS = {
    "run": "run a command while this process leads, and stop it when leadership ends",
    "list": "show every election, lock, semaphore, barrier, group, set of shards and configuration",
    "leader": "show the leader of an election",
    "watch": "show every change of leader of an election",
    "line": "show the leader and the waiting candidates of an election, in order",
    "history": "show the past terms of an election, from the store or from audit logs",
    "members": "show the members of a group, and every change",
    "dash": "serve a live page of a store: elections, members, shards, nodes",
    "resign": "order the leader of an election to resign",
    "transfer": "order the leader of an election to hand over to a candidate",
    "config": "read, write, edit, roll back and watch configurations",
    "shards": "show who owns the shards of a set, move them, drain a member",
    "serve": "run one node of a quorum, doyen's own store",
    "cluster": "show the state of a quorum, change its members, back it up",
    "lab": "run simulated clusters, with every protocol and fault, from a seed",
    "up": "start some candidates on this machine for a demonstration",
    "warden": "end the leases of this user's processes as soon as they die",
    "doctor": "check a store and a configuration: latency, margins, worst case, known problems",
    "deploy": "print a ready-made file: systemd, supervisord, HAProxy, Docker",
    "metrics": "print a Grafana dashboard, or alert rules for Prometheus",
    "verify": "prove from audit logs that there were never two leaders at a time",
    "completion": "print the completion script for a shell",
    "help": "show the help of a command",
}
"""Each command is the module of that name in this package."""

MANUAL = """\
exit codes:
  0    done
  1    a negative result: no leader or candidate, an order was not carried out,
       doctor found a problem, verify or up found a violation
  2    wrong usage or configuration; nothing was done
  69   the store cannot be used or reached
  70   the disk of a node failed, and the node stopped at once
  71   an operating system error, such as a failed write to standard output
  75   not elected in time, or leadership lost: trying again may help
  130  interrupted (128 + the number of the signal)
  `doyen run` otherwise returns the exit code of its command.

A TIME is a number of seconds, or has units: 500ms, 5s, 10m, 1h30m.

environment:
  DOYEN_STORE            the URL of the store, used without --store;
                         env:NAME takes it from another variable
  DATABASE_URL, ETCDCTL_ENDPOINTS, ZK_HOSTS
                         name the store without DOYEN_STORE, if one is set
  DOYEN_REQUIRE_STORE=1  refuse the default, a file only on this machine
  DOYEN_WARDEN           where the warden of this host listens, or off
  DOYEN_NODE_…           settings of a node: see doyen help serve
  DOYEN_DEBUG=1          show the traceback of an error

examples:
  # in several terminals: one process runs the worker, the others wait
  doyen run billing -- python worker.py
  # the leader and the candidates after it
  doyen line billing --watch
  # description, options and exit codes of a command
  doyen help transfer
"""

_CODES: Sequence[tuple[type[DoyenError], Exit]] = [
    (ConfigError, Exit.USAGE),
    (StoreError, Exit.UNAVAILABLE),
    (SessionClosed, Exit.UNAVAILABLE),
    (NotElected, Exit.TRY_AGAIN),
    (LeadershipLost, Exit.TRY_AGAIN),
    (DoyenError, Exit.NO),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Help and wrong usage raise `SystemExit`."""
    arguments = sys.argv[1:] if argv is None else [*argv]  # `list` is the module of a command
    _open_standard_streams()
    try:
        # Options of `doyen` itself take no values, so the first other argument is the command.
        name = next((each for each in arguments if not each.startswith("-")), None)
        command = _load(name) if name in COMMANDS else None
        parser, commands = parsers(*([name] if name in COMMANDS else []))
        if name is not None and command is not None and hasattr(command, "check_arguments"):
            following = arguments[arguments.index(name) + 1 :]
            command.check_arguments(commands[name], following)
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
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"doyen: {text}", file=sys.stderr)
        return next(code for kind, code in _CODES if isinstance(error, kind))
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if os.environ.get("DOYEN_DEBUG") == "1":
            traceback.print_exc()
        print(f"doyen: operating system error: {error}", file=sys.stderr)
        _discard_output()
        return Exit.SYSTEM


def _open_standard_streams() -> None:
    """Open standard streams that are closed. Otherwise the next file that is opened, such as that
    of a lease, would get the descriptor, and prints would be written to it."""
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
        # A character that the terminal's encoding lacks is escaped instead of raising an error.
        out.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
    """Redirect standard output to /dev/null, so that the flush at exit does not fail again."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _load(name: str) -> ModuleType:
    module = f"{__name__}.{name}"
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise ConfigError(f"the command {name!r} is missing from this installation") from error


class _Manual(argparse.HelpFormatter):
    """Wraps paragraphs to the width of the terminal, and prints blocks with an indented line, such
    as lists and examples, as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = text.strip("\n").split("\n\n")
        return "\n\n".join(
            block if "\n " in f"\n{block}" else textwrap.fill(" ".join(block.split()), width)
            for block in blocks
        )


def _add_manual(parser: argparse.ArgumentParser, text: str) -> None:
    before, codes, after = text.partition("exit codes:\n")
    parser.description = f"{parser.description}\n\n{before}".strip("\n")
    parser.epilog = (codes + after).strip("\n")


class _Parser(argparse.ArgumentParser):
    """A parser that suggests what was probably meant."""

    command: argparse.ArgumentParser | None = None
    """Of the parser of `doyen`: the parser of the command that is used."""

    def error(self, message: str) -> NoReturn:
        super().error(message + self._suggestion(message))

    def _suggestion(self, message: str) -> str:
        if wrong := re.search("invalid choice: '([^']*)'", message):
            choices = (each for action in self._actions for each in action.choices or ())
            return did_you_mean(wrong[1], map(str, choices))
        if wrong := re.search("unrecognized arguments: (?:.* )?(--?[a-z][^ =]*)", message):
            return did_you_mean(wrong[1], _options(self.command or self))
        return ""


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of its actions."""
    found: set[str] = set()
    for action in parser._actions:
        found.update(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                found |= _options(each)
    return found


def parsers(*names: str) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """The parser of `doyen` and the parsers of its commands. Only the commands in `names` are
    imported, and only their parsers have arguments."""
    parser = _Parser(
        prog="doyen",
        description="Leader election for the processes of one machine or of many.",
        formatter_class=_Manual,
        allow_abbrev=False,
    )
    _add_manual(parser, MANUAL)
    parser.add_argument("--version", action="version", version=f"doyen {doyen.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    subparsers: dict[str, argparse.ArgumentParser] = {}
    for each, summary in COMMANDS.items():
        described = f"{summary[0].upper()}{summary[1:]}."
        subparser = subparsers[each] = commands.add_parser(
            each, help=summary, description=described, formatter_class=_Manual, allow_abbrev=False
        )
        if each in names:
            module = _load(each)
            _add_manual(subparser, module.MANUAL)
            module.configure(subparser)
            subparser.add_argument("--json", action="store_true", help="print JSON for programs")
            parser.command = subparser
    return parser, subparsers
