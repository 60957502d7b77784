"""Reads at a node: nothing is read before the node is current."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

import pytest

from doyen.quorum.keyspace import state
from doyen.quorum.keyspace.commands import (
    Create,
    Enqueue,
    EntryExists,
    Grant,
    LeaseGranted,
    Put,
    RaiseVersion,
    Revoke,
    StoredEntry,
    TicketIssued,
    decode_result,
    encode,
)
from doyen.quorum.keyspace.state import Keyspace
from doyen.quorum.keyspace.versions import NEWEST
from doyen.quorum.node import lists
from doyen.quorum.node.clients import RefusedCreate
from doyen.quorum.node.lists import Lists
from doyen.quorum.protocol.requests import (
    Ahead,
    FoundEntry,
    Get,
    Head,
    ListChunk,
    Response,
    Scan,
    WriteResults,
)
from mutants_nodes import refused_while_behind


class BehindDriver:
    """The driver of a node that has not applied everything yet."""

    def __init__(self) -> None:
        self.current: list[Callable[[], None]] = []

    def when_current(self, call: Callable[[], None]) -> None:
        self.current.append(call)


class Client:
    ending = congested = draining = False

    def __init__(self) -> None:
        self.reads: deque[Any] = deque()
        self.held: deque[bytes] = deque()
        self.received: list[Response] = []
        self.connection, self.send = self, self.received.append
        self.lists = 0
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True

    async def drain(self) -> None:
        pass


def refusal() -> Any:
    """The answer to a create that was refused because of an entry that this node has an older value
    of."""
    keyspace, driver, client = Keyspace(), BehindDriver(), Client()
    keyspace.apply(encode(Put("k", b"old", 0)))
    lists: Any = Lists(driver, keyspace, lambda task, _: None, lambda connection: None)  # type: ignore[arg-type]
    lists.read(client, [RefusedCreate(7, "k")])
    keyspace.apply(encode(Put("k", b"new", 1)))
    for call in driver.current:
        call()
    (answer,) = client.received
    assert isinstance(answer, WriteResults)
    return decode_result(answer.results[0])


def test_the_entry_of_a_refused_create_is_read_when_the_node_is_current() -> None:
    refused = refusal()
    assert isinstance(refused, EntryExists)
    assert refused.entry.value == b"new"


def test_the_mutant_that_does_not_wait_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    refused_while_behind(monkeypatch)
    assert refusal().entry.value == b"old"


def test_a_list_of_many_entries_that_wait_for_their_removal_is_read_a_piece_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Although it is short: all of them belong to a lease that has ended."""
    monkeypatch.setattr(lists, "BLOCKS", 2)
    keyspace, driver, client = Keyspace(), BehindDriver(), Client()
    keyspace.apply(encode(RaiseVersion(NEWEST)))
    granted = decode_result(keyspace.apply(encode(Grant(5.0))))
    assert isinstance(granted, LeaseGranted)
    lease = granted.lease
    for number in range(1000):
        keyspace.apply(encode(Create(f"k/{number:03}", b"", lease)))
    keyspace.apply(encode(Revoke(lease)))
    keyspace.apply(encode(Put("k/living", b"", 0)))
    looked = 0
    scan = keyspace.scan

    def counted(prefix: str) -> Iterator[Sequence[StoredEntry]]:
        nonlocal looked
        for block in scan(prefix):
            looked += 1
            yield block

    monkeypatch.setattr(keyspace, "scan", counted)
    started: list[Coroutine[Any, Any, None]] = []
    served: Any = Lists(
        driver,  # type: ignore[arg-type]
        keyspace,
        lambda task, _: started.append(task),
        lambda connection: None,
    )
    served.read(client, [Scan(1, "k")])
    for call in driver.current:
        call()
    assert looked <= lists.BLOCKS
    assert client.received == [ListChunk(1, [], True)]

    async def rest() -> None:
        tasks: list[asyncio.Future[None]] = []
        while started or not all(task.done() for task in tasks):
            tasks += map(asyncio.ensure_future, started)
            started.clear()
            before = looked
            await asyncio.sleep(0)
            assert looked - before <= lists.BLOCKS

    asyncio.run(rest())
    assert looked > 5 * lists.BLOCKS
    chunks = [each for each in client.received if isinstance(each, ListChunk)]
    assert [each.more for each in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [entry.key for each in chunks for entry in each.entries] == ["k/living"]


def waiting_line() -> tuple[Keyspace, list[StoredEntry]]:
    """A line in which all tickets but two belong to a lease that has ended and are not removed yet;
    and these two. Most are ahead of both, as many again between them."""
    keyspace = Keyspace(slice_keys=1)
    leases = []
    for _ in range(2):
        granted = decode_result(keyspace.apply(encode(Grant(5.0))))
        assert isinstance(granted, LeaseGranted)
        leases.append(granted.lease)
    living = []
    for number in range(2000):
        lease = leases[number % 1000 == 999]
        issued = decode_result(keyspace.apply(encode(Enqueue("line", b"", lease, 0))))
        assert isinstance(issued, TicketIssued)
        if lease == leases[1]:
            living.append(issued.key)
    keyspace.apply(encode(Revoke(leases[0])))
    return keyspace, [entry for key in living if (entry := keyspace.get(key)) is not None]


def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks reads of lines look at, in each turn of the loop; the last is the present."""
    turns = [0]

    def counted(scan: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def blocks(*given: Any) -> Iterator[Any]:
            for block in scan(*given):
                turns[-1] += 1
                yield block

        return blocks

    monkeypatch.setattr(state, "_below", counted(state._below))
    monkeypatch.setattr(state, "_before", counted(state._before))
    return turns


async def read(
    keyspace: Keyspace, turns: list[int], *reads: list[Any], change: Revoke | None = None
) -> list[Client]:
    """Clients that have read, each of them several things. `change` is applied after one turn."""
    driver, loop = BehindDriver(), asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    served: Any = Lists(
        driver,  # type: ignore[arg-type]
        keyspace,
        lambda work, _: tasks.append(loop.create_task(work)),
        lambda connection: None,
    )
    clients = [Client() for _ in reads]
    for client, some in zip(clients, reads, strict=True):
        served.read(client, some)
    turns.clear()
    turns.append(0)
    for call in driver.current:
        call()
    while not all(task.done() for task in tasks):
        if change is not None:
            keyspace.apply(encode(change))
            change = None
        turns.append(0)
        await asyncio.sleep(0)
    return clients


def test_a_search_among_tickets_that_wait_for_their_removal_goes_on_in_the_next_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It finds what was there when it began, whatever is applied meanwhile."""
    monkeypatch.setattr(lists, "BLOCKS", 4)
    turns = looked_at(monkeypatch)
    keyspace, (first, last) = waiting_line()
    for request, found in ((Head(1, "line"), first), (Ahead(1, last.key), first)):
        assert found.lease
        (client,) = asyncio.run(read(keyspace, turns, [request]))
        assert client.received == [FoundEntry(1, found)]
        assert max(turns) <= lists.BLOCKS
        assert sum(turns) > 5 * lists.BLOCKS
    (client,) = asyncio.run(read(keyspace, turns, [Ahead(1, first.key)]))
    assert client.received == [FoundEntry(1, None)]
    ends = Revoke(first.lease)
    (client,) = asyncio.run(read(keyspace, turns, [Head(1, "line")], change=ends))
    assert client.received == [FoundEntry(1, first)]
    (client,) = asyncio.run(read(keyspace, turns, [Head(1, "line")]))
    assert client.received == [FoundEntry(1, None)]


def test_reads_of_the_same_head_share_a_search_and_clients_take_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "BLOCKS", 4)
    turns = looked_at(monkeypatch)
    keyspace, (first, last) = waiting_line()
    asyncio.run(read(keyspace, turns, [Head(1, "line")]))
    once = sum(turns)
    heads = [Head(number, "line") for number in range(1, 257)]
    mixed = [Ahead(1, last.key), Get(2, last.key), Head(3, "line"), Scan(4, "line")]
    clients = asyncio.run(read(keyspace, turns, heads, mixed))
    assert clients[0].received == [FoundEntry(number, first) for number in range(1, 257)]
    assert clients[1].received[:3] == [
        FoundEntry(1, first),
        FoundEntry(2, last),
        FoundEntry(3, first),
    ]
    assert max(turns) <= lists.BLOCKS
    assert sum(turns) < 6 * once


