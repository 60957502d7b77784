"""The journal on real files: who may open it, a full disk, a killed process, snapshots, backups."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from random import Random

import pytest
from msgspec import Struct

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.lab.files import Files
from doyen.quorum.consensus.core import (
    EntryKind,
    Install,
    LogEntry,
    Membership,
    Persist,
    Recovered,
    Snapshot,
)
from doyen.quorum.node import journal as module
from doyen.quorum.node.backup import backup, inspect, restore
from doyen.quorum.node.data_directory import DirectoryIdentity
from doyen.quorum.node.journal import FileJournal
from fragile import FragileDisk

WHOSE = DirectoryIdentity("c1", "n1", "raft")
MEMBERS = Membership(("n1", "n2", "n3"))
WRITER = [sys.executable, str(Path(__file__).with_name("journal_writer.py"))]


class Voted(Struct, frozen=True, array_like=True):
    generation: int
    vote: str | None


class Acks:
    def __init__(self, journal: FileJournal) -> None:
        self.tokens: list[int] = []
        self.failures: list[BaseException] = []
        self._told = asyncio.Event()
        journal.start(self._persisted, self.failures.append)

    def _persisted(self, token: int) -> None:
        self.tokens.append(token)
        self._told.set()

    async def upto(self, token: int) -> None:
        async with asyncio.timeout(20):
            while not self.tokens or self.tokens[-1] < token:
                self._told.clear()
                await self._told.wait()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - the journal's thread tells nobody
            await asyncio.sleep(0.001)


def entries(count: int, size: int = 10) -> list[LogEntry]:
    return [LogEntry(1, 1, bytes(size))] * count


async def each(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def collected(journal: FileJournal) -> tuple[Snapshot, list[bytes]]:
    snapshot, pieces = await journal.read_snapshot()
    return snapshot, [piece async for piece in pieces]


def found(folder: Path) -> Recovered:
    async def look() -> Recovered:
        journal = FileJournal(folder, WHOSE, Voted)
        await journal.close()
        return journal.recovered

    return asyncio.run(look())


def refusal(folder: Path, identity: DirectoryIdentity = WHOSE) -> str:
    with pytest.raises(StoreUnusable) as refused:
        FileJournal(folder, identity)
    return str(refused.value)


def test_what_was_written_is_found_again(tmp_path: Path) -> None:
    async def write() -> None:
        journal = FileJournal(tmp_path / "a" / "b", WHOSE, Voted)
        assert journal.recovered == Recovered(entries=[])
        acks = Acks(journal)
        journal.persist(Persist(1, Voted(3, "n2"), 1, entries(5)))
        journal.persist(Persist(2, None, 3, [LogEntry(3, 1, b"x")]))
        journal.persist(Persist(3))
        await acks.upto(3)
        assert not journal.full
        await journal.close()
        assert not acks.failures

    asyncio.run(write())
    assert found(tmp_path / "a" / "b") == Recovered(
        Voted(3, "n2"), None, [*entries(2), LogEntry(3, 1, b"x")]
    )


async def test_what_is_queued_during_a_sync_goes_down_in_one_batch() -> None:
    disk = FragileDisk()
    journal = FileJournal(Path("data"), WHOSE, disk=disk)
    for token in range(1, 101):
        journal.persist(Persist(token, None, token, entries(1)))
    before = disk.operations
    acks = Acks(journal)
    await acks.upto(100)
    assert acks.tokens == [100]
    await journal.close()
    # Batch, zeros ahead of it, sync, seal.
    assert disk.operations - before <= 6


def test_long_writes_go_down_in_several_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BATCH_BYTES", 1000)

    async def write() -> None:
        journal = FileJournal(tmp_path, WHOSE, Voted)
        acks = Acks(journal)
        journal.persist(Persist(1, Voted(1, None), 1, entries(100, 90)))
        await acks.upto(1)
        journal.persist(Persist(2, None, 50, entries(100, 90), keep=True))
        await acks.upto(2)
        await journal.close()

    asyncio.run(write())
    assert len(found(tmp_path).entries) == 149
    [segment] = inspect(tmp_path).segments
    assert segment.batches > 10


def test_a_log_with_a_gap_is_a_defect_of_the_core(tmp_path: Path) -> None:
    async def write() -> None:
        journal = FileJournal(tmp_path, WHOSE)
        acks = Acks(journal)
        journal.persist(Persist(1, None, 1, entries(2)))
        journal.persist(Persist(2, None, 4, entries(1), keep=True))
        await acks.upto(2)
        journal.persist(Persist(3, None, 6, entries(1)))
        await until(lambda: bool(acks.failures))
        await journal.close()
        assert acks.tokens[-1] == 2
        assert "entries at 6 after a log that ends at 4" in str(acks.failures[0])

    asyncio.run(write())
    assert [entry.generation for entry in found(tmp_path).entries] == [1, 1, 0, 1]


class TestWhose:
    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        journal = FileJournal(tmp_path, WHOSE)
        words = refusal(tmp_path)
        assert str(tmp_path) in words
        assert f"process {os.getpid()}" in words
        asyncio.run(journal.close())
        found(tmp_path)

    def test_a_child_does_not_hold_what_its_parent_held(self, tmp_path: Path) -> None:
        script = f"""
