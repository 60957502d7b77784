"""The cost of `term.valid` compared with a bare clock call, and of `import doyen`."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from timeit import Timer

import doyen
from bench.figures import Figure, spread

__all__ = ["importing", "valid"]

CLOCK = "from time import CLOCK_BOOTTIME as boot, clock_gettime as gettime"


def valid(*, rounds: int = 40, calls: int = 20_000) -> list[Figure]:
    """`term.valid` of a live term on the local store, compared with a bare clock call."""
    with (
        tempfile.TemporaryDirectory(prefix="doyen-bench-") as folder,
        doyen.connect_blocking(f"sqlite://{folder}/doyen.db") as session,
        session.campaign("bench") as term,
    ):
        ask = Timer("term.valid", globals={"term": term})
        clock = Timer("gettime(boot)", CLOCK)
        asked, read = [], []
        for _ in range(rounds):
            read.append(clock.timeit(calls) / calls * 1e9)
            asked.append(ask.timeit(calls) / calls * 1e9)
        term.check()
    return [
        Figure(
            name="term.valid",
            value=statistics.median(asked) / statistics.median(read),
            unit="clock calls, p50",
            limit=4.0,
            details={"valid_ns": spread(asked, 1), "clock_ns": spread(read, 1)},
        )
    ]


IMPORT = """
import time
started = time.perf_counter()
import asyncio
before = time.perf_counter()
import doyen
doyen.connect, doyen.connect_blocking
after = time.perf_counter()
import json, sys
print(json.dumps([(before - started) * 1e3, (after - before) * 1e3, sorted(sys.modules)]))
"""

CLIENTS = {
    "consul",
    "etcd3",
    "etcd3gw",
    "grpc",
    "kazoo",
    "nats",
    "psycopg",
    "pymysql",
    "redis",
    "rich",
    "sqlite3",
    "_sqlite3",
}


def importing(*, trials: int = 20) -> list[Figure]:
    """`import doyen` in a fresh interpreter with cached bytecode, after `import asyncio`.

    Public names are imported on first use, so the measurement includes `doyen.connect`.
    """
    with tempfile.TemporaryDirectory(prefix="doyen-bench-") as cache:
        environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        environment["PYTHONPATH"] = str(Path(doyen.__file__).parents[1])

        def fresh() -> tuple[float, float, list[str]]:
            command = [sys.executable, "-c", IMPORT]
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            asyncio_ms, doyen_ms, modules = json.loads(done.stdout)
            return asyncio_ms, doyen_ms, modules

        _, _, modules = fresh()
        asyncio_ms, doyen_ms = [], []
        for _ in range(trials):
            first, second, _ = fresh()
            asyncio_ms.append(first)
            doyen_ms.append(second)
            time.sleep(0.01)
    adapters = [f"{name}." for name in modules if name.startswith("doyen.stores.")]
    light = ("doyen.stores.port.", "doyen.stores.kit.", "doyen.stores.choice.")
    heavy = [name[:-1] for name in adapters if not name.startswith(light)]
    heavy += [name for name in modules if name in CLIENTS]
    return [
        Figure(
            name="import doyen and connect, after asyncio",
            value=statistics.median(doyen_ms),
            unit="ms, p50",
            limit=30.0,
            details={"doyen_ms": spread(doyen_ms, 1), "asyncio_ms": spread(asyncio_ms, 1)},
        ),
        Figure(
            name="import doyen and connect, store clients",
            value=len(heavy),
            unit="modules",
            limit=0,
            details={"loaded": " ".join(heavy) or "none"},
        ),
    ]
