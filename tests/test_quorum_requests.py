"""A client's requests on fake connections: what is sent, and under which ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from doyen.errors import OutcomeUnknown, StoreUnavailable, StoreUnusable
from doyen.quorum.keyspace.commands import Put, Result, Written, decode_command, encode
from doyen.quorum.protocol.connection import BOUND, End
from doyen.quorum.protocol.frames import MAX_FRAME, CloseReason
from doyen.quorum.protocol.handshake import ANY, ConnectionIdentity, MemberInfo
from doyen.quorum.protocol.requests import (
    ANSWER,
    MAX_WRITES,
    REQUEST,
    ErrorCode,
    Failed,
    IdentifyClient,
    Response,
    WatchConfirmed,
    WatchRequest,
    Write,
    WriteResults,
    decode_request,
)
from doyen.quorum.protocol.security import Security
from doyen.stores.quorum import connection, dialling
from doyen.stores.quorum.connection import QuorumConnection, QuorumWatch
from doyen.stores.quorum.dialling import Dialler, ExpectedCluster


class FakeLink:
    """An open connection to a node; the test answers in the node's place. Its queue is written in
    the next turn of the loop."""

    address = "a node"
    closed = ending = full = False
    bound = BOUND
    queued = 0
    remote = ConnectionIdentity("cluster", "n1", 1)
    info = MemberInfo()

    def __init__(self, on_frames: Any, on_end: Any) -> None:
        self._on_frames, self._on_end = on_frames, on_end
        self.asked: list[Any] = []
        self.faults: list[CloseReason] = []

    def send(self, kind: int, payload: bytes) -> bool:
        assert kind == REQUEST
        if len(payload) >= MAX_FRAME:
            raise ValueError("too large for a frame")
        if self.full or self.ending or self.queued > self.bound:
            return False
        if not self.queued:
            asyncio.get_running_loop().call_soon(self._flush)
        self.queued += len(payload)
        self.asked.append(decode_request(payload))
        return True

    def _flush(self) -> None:
        self.queued = 0

    @property
    def congested(self) -> bool:
        return self.queued > self.bound // 64

    async def drain(self) -> None:
        while self.congested:  # noqa: ASYNC110
            await asyncio.sleep(0)

    def answer(self, *answers: Response) -> None:
        self._on_frames(self, [(ANSWER, encode(each)) for each in answers])

    def end(self) -> None:
        self.closed = self.ending = True
        self._on_end(self, End.LEFT)

    def abort(self) -> None:
        self.ending = True
        asyncio.get_running_loop().call_soon(self.end)

    def close(self) -> None:
        pass

    async def wait(self) -> None:
        pass

    def fail(self, reason: CloseReason, text: str) -> None:
        self.faults.append(reason)
        self.end()

    async def alive(self, within_s: float) -> bool:
        return True

    @property
    def writes(self) -> list[Write]:
        return [each for each in self.asked if isinstance(each, Write)]

    @property
    def names(self) -> list[str]:
        return [each.client for each in self.asked if isinstance(each, IdentifyClient)]


def with_client(
    test: Callable[[QuorumConnection, list[FakeLink]], Coroutine[Any, Any, None]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    links: list[FakeLink] = []

    async def dial(
        address: str, me: ConnectionIdentity, *, on_frames: Any, on_end: Any, **_: Any
    ) -> Any:
        links.append(FakeLink(on_frames, on_end))
        return links[-1]

    async def main() -> None:
        dialler = Dialler(["h:1"], Security(), ExpectedCluster(ANY), connect_timeout_s=1.0)
        client = QuorumConnection(dialler)
        await test(client, links)
        await client.close()

    monkeypatch.setattr(dialling, "dial", dial)
    asyncio.run(main())


async def settle() -> None:
    """Let everything that is scheduled be sent."""
    for _ in range(20):
        await asyncio.sleep(0)


def asked(client: QuorumConnection, *values: bytes) -> list[asyncio.Task[Result]]:
    return [asyncio.create_task(client.write(put(value))) for value in values]


def put(value: bytes) -> Put:
    return Put("k", value, 0)


def results(*versions: int) -> list[bytes]:
    return [encode(Written(version, version)) for version in versions]


def values(writes: Sequence[Write]) -> list[list[bytes]]:
    """The values to be written, frame by frame."""
    commands = [[decode_command(body) for body in each.bodies] for each in writes]
    return [[each.value for each in frame if isinstance(each, Put)] for frame in commands]


def test_writes_of_one_turn_go_out_together(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        writes = asked(client, *(b"%d" % n for n in range(2 * MAX_WRITES + 5)))
        await settle()
        frames = links[0].writes
        assert [len(each.ids) for each in frames] == [MAX_WRITES, MAX_WRITES, 5]
        assert [n for each in frames for n in each.ids] == [*range(1, 2 * MAX_WRITES + 6)]
        for each in frames:
            links[0].answer(WriteResults(each.ids, results(*each.ids)))
        answers = await asyncio.gather(*writes)
        assert answers == [Written(n, n) for n in range(1, len(writes) + 1)]
        more = asked(client, b"more")
        await settle()
        assert links[0].writes[-1].floor == links[0].writes[-1].ids[0], "all before are settled"
        links[0].answer(WriteResults(links[0].writes[-1].ids, results(1)))
        await asyncio.gather(*more)

    with_client(test, monkeypatch)


def test_large_writes_go_out_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        small, too_large, large = asked(client, b"", bytes(MAX_FRAME), bytes(MAX_FRAME // 2))
        await settle()
        assert [each.ids for each in links[0].writes] == [[1], [3]]
        with pytest.raises(StoreUnusable, match="cannot be sent"):
            await too_large
        links[0].answer(WriteResults([1, 3], results(7, 8)))
        assert (await small, await large) == (Written(7, 7), Written(8, 8))

    with_client(test, monkeypatch)


def test_requests_whose_waiters_have_gone_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        first = asked(client, b"first")
        await settle()
        kept, given_up = asked(client, b"kept", b"given up")
        await asyncio.sleep(0)
        given_up.cancel()
        await settle()
        assert values(links[0].writes) == [[b"first"], [b"kept"]]
        links[0].answer(WriteResults([1, 2], results(1, 2)))
        await asyncio.gather(*first, kept)

    with_client(test, monkeypatch)


def test_a_write_gets_its_number_when_it_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the floor would skip a write that is sent later than others with higher numbers."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        (first,) = asked(client, b"first")
        await settle()
        links[0].answer(WriteResults([1], results(1)))
        await first
        later, sooner = client.write(put(b"later")), client.write(put(b"sooner"))
        for number, write in ((2, sooner), (3, later)):
            task = asyncio.create_task(write)
            await settle()
            assert (links[0].writes[-1].floor, links[0].writes[-1].ids) == (number, [number])
            links[0].answer(WriteResults([number], results(number)))
            assert await task == Written(number, number)

    with_client(test, monkeypatch)


def test_a_link_that_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was sent before, on another connection, may have been carried out."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        (sent,) = asked(client, b"sent")
        await settle()
        monkeypatch.setattr(FakeLink, "full", True)
        (unsent,) = asked(client, b"unsent")
        await settle()
        with pytest.raises(StoreUnavailable, match="more slowly than they are made"):
            await unsent
        with pytest.raises(StoreUnavailable, match="more slowly than they are made"):
            async with asyncio.timeout(1):
                await client.watch("k", lambda: None)
        links[0].end()
        await settle()
        with pytest.raises(OutcomeUnknown, match="more slowly than they are made"):
            await sent

    with_client(test, monkeypatch)


def test_a_link_that_does_not_take_the_new_name_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the node would number under the old name what is then sent under the new one."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        (first,) = asked(client, b"first")
        await settle()
        links[0].answer(WriteResults([1], results(1)))
        await first
        (refused,) = asked(client, b"refused")
        await settle()
        links[0].full = True
        links[0].answer(Failed(2, ErrorCode.FORGOTTEN, "forgotten"))
        links[0].full = False
        await settle()
        assert values(links[0].writes) == [[b"first"], [b"refused"]]
        assert values(links[1].writes) == [[b"refused"]]
        assert links[1].names != links[0].names
        links[1].answer(WriteResults([2], results(2)))
        assert await refused == Written(2, 2)

    with_client(test, monkeypatch)


def test_a_new_link_is_asked_for_everything_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for writes that were in flight when the old connection ended."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        writes = asked(client, b"sent")
        await settle()
        writes += asked(client, b"about to be")
        await asyncio.sleep(0)
        links[0].end()
        await settle()
        assert values(links[1].writes) == [[b"sent", b"about to be"]]
        assert links[1].names == links[0].names
        links[1].answer(WriteResults([1, 2], results(1, 2)))
        await asyncio.gather(*writes)

    with_client(test, monkeypatch)


def test_more_than_a_connection_can_queue_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Watches and writes that went out one by one are sent on the next connection in one turn."""
    monkeypatch.setattr(FakeLink, "bound", 1 << 20)
    size = 5_000

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        writes: list[asyncio.Task[Result]] = []
        begun: list[asyncio.Task[QuorumWatch]] = []
        for number in range(300):
            writes += asked(client, b"%d" % number + bytes(size))
            begun.append(asyncio.create_task(client.watch(f"{number}" + "x" * 4000, lambda: None)))
            await settle()
        watched = [each.id for each in links[0].asked if isinstance(each, WatchRequest)]
        links[0].answer(*(WatchConfirmed(number, 7) for number in watched))
        await asyncio.gather(*begun)
        for _ in range(2):
            links[-1].end()
            for _ in range(50):
                await settle()
        again = links[-1].asked
        resumed = [each for each in again if isinstance(each, WatchRequest)]
        assert [each.id for each in resumed] == watched
        assert {each.since for each in resumed} == {7}
        sent = [number for each in links[-1].writes for number in each.ids]
        assert sent == [*range(1, 301)]
        links[-1].answer(WriteResults(sent, results(*sent)))
        assert len(await asyncio.gather(*writes)) == 300

    with_client(test, monkeypatch)


