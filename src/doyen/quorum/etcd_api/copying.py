"""Copies a keyspace from one server of etcd's API to another, in either direction.

Both sides are read in the order of their keys and compared, the source at one revision; what
differs is written. So a copy that was interrupted is resumed by copying again, and a second copy
writes only what has changed since.

- Keys without a lease are copied first, then the leases, each with the time that it has left, and
  their keys last, since that time runs on both sides.
- Without `replace` nothing is overwritten: a target that has other keys or values is refused before
  anything is written.
- At the end the target is read again, and both sides must agree on the number and the checksum of
  their keys. Keys of leases that have ended meanwhile do not count.

Revisions and versions of keys are not copied: they are the target's own. Imports grpc.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, Final

from doyen.errors import (
    ConfigError,
    LeaseGone,
    OrderFailed,
    OutcomeUnknown,
    StoreUnavailable,
    StoreUnusable,
)
from doyen.quorum.etcd_api import rpc
from doyen.quorum.keyspace.etcd_requests import FROM_KEY
from doyen.stores.etcd.connection import Denied, EtcdClient, EtcdCluster
from doyen.stores.etcd.rpc import Method
from doyen.stores.kit import url as options
from doyen.stores.port import StoreURL, tls_remedy

PAGE_BYTES: Final = 2 << 20
"""About how much is read at a time."""
PAGE_KEYS: Final = 128
"""The most keys that are read at a time, whatever their size: the next ones may be the largest."""
FIRST_PAGE: Final = 64
BATCH: Final = 100
"""How many keys are written at a time. etcd allows 128."""
BATCH_BYTES: Final = 512 << 10
LEASES_AT_ONCE: Final = 32
"""How many leases are copied at a time, so that those with short ttls do not end meanwhile."""
ANSWER_S: Final = 5.0
PATIENCE_S: Final = 30.0
"""How long a side may be unavailable."""
RETRY_S: Final = 0.2
TRIES: Final = 4
"""How often a copy begins again because the source has compacted the revision that it reads."""
TTL_SLACK: Final = 1
"""By how many seconds what is left of a lease may differ: both sides round it."""
ALL: Final = b"\0"
READING: Final = {rpc.RANGE, rpc.LEASES, rpc.TIME_TO_LIVE}

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how many keys are done, and of how many."""


class _Compacted(Exception):
    """The source does not have the revision any more."""


@dataclass(frozen=True, slots=True)
class Copied:
    """The result of a copy, in which both sides agree."""

    keys: int
    leases: int
    ended: int
    """How many keys were not copied because their leases have ended meanwhile."""
    written: int
    deleted: int
    revision: int
    """The revision of the source."""
    checksum: str
    changed: bool
    """The source has changed since."""