def test_clients_that_wait_share_the_turns_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reads one ticket. So many arrive at once when the node that they used has ended."""
    turns = looked_at(monkeypatch)
    keyspace = Keyspace()
    granted = decode_result(keyspace.apply(encode(Grant(5.0))))
    assert isinstance(granted, LeaseGranted)
    keyspace.apply(encode(Enqueue("line", b"", granted.lease, 0)))
    many = 4 * lists.BLOCKS
    clients = asyncio.run(read(keyspace, turns, *([Head(1, "line")] for _ in range(many))))
    assert all(len(client.received) == 1 for client in clients)
    assert max(turns) <= lists.BLOCKS
    assert len(turns) <= many // lists.BLOCKS + 3


def test_a_client_whose_read_fails_when_its_turn_comes_is_disconnected(
    monkeypatch: pytest.MonkeyPatch, callback_failures: list[str]
) -> None:
    """Otherwise neither that read nor any later one of this client would ever be answered."""
    monkeypatch.setattr(lists, "BLOCKS", 4)
    turns = looked_at(monkeypatch)
    keyspace, (first, _) = waiting_line()
    scan = keyspace.scan
    monkeypatch.setattr(keyspace, "scan", lambda line: scan(line) if line == "line" else 1 / 0)
    some = [Head(1, "line")], [Head(1, "broken")], [Head(1, "line")]
    clients = asyncio.run(read(keyspace, turns, *some))
    assert [client.aborted for client in clients] == [False, True, False]
    assert clients[0].received == clients[2].received == [FoundEntry(1, first)]
    assert callback_failures.pop().startswith("ZeroDivisionError")


def test_all_lists_together_look_at_a_bounded_part_in_a_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lists, "BLOCKS", 4)
    turns = looked_at(monkeypatch)
    keyspace, (first, last) = waiting_line()
    clients = asyncio.run(read(keyspace, turns, *([Scan(1, "line")] for _ in range(20))))
    for client in clients:
        chunks = [each for each in client.received if isinstance(each, ListChunk)]
        assert [entry for each in chunks for entry in each.entries] == [first, last]
    assert max(turns) <= lists.BLOCKS
