"""The state transfer script of Galera members (`wsrep_sst_<method>`).

If the missing writes are in the write cache of the donor, Galera itself sends them, and the two
programs only have to agree that nothing else is needed. A copy of the files is refused.

It runs by path and imports the standard library only.
"""

from __future__ import annotations

import argparse
import socket
import sys

HOST = "127.0.0.1"
WAIT_S = 60.0


def join() -> None:
    """Print the address on which we listen, then the state that the donor sends."""
    with socket.create_server((HOST, 0)) as listening:
        listening.settimeout(WAIT_S)
        print(f"ready {HOST}:{listening.getsockname()[1]}", flush=True)
        connection, _ = listening.accept()
        with connection, connection.makefile() as lines:
            print(lines.readline().strip(), flush=True)


def donate(address: str, state: str) -> None:
    host, _, port = address.partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection:
        connection.sendall(f"{state}\n".encode())
    print(f"done {state}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--role")
    parser.add_argument("--address")
    parser.add_argument("--gtid")
    parser.add_argument("--bypass", action="store_true")
    given, _ = parser.parse_known_args()
    if given.role == "joiner":
        join()
    elif given.bypass:
        donate(given.address, given.gtid)
    else:
        sys.exit("the missing writes are no longer in the cache: raise gcache.size")


if __name__ == "__main__":
    main()
