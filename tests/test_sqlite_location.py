"""The location of the local store: URLs, file systems, foreign files."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from doyen.errors import ConfigError, LeaseGone, StoreUnusable
from doyen.lease.clock import SystemClock
from doyen.stores.port import Context, Store, StoreURL, open_store
from doyen.stores.sqlite.connection import LocalConnection
from doyen.stores.sqlite.location import file_system, path_of, refuse_shared
from doyen.stores.sqlite.tables import APPLICATION_ID, SCHEMA_VERSION

TTL_S = 60.0


async def opened(path: Path) -> Store:
    return await open_store(f"sqlite://{path}", Context(SystemClock(), lambda event: None))


@asynccontextmanager
async def stores(path: Path) -> AsyncIterator[list[Store]]:
    store = await opened(path)
    try:
        yield [store]
    finally:
        await store.close()


# Addresses


def test_three_slashes_are_an_absolute_path(tmp_path: Path) -> None:
    assert path_of(StoreURL.parse("sqlite:///var/lib/doyen.db")) == "/var/lib/doyen.db"
    here = os.getcwd()
    try:
        os.chdir(tmp_path)
        inside = os.path.realpath(tmp_path)
        assert path_of(StoreURL.parse("sqlite:rel.db")) == f"{inside}/rel.db"
        assert path_of(StoreURL.parse("sqlite://./a/rel.db")) == f"{inside}/a/rel.db"
        assert path_of(StoreURL.parse("sqlite://../x.db")) == f"{os.path.dirname(inside)}/x.db"
        assert path_of(StoreURL.parse("sqlite:a%20b%3F%23.db")) == f"{inside}/a b?#.db"
    finally:
        os.chdir(here)


def test_symbolic_links_to_one_file_are_one_store(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert path_of(StoreURL.parse(f"sqlite://{tmp_path}/link/x.db")) == path_of(
        StoreURL.parse(f"sqlite://{tmp_path}/real/x.db")
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("sqlite://host/x.db", "names a host, 'host'"),
        ("sqlite:///tmp/x.db#1", "%23"),
        ("sqlite:", "does not name a file"),
        ("sqlite:///tmp/", "does not name a file"),
        ("sqlite::memory:", "memory://"),
        ("sqlite:///tmp/%00", "does not name a file"),
        ("sqlite:///tmp/x.db?ttl=3", "no option 'ttl'"),
        ("sqlite:///tmp/x.db?token_floor=many", "whole number of 0 or more, not 'many'"),
        ("sqlite:///tmp/x.db?token_floor=-1", "whole number"),
        ("sqlite:///tmp/x.db?token_floor=", "whole number"),
        (f"sqlite:///tmp/x.db?token_floor={1 << 62}", "whole number"),
    ],
)
async def test_invalid_urls_are_refused(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await open_store(url, Context(SystemClock(), lambda event: None))


MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
28 27 0:25 / /home rw - nfs4 server:/home rw
29 28 0:26 / /home/with\\040space rw - tmpfs none rw
30 27 0:27 / /mnt rw - ext4 /dev/vdb rw
31 27 0:28 / /mnt rw shared:1 - fuse.sshfs far:/ rw
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/x.db", "ext4"),
        ("/home/me/x.db", "nfs4"),
        ("/homes/x.db", "ext4"),
        ("/home/with space/x.db", "tmpfs"),
        ("/mnt/x.db", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_found_by_the_innermost_mount(path: str, kind: str) -> None:
    assert file_system(path, iter(MOUNTS.splitlines())) == kind


def test_shared_file_systems_are_refused_by_name(tmp_path: Path) -> None:
    table = tmp_path / "mountinfo"
    table.write_text(MOUNTS)
    with pytest.raises(StoreUnusable, match=r"is on nfs4.*local disk.*etcd://"):
        refuse_shared("/home/me/x.db", str(table))
    refuse_shared("/var/x.db", str(table))
    refuse_shared("/home/me/x.db", str(tmp_path / "no such table"))


async def test_missing_directories_are_created_and_permissions_kept(tmp_path: Path) -> None:
    async with stores(tmp_path / "a" / "b" / "x.db"):
        assert (tmp_path / "a" / "b" / "x.db.sessions").is_dir()


# Foreign files


def _foreign(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE theirs (x)")
    connection.close()


def _newer(path: Path) -> None:
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()


@pytest.mark.parametrize("after", range(4))
def test_two_processes_may_create_the_store_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    """The other process creates it while this one is still checking the file."""
    path, other = tmp_path / "new.db", tmp_path / "other.db"
    looked = 0
    patiently = LocalConnection._patiently

    def interrupted(self: LocalConnection, statement: str) -> object:
        nonlocal looked
        value = patiently(self, statement)
        if self.path == str(path):
            looked += 1
            if looked == after:
                with sqlite3.connect(other) as from_there, sqlite3.connect(path) as to_here:
                    from_there.backup(to_here)
                from_there.close()
                to_here.close()
        return value

    async def test() -> None:
        async with stores(other):
            pass
        monkeypatch.setattr(LocalConnection, "_patiently", interrupted)
        async with stores(path) as [store]:
            assert await store.list("elections") == []

    asyncio.run(test())
    assert looked >= after


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda path: path.write_bytes(b"no database, just text\n" * 100),
            "not an SQLite database",
        ),
        (_foreign, "database of another application: choose another path"),
        (_newer, f"newer doyen \\(schema {SCHEMA_VERSION + 1}.*upgrade doyen"),
        (lambda path: path.mkdir(), "is a directory: choose a file"),
        (
            lambda path: path.with_name("x.db.sessions").touch(),
            "x.db.sessions cannot be used .not a directory",
        ),
    ],
)
def test_foreign_files_are_refused_and_not_changed(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / "x.db"
    make(path)
    before = path.read_bytes() if path.is_file() else None

    async def test() -> None:
        with pytest.raises(StoreUnusable, match=message):
            await opened(path)

    asyncio.run(test())
    assert before is None or path.read_bytes() == before
    assert not [thread for thread in threading.enumerate() if thread.name == "doyen-sqlite"]


async def test_a_directory_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreUnusable, match=r"directory .*/file/sub .*cannot be created"):
        await opened(tmp_path / "file" / "sub" / "x.db")


async def test_an_empty_file_is_treated_as_absent(tmp_path: Path) -> None:
    (tmp_path / "x.db").touch()
    async with stores(tmp_path / "x.db") as (store,):
        assert await store.put("k", b"v", if_version=None)


def test_a_damaged_database_is_reported_with_its_remedy(tmp_path: Path) -> None:
    path = tmp_path / "x.db"

    async def fill() -> None:
        async with stores(path) as (store,):
            for number in range(300):
                await store.put(f"k{number}", b"v" * 100, if_version=None)

    async def read() -> None:
        async with stores(path) as (store,):
            reads = [store.get(f"k{number}") for number in range(300)]
            with pytest.raises(StoreUnusable, match=r"damaged .*token_floor above the highest"):
                await asyncio.gather(*reads)

    asyncio.run(fill())
    with open(path, "r+b") as file:
        file.seek(4096 * 6)
        file.write(random.Random(1).randbytes(4096 * 4))
    asyncio.run(read())


async def test_a_replaced_database_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    async with stores(path) as (store,):
        lease = await store.grant(TTL_S)
        path.rename(tmp_path / "away.db")
        for replaced in (False, True):
            if replaced:
                path.touch()
            with pytest.raises(StoreUnusable, match=r"removed or replaced.*token_floor"):
                await store.create("k", b"v", lease)
            with pytest.raises(LeaseGone, match="removed or replaced"):
                await store.renew(lease)
        path.unlink()
        (tmp_path / "away.db").rename(path)
        await store.renew(lease)
        assert (await store.create("k", b"v", lease)).won
