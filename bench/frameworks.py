"""How soon another process works after the leader got SIGTERM, in each framework.

The processes are those of the tests: real servers and schedulers on a local store, three of each.
It is measured from the signal to the first line that the work of the successor records. The jobs of
APScheduler and Celery are due every 20 ms, which is part of their figures.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench.figures import Figure, spread

sys.path.append(str(Path(__file__).parents[1] / "tests"))
import servers
from framework_crew import FRAMEWORKS, TARGET_S, crew

__all__ = ["frameworks"]


def frameworks(*, trials: int = 20, only: str | None = None) -> Iterator[Figure]:
    """From SIGTERM to the work of the successor, in each framework."""
    with servers.Redis() as redis:
        for framework in only.split(",") if only else FRAMEWORKS:
            with (
                tempfile.TemporaryDirectory(prefix="doyen-bench-") as folder,
                crew(framework, Path(folder), 3, REDIS_PORT=str(redis.port)) as processes,
            ):
                took_ms = [each * 1e3 for each in processes.hand_overs(trials)]
            yield Figure(
                name=f"SIGTERM to the successor's work, {framework}",
                value=statistics.median(took_ms),
                unit="ms, p50",
                limit=TARGET_S * 1e3,
                details={"ms": spread(took_ms, 1)},
            )