def test_requests_are_not_repeated_under_another_client_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum has forgotten the client, and the connection ends. What was sent under the old
    name may have been carried out: under the new one it would be carried out again."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        (first,) = asked(client, b"first")
        await settle()
        links[0].answer(WriteResults([1], results(1)))
        await first
        old, refused = asked(client, b"old", b"refused")
        await settle()
        links[0].answer(Failed(3, ErrorCode.FORGOTTEN, "forgotten"))
        await settle()
        again = Write(1, [3], [encode(put(b"refused"))])
        assert links[0].writes[-1] == again
        before, after = links[0].names
        assert before != after
        links[0].end()
        await settle()
        assert links[1].names == [after]
        assert links[1].writes == [again]
        with pytest.raises(OutcomeUnknown, match="forgotten"):
            await old
        links[1].answer(WriteResults([3], results(9)))
        assert await refused == Written(9, 9)

    with_client(test, monkeypatch)


def test_a_first_write_is_not_retried_once_a_later_one_was_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would look like the first write of a new client: nothing below it has been answered."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        monkeypatch.setattr(connection, "REMEMBERED_S", -1.0)
        first, second = asked(client, b"first", b"second")
        await settle()
        links[0].answer(WriteResults([2], results(2)))
        await second
        links[0].end()
        with pytest.raises(OutcomeUnknown, match="forgotten"):
            await asyncio.wait_for(first, 1.0)

    with_client(test, monkeypatch)


