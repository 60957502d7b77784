"""What can be known about a process and a store without changing them."""

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
    """A store whose calls are counted, and as `told` the calls that it makes to its watchers."""
    store = await open_store(url, context)
    for name in _CALLS:
        setattr(store, name, _counted(getattr(store, name), name, counts))
    watch = store.watch

    def watch_counted(scope: str, notify: Callable[[], None]) -> Any:
        counts["watch"] += 1
        return watch(scope, _counted(notify, "told", counts))

    store.watch = watch_counted  # type: ignore[method-assign]
    return store


def _counted(call: Callable[..., Any], name: str, counts: Counter[str]) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return call(*args, **kwargs)

    return counted


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, to the nanosecond: its clock, by the kernel's rule for
    numbering such clocks."""
    return time.clock_gettime(~pid << 3 | 2)


def rss(pid: int) -> int:
    """Bytes of memory that a process has resident."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def threads(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def switches(pid: int) -> int:
    """How often the threads of a process have gone to sleep of their own accord, and so woken."""
    total = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        for line in Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                total += int(line.split()[1])
    return total
