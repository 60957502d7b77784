"""One node of the quorum of `doyen up`: `doyen serve`, in a process that ends with its parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from doyen.cli.up.processes import die_with

ELECTION_S = 0.5
"""The election timeout. It is short, because all nodes are on one machine."""


def command(name: str, peers: Mapping[str, str], directory: Path) -> list[str]:
    """The command that starts a node."""
    addresses = ",".join(f"{peer}={address}" for peer, address in peers.items())
    arguments = ["--id", name, "--peers", addresses, "--data-dir", str(directory / name)]
    arguments += ["--found", "--cluster", directory.name, "--election-s", str(ELECTION_S)]
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *arguments]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from doyen.cli import main

    sys.exit(main(["serve", "--json", *sys.argv[2:]]))
