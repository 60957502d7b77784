"""One member of a partitioned set, with another library: `python partitioner.py KIND OPTIONS`.

    kazoo            `SetPartitioner`, as in its documentation: a lock for each partition
    tooz-zookeeper   `join_partitioned_group`: a hash ring over the members, and no exclusion

It uses the protocol of `bench.worker`, waits for a line before it joins, and imports nothing of
doyen. It reports how many partitions it has, how many of them it did not have before, and how many
it had to stop for that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

KIND, OPTIONS = sys.argv[1], json.loads(sys.argv[2])
WHO, PORT, TTL_S = OPTIONS["who"], OPTIONS["port"], OPTIONS["ttl_s"]
SET = tuple(range(OPTIONS["count"]))
POLL_S = 0.05
TOLD: list[int] = []
"""How many partitions this member has had, for a line that asks."""


def report(kind: str, **fields: Any) -> None:
    at = time.clock_gettime(time.CLOCK_BOOTTIME)
    os.write(1, (json.dumps({"who": WHO, "kind": kind, "last": at, **fields}) + "\n").encode())


def end_with_stdin() -> None:
    def wait() -> None:
        while sys.stdin.readline():
            if TOLD:
                report("owned", count=TOLD[-1])
        os._exit(0)

    report("ready")
    if not sys.stdin.readline():
        os._exit(0)
    threading.Thread(target=wait, daemon=True).start()


def kazoo() -> None:
    from kazoo.client import KazooClient

    client = KazooClient(hosts=f"127.0.0.1:{PORT}", timeout=TTL_S)
    client.start()
    end_with_stdin()
    # By default members have to be stable for 30 s before partitions are acquired.
    partitioner = client.SetPartitioner("/bench", set=SET, identifier=WHO, time_boundary=1)
    owned = 0
    while True:
        if partitioner.failed:
            report("failed")
            os._exit(1)
        elif partitioner.release:
            report("stopped", count=owned)
            owned = 0
            partitioner.release_set()
        elif partitioner.acquired:
            if owned != len(list(partitioner)):
                owned = len(list(partitioner))
                report("owned", count=owned)
            time.sleep(POLL_S)
        else:
            partitioner.wait_for_acquire(1)


def tooz() -> None:
    from tooz import coordination

    url = f"zookeeper://127.0.0.1:{PORT}?timeout={int(TTL_S)}"
    coordinator = coordination.get_coordinator(url, WHO.encode())
    coordinator.start(start_heart=True)
    end_with_stdin()
    partitioner = coordinator.join_partitioned_group(b"bench")
    members = 0
    owned: set[int] = set()
    while True:
        coordinator.run_watchers()
        if len(partitioner.ring.nodes) != members:
            members = len(partitioner.ring.nodes)
            mine = {each for each in SET if partitioner.belongs_to_self(each)}
            report("stopped", count=len(owned - mine))
            owned = mine
            TOLD.append(len(owned))
            report("owned", count=len(owned))
        time.sleep(POLL_S)


KINDS: dict[str, Callable[[], None]] = {"kazoo": kazoo, "tooz-zookeeper": tooz}

if __name__ == "__main__":
    threading.excepthook = lambda args: None
    KINDS[KIND]()
