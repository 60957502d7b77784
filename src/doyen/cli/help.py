"""`doyen help COMMAND`: the same as `doyen COMMAND --help`."""

from __future__ import annotations

import argparse

from doyen.cli import COMMANDS, parsers
from doyen.cli._output import Exit, add_option, print_json

MANUAL = """\
Prints the same as `doyen COMMAND --help`; without a command, the same as `doyen --help`. With --man
it prints a manual page for man(1).

exit codes:
  0    done
  others as for every command: see doyen --help

examples:
  doyen help
  doyen help run
  # installed with the package too, as share/man/man1/doyen.1
  doyen help --man > ~/.local/share/man/man1/doyen.1
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "command",
        nargs="?",
        metavar="COMMAND",
        choices=list(COMMANDS),
        help="the command (default: all)",
    )
    add_option(parser, "--man", "print a manual page, for man")


def run(args: argparse.Namespace) -> int:
    top, commands = parsers(*filter(None, [args.command]))
    text = (commands[args.command] if args.command else top).format_help()
    if args.man:
        from doyen.cli._man import man_page

        text = man_page(args.command)
    if args.json:
        print_json({"command": args.command, "help": text})
    else:
        print(text, end="")
    return Exit.DONE
