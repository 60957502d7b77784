"""Whatever was acknowledged is there again: after a crash at every single operation, with every
byte cut off or flipped, and after random lives compared with a list of entries."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.quorum.consensus.core import Install, LogEntry, Membership, Persist, Snapshot
from doyen.quorum.node import data_directory as folder
from doyen.quorum.node import framed_files as frames
from doyen.quorum.node import journal
from doyen.quorum.node.data_directory import DirectoryIdentity, SnapshotReader
from doyen.quorum.node.framed_files import SyncFailed
from doyen.quorum.node.journal import FileJournal
from fragile import LUCK, Crashed, FragileDisk

FOLDER = Path("data")
WHOSE = DirectoryIdentity("c1", "n1", "raft")
MEMBERS = Membership(("n1", "n2", "n3"))


class Voted(Struct, frozen=True, array_like=True):
    generation: int
    vote: str | None


def opened(disk: FragileDisk, **sizes: int) -> FileJournal:
    settings = {"segment_bytes": 400, "ahead_bytes": 64, "reserve_bytes": 32} | sizes
    return FileJournal(FOLDER, WHOSE, Voted, disk=disk, **settings)


def entry(n: int) -> LogEntry:
    return LogEntry(n // 7, 1, b"%d" % n * (n % 9))


def pieces_of(snapshot: Snapshot) -> list[bytes]:
    return [b"%d.%d" % (snapshot.index, n) for n in range(4)]


class Life:
    """What a journal has been told, as a list: the dumb model."""

    def __init__(self) -> None:
        self.state: Voted | None = None
        self.log: dict[int, LogEntry] = {}
        self.end = 0
        self.installed = 0

    def persist(self, effect: Persist) -> None:
        self.state = effect.state or self.state
        if not effect.first:
            return
        for at, new in enumerate(effect.entries, effect.first):
            self.log[at] = new
        end = effect.first + len(effect.entries) - 1
        self.end = max(end, self.end) if effect.keep else end

    def install(self, snapshot: Snapshot) -> None:
        self.end = self.installed = snapshot.index


class Rig:
    """A journal in use, and every state that it may be found in."""

    def __init__(self, disk: FragileDisk, **sizes: int) -> None:
        self.disk = disk
        self.lives = [Life()]
        self.acknowledged = 0
        self.snapshots: dict[int, Snapshot] = {}
        self.covered = 0
        self.failures: list[BaseException] = []
        self._told = asyncio.Event()
        self._numbers = 0
        self.journal = opened(disk, **sizes)
        self.journal.start(self._persisted, self._failed)

    def _persisted(self, token: int) -> None:
        assert token > self.acknowledged
        assert not self.failures
        self.acknowledged = token
        self._told.set()

    def _failed(self, error: BaseException) -> None:
        self.failures.append(error)
        self._told.set()

    def _next(self) -> Life:
        life = copy.copy(self.lives[-1])
        life.log = dict(life.log)
        self.lives.append(life)
        return life

    def entries(self, count: int) -> list[LogEntry]:
        self._numbers += count
        return [entry(n) for n in range(self._numbers - count, self._numbers)]

    def put(
        self, count: int, *, at: int | None = None, vote: int | None = None, keep: bool = False
    ) -> None:
        first = self.lives[-1].end + 1 if at is None else at
        state = Voted(vote, "n2") if vote else None
        token = len(self.lives)
        effect = Persist(token, state, first if count else 0, self.entries(count), keep)
        self.journal.persist(effect)
        self._next().persist(effect)

    async def settled(self) -> None:
        while self.acknowledged < len(self.lives) - 1:
            if self.failures:
                raise self.failures[0]
            self._told.clear()
            await self._told.wait()

    def _snapshot(self, index: int) -> Snapshot:
        snapshot = self.snapshots[index] = Snapshot(index, 3, MEMBERS)
        return snapshot

    async def take(self, index: int) -> None:
        snapshot = self._snapshot(index)
        taking = asyncio.ensure_future(
            self.journal.take_snapshot(snapshot, iter(pieces_of(snapshot)))
        )
        while not taking.done():
            if self.failures:
                taking.cancel()
                raise self.failures[0]
            await asyncio.sleep(0)
        await taking
        self.covered = max(self.covered, index)

    async def install(self, index: int) -> None:
        snapshot = self._snapshot(index)
        await self.journal.receive_snapshot(snapshot, _each(pieces_of(snapshot)))
        self.journal.install(Install(snapshot, len(self.lives)))
        self._next().install(snapshot)

    def check(self, disk: FragileDisk, least: int | None = None) -> int:
        """What is found there is one of the lives, and nothing acknowledged is missing."""
        journal = opened(disk)
        found = journal.recovered
        base = found.snapshot.index if found.snapshot else 0
        if found.snapshot:
            kept = journal._kept
            assert kept
            assert found.snapshot == self.snapshots[base]
            assert list(SnapshotReader(disk, FOLDER, kept)) == pieces_of(found.snapshot)
        least = self.acknowledged if least is None else least
        for n in range(len(self.lives) - 1, least - 1, -1):
            life = self.lives[n]
            if (
                life.installed <= base
                and life.end == base + len(found.entries)
                and life.state == found.state
                and all(life.log.get(i) == e for i, e in enumerate(found.entries, base + 1))
            ):
                assert base >= self.covered or least < self.acknowledged
                return n
        raise AssertionError(f"found {found}, which is none of the lives from {least} on")


async def _each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


Story = Callable[[Rig], Coroutine[Any, Any, None]]


async def appending(rig: Rig) -> None:
    rig.put(2, vote=1)
    await rig.settled()
    rig.put(3)
    rig.put(0, vote=2)
    rig.put(1)
    await rig.settled()


async def rolling(rig: Rig) -> None:
    for n in range(1, 9):
        rig.put(9, vote=n if n % 3 == 0 else None)
        await rig.settled()


async def truncating(rig: Rig) -> None:
    rig.put(9, vote=1)
    await rig.settled()
    rig.put(4, at=3)
    await rig.settled()
    rig.put(20, at=5)
    rig.put(15, at=5)
    await rig.settled()
    rig.put(1, at=1)
    await rig.settled()


async def keeping(rig: Rig) -> None:
    rig.put(9, vote=1)
    rig.put(2, at=3, keep=True)
    await rig.settled()
    rig.put(4, at=8, keep=True)
    await rig.settled()


async def snapshotting(rig: Rig) -> None:
    for n in range(1, 7):
        rig.put(12, vote=n)
        await rig.settled()
        if n % 2 == 0:
            await rig.take(n * 12 - 5)
    rig.put(3)
    await rig.settled()


async def installing(rig: Rig) -> None:
    rig.put(12, vote=1)
    await rig.settled()
    await rig.install(40)
    rig.put(2)
    await rig.settled()
    rig.put(12)
    await rig.install(100)
    rig.put(12, vote=2)
    await rig.settled()
    await rig.take(105)
    rig.put(30)
    await rig.settled()


async def cutting_by_install(rig: Rig) -> None:
    rig.put(30, vote=1)
    rig.put(30)
    await rig.settled()
    await rig.install(20)
    rig.put(2)
    await rig.settled()
    await rig.take(21)
    rig.put(30)
    await rig.settled()


STORIES = [appending, rolling, truncating, keeping, snapshotting, installing, cutting_by_install]


async def live(disk: FragileDisk, story: Story) -> Rig | None:
    """None if the crash came before the journal was open."""
    try:
        rig = Rig(disk)
    except Crashed:
        return None
    try:
        await story(rig)
        await rig.journal.close()
    except Crashed:
        rig.journal._queue.put(None)
        writer = rig.journal._writer
        assert writer
        writer.join()
        await asyncio.sleep(0)
        rig.journal._aside.shutdown()
    return rig


def crash_everywhere(story: Story) -> int:
    points = 0
    while True:
        disk = FragileDisk()
        disk.crash_at = points
        rig = asyncio.run(live(disk, story))
        for luck in LUCK:
            found = disk.after_crash(luck)
            if rig is None:
                opened(found)
            else:
                rig.check(found)
                crash_again(rig, disk.after_crash(luck), points)
        if not disk.crashed:
            return points
        points += 1


def crash_again(rig: Rig, disk: FragileDisk, seed: int) -> None:
    """A second crash, while the first is being recovered from."""
    random = Random(seed)
    disk.crash_at = random.randrange(8)
    try:
        opened(disk)
    except Crashed:
        pass
    rig.check(disk.after_crash(random.choice(LUCK)))


@pytest.mark.parametrize("story", STORIES)
def test_a_crash_at_every_operation_loses_nothing_acknowledged(story: Story) -> None:
    assert crash_everywhere(story) > 20


async def _whole(disk: FragileDisk, story: Story) -> Rig:
    rig = await live(disk, story)
    assert rig
    return rig


def files_after(story: Story) -> tuple[Rig, dict[str, bytes]]:
    disk = FragileDisk()
    rig = asyncio.run(_whole(disk, story))
    assert rig.acknowledged == len(rig.lives) - 1
    return rig, disk.files()


def variants(data: bytes) -> Iterator[tuple[int, bytes]]:
    for at in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            yield at, bytes(changed)


def outcome(rig: Rig, files: dict[str, bytes], least: int | None = None) -> int | str:
    """Which life is found, or the words with which the folder is refused."""
    try:
        return rig.check(FragileDisk(files), least)
    except StoreUnusable as error:
        return str(error)


def flip_everything(story: Story) -> set[str]:
    """Flip each bit of each file: all is found, or the folder is refused, with the remedy."""
    rig, files = files_after(story)
    refused = set()
    for name, data in files.items():
        for at, changed in variants(data):
            found = outcome(rig, files | {name: changed})
            if isinstance(found, int):
                assert found == rig.acknowledged, f"{name} at {at}"
            else:
                assert (
                    "Restore this node from its peers" in found or "later release of doyen" in found
                )
                assert name in found
                refused.add(name)
    return refused


@pytest.mark.parametrize("story", [appending, snapshotting, installing])
def test_no_flipped_bit_passes_unseen(story: Story) -> None:
    refused = flip_everything(story)
    assert {name.split("-")[0] for name in refused} >= {"log", "identity"}


def truncate_everything(story: Story) -> None:
    """Cut each file at each byte: what is found is a life that was, or the folder is refused."""
    rig, files = files_after(story)
    last = max(name for name in files if name.startswith("log"))
    reached = set()
    for name, data in files.items():
        for size in range(len(data)):
            found = outcome(rig, files | {name: data[:size]}, 0)
            if isinstance(found, str):
                assert name in found
            elif name == last:
                reached.add(found)
            else:
                assert found == rig.acknowledged
    assert rig.acknowledged in reached


@pytest.mark.parametrize("story", STORIES)
def test_no_missing_byte_passes_unseen(story: Story) -> None:
    truncate_everything(story)


@pytest.mark.parametrize("story", [rolling, snapshotting, installing])
def test_no_missing_file_passes_unseen(story: Story) -> None:
    rig, files = files_after(story)
    for name in files:
        if name in ("lock", "reserve"):
            continue
        left = {other: data for other, data in files.items() if other != name}
        with pytest.raises(StoreUnusable, match=name):
            rig.check(FragileDisk(left))


class Step(Struct, frozen=True):
    what: str
    count: int
    place: float


KINDS = ["put", "put", "put", "state", "overwrite", "keep", "take", "install", "squeeze", "wait"]
steps = st.builds(Step, st.sampled_from(KINDS), st.integers(1, 12), st.floats(0, 1))


def random_story(plan: list[Step]) -> Story:
    async def step(rig: Rig, what: str, count: int, place: float) -> None:
        life = rig.lives[-1]
        base = max(rig.covered, life.installed)
        within = base + 1 + int(place * (life.end - base))
        if what == "put":
            rig.put(count)
        elif what == "state":
            rig.put(0, vote=count)
        elif what in ("overwrite", "keep"):
            rig.put(count, at=within, keep=what == "keep")
        elif what == "squeeze":
            rig.disk.squeeze(count * 20)
        elif what == "take" and base < within <= life.end:
            if rig.disk.room is not None:
                # In force only when the log has room to say so.
                asyncio.get_running_loop().call_later(0.01, rig.disk.squeeze, None)
            await rig.take(within)
        elif what == "install":
            await rig.install(base + int(place * 20) + 1)
        else:
            rig.disk.squeeze(None)
            await rig.settled()

    async def story(rig: Rig) -> None:
        for planned in plan:
            with suppress(StoreUnavailable):
                await step(rig, planned.what, planned.count, planned.place)
        rig.disk.squeeze(None)
        await rig.settled()

    return story


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(steps, max_size=15), st.integers(0, 120), st.sampled_from(LUCK))
def test_any_sequence_of_operations_is_recovered(
    plan: list[Step], crash_at: int, luck: str
) -> None:
    disk = FragileDisk()
    disk.crash_at = crash_at
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal, "RETRY_S", 0.001)
        rig = asyncio.run(live(disk, random_story(plan)))
    if rig:
        rig.check(disk.after_crash(luck))


def test_damage_says_where_and_what_to_do() -> None:
    _, files = files_after(appending)
    data = bytearray(files["log-0000000001"])
    data[90] ^= 1
    with pytest.raises(StoreUnusable) as refused:
        opened(FragileDisk(files | {"log-0000000001": bytes(data)}))
    words = str(refused.value)
    assert "data/log-0000000001 is damaged at byte " in words
    assert "remove it from the cluster, delete the data directory and add it again" in words


def test_a_torn_tail_is_cut_and_written_over() -> None:
    rig, files = files_after(appending)
    name = "log-0000000001"
    whole = files[name].rstrip(b"\0")
    disk = FragileDisk(files | {name: whole[:-30] + b"\xff" * 200})
    lost = rig.check(disk, 0)
    assert lost < rig.acknowledged
    assert b"\xff" * 20 not in disk.files()[name]


async def failing(disk: FragileDisk) -> Rig:
    rig = Rig(disk)
    rig.put(3, vote=1)
    await rig.settled()
    disk.sync_errors = 1
    rig.put(3)
    rig.put(3)
    with suppress(SyncFailed):
        await rig.settled()
    rig.put(3)
    await rig.journal.close()
    return rig


def fail_a_sync() -> Rig:
    disk = FragileDisk()
    rig = asyncio.run(failing(disk))
    rig.check(disk.after_crash("none"))
    return rig


def test_a_failed_sync_is_the_end() -> None:
    rig = fail_a_sync()
    assert [type(error).__name__ for error in rig.failures] == ["SyncFailed"]
    assert "log-0000000001" in str(rig.failures[0])
    assert rig.acknowledged == 1


class TestMutants:
    """The trials above can fail: each of these defects is seen by one of them."""

    def test_a_torn_tail_accepted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unchecked(data: memoryview, offset: int, salt: int) -> tuple[int, int, int] | None:
            if offset + frames.FRAME_SIZE > len(data):
                return None
            magic, _, length, flag, number = frames._FRAME.unpack_from(data, offset)
            end = offset + frames.FRAME_SIZE + length
            return (flag, number, end) if magic == frames.MAGIC and end <= len(data) else None

        monkeypatch.setattr(frames, "valid_at", unchecked)
        with pytest.raises((AssertionError, StoreUnusable)):
            crash_everywhere(appending)

    def test_damage_in_the_middle_cut_off_as_if_a_tail(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frames, "valid_after", lambda data, offset, salt: None)
        with pytest.raises(AssertionError):
            flip_everything(appending)

    def test_a_failed_sync_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        sync = FragileDisk.sync

        def again(disk: FragileDisk, fd: int, path: Path) -> None:
            try:
                sync(disk, fd, path)
            except SyncFailed:
                sync(disk, fd, path)

        monkeypatch.setattr(FragileDisk, "sync", again)
        with pytest.raises(AssertionError):
            fail_a_sync()

    def test_a_batch_reported_before_its_sync(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FragileDisk, "sync", lambda disk, fd, path: None)
        with pytest.raises((AssertionError, StoreUnusable)):
            crash_everywhere(appending)

    def test_names_not_synced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FragileDisk, "sync_folder", lambda disk, path: None)
        with pytest.raises((AssertionError, StoreUnusable)):
            crash_everywhere(rolling)

    def test_a_snapshot_in_force_before_it_is_on_disk(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(frames.FrameWriter, "sync", lambda writer: None)
        with pytest.raises((AssertionError, StoreUnusable)):
            crash_everywhere(snapshotting)

    def test_a_batch_found_but_never_synced(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(folder.LogWriter, "_rewrite", lambda log, name, start, end: None)
        with pytest.raises(AssertionError):
            for story in STORIES:
                found_is_kept(story)


def found_is_kept(story: Story) -> None:
    """What a process finds in the system's cache after another was killed is on disk once it has
    opened the journal, even if a sync had failed before."""
    points = 0
    while True:
        disk = FragileDisk()
        disk.crash_at = points
        rig = asyncio.run(live(disk, story))
        if not disk.crashed:
            return
        points += 1
        if rig is None:
            continue
        disk.crash_at, disk.crashed = None, False
        found = rig.check(disk)
        rig.check(disk.after_crash("none"), found)


@pytest.mark.parametrize("story", STORIES)
def test_what_was_found_is_kept(story: Story) -> None:
    found_is_kept(story)
