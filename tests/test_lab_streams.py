"""The connections of simulated nodes."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

from doyen.lab.plan import Latencies
from doyen.lab.processes import LabLoop, SimulatedConnection, StreamNetwork


class Timers:
    """A loop that swaps timers of the same time, as the heap of asyncio may do."""

    def __init__(self) -> None:
        self.network: Any = None
        self._count = 0
        self._timers: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def time(self) -> float:
        return 1.0

    def call_at(self, at: float, call: Callable[..., object], *given: Any, context: Any) -> None:
        self._count -= 1
        heapq.heappush(self._timers, (at, self._count, call, given))

    def call_soon(self, call: Callable[..., object], *given: Any, context: Any) -> None:
        call(*given)

    def run(self) -> None:
        while self._timers:
            _, _, call, given = heapq.heappop(self._timers)
            call(*given)


def test_data_arrives_in_the_order_in_which_it_was_sent() -> None:
    loop = Timers()
    network = StreamNetwork(cast(LabLoop, loop), Latencies(latency_s=0.02, spread=0.4), 1)
    processes = [
        SimpleNamespace(machine=name, connections={}, context=None, dead=False)
        for name in ("one", "two")
    ]
    one, two = (SimulatedConnection(network, cast(Any, each), "") for each in processes)
    one.other, two.other = two, one
    received: list[bytes] = []
    two.protocol = SimpleNamespace(data_received=received.append)
    sent = [b"%d" % number for number in range(300)]
    for number, data in enumerate(sent):
        if number == 100:
            network.cut("one", "two", 1)
        elif number == 200:
            network.cut("one", "two", -1)
        one.write(data)
    loop.run()
    assert received == sent