def test_a_first_write_is_not_retried_after_a_long_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quorum may have carried it out and forgotten the client since. Once it has answered a
    write under this name, it notices that."""

    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        monkeypatch.setattr(connection, "REMEMBERED_S", -1.0)
        (first,) = asked(client, b"first")
        await settle()
        links[0].end()
        with pytest.raises(OutcomeUnknown, match="forgotten"):
            await first
        (second,) = asked(client, b"second")
        await settle()
        links[-1].answer(WriteResults([2], results(2)))
        await second
        (third,) = asked(client, b"third")
        await settle()
        links[-1].end()
        await settle()
        links[-1].answer(WriteResults(links[-1].writes[0].ids, results(3)))
        assert await third == Written(3, 3)

    with_client(test, monkeypatch)


@pytest.mark.parametrize(
    "answer", [WriteResults([1], [b"no result"]), WriteResults([1], []), WriteResults([], [b""])]
)
def test_an_answer_that_makes_no_sense_ends_the_link(
    answer: WriteResults, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(client: QuorumConnection, links: list[FakeLink]) -> None:
        (write,) = asked(client, b"v")
        await settle()
        links[0].answer(answer)
        assert links[0].faults == [CloseReason.MALFORMED]
        await settle()
        links[1].answer(WriteResults([1], results(3)))
        assert await write == Written(3, 3)

    with_client(test, monkeypatch)
