"""One candidate of another library: `python peer.py KIND WHO PORT TTL_S`.

It uses the protocol of `bench.worker`: reports on standard output, commands on standard input, and
ends when that ends. It runs in an interpreter that has the library, and imports nothing of doyen.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

KIND, WHO, PORT, TTL_S = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


def now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def report(kind: str, at: float = 0.0) -> None:
    os.write(1, (json.dumps({"who": WHO, "kind": kind, "at": at}) + "\n").encode())


def lead() -> float:
    """Lead until a command arrives. Returns the time at which the work ended."""
    report("entered", now())
    if not sys.stdin.readline():
        os._exit(0)
    return now()


def resigned(at: float) -> None:
    report("resigned", at)
    sys.stdin.readline()


def acquire_and_release(lock: Any) -> None:
    """The idiom of every lock: acquire, work, release."""
    while True:
        report("waiting")
        lock.acquire()
        at = lead()
        lock.release()
        resigned(at)


def kazoo() -> None:
    from kazoo.client import KazooClient

    client = KazooClient(hosts=f"127.0.0.1:{PORT}", timeout=TTL_S)
    client.start()
    ended = 0.0

    def work() -> None:
        nonlocal ended
        ended = lead()

    while True:
        report("waiting")
        client.Election("/bench", WHO).run(work)
        resigned(ended)


def tooz(url: str) -> None:
    from tooz import coordination

    coordinator = coordination.get_coordinator(url, WHO.encode())
    coordinator.start(start_heart=True)
    acquire_and_release(coordinator.get_lock(b"bench"))


def etcd3() -> None:
    """As in the documentation of etcd: lease, create if absent, refresh every second. The others
    check once per second whether the key was deleted."""
    import etcd3 as library

    client = library.client(host="127.0.0.1", port=PORT, timeout=3)
    create = client.transactions
    report("waiting")
    at = 0.0
    while True:
        with leased(client) as lease:
            won, _ = client.transaction(
                compare=[create.version("/bench") == 0],
                success=[create.put("/bench", WHO, lease)],
                failure=[],
            )
            if won:
                at = lead()
        if won:
            resigned(at)
            report("waiting")
            continue
        gone = threading.Event()
        watch = client.add_watch_callback("/bench", lambda answer, gone=gone: gone.set())
        while not gone.is_set():
            time.sleep(1.0)
        client.cancel_watch(watch)


@contextmanager
def leased(client: Any) -> Iterator[Any]:
    lease = client.lease(int(TTL_S))
    ended = threading.Event()

    def refresh() -> None:
        while not ended.wait(1.0):
            lease.refresh()

    thread = threading.Thread(target=refresh, daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        lease.revoke()


def advisory() -> None:
    """A blocked advisory lock, without lease and token: the floor of a database."""
    import psycopg

    connection = psycopg.connect(
        f"host=127.0.0.1 port={PORT} user=postgres dbname=postgres", autocommit=True
    )
    while True:
        report("waiting")
        connection.execute("select pg_advisory_lock(42)")
        at = lead()
        connection.execute("select pg_advisory_unlock(42)")
        resigned(at)


TTL = int(TTL_S)
KINDS: dict[str, Callable[[], None]] = {
    "kazoo": kazoo,
    "etcd3": etcd3,
    "advisory": advisory,
    "tooz-zookeeper": lambda: tooz(f"zookeeper://127.0.0.1:{PORT}?timeout={TTL}"),
    "tooz-redis": lambda: tooz(f"redis://127.0.0.1:{PORT}?timeout={TTL}"),
    "tooz-etcd": lambda: tooz(f"etcd3+http://127.0.0.1:{PORT}?timeout={TTL}&api_version=v3"),
    "tooz-postgresql": lambda: tooz(f"postgresql://postgres@127.0.0.1:{PORT}/postgres"),
    "tooz-consul": lambda: tooz(f"consul://127.0.0.1:{PORT}?ttl={TTL}"),
    "tooz-mysql": lambda: tooz(f"mysql://root@127.0.0.1:{PORT}/test"),
}

if __name__ == "__main__":
    threading.excepthook = lambda args: None
    KINDS[KIND]()