class KeyspaceSide:
    """One of the two keyspaces: an etcd, or a quorum that serves its API."""

    def __init__(self, url: StoreURL, prefix: bytes = b"") -> None:
        """`url` is an `etcd://` URL without a path. With a `prefix`, only keys that begin with it
        are read. Needs a running loop."""
        url.refuse_unknown(*options.TLS_OPTIONS, "connect_timeout_s")
        if url.parts.path.strip("/"):
            raise ConfigError(
                f"{url.parts.path!r} is the prefix of doyen's own keys, and this command copies all"
                " keys: leave the path out, or use --prefix"
            )
        cluster = EtcdCluster(url)
        self.name = f"etcd://{','.join(cluster.members)}"
        self.whole = not prefix
        self._url, self._user, self._prefix = url, cluster.login.user, prefix
        self._reached = False
        """It has answered once. Before that, it is not waited for."""
        self._start = prefix or ALL
        self._end = _end_of(prefix) if prefix else ALL
        self._client = EtcdClient(cluster)

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, method: rpc.EtcdMethod, **fields: Any) -> Any:
        """One request, repeated while the side is unavailable. Every request of a copy may be
        carried out twice."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + PATIENCE_S
        request = method.request(**fields)
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    call = Method(method.path, method.response)
                    answer = await self._client.call(call, request, reads=True)
                    self._reached = True
                    return answer
            except (StoreUnavailable, OutcomeUnknown, TimeoutError) as error:
                reason = str(error) or f"no answer within {ANSWER_S:g} s"
                if not self._reached:
                    remedy = tls_remedy(self._url, reason.lower())
                    text = f"{self.name}: {reason}{'; ' if remedy else ''}{remedy}"
                    raise StoreUnavailable(text) from error
                if "quota is exhausted" in reason or loop.time() > give_up:
                    raise StoreUnavailable(
                        f"{self.name}: {reason}. What was copied stays there: run the same command"
                        " again to go on"
                    ) from error
                await asyncio.sleep(RETRY_S)
            except Denied as error:
                raise StoreUnusable(self._denied(method)) from error
            except StoreUnusable as error:
                if "has been compacted" in str(error):
                    raise _Compacted from error
                raise

    def _denied(self, method: rpc.EtcdMethod) -> str:
        """Why the user may not do this, and what to do."""
        who = f"the user {self._user!r}" if self._user else "the user of this certificate"
        which = f"the keys that begin with {_shown(self._prefix)}" if self._prefix else "all keys"
        right = "read" if method in READING else "write"
        grant = f"etcdctl role grant-permission ROLE readwrite --prefix=true {_shown(self._prefix)}"
        return (
            f"{self.name} does not let {who} {right} {which}: grant a role of it the permission"
            f" ({grant}), or use a user that has it, such as root, or copy with --prefix what it"
            " may use. What was copied stays there: run the same command again to go on"
        )

    async def size(self) -> tuple[int, int, int]:
        """The number of keys, the revision, and the id of the cluster."""
        found = await self.ask(rpc.RANGE, key=self._start, range_end=self._end, count_only=True)
        return found.count, found.header.revision, found.header.cluster_id

    async def scan(self, revision: int = 0) -> AsyncIterator[Any]:
        """All keys, in order: at one revision or, if it is 0, each page at the latest one. That
        serves for the target, whose own history may be compacted because of what is written."""
        key, limit = self._start, FIRST_PAGE
        while True:
            page = await self.ask(
                rpc.RANGE, key=key, range_end=self._end, limit=limit, revision=revision
            )
            for each in page.kvs:
                yield each
            if not page.more:
                return
            key = page.kvs[-1].key + b"\0"
            limit = max(1, min(PAGE_KEYS, limit * PAGE_BYTES // page.ByteSize()))

    async def leases(self) -> set[int]:
        return {each.ID for each in (await self.ask(rpc.LEASES)).leases}

    async def left(self, lease: int) -> int:
        """What is left of a lease, in seconds; negative if it has ended."""
        try:
            return int((await self.ask(rpc.TIME_TO_LIVE, ID=lease)).TTL)
        except LeaseGone:
            return -1

    async def grant(self, lease: int, ttl: int) -> None:
        try:
            await self.ask(rpc.GRANT, ID=lease, TTL=max(1, ttl))
        except StoreUnusable as error:
            if "already exists" not in str(error):
                raise

    async def revoke(self, lease: int) -> None:
        try:
            await self.ask(rpc.REVOKE, ID=lease)
        except LeaseGone:
            pass


class _Sums:
    """For each lease the number of its keys and the sum of their hashes, so that those of leases
    that have ended can be left out. The lease 0 stands for keys without one."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._sums: dict[int, int] = {}

    @property
    def leases(self) -> set[int]:
        return {*self._counts} - {0}

    def add(self, record: Any) -> None:
        text = sha256(b"%d:" % len(record.key) + record.key + record.value)
        lease = record.lease
        self._counts[lease] = self._counts.get(lease, 0) + 1
        self._sums[lease] = self._sums.get(lease, 0) + int.from_bytes(text.digest())

    def total(self, ended: set[int]) -> tuple[int, str]:
        counted = {*self._counts} - ended
        checksum = sum(self._sums[each] for each in counted) % (1 << 256)
        return sum(self._counts[each] for each in counted), f"{checksum:064x}"