import os, pathlib, sys
from doyen.quorum.node.data_directory import DirectoryIdentity
from doyen.quorum.node.journal import FileJournal
journal = FileJournal(pathlib.Path({str(tmp_path)!r}), DirectoryIdentity("c1", "n1", "raft"))
if os.fork():
    os._exit(0)
print("child", flush=True)
sys.stdin.read()
"""
        with subprocess.Popen(
            [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as parent:
            assert parent.stdout
            assert parent.stdout.readline() == b"child\n"
            parent.wait()
            found(tmp_path)

    @pytest.mark.parametrize(
        ("identity", "words"),
        [
            (
                DirectoryIdentity("c2", "n1", "raft"),
                "belongs to cluster 'c1', and this is cluster 'c2'",
            ),
            (DirectoryIdentity("c1", "n2", "raft"), "belongs to node 'n1', and this is node 'n2'"),
            (
                DirectoryIdentity("c1", "n1", "zab"),
                "belongs to protocol 'raft', and this is protocol 'zab'",
            ),
        ],
    )
    def test_another_s_folder_is_refused(
        self, tmp_path: Path, identity: DirectoryIdentity, words: str
    ) -> None:
        found(tmp_path)
        refused = refusal(tmp_path, identity)
        assert words in refused
        assert "the data directory it had before, or an empty one" in refused

    def test_a_later_format_is_refused(self, tmp_path: Path) -> None:
        asyncio.run(FileJournal(tmp_path, DirectoryIdentity("c1", "n1", "raft", format=2)).close())
        assert "later release of doyen (format 2" in refusal(tmp_path)

    def test_a_lost_log_is_not_begun_anew(self, tmp_path: Path) -> None:
        found(tmp_path)
        (tmp_path / "log-0000000001").unlink()
        assert "could vote twice" in refusal(tmp_path)

    def test_what_is_not_ours_is_left_alone(self, tmp_path: Path) -> None:
        found(tmp_path)
        (tmp_path / "notes.txt").write_text("mine")
        (tmp_path / "snapshot-5-0badcafe.new").write_text("left by a crash")
        found(tmp_path)
        assert sorted(os.listdir(tmp_path)) == [
            "identity", "lock", "log-0000000001", "notes.txt", "reserve",
        ]  # fmt: skip


class TestSnapshots:
    def test_taken_read_and_compacted(self, tmp_path: Path) -> None:
        async def write() -> None:
            journal = FileJournal(tmp_path, WHOSE, segment_bytes=2000)
            acks = Acks(journal)
            with pytest.raises(LookupError):
                await journal.read_snapshot()
            for token in range(1, 21):
                journal.persist(Persist(token, None, token * 10 - 9, entries(10)))
                await acks.upto(token)
            assert len(inspect(tmp_path).segments) > 1
            pieces = [bytes([n]) * 100_000 for n in range(20)]
            await journal.take_snapshot(Snapshot(195, 1, MEMBERS), iter(pieces))
            assert await collected(journal) == (Snapshot(195, 1, MEMBERS), pieces)
            _, reading = await journal.read_snapshot()
            async with aclosing(reading):  # type: ignore[type-var]
                assert await anext(reading) == pieces[0]
                await journal.take_snapshot(Snapshot(199, 1, MEMBERS), iter([b"later"]))
                assert [piece async for piece in reading] == pieces[1:]
            await journal.take_snapshot(Snapshot(150, 1, MEMBERS), iter([b"too late"]))
            assert await collected(journal) == (Snapshot(199, 1, MEMBERS), [b"later"])
            await journal.close()

        asyncio.run(write())
        assert len(list(tmp_path.glob("log-*"))) == 1
        assert len(list(tmp_path.glob("snapshot-*"))) == 1
        assert found(tmp_path) == Recovered(None, Snapshot(199, 1, MEMBERS), entries(1))

    def test_a_received_snapshot_is_kept_apart_until_it_is_installed(self, tmp_path: Path) -> None:
        async def write() -> None:
            journal = FileJournal(tmp_path, WHOSE)
            acks = Acks(journal)
            journal.persist(Persist(1, None, 1, entries(5)))
            theirs = Snapshot(50, 2, MEMBERS)
            with pytest.raises(ValueError, match="no snapshot of index 50"):
                journal.install(Install(theirs, 2))
            await journal.receive_snapshot(Snapshot(40, 2, MEMBERS), each([b"older"]))
            await journal.receive_snapshot(theirs, each([b"a", b"b"]))
            with pytest.raises(LookupError):
                await journal.read_snapshot()
            journal.install(Install(theirs, 2))
            assert await collected(journal) == (theirs, [b"a", b"b"])
            journal.persist(Persist(3, None, 51, entries(2)))
            await acks.upto(3)
            await journal.receive_snapshot(Snapshot(90, 2, MEMBERS), each([b"never installed"]))
            await journal.close()

        asyncio.run(write())
        assert found(tmp_path) == Recovered(None, Snapshot(50, 2, MEMBERS), entries(2))
        assert len(list(tmp_path.glob("snapshot-*"))) == 1

    async def test_the_loop_is_not_held_up(self, tmp_path: Path) -> None:
        """Pieces are taken off the loop and a few at a time."""
        turns = 0

        async def turn() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        journal = FileJournal(tmp_path, WHOSE)
        Acks(journal)
        seen = []

        def pieces() -> Iterator[bytes]:
            for _ in range(40):
                seen.append(turns)
                yield bytes(100_000)

        turning = asyncio.ensure_future(turn())
        await journal.take_snapshot(Snapshot(1, 1, MEMBERS), pieces())
        turning.cancel()
        assert len(set(seen)) > 5
        await journal.close()

    def test_an_abandoned_snapshot_leaves_nothing(self, tmp_path: Path) -> None:
        async def write() -> None:
            journal = FileJournal(tmp_path, WHOSE)
            Acks(journal)

            async def breaking() -> AsyncIterator[bytes]:
                yield b"a"
                raise ConnectionError("the leader has gone")

            with pytest.raises(ConnectionError):
                await journal.receive_snapshot(Snapshot(9, 1, MEMBERS), breaking())
            await journal.close()

        asyncio.run(write())
        assert not list(tmp_path.glob("snapshot-*"))

    def test_a_damaged_piece_is_refused(self, tmp_path: Path) -> None:
        async def write() -> None:
            journal = FileJournal(tmp_path, WHOSE)
            Acks(journal)
            await journal.take_snapshot(Snapshot(1, 1, MEMBERS), iter([b"abc", b"def"]))
            await journal.close()

        asyncio.run(write())
        [path] = tmp_path.glob("snapshot-*")
        path.write_bytes(path.read_bytes().replace(b"def", b"dfe"))

        async def read() -> None:
            journal = FileJournal(tmp_path, WHOSE)
            with pytest.raises(StoreUnusable, match=rf"{path.name} is damaged at byte \d+"):
                await collected(journal)
            await journal.close()

        asyncio.run(read())


class TestFull:
    @pytest.fixture(autouse=True)
    def _impatient(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "RETRY_S", 0.005)

    async def test_stops_and_goes_on(self) -> None:
        disk = FragileDisk()
        sizes = {"segment_bytes": 3000, "ahead_bytes": 100, "reserve_bytes": 1000}
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk, **sizes)
        acks = Acks(journal)
        disk.room = 9000
        token = 0
        while not journal.full:
            token += 1
            journal.persist(Persist(token, None, token, entries(1, 300)))
            await acks.upto(token)
        assert "reserve" not in disk.files()
        journal.persist(Persist(token + 1, Voted(9, "n3")))
        await acks.upto(token + 1)
        journal.persist(Persist(token + 2, None, token + 1, entries(50, 300)))
        journal.persist(Persist(token + 3, Voted(10, "n3")))
        with pytest.raises(StoreUnavailable, match="no room for a snapshot"):
            await journal.take_snapshot(Snapshot(1, 1, MEMBERS), iter([bytes(5000)]))
        assert acks.tokens[-1] == token + 1
        disk.room = 40_000
        await acks.upto(token + 3)
        await until(lambda: not journal.full)
        await journal.close()
        again = FileJournal(Path("data"), WHOSE, Voted, disk=disk.after_crash("none"))
        assert len(again.recovered.entries) == token + 50
        assert again.recovered.state == Voted(10, "n3")
        assert not acks.failures

    async def test_space_is_noticed_while_writes_go_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also if the disk is never idle: a node with room must not go on refusing writes."""
        monkeypatch.setattr(module, "RETRY_S", 0.1)
        disk = FragileDisk()
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk, reserve_bytes=100)
        acks = Acks(journal)
        disk.room, token = 0, 1
        journal.persist(Persist(token, None, 1, entries(50, 300)))
        await until(lambda: journal.full)
        disk.room = 1 << 22
        async with asyncio.timeout(20):
            while journal.full:
                await acks.upto(token)
                token += 1
                journal.persist(Persist(token, Voted(token, "n1")))
        await journal.close()

    async def test_it_is_noticed_while_nothing_is_written(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """As on a follower while the leader refuses writes. The reserve stays for what is written
        then."""
        monkeypatch.setattr(module, "LOOK_S", 0.01)
        disk = Files()
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk, ahead_bytes=100)
        acks = Acks(journal)
        journal.persist(Persist(1, Voted(1, "n1")))
        await acks.upto(1)
        assert not journal.full
        disk.fill(True)
        await until(lambda: journal.full)
        assert "reserve" in disk.names(Path("data"))
        disk.fill(False)
        await until(lambda: not journal.full)
        await journal.close()

    async def test_it_is_noticed_before_the_log_needs_more_space(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Small writes fit into what the log has written ahead, for hours if there are few."""
        monkeypatch.setattr(module, "LOOK_S", 0.01)
        disk = Files()
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk)
        acks = Acks(journal)
        for token in range(1, 1000):
            journal.persist(Persist(token, Voted(token, "n1")))
            await acks.upto(token)
            disk.fill(True)
            if journal.full:
                break
        assert journal.full
        assert "reserve" in disk.names(Path("data"))
        await journal.close()

    async def test_a_disk_that_was_found_full_takes_writes_from_the_reserve(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "LOOK_S", 0.01)
        disk = FragileDisk()
        sizes = {"ahead_bytes": 100, "reserve_bytes": 5000}
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk, **sizes)
        acks = Acks(journal)
        disk.squeeze(0)
        await until(lambda: journal.full)
        journal.persist(Persist(1, None, 1, entries(5, 300)))
        await acks.upto(1)
        assert journal.full
        assert "reserve" not in disk.files()
        await journal.close()

    async def test_can_be_closed_and_opened(self) -> None:
        disk = FragileDisk()
        journal = FileJournal(Path("data"), WHOSE, Voted, disk=disk, reserve_bytes=100)
        acks = Acks(journal)
        disk.room = 0
        journal.persist(Persist(1, None, 1, entries(50, 300)))
        journal.persist(Persist(2, Voted(1, "n1")))
        await until(lambda: journal.full)
        await journal.close()
        assert acks.tokens == []
        again = FileJournal(Path("data"), WHOSE, Voted, disk=disk, reserve_bytes=100)
        assert again.full
        assert again.recovered == Recovered(entries=[])
        await again.close()

    def test_a_real_full_disk(self, tmp_path: Path) -> None:
        mount = f"mount -t tmpfs -o size=1m none {tmp_path}"
        alone = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-ec"]
        if not shutil.which("unshare") or subprocess.run([*alone, mount]).returncode:
            pytest.skip("this machine does not let us mount a small disk")
        folder = tmp_path / "data"
        script = f"{mount}; exec {' '.join(WRITER)} full {folder}"
        done = subprocess.run([*alone, script], capture_output=True, text=True, timeout=60)
        words = done.stdout.split()
        assert done.returncode == 0, done.stderr
        full_at, stuck_at, end = int(words[2]), int(words[5]), int(words[7])
        assert full_at + 15 <= stuck_at < end == full_at + 115


def test_a_killed_process_loses_nothing_acknowledged(tmp_path: Path) -> None:
    random = Random(5)
    least = 0
    for _ in range(8):
        with subprocess.Popen(
            [*WRITER, "endless", str(tmp_path)], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout
            lines = [writer.stdout.readline() for _ in range(random.randrange(1, 120))]
            writer.send_signal(signal.SIGKILL)
            lines += writer.stdout.readlines()
        acknowledged = max(int(line) for line in lines if line.endswith("\n"))
        assert acknowledged >= least
        recovered = FileJournal(tmp_path, WHOSE, list)
        count = len(recovered.recovered.entries)
        assert count >= acknowledged
        assert recovered.recovered.state == [count]
        for index, entry in enumerate(recovered.recovered.entries, 1):
            assert entry.data.startswith(b"%d " % index)
        asyncio.run(recovered.close())
        least = count
    assert len(inspect(tmp_path).segments) > 1


class TestBackups:
    def _filled(self, folder: Path, *, snapshot: bool) -> None:
        async def write() -> None:
            journal = FileJournal(folder, WHOSE, Voted)
            acks = Acks(journal)
            journal.persist(Persist(1, Voted(4, "n2"), 1, entries(8)))
            if snapshot:
                await journal.take_snapshot(Snapshot(6, 1, MEMBERS), iter([b"a", b"b"]))
            joined = LogEntry(3, EntryKind.MEMBERSHIP, b"whoever")
            journal.persist(Persist(2, None, 9, [joined, LogEntry(4, 1, b"last")]))
            await acks.upto(2)
            await journal.close()

        asyncio.run(write())

    @pytest.mark.parametrize("snapshot", [True, False])
    def test_restored_as_another_cluster(self, tmp_path: Path, snapshot: bool) -> None:
        old, file, new = tmp_path / "old", tmp_path / "backup", tmp_path / "new"
        self._filled(old, snapshot=snapshot)
        saved = backup(old, file)
        assert (saved.identity, saved.state) == (WHOSE, [4, "n2"])
        assert (saved.last, saved.generation) == (10, 4)
        alone = Membership(("m1",))
        contents = restore(file, new, DirectoryIdentity("c2", "m1", "raft"), alone, [b"lift"])
        assert (contents.first, contents.last) == (7 if snapshot else 1, 12)

        async def read() -> None:
            journal = FileJournal(new, DirectoryIdentity("c2", "m1", "raft"), Voted)
            recovered = journal.recovered
            assert recovered.state == Voted(4, "n2")
            if snapshot:
                assert await collected(journal) == (Snapshot(6, 1, alone), [b"a", b"b"])
            *before, gone, last, members, lifted = recovered.entries
            assert before == entries(2 if snapshot else 8)
            assert (gone, last) == (LogEntry(3, 0, b""), LogEntry(4, 1, b"last"))
            assert (members.generation, members.kind) == (4, EntryKind.MEMBERSHIP)
            assert lifted == LogEntry(4, 1, b"lift")
            await journal.close()

        asyncio.run(read())

    def test_any_damage_is_seen_before_anything_is_done(self, tmp_path: Path) -> None:
        old, file, new = tmp_path / "old", tmp_path / "backup", tmp_path / "new"
        self._filled(old, snapshot=True)
        backup(old, file)
        whole = file.read_bytes()
        for at in range(len(whole)):
            for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :]):
                file.write_bytes(damaged)
                with pytest.raises(StoreUnusable, match=r"another backup|later release of doyen"):
                    restore(file, new, DirectoryIdentity("c2", "m1", "raft"), MEMBERS)
        assert not new.exists()

    def test_refusals(self, tmp_path: Path) -> None:
        old, file = tmp_path / "old", tmp_path / "backup"
        self._filled(old, snapshot=False)
        journal = FileJournal(old, WHOSE, Voted)
        with pytest.raises(StoreUnusable, match="in use by process"):
            backup(old, file)
        assert (inspect(old).last, inspect(old).generation) == (10, 4)
        asyncio.run(journal.close())
        backup(old, file)
        for identity, folder, words in (
            (DirectoryIdentity("c1", "m1", "raft"), tmp_path / "new", "another name"),
            (DirectoryIdentity("c2", "m1", "zab"), tmp_path / "new", "runs raft, not zab"),
            (DirectoryIdentity("c2", "m1", "raft"), old, "is not empty"),
        ):
            with pytest.raises(StoreUnusable, match=words):
                restore(file, folder, identity, MEMBERS)
        with pytest.raises(StoreUnusable, match="has no journal"):
            inspect(tmp_path)
        with pytest.raises(StoreUnusable, match="does not exist"):
            backup(tmp_path / "nowhere", file)
