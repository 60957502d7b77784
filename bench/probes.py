"""Statistics of processes, and stores that count their calls."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from doyen.stores.port import Context, Store, open_store

__all__ = ["cpu_s", "descriptors", "open_counted", "rss", "switches", "threads"]

_CALLS = ("grant", "renew", "create", "put", "delete", "enqueue", "ahead", "get", "list")


async def open_counted(url: str, context: Context, counts: Counter[str]) -> Store:
    """Open a store that counts its calls, and its notifications under the name `notified`."""
    store = await open_store(url, context)
    for name in _CALLS:
        setattr(store, name, _counted(getattr(store, name), name, counts))
    watch = store.watch

    def watch_counted(scope: str, notify: Callable[[], None]) -> Any:
        counts["watch"] += 1
        return watch(scope, _counted(notify, "notified", counts))

    store.watch = watch_counted  # type: ignore[method-assign]
    return store


def _counted(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return call(*args, **kwargs)

    return counted


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, in nanosecond resolution. The clock id follows the rule
    of the kernel for CPU clocks of processes."""
    return time.clock_gettime(~pid << 3 | 2)


def rss(pid: int) -> int:
    """Resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def switches(pid: int) -> int:
    """The number of voluntary context switches of all threads of a process."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        for line in Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total
