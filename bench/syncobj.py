"""One node of PySyncObj under load: `python syncobj.py WHO ADDRESS OTHER OTHER`.

It uses the protocol of `bench.replica`. The settings are the fastest for many concurrent writes: a
tick of 1 ms, batches of 5 ms. PySyncObj never syncs to disk. This program runs in an interpreter
that has the library, and imports nothing of doyen.
"""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import threading
import time
from typing import Any

from pysyncobj import SyncObj, SyncObjConf, replicated

WHO, ADDRESS, OTHERS = sys.argv[1], sys.argv[2], sys.argv[3:]
BYTES = 100
PATIENCE_S = 20.0


def report(kind: str, **fields: Any) -> None:
    os.write(1, (json.dumps({"who": WHO, "kind": kind, **fields}) + "\n").encode())


class Registers(SyncObj):
    def __init__(self) -> None:
        settings = SyncObjConf(
            autoTickPeriod=0.001, appendEntriesPeriod=0.005, commandsQueueSize=200_000
        )
        super().__init__(ADDRESS, OTHERS, settings)
        self.latest: dict[int, bytes] = {}

    @replicated
    def put(self, key: int, value: bytes) -> None:
        self.latest[key] = value


class Truncations(logging.Handler):
    """Counts the log lines by which PySyncObj reports that it truncates applied entries."""

    count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.count += record.getMessage().startswith("truncating already-applied")


def load(registers: Registers, in_flight: int, seconds: float) -> dict[str, Any]:
    clock = time.perf_counter
    took: list[float] = []
    failed = 0
    writers = in_flight
    done = threading.Event()
    value = b"." * BYTES
    began = clock()
    end = began + seconds

    def write(number: int) -> None:
        at = clock()

        def answered(result: Any, error: Any) -> None:
            nonlocal failed, writers
            now = clock()
            if error:
                failed += 1
            else:
                took.append(now - at)
            if now < end:
                write(number)
                return
            writers -= 1
            if not writers:
                done.set()

        registers.put(number, value, callback=answered)

    for number in range(in_flight):
        write(number)
    done.wait(seconds + PATIENCE_S)
    per_s = len(took) / (clock() - began)
    took.sort()
    p50 = statistics.median(took) if took else float("inf")
    return {"per_s": per_s, "p50_ms": p50 * 1e3, "failed": failed, "unanswered": writers}


def main() -> None:
    truncations = Truncations()
    logging.getLogger().addHandler(truncations)
    registers = Registers()
    report("ready")
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "load":
            report("loaded", **load(registers, order["in_flight"], order["seconds"]))
        else:
            status = registers.getStatus()
            leader = status["leader"]
            report(
                "status",
                leader=None if leader is None else str(leader),
                generation=status["raft_term"],
                truncations=truncations.count,
            )
    os._exit(0)


main()
