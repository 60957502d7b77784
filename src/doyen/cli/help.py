"""`doyen help COMMAND`: the same as `doyen COMMAND --help`."""

from __future__ import annotations

import argparse

from doyen.cli import COMMANDS, parsers
from doyen.cli._output import Exit, print_json

MANUAL = """\
Prints the same as `doyen COMMAND --help`; without a command, the same as `doyen --help`.

exit codes:
  0    done
  others as for every command: see doyen --help

examples:
  doyen help
  doyen help run
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="?",
        metavar="COMMAND",
        choices=list(COMMANDS),
        help="the command (default: all)",
    )


def run(args: argparse.Namespace) -> int:
    top, commands = parsers(*filter(None, [args.command]))
    text = (commands[args.command] if args.command else top).format_help()
    if args.json:
        print_json({"command": args.command, "help": text})
    else:
        print(text, end="")
    return Exit.DONE
