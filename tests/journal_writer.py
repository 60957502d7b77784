"""A process that writes to a journal until it is killed, or until its disk is full, and says what
was acknowledged.

    journal_writer.py endless FOLDER     one line per token, until killed
    journal_writer.py full FOLDER        on a small disk: fills it, empties it, goes on
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from pathlib import Path

from doyen.quorum.consensus.core import LogEntry, Persist
from doyen.quorum.node import journal
from doyen.quorum.node.data_directory import DirectoryIdentity
from doyen.quorum.node.journal import FileJournal

WHOSE = DirectoryIdentity("c1", "n1", "raft")


class Writer:
    def __init__(self, journal: FileJournal) -> None:
        self.journal = journal
        self.end = len(self.journal.recovered.entries)
        self.token = self.acknowledged = 0
        self._told = asyncio.Event()
        self.journal.start(self._persisted, self._failed)

    def _persisted(self, token: int) -> None:
        self.acknowledged = token
        self._told.set()

    def _failed(self, error: BaseException) -> None:
        print("failed", error, flush=True)
        os._exit(3)

    def put(self, size: int) -> None:
        self.end += 1
        self.token += 1
        data = b"%d " % self.end
        entry = LogEntry(1, 1, data + bytes(max(0, size - len(data))))
        self.journal.persist(Persist(self.token, [self.end], self.end, [entry]))

    async def room_for(self, in_flight: int) -> None:
        while self.token - self.acknowledged > in_flight:
            self._told.clear()
            await self._told.wait()


async def endless(folder: Path) -> None:
    writer = Writer(FileJournal(folder, WHOSE, list, segment_bytes=20_000))
    begun = writer.end
    while True:
        writer.put(writer.end % 200)
        await writer.room_for(8)
        print(begun + writer.acknowledged, flush=True)


async def full(folder: Path) -> None:
    """On a disk of 1 MiB."""
    journal.RETRY_S = 0.01
    writer = Writer(
        FileJournal(
            folder, WHOSE, list, segment_bytes=200_000, ahead_bytes=10_000, reserve_bytes=50_000
        )
    )
    ballast = folder.parent / "ballast"
    ballast.write_bytes(bytes(500_000))
    while not writer.journal.full:
        writer.put(2_000)
        await writer.room_for(0)
    print("full at", writer.end, flush=True)
    for _ in range(15):  # The reserve still takes these.
        writer.put(100)
    await writer.room_for(0)
    for _ in range(100):
        writer.put(2_000)
    with suppress(TimeoutError):
        await asyncio.wait_for(writer.room_for(0), 0.3)
    print("stuck at", writer.acknowledged, flush=True)
    ballast.unlink()
    await writer.room_for(0)
    while writer.journal.full:  # noqa: ASYNC110 - the journal's thread tells nobody
        await asyncio.sleep(0.01)
    await writer.journal.close()
    print("end", writer.end, flush=True)


if __name__ == "__main__":
    asyncio.run({"endless": endless, "full": full}[sys.argv[1]](Path(sys.argv[2])))
