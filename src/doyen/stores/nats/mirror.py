"""The copy of the bucket that each client keeps: what stands there, and whom a change concerns.

    $KV.<bucket>.leases.<id>      a lease; its ttl. Written once, buried when the lease has ended
    $KV.<bucket>.entries.<key>    an entry; headers tell its lease and its creation

- One consumer feeds it, in the order of the stream. A gap, silence or another connection begins it
  anew from the last message of each subject, and then everybody is told.
- An entry stands as long as its lease is there. A lease is written before anything is bound to it,
  and its id is never used again; so whatever the order of arrival, what has lost its lease is void.
- `catch_up` makes the copy as new as the stream was when it was called.

Imports the link and the model.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from nats.aio.msg import Msg

from doyen.errors import StoreError, StoreUnavailable
from doyen.model import Entry
from doyen.stores.nats.link import Link, Message

__all__ = ["CREATED", "LEASE", "Mirror", "subject_of"]

log = logging.getLogger("doyen.nats")

LEASE = "Doyen-Lease"
CREATED = "Doyen-Created"
PULSE_S = 1.0
SILENCE_S = 3.0
PAUSE_S = 0.2
_GRAVES = 10_000
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
    leases: dict[str, float] = field(default_factory=dict)
    bound: defaultdict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """The keys of what is bound to each lease."""
    graves: dict[str, int] = field(default_factory=dict)
    """The last sequence of keys at which nothing stands."""


class Mirror:
    """A copy of one bucket."""

    def __init__(self, link: Link, bucket: str, changed: Callable[[str], None]) -> None:
        self._link = link
        self._bucket = bucket
        self._stream = f"KV_{bucket}"
        self._changed = changed
        self._all_changed: Callable[[], None] = lambda: None
        self.view = _View()
        self._position = 0
        self._moved = asyncio.Event()
        self._restart = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self, all_changed: Callable[[], None]) -> None:
        self._all_changed = all_changed
        self._task = asyncio.get_running_loop().create_task(self._run())

    def restart(self) -> None:
        """The connection is another: what was sent meanwhile is lost."""
        self._restart.set()

    async def catch_up(self) -> None:
        """Have everything in the copy that was written before this call."""
        await self.reach(int((await self.state())["last_seq"]))

    async def reach(self, sequence: int) -> None:
        """Have everything in the copy up to this sequence."""
        while self._position < sequence:
            await self._moved.wait()

    async def state(self) -> dict[str, Any]:
        try:
            state: dict[str, Any] = (await self._link.ask(f"STREAM.INFO.{self._stream}"))["state"]
        except KeyError as error:
            raise StoreUnavailable(f"the bucket {self._bucket} is gone") from error
        return state

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            try:
                await self._follow()
            except (StoreError, KeyError, TimeoutError) as error:
                log.debug("the copy of the bucket begins anew: %s", error)
                await asyncio.sleep(PAUSE_S)

    async def _follow(self) -> None:
        """Copy the bucket, then follow its changes until something is missed."""
        self._restart.clear()
        arrived: asyncio.Queue[Msg] = asyncio.Queue()
        inbox = self._link.client.new_inbox()

        async def take(message: Msg) -> None:
            arrived.put_nowait(message)

        base = int((await self.state())["last_seq"])
        subscription = await self._link.client.subscribe(inbox, cb=take)
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
            await self._copy(arrived, int(made["num_pending"]), base)
        finally:
            if not self._link.client.is_closed and self._link.client.is_connected:
                await subscription.unsubscribe()
                if name:
                    await self._link.client.publish(
                        f"$JS.API.CONSUMER.DELETE.{self._stream}.{name}", b""
                    )

    async def _copy(self, arrived: asyncio.Queue[Msg], pending: int, base: int) -> None:
        view, position, delivered, ready = _View(), 0, 0, False
        while True:
            if not ready and pending == 0:
                ready, self.view = True, view
                self._advance(max(position, base))
                self._all_changed()
            message = await self._next(arrived)
            if message.headers and message.headers.get("Status") == "100":
                last = int(message.headers.get("Nats-Last-Consumer", delivered))
                if last != delivered:
                    raise StoreUnavailable("messages were missed")
                continue
            sequence, delivered_now, pending = _numbers(message.reply)
            if delivered_now != delivered + 1:
                raise StoreUnavailable("messages were missed")
            delivered, position = delivered_now, sequence
            touched = _apply(view, self._path(message.subject), _message(message, sequence))
            if ready:
                self._advance(position)
                for key in touched:
                    self._changed(key)

    async def _next(self, arrived: asyncio.Queue[Msg]) -> Msg:
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
        self._moved.set()
        self._moved = asyncio.Event()

    def _path(self, subject: str) -> tuple[str, str]:
        """The kind of a subject, and the key."""
        kind, _, rest = subject.removeprefix(f"$KV.{self._bucket}.").partition(".")
        return kind, "/".join(unquote(token) for token in rest.split("."))


def _apply(view: _View, path: tuple[str, str], message: Message) -> set[str]:
    """Take a message into the view; the keys at which something has changed by that."""
    kind, key = path
    if kind == "leases":
        if not message.deleted:
            view.leases[key] = float(message.value)
            return set()
        view.leases.pop(key, None)
        ended = view.bound.pop(key, set())
        for each in ended:
            _bury(view, each, int(str(view.entries.pop(each).version)))
        return ended
    before = view.entries.pop(key, None)
    if before is not None and before.lease is not None:
        view.bound[before.lease].discard(key)
    lease = message.headers.get(LEASE)
    if message.deleted or (lease is not None and lease not in view.leases):
        _bury(view, key, message.sequence)
    else:
        view.graves.pop(key, None)
        created = int(message.headers.get(CREATED, message.sequence))
        view.entries[key] = Entry(key, message.value, created, message.sequence, lease)
        if lease is not None:
            view.bound[lease].add(key)
    return {key}


def _bury(view: _View, key: str, sequence: int) -> None:
    view.graves[key] = sequence
    if len(view.graves) > _GRAVES:
        del view.graves[next(iter(view.graves))]


def _message(message: Msg, sequence: int) -> Message:
    return Message(sequence, message.headers or {}, message.data)


def _numbers(reply: str) -> tuple[int, int, int]:
    """Of a delivery: its place in the stream, in the consumer, and how many are to come."""
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6  # longer with a domain and an account
    return int(tokens[first + 1]), int(tokens[first + 2]), int(tokens[first + 4])
