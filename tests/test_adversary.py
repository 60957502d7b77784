"""The simulated network of `adversary`: connections in virtual time, and its faults."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from adversary import Connection, Network, WireLoop
from doyen.lease.clock import VirtualClock
from doyen.testing.faults import Fault, Faults, Late, LostCall, RefusedCall, Stray, Unanswered


class Counter:
    """Adds the numbers that it receives and answers with the sum."""

    def __init__(self) -> None:
        self.sum = 0

    async def serve(self, connection: Connection) -> None:
        while line := await connection.reader.readline():
            amount = int(line)

            def add(amount: int = amount) -> bytes:
                self.sum += amount
                return b"%d\n" % self.sum

            await connection.answer("add", add)


Client = Callable[[Counter, Network, Faults], Coroutine[Any, Any, None]]


def run(client: Client) -> float:
    """Run a client against the counter and return how much virtual time that took."""
    clock = VirtualClock()
    network, counter, faults = Network(), Counter(), Faults()
    loop = WireLoop(clock)
    loop.network = network

    async def main() -> None:
        await network.listen("here", 1000, counter, faults)
        await client(counter, network, faults)

    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())
    finally:
        network.close()
    return clock.now()


async def ask(amount: int, wait_s: float = 5.0) -> bytes:
    async with asyncio.timeout(wait_s):
        reader, writer = await asyncio.open_connection("here", 1000)
        try:
            writer.write(b"%d\n" % amount)
            return await reader.readline()
        finally:
            writer.close()


def test_requests_are_answered_and_take_no_time() -> None:
    async def client(counter: Counter, network: Network, faults: Faults) -> None:
        assert [await ask(n) for n in (1, 2, 3)] == [b"1\n", b"3\n", b"6\n"]

    assert run(client) == 0.0


@pytest.mark.parametrize(
    ("fault", "answer", "sum_at_once", "sum_later"),
    [
        (Late(before_s=2.0), b"1\n", 1, 1),
        (Late(after_s=2.0), b"1\n", 1, 1),
        (LostCall(), None, 0, 0),
        (LostCall(raises=True), b"", 0, 0),
        (Unanswered(), None, 1, 1),
        (Unanswered(raises=True), b"", 1, 1),
        (RefusedCall(), b"", 0, 0),
        (Stray(after_s=2.0), b"", 0, 1),
    ],
)
def test_each_fault(fault: Fault, answer: bytes | None, sum_at_once: int, sum_later: int) -> None:
    async def client(counter: Counter, network: Network, faults: Faults) -> None:
        faults.next("add", fault)
        if answer is None:
            with pytest.raises(TimeoutError):
                await ask(1)
        else:
            assert await ask(1) == answer
        assert counter.sum == sum_at_once
        await asyncio.sleep(3.0)
        assert counter.sum == sum_later
        assert await ask(10) == b"%d\n" % (sum_later + 10)

    run(client)


def test_delayed_answers_keep_their_order() -> None:
    async def client(counter: Counter, network: Network, faults: Faults) -> None:
        faults.next("add", Late(after_s=2.0))
        reader, writer = await asyncio.open_connection("here", 1000)
        writer.write(b"1\n2\n")
        assert [await reader.readline(), await reader.readline()] == [b"1\n", b"3\n"]
        writer.close()

    assert run(client) == pytest.approx(2.0, abs=1e-3)


def test_a_cut_drops_data_and_healing_closes_the_affected_connections() -> None:
    async def client(counter: Counter, network: Network, faults: Faults) -> None:
        reader, writer = await asyncio.open_connection("here", 1000)
        faults.cut()
        writer.write(b"1\n")
        with pytest.raises(TimeoutError):
            await ask(2)  # a new connection hangs
        faults.heal()
        network.healed(faults)
        assert await reader.readline() == b""
        assert counter.sum == 0
        assert await ask(3) == b"3\n"
        writer.close()

    run(client)


def test_a_server_that_is_down_refuses() -> None:
    async def client(counter: Counter, network: Network, faults: Faults) -> None:
        reader, writer = await asyncio.open_connection("here", 1000)
        network.stop()
        assert await reader.readline() == b""
        with pytest.raises(ConnectionRefusedError):
            await ask(1)
        network.start()
        assert await ask(1) == b"1\n"
        writer.close()

    run(client)
