"""`doyen warden`: end the leases of this user's processes as soon as they die."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import sys

from doyen.cli._output import add_option

MANUAL = """\
Serves all sessions of this user on this host, until SIGTERM or Ctrl-C. When the kernel reports that
a process with a session has died, the warden ends its leases at the store, so that a successor
leads within milliseconds instead of after the ttl. Sessions find it by its socket:

  /run/doyen/<uid>/warden        if a system service made the directory
  /run/user/<uid>/doyen/warden   otherwise

DOYEN_WARDEN names another place; its value `off` turns wardens off. The warden keeps nothing on
disk. Without it, or while it is stopped, leases expire as usual. Log lines go to standard error.

exit codes:
  0    stopped by a signal
  2    another warden serves this user, or the socket cannot be made
  others as for every command: see doyen --help

examples:
  # for one's own user, by the user's service manager
  doyen warden --unit user > ~/.config/systemd/user/doyen-warden.service
  systemctl --user enable --now doyen-warden
  # for the user with the number 1000, by the system's
  doyen warden --unit system | sudo tee /etc/systemd/system/doyen-warden@.service
  sudo systemctl enable --now doyen-warden@1000
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--unit", choices=("system", "user"), help="print a systemd unit instead of serving"
    )
    add_option(parser, "--verbose", "also log every session and every lease that is ended")


def run(args: argparse.Namespace) -> int:
    from doyen.warden.daemon import serve, unit

    if args.unit:
        program = shutil.which("doyen") or os.path.abspath(sys.argv[0])
        print(unit(args.unit, program), end="")
        return 0
    level = logging.DEBUG if args.verbose else logging.INFO
    logging.basicConfig(level=level, format="%(message)s", stream=sys.stderr)
    asyncio.run(serve())
    return 0
