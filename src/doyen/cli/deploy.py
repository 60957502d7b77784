"""`doyen deploy [FILE]`: print a ready-made file for systemd, supervisord, HAProxy or Docker."""

from __future__ import annotations

import argparse
import os
import shutil
import stat
import sys
from importlib.resources import files
from pathlib import Path

from doyen.cli._output import Exit, print_json
from doyen.errors import ConfigError

FILES = {
    "doyen-run@.service": "a systemd unit that runs a command while this host leads",
    "doyen-serve@.service": "a systemd unit for a node of a quorum",
    "supervisord.conf": "a program of supervisord that runs a command while this host leads",
    "haproxy.cfg": "HAProxy, sending every request to the leader",
    "Dockerfile": "an image for the nodes of a quorum, and for every other command",
    "compose.yaml": "Docker Compose: three nodes, and a worker of which one replica works",
}
"""What each file is for. The warden prints its own units: `doyen warden --unit`."""

MANUAL = """\
Prints a file to start from. Without FILE, shows which files there are. The path of doyen on this
machine is filled in; hosts, commands and elections are examples.

exit codes:
  0    printed
  others as for every command: see doyen --help

examples:
  # which files there are
  doyen deploy
  # a unit for any election, and one of its instances
  doyen deploy doyen-run@.service > /etc/systemd/system/doyen-run@.service
  # three nodes and a worker in containers
  doyen deploy Dockerfile > Dockerfile; doyen deploy compose.yaml > compose.yaml
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", nargs="?", metavar="FILE", choices=[*FILES], help="the file to print"
    )


def run(args: argparse.Namespace) -> int:
    if args.file is not None:
        program = program_path()
        text = deployment(args.file, program)
        if "DynamicUser=yes" in text and (closed := closed_to_others(program)) is not None:
            sys.stderr.write(
                f"doyen: warning: the unit has a user of its own, who cannot use {closed}: install"
                " doyen for all users, or name another user in the unit, with User=\n"
            )
        if args.json:
            print_json({"file": args.file, "text": text})
        else:
            print(text, end="")
    elif args.json:
        print_json({"files": FILES})
    else:
        width = max(map(len, FILES))
        for name, purpose in FILES.items():
            print(f"{name:{width}}  {purpose}")
    return Exit.DONE


def deployment(name: str, program: str) -> str:
    """The text of one of the files, with the path of doyen."""
    if any(each.isspace() for each in program):
        raise ConfigError(
            f"the path of doyen, {program!r}, has a space, which these files do not allow"
        )
    text = files(__package__).joinpath("deployment", name).read_text()
    return text.replace("@DOYEN@", program)


def program_path() -> str:
    """The path of the doyen that is running, or of another one."""
    beside = os.path.join(os.path.dirname(sys.executable), "doyen")
    for each in (sys.argv[0], shutil.which("doyen"), beside):
        if each and os.path.basename(each) == "doyen" and os.access(each, os.X_OK):
            return os.path.abspath(each)
    return os.path.abspath(sys.argv[0])


def closed_to_others(program: str) -> Path | None:
    """What stands in the way of another user who wants to execute a program, if anything does."""
    path = Path(program).resolve()
    for each in (*reversed(path.parents), path):
        if not each.exists() or not each.stat().st_mode & stat.S_IXOTH:
            return each
    return None
