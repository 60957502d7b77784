"""Watches of clients on several nodes, in virtual time."""

from __future__ import annotations

from doyen.quorum.keyspace.commands import Create, Put, encode
from doyen.quorum.node.clients import PIECE
from doyen.quorum.node.watches import CARRIED
from doyen.quorum.protocol.frames import MAX_FRAME
from doyen.quorum.protocol.requests import (
    CancelWatch,
    Get,
    WatchConfirmed,
    WatchNotification,
    WatchRequest,
)
from test_quorum_service import Client, Quorum, granted, notices, with_quorum


@with_quorum
async def test_watches_notify_of_changes_by_other_nodes(quorum: Quorum) -> None:
    writer, watcher = (Client(quorum.services[node]) for node in ("n1", "n2"))
    assert isinstance(await watcher.answer(WatchRequest(-1, "a", -1)), WatchConfirmed)
    assert isinstance(await watcher.answer(WatchRequest(-2, "a/b", -1)), WatchConfirmed)
    assert isinstance(await watcher.answer(WatchRequest(-3, "a/c", -1)), WatchConfirmed)
    result = await writer.do(1, Put("a/b", b"", 0))
    await quorum.world.until(lambda: notices(watcher))
    assert sorted(notices(watcher)) == [-2, -1]
    revision = max(
        each.revision for each in watcher.received if isinstance(each, WatchNotification)
    )
    assert revision == result.revision
    watcher.put(CancelWatch(-1))
    watcher.received.clear()
    await writer.do(2, Put("a/c/d", b"", 0))
    await quorum.world.until(lambda: notices(watcher))
    assert notices(watcher) == [-3]
    service = quorum.services["n2"]
    assert service.watches == 2
    watcher.close()
    assert service.watches == 0


@with_quorum
async def test_watches_of_one_client_that_carry_much_cost_no_other_its_notification(
    quorum: Quorum,
) -> None:
    """The entries that all its watches would carry are larger than a frame."""
    service = quorum.services[await quorum.leader()]
    greedy, other = Client(service, "greedy-client"), Client(service, "other-client")
    count = MAX_FRAME // CARRIED + 50
    greedy.put(*(WatchRequest(-each, "k", -1, "", True) for each in range(1, count + 1)))
    await greedy.answer_to(-count)
    await other.answer(WatchRequest(-1, "k", -1))
    await other.do(1, Put("k", b"x" * CARRIED, 0))
    await quorum.world.until(lambda: notices(other) and notices(greedy))
    assert notices(other) == [-1]
    assert not greedy.closed
    assert len(notices(greedy)) == count
    (carrying,) = (each for each in greedy.received if isinstance(each, WatchNotification))
    assert sum(len(each.value) for each in carrying.entries.values()) <= PIECE
    assert len(carrying.entries) > PIECE // CARRIED // 2


@with_quorum
async def test_a_client_that_cannot_be_notified_resumes_and_costs_no_other_its_notification(
    quorum: Quorum, callback_failures: list[str]
) -> None:
    service = quorum.services[await quorum.leader()]
    broken, other, third = (Client(service, f"client-{each}") for each in range(3))
    begun = await broken.answer(WatchRequest(-1, "k", -1))
    await other.answer(WatchRequest(-1, "k", -1))

    def send(kind: int, *parts: bytes) -> bool:
        raise ValueError("the frame has too many bytes")

    broken.send = send  # type: ignore[method-assign]
    quorum.keyspace(await quorum.leader()).apply(encode(Put("k", b"", 0)))
    # The request of another one is the first occasion on which the others are notified.
    await third.answer(WatchRequest(-1, "k", -1))
    assert not third.closed
    assert notices(other) == [-1]
    assert broken.closed
    again = Client(service, "client-0")
    await again.answer(WatchRequest(-1, "k", begun.revision))
    assert notices(again) == [-1]
    assert callback_failures.pop() == "ValueError('the frame has too many bytes')"


@with_quorum
async def test_the_end_of_a_lease_notifies_watches_on_every_node(quorum: Quorum) -> None:
    holder = Client(quorum.services["n1"])
    watchers = [Client(service) for service in quorum.services.values()]
    lease = await granted(holder)
    await holder.do(2, Create("k", b"", lease))
    for watcher in watchers:
        await watcher.answer(WatchRequest(-1, "k", -1))
        watcher.received.clear()
    await quorum.world.until(lambda: all(notices(each) for each in watchers))


@with_quorum
async def test_a_resumed_watch_notifies_of_missed_changes_only(quorum: Quorum) -> None:
    writer, first = Client(quorum.services["n1"]), Client(quorum.services["n2"])
    begun = await first.answer(WatchRequest(-1, "a", -1))
    await writer.do(1, Put("b", b"", 0))
    quiet = Client(quorum.services["n3"])
    await quiet.ask(Get, "b")  # so that it has caught up
    await quiet.answer(WatchRequest(-5, "a", begun.revision))
    assert notices(quiet) == []
    first.close()
    await writer.do(2, Put("a/x", b"", 0))
    await quiet.ask(Get, "a")
    missed = Client(quorum.services["n3"])
    await missed.answer(WatchRequest(-1, "a", begun.revision))
    await quorum.world.until(lambda: notices(missed))
