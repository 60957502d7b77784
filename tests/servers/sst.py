"""What a Galera member runs when it needs state from another: `wsrep_sst_<method>`.

A member whose gap is within the other's cache of writes is sent those writes by Galera itself; the
two programs only have to agree that nothing else is needed. A copy of the files is refused.

Runs by itself, by path; imports the standard library only.
"""

from __future__ import annotations

import argparse
import socket
import sys

HOST = "127.0.0.1"
WAIT_S = 60.0


def join() -> None:
    """Say where we listen, and then which state the other member says we are to have."""
    with socket.create_server((HOST, 0)) as listening:
        listening.settimeout(WAIT_S)
        print(f"ready {HOST}:{listening.getsockname()[1]}", flush=True)
        link, _ = listening.accept()
        with link, link.makefile() as lines:
            print(lines.readline().strip(), flush=True)


def donate(address: str, state: str) -> None:
    host, _, port = address.partition("/")[0].rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as link:
        link.sendall(f"{state}\n".encode())
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
        sys.exit("the gap is larger than the cache of writes: raise gcache.size")


if __name__ == "__main__":
    main()
