"""One node of the quorum of `doyen up`: `doyen serve` in a process that does not outlive its
parent."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from doyen.cli.up.parent import die_with

__all__ = ["ELECTION_S", "command"]

ELECTION_S = 0.5
"""How long the quorum's leader may be silent: on one machine, where nobody wants to wait."""


def command(name: str, peers: Mapping[str, str], folder: Path) -> list[str]:
    """What starts a node of this process."""
    addresses = ",".join(f"{peer}={address}" for peer, address in peers.items())
    arguments = ["--id", name, "--peers", addresses, "--data-dir", str(folder / name)]
    arguments += ["--found", "--cluster", folder.name, "--election-s", str(ELECTION_S)]
    return [sys.executable, "-P", "-m", __name__, str(os.getpid()), *arguments]


if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    from doyen.cli import main

    sys.exit(main(["serve", "--json", *sys.argv[2:]]))