class _Writer:
    """Collects changes of the target and makes them in batches."""

    def __init__(self, target: KeyspaceSide) -> None:
        self._target = target
        self._batch: list[dict[str, Any]] = []
        self._bytes = 0
        self.written = self.deleted = 0

    async def put(self, record: Any) -> None:
        put = {"key": record.key, "value": record.value, "lease": record.lease}
        await self._add({"request_put": put}, len(record.key) + len(record.value))
        self.written += 1

    async def delete(self, key: bytes) -> None:
        await self._add({"request_delete_range": {"key": key}}, len(key))
        self.deleted += 1

    async def _add(self, change: dict[str, Any], size: int) -> None:
        if len(self._batch) >= BATCH or (self._batch and self._bytes + size > BATCH_BYTES):
            await self.flush()
        self._batch.append(change)
        self._bytes += size

    async def flush(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0
        try:
            if batch:
                await self._target.ask(rpc.TXN, success=batch)
        except LeaseGone:  # one of them; it is found when both sides are compared
            for each in batch if len(batch) > 1 else ():
                try:
                    await self._target.ask(rpc.TXN, success=[each])
                except LeaseGone:
                    continue
        except StoreUnusable as error:
            if "too large" not in str(error):
                raise
            largest = max(batch, key=lambda each: len(str(each)))
            key = next(iter(largest.values()))["key"]
            raise StoreUnusable(
                f"{self._target.name} does not accept the key {_shown(key)} because it is too"
                " large. Nothing after it was copied: delete it from the source, or leave it out"
                " with --prefix, and run the command again"
            ) from error


async def copy(
    source: KeyspaceSide,
    target: KeyspaceSide,
    *,
    replace: bool = False,
    progress: Progress = lambda *_: None,
) -> Copied:
    """Make the target have what the source has. Raises `OrderFailed` if that was not done."""
    if (await source.size())[2] == (await target.size())[2]:
        raise ConfigError(f"{source.name} and {target.name} are the same cluster")
    may_write = replace
    for _ in range(TRIES):
        try:
            if not may_write:
                await _refuse_conflicts(source, target)
                may_write = True
            return await _copy(source, target, replace, progress)
        except _Compacted:
            # What this attempt has written, if it has, may be older than the source now.
            replace = may_write
    raise OrderFailed(
        f"{source.name} compacts its revisions faster than they can be copied: stop the programs"
        " that write to it, and run the command again"
    )


async def _copy(
    source: KeyspaceSide, target: KeyspaceSide, replace: bool, progress: Progress
) -> Copied:
    total, revision, _ = await source.size()
    sums, writer, done = _Sums(), _Writer(target), 0
    async for here, there in _paired(source.scan(revision), target.scan()):
        if here is None:
            if replace:
                await writer.delete(there.key)
            continue
        sums.add(here)
        if not here.lease and (there is None or there.value != here.value or there.lease):
            await writer.put(here)
        done += 1
        progress("copying keys", done, total)
    await writer.flush()
    leases = sums.leases | (await source.leases() if source.whole else set())
    ended = await _copy_leases(source, target, leases, progress)
    if sums.leases:
        done = 0
        async for here, there in _paired(source.scan(revision), target.scan()):
            if here is not None and here.lease and here.lease not in ended:
                same = there is not None and (there.value, there.lease) == (here.value, here.lease)
                if not same:
                    await writer.put(here)
            done += here is not None
            progress("copying keys of leases", done, total)
        await writer.flush()
    keys, checksum, ended = await _check(target, sums, ended, progress)
    _, latest, _ = await source.size()
    return Copied(
        keys,
        len(leases - ended),
        sums.total(set())[0] - keys,
        writer.written,
        writer.deleted,
        revision,
        checksum,
        latest != revision,
    )


async def _refuse_conflicts(source: KeyspaceSide, target: KeyspaceSide) -> None:
    """Raise `OrderFailed` if the target has anything that the source does not have."""
    if not (await target.size())[0]:
        return
    _, revision, _ = await source.size()
    count, first = 0, b""
    async for here, there in _paired(source.scan(revision), target.scan()):
        if there is not None and (here is None or here.value != there.value):
            count += 1
            first = first or there.key
    if count:
        keys = "key" if count == 1 else "keys"
        raise OrderFailed(
            f"{target.name} has {count:,} {keys} that the source does not have, or"
            f" has with other values, such as {_shown(first)}. Nothing was changed. To"
            " make it equal to the source, add --replace"
        )


async def _copy_leases(
    source: KeyspaceSide, target: KeyspaceSide, leases: set[int], progress: Progress
) -> set[int]:
    """Grant leases with the time that they have left. Returns those that have ended."""
    ended: set[int] = set()
    remaining = iter(sorted(leases))
    done = 0

    async def work() -> None:
        nonlocal done
        for lease in remaining:
            if not await _copy_lease(source, target, lease):
                ended.add(lease)
            done += 1
            progress("copying leases", done, len(leases))

    tasks = [asyncio.create_task(work()) for _ in range(min(LEASES_AT_ONCE, len(leases)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return ended


async def _copy_lease(source: KeyspaceSide, target: KeyspaceSide, lease: int) -> bool:
    """Grant a lease with the time that it has left. False if it has ended."""
    left = await source.left(lease)
    if left < 0:
        return False
    there = await target.left(lease)
    if there >= 0 and abs(there - left) > TTL_SLACK:
        # It was copied before, and has been renewed since. Its ttl cannot be changed.
        await target.revoke(lease)
        there = -1
    if there < 0:
        await target.grant(lease, left)
    return True


async def _check(
    target: KeyspaceSide, expected: _Sums, ended: set[int], progress: Progress
) -> tuple[int, str, set[int]]:
    """Compare the target with the source. Returns the number of keys, their checksum, and the
    leases that have ended."""
    total, revision, _ = await target.size()
    found, done = _Sums(), 0
    async for record in target.scan(revision):
        found.add(record)
        done += 1
        progress("checking", done, total)
    # A lease that exists now existed when the target was read.
    ended = ended | (expected.leases - await target.leases())
    (keys, checksum), (there, same) = expected.total(ended), found.total(ended)
    if (keys, checksum) != (there, same):
        raise OrderFailed(
            f"the copy differs from the source: {there:,} keys with the checksum {same[:16]}…"
            f" instead of {keys:,} with {checksum[:16]}…. Another program writes to"
            f" {target.name}: stop it, and run the command again with --replace"
        )
    return keys, checksum, ended


async def _paired(
    some: AsyncIterator[Any], others: AsyncIterator[Any]
) -> AsyncIterator[tuple[Any, Any]]:
    """Two sequences in the order of their keys, side by side; None where one has no such key."""
    here, there = await anext(some, None), await anext(others, None)
    while here is not None or there is not None:
        if there is None or (here is not None and here.key < there.key):
            yield here, None
            here = await anext(some, None)
        elif here is None or there.key < here.key:
            yield None, there
            there = await anext(others, None)
        else:
            yield here, there
            here, there = await anext(some, None), await anext(others, None)


def _end_of(prefix: bytes) -> bytes:
    """The end of the range of keys that begin with a prefix."""
    short = prefix.rstrip(b"\xff")
    return short[:-1] + bytes([short[-1] + 1]) if short else FROM_KEY


def _shown(key: bytes) -> str:
    return repr(key[:60].decode(errors="backslashreplace"))
