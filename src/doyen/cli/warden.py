"""`doyen warden`: end the leases of this user's processes as soon as they die."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys

from doyen.cli._output import add_option
from doyen.events.log_lines import LogfmtLine

MANUAL = """\
Serves all sessions of this user on this host, until SIGTERM or Ctrl-C. When the kernel reports that
a process with a session has died, the warden ends its leases at the store, so that a successor
leads within milliseconds instead of after the ttl. Sessions find it by its socket:

  /run/doyen/<uid>/warden        if a system service made the directory
  /run/user/<uid>/doyen/warden   otherwise

DOYEN_WARDEN names another place; its value `off` turns wardens off. The warden keeps nothing on
disk. Without it, or while it is stopped, leases expire as usual. Log lines go to standard error;
with --json, they are JSON objects on standard output.

exit codes:
  0    stopped by a signal
  2    another warden serves this user, or the socket cannot be made
  others as for every command: see doyen --help

examples:
  # by the user's own service manager, then: systemctl --user enable --now …
  doyen warden --unit user > ~/.config/systemd/user/doyen-warden.service
  # for any user, then: systemctl enable --now doyen-warden@1000
  doyen warden --unit system > /etc/systemd/system/doyen-warden@.service
  # in a terminal
  doyen warden --verbose
"""


def configure(parser: argparse.ArgumentParser) -> None:
    print_unit = "print a systemd unit, system or user, and end (default: serve)"
    add_option(parser, "--unit KIND", print_unit, choices=("system", "user"))
    add_option(parser, "--verbose", "also log every session and every lease that is ended")


def run(args: argparse.Namespace) -> int:
    from doyen.warden.daemon import serve, unit

    if args.unit:
        program = shutil.which("doyen") or os.path.abspath(sys.argv[0])
        print(unit(args.unit, program), end="")
        return 0
    handler = logging.StreamHandler(sys.stdout if args.json else sys.stderr)
    handler.setFormatter(_JSONLine() if args.json else None)
    logger = logging.getLogger("doyen")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if args.verbose else logging.INFO)
    asyncio.run(serve())
    return 0


class _JSONLine(logging.Formatter):
    """A log line as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        line = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if isinstance(line, LogfmtLine):
            return json.dumps(dict(line.fields), default=str)
        return json.dumps({"event": "message", "text": record.getMessage()})
