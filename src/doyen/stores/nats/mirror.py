"""The copy of the bucket that each client keeps: what stands there, and whom a change concerns.

    $KV.<bucket>.leases.<id>      a lease; its ttl. Written once, deleted when the lease has ended
    $KV.<bucket>.entries.<key>    an entry; headers tell its lease and its creation

- One consumer feeds it, in the order of the stream. A gap, silence or another connection begins it
  anew from the last message of each subject, and then everybody is told.
- An entry stands as long as its lease is there. A lease is written before anything is bound to it,
  and its id is never used again; so whatever the order of arrival, what has lost its lease is void.
- `catch_up` makes the copy as new as the stream was when it was called.
- The server may place the consumer on a replica that lacks the latest messages. A copy is therefore
  used once it has the message that is the last one according to the leader of the stream.
- Anybody may write to a bucket. A message that doyen cannot have written is logged once and does
  not end the copy. A lease whose value is damaged still stands: were it taken for absent, a client
  that has just come would think a live leader's record void.

Imports the link and the model.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import nats.errors
from nats.aio.msg import Msg

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.model import Entry
from doyen.stores.nats.connection import (
    ANSWER_S,
    CLOSE_S,
    NatsConnection,
    StoredMessage,
    StreamMissing,
    apart,
)

__all__ = ["CREATED", "LEASE", "Mirror", "subject_of"]

log = logging.getLogger("doyen.nats")

LEASE = "Doyen-Lease"
CREATED = "Doyen-Created"
PULSE_S = 1.0
SILENCE_S = 3.0
PAUSE_S = 0.2
_GRAVES = 10_000
_COMPLAINTS = 1_000
_AT_A_TIME = 200
_NANO = 1_000_000_000


def subject_of(bucket: str, kind: str, key: str) -> str:
    """
    >>> subject_of("doyen", "entries", "elections/a.b/leader")
    '$KV.doyen.entries.elections.a%2Eb.leader'
    """
    segments = (quote(segment, safe="").replace(".", "%2E") for segment in key.split("/"))
    return f"$KV.{bucket}.{kind}.{'.'.join(segments)}"


@dataclass(slots=True)
class _View:
    """What the bucket holds."""

    entries: dict[str, Entry] = field(default_factory=dict)
    leases: dict[str, float | None] = field(default_factory=dict)
    """The ttl of each lease; None if the value of the lease is damaged."""
    bound: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The keys of what is bound to each lease."""
    graves: dict[str, int] = field(default_factory=dict)
    """The last sequence of keys at which nothing stands."""


class _Damaged(ValueError):
    """A message that doyen did not write, or not so."""


class Mirror:
    """A copy of one bucket."""

    def __init__(self, link: NatsConnection, bucket: str, changed: Callable[[str], None]) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._changed = changed
        self._all_changed: Callable[[], None] = lambda: None
        self.view = _View()
        self._position = 0
        self.highest = 0
        """The highest sequence that was ever seen."""
        self._moved = asyncio.Event()
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._complaints: dict[str, int] = {}
        """The sequence of the damaged message that was last logged, by subject."""

    def start(self, all_changed: Callable[[], None]) -> None:
        self._all_changed = all_changed
        self._task = asyncio.get_running_loop().create_task(self._run())

    def restart(self) -> None:
        """The connection is another: what was sent meanwhile is lost."""
        self._restart.set()

    async def catch_up(self) -> None:
        """Have everything in the copy that was written before this call."""
        known, last = self._position, int((await self.state())["last_seq"])
        if last < known:
            self._restart.set()
            raise OutcomeUnknown(
                f"the bucket {self._bucket} has gone back from sequence {known} to {last}"
            )
        await self.reach(last)

    async def reach(self, sequence: int) -> None:
        """Have everything in the copy up to this sequence."""
        try:
            async with asyncio.timeout(ANSWER_S):
                while self._position < sequence:
                    await self._moved.wait()
        except TimeoutError:
            raise OutcomeUnknown(
                f"the changes of the bucket {self._bucket} up to {sequence} did not arrive within"
                f" {ANSWER_S:g} s; the last that did is {self._position}"
            ) from None

    async def state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = (await self._link.ask(f"STREAM.INFO.{self._stream}"))["state"]
        except StreamMissing as error:
            raise StoreUnavailable(f"the bucket {self._bucket} is gone") from error
        return state

    def learn(self, key: str, tried: int, found: StoredMessage | None) -> None:
        """Note the last message of a key's subject, after a write that expected `tried` there was
        refused. The copy is at least as new as that message.

        The server forgets delete markers after a while, and this copy keeps a limited number.
        Anything but a delete marker, or the record of a lease that has ended, is left alone: a
        live record is in the copy by now.
        """
        view = self.view
        if key in view.entries:
            return
        if found is None:
            if view.graves.get(key) == tried:
                del view.graves[key]
        elif found.deleted or (LEASE in found.headers and found.headers[LEASE] not in view.leases):
            _bury(view, key, found.sequence)

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            self._restart.clear()
            try:
                await self._follow()
            except (StoreError, OSError, nats.errors.Error) as error:
                log.debug("the copy of the bucket %s begins anew: %s", self._bucket, error)
            except Exception:
                log.exception("the copy of the bucket %s begins anew", self._bucket)
            await asyncio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        """Copy the bucket, then follow its changes until something is missed."""
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        client = self._link.connected()
        inbox = client.new_inbox()

        async def take(message: Msg) -> None:
            arrived.put_nowait(message)

        base = int((await self.state())["last_seq"])
        last = await self._link.last(self._stream, f"$KV.{self._bucket}.>")
        subscription = await apart(client.subscribe(inbox, cb=take), CLOSE_S)
        name = ""
        try:
            made = await self._link.ask(
                f"CONSUMER.CREATE.{self._stream}",
                stream_name=self._stream,
                config={
                    "deliver_subject": inbox,
                    "deliver_policy": "last_per_subject",
                    "filter_subject": f"$KV.{self._bucket}.>",
                    "ack_policy": "none",
                    "max_deliver": 1,
                    "idle_heartbeat": int(PULSE_S * _NANO),
                    "inactive_threshold": int(10 * SILENCE_S * _NANO),
                    "mem_storage": True,
                    "num_replicas": 1,
                },
            )
            name = made["name"]
            await self._copy(arrived, int(made["num_pending"]), base, last.sequence if last else 0)
        finally:
            if client.is_connected:
                await apart(subscription.unsubscribe(), CLOSE_S)
                if name:
                    subject = f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}"
                    await apart(client.publish(subject, b""), CLOSE_S)

    async def _copy(self, arrived: asyncio.Queue[Msg], pending: int, base: int, last: int) -> None:
        """`base` is where the stream was before, `last` the sequence of its last message."""
        position, delivered = 0, 0
        first: list[tuple[str, StoredMessage]] = []
        async with asyncio.timeout(None) as limit:
            while pending > 0 or position < last:
                if pending == 0 and limit.when() is None:
                    # The replica is behind, or the last message has expired in the meantime.
                    limit.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                subject, message, delivered, pending = await self._next(arrived, delivered)
                position = message.sequence
                first.append((subject, message))
        view = _View()
        leases = f"$KV.{self._bucket}.leases."
        first.sort(key=lambda each: not each[0].startswith(leases))
        for number, (subject, message) in enumerate(first):
            self._take(view, subject, message)
            if number % _AT_A_TIME == 0:
                await asyncio.sleep(0)  # others of this loop, renewals among them, have their turn
        del first
        self.view = view
        self._advance(max(position, base))
        self._all_changed()
        while True:
            subject, message, delivered, _ = await self._next(arrived, delivered)
            touched = self._take(view, subject, message)
            self._advance(message.sequence)
            for key in touched:
                self._changed(key)

    async def _next(
        self, arrived: asyncio.Queue[Msg], delivered: int
    ) -> tuple[str, StoredMessage, int, int]:
        """The next message of the stream: subject, message, its number, how many are to come."""
        while True:
            message = await self._arrival(arrived)
            headers = message.headers or {}
            if message.reply.startswith("$JS.ACK."):
                sequence, number, pending = _numbers(message.reply)
                if number != delivered + 1:
                    raise StoreUnavailable("messages were missed")
                return (
                    message.subject,
                    StoredMessage(sequence, headers, message.data),
                    number,
                    pending,
                )
            if headers.get("Status") == "100":
                if int(headers.get("Nats-Last-Consumer", delivered)) != delivered:
                    raise StoreUnavailable("messages were missed")
            elif "Status" in headers:
                raise StoreUnavailable(f"the consumer has ended: {headers.get('Description')}")

    async def _arrival(self, arrived: asyncio.Queue[Msg]) -> Msg:
        if not arrived.empty():
            return arrived.get_nowait()
        getting = asyncio.ensure_future(arrived.get())
        ending = asyncio.ensure_future(self._restart.wait())
        try:
            done, _ = await asyncio.wait(
                {getting, ending}, timeout=SILENCE_S, return_when=asyncio.FIRST_COMPLETED
            )
            if getting not in done:
                raise StoreUnavailable("the stream of changes has ended")
            return getting.result()
        finally:
            getting.cancel()
            ending.cancel()

    def _advance(self, position: int) -> None:
        self._position = position
        self.highest = max(self.highest, position)
        self._moved.set()
        self._moved = asyncio.Event()

    def _take(self, view: _View, subject: str, message: StoredMessage) -> set[str]:
        """Take a message into the view; the keys at which something has changed by that."""
        try:
            kind, key = self._path(subject)
            return _apply(view, kind, key, message)
        except _Damaged as damage:
            if self._complaints.get(subject) != message.sequence:
                if len(self._complaints) >= _COMPLAINTS:
                    self._complaints.clear()
                self._complaints[subject] = message.sequence
                log.warning(
                    "%s (sequence %d) was not written by doyen and is ignored: %s; delete it,"
                    " and keep other programs out of the bucket %s",
                    subject,
                    message.sequence,
                    damage,
                    self._bucket,
                )
            return set()

    def _path(self, subject: str) -> tuple[str, str]:
        """The kind of a subject, and the key."""
        kind, _, rest = subject.removeprefix(f"$KV.{self._bucket}.").partition(".")
        key = "/".join(unquote(token) for token in rest.split("."))
        # Of all spellings of a key only one is read and written.
        if kind not in ("leases", "entries") or subject != subject_of(self._bucket, kind, key):
            raise _Damaged("it is no key of doyen's")
        return kind, key


def _apply(view: _View, kind: str, key: str, message: StoredMessage) -> set[str]:
    if kind == "leases":
        return _apply_lease(view, key, message)
    before = view.entries.pop(key, None)
    if before is not None and before.lease is not None:
        view.bound[before.lease].discard(key)
    lease = message.headers.get(LEASE)
    if message.deleted or (lease is not None and lease not in view.leases):
        _bury(view, key, message.sequence)
    else:
        view.graves.pop(key, None)
        created = _created(message)
        view.entries[key] = Entry(key, message.value, created, message.sequence, lease)
        if lease is not None:
            view.bound[lease].add(key)
    return {key}


def _apply_lease(view: _View, lease: str, message: StoredMessage) -> set[str]:
    if not message.deleted:
        view.leases[lease] = None
        try:
            ttl_s = float(message.value)
        except ValueError:
            ttl_s = math.nan
        if not 0 < ttl_s < math.inf:
            raise _Damaged(f"{message.value[:40]!r} is not the ttl of a lease")
        view.leases[lease] = ttl_s
        return set()
    view.leases.pop(lease, None)
    ended = view.bound.pop(lease, set())
    for each in ended:
        _bury(view, each, int(str(view.entries.pop(each).version)))
    return ended


def _created(message: StoredMessage) -> int:
    """The revision of an entry: the sequence of its creation, if it has been changed since."""
    text = message.headers.get(CREATED, "")
    return int(text) if text.isdecimal() else message.sequence


def _bury(view: _View, key: str, sequence: int) -> None:
    view.graves[key] = sequence
    if len(view.graves) > _GRAVES:
        del view.graves[next(iter(view.graves))]


def _numbers(reply: str) -> tuple[int, int, int]:
    """Of a delivery: its place in the stream, in the consumer, and how many are to come."""
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6  # longer with a domain and an account
    return int(tokens[first + 1]), int(tokens[first + 2]), int(tokens[first + 4])
