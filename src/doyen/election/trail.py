"""The trail of an election: its last terms, which leaders leave in the store.

    trails/<name>    {"schema": 1, "terms": [{token, name, since, until, end, reason}, …]}

A leader adds its term when that has begun, and how it ended when it has, in the background. Nothing
depends on the trail: a term whose leader was killed has no end in it, and one whose leader could
not reach the store may be missing.

A handover does not wait for these writes: they begin a moment after it, first that of the leader
that has ended, then that of the next, so that they do not compete. A leader that wrote last when
its term began need not read the trail again when it ends. So a handover costs three requests more.
They do not wait for the disk of a local store, which would keep the next leader from writing. While
a session begins or ends hundreds of terms, few trails are written; the others follow.

Terms are merged by their token, so leaders that write at the same time, or late, lose nothing of
one another: each reads, merges, and replaces exactly what it has read. The trail is bounded: by
`TERMS`, and by `TRAIL_BYTES`, beyond which the oldest terms are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, cast

from doyen._waiting import BackgroundTasks
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.keeper import StoreCalls
from doyen.model import Entry, PastTerm, TermEnd, encode_json, trail_key

__all__ = ["TERMS", "TrailKeeper", "decode_trail", "encode_trail", "merge_terms"]

log = logging.getLogger("doyen")

SCHEMA = 1
TERMS = 50
"""How many terms a trail has."""
TRAIL_BYTES = 32 * 1024
TEXT = 200
"""How many characters of a name or a reason are kept."""
WRITERS = 4
"""How many trails a session writes at a time. They are not urgent and must not delay other
calls."""
AFTER_END_S, AFTER_BEGINNING_S = 0.05, 0.1
"""How long after the end, and after the beginning, of a term it is written."""
KNOWN = 100
"""How many trails a session keeps in memory."""
ATTEMPTS = 5
"""How often a write is tried at once when another has replaced the trail since it was read."""


class TrailKeeper:
    """Records the terms of one session. Used on doyen's loop."""

    def __init__(self, calls: StoreCalls, tasks: BackgroundTasks, busy: Callable[[], bool]) -> None:
        """`busy`: whether so many candidates join or leave that these writes would delay them."""
        self._calls = calls
        self._tasks = tasks
        self._busy = busy
        self._due: dict[str, dict[int, PastTerm]] = {}
        """By election and token: what has not been written yet."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._ready: dict[str, None] = {}
        """Elections of which something is due now."""
        self._known: dict[str, Entry] = {}
        """The trails of elections that this session leads, as it last wrote them."""
        self._writing: dict[str, dict[int, PastTerm]] = {}
        """What is being written, by election."""
        self._writers: dict[asyncio.Task[None], None] = {}
        self._closing = asyncio.Event()

    def note(self, election: str, term: PastTerm) -> None:
        """Record a term, or how it has ended."""
        self._due.setdefault(election, {})[term.token] = term
        if self._closing.is_set():
            self._begin(election)
        elif election not in self._timers:
            pause_s = AFTER_END_S if term.end else AFTER_BEGINNING_S
            loop = asyncio.get_running_loop()
            self._timers[election] = loop.call_later(pause_s, self._begin, election)

    def unwritten(self, election: str) -> Iterable[PastTerm]:
        """Terms of this session that the trail may lack."""
        return {**self._writing.get(election, {}), **self._due.get(election, {})}.values()

    def _begin(self, election: str) -> None:
        timer = self._timers.pop(election, None)
        if timer is not None:
            timer.cancel()
        self._ready[election] = None
        if len(self._writers) < WRITERS:
            writer = self._tasks.start(self._write())
            self._writers[writer] = None
            writer.add_done_callback(self._writers.pop)

    async def flush(self) -> None:
        """Write what is due now, within one request timeout. A write that fails is not retried."""
        self._closing.set()
        for election in list(self._timers):
            self._begin(election)
        if self._writers:
            await asyncio.wait(list(self._writers), timeout=self._calls.timing.request_timeout_s)

    async def _write(self) -> None:
        while True:
            if self._busy():
                await self._pause(AFTER_BEGINNING_S)
            election = self._next()
            if election is None:
                return
            del self._ready[election]
            terms = self._due.pop(election, {})
            if not terms:
                continue
            self._writing[election] = terms
            try:
                await self._merge(election, terms.values())
                continue
            except (StoreUnavailable, OutcomeUnknown):
                pass
            except StoreError as error:
                log.debug("%s", log_line(event="trail_not_written", election=election, error=error))
                continue
            finally:
                del self._writing[election]
            if self._closing.is_set():
                return
            # What was noted meanwhile is newer.
            self._due[election] = {**terms, **self._due.get(election, {})}
            self._ready[election] = None
            await self._pause(self._calls.timing.ttl_s / 3)

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer than until the session is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    def _next(self) -> str | None:
        """An election that no other writer is at work on. That writer takes up what has become due
        meanwhile."""
        return next((each for each in self._ready if each not in self._writing), None)

    async def _merge(self, election: str, terms: Iterable[PastTerm]) -> None:
        calls, key = self._calls, trail_key(election)
        leads = any(not term.end for term in terms)
        for _ in range(ATTEMPTS):
            entry = self._known.pop(election, None) or await calls.call(calls.store.get(key))
            before = decode_trail(entry.value) if entry is not None else ()
            value = encode_trail(merge_terms(before, terms).values())
            if entry is not None and entry.value == value:
                return
            version = None if entry is None else entry.version
            put = calls.store.put_relaxed(key, value, if_version=version)
            written = await calls.call(put)
            if written is not None:
                if leads and len(self._known) < KNOWN:
                    self._known[election] = written
                return
        raise StoreUnavailable(f"{key} was replaced by others {ATTEMPTS} times in a row")


def merge_terms(known: Iterable[PastTerm], noted: Iterable[PastTerm]) -> dict[int, PastTerm]:
    """The terms of a trail by token, with what was noted since. An end is final: what was noted
    before it may arrive after it."""
    merged = {term.token: term for term in known}
    for term in noted:
        if term.token not in merged or not merged[term.token].end:
            merged[term.token] = term
    return merged


def encode_trail(terms: Iterable[PastTerm]) -> bytes:
    """The value of a trail: the newest of these terms, in order."""
    kept = sorted(terms, key=lambda term: term.token)[-TERMS:]
    while True:
        value = encode_json({"schema": SCHEMA, "terms": [_raw(term) for term in kept]})
        if len(value) <= TRAIL_BYTES:
            return value
        kept = kept[len(kept) // 4 + 1 :]


def _raw(term: PastTerm) -> dict[str, Any]:
    fields = {
        "token": term.token,
        "name": term.name[:TEXT],
        "since": round(term.since, 3),
        "until": None if term.until is None else round(term.until, 3),
        "end": term.end,
        "reason": term.reason[:TEXT],
    }
    return {name: value for name, value in fields.items() if value not in (None, "")}


def decode_trail(value: bytes) -> tuple[PastTerm, ...]:
    """The terms of a trail. Anything else in the value is skipped."""
    terms = []
    try:
        listed = json.loads(value)["terms"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return ()
    for raw in listed if isinstance(listed, list) else ():
        try:
            since, until = float(raw["since"]), raw.get("until")
            end = raw.get("end", "")
            if not math.isfinite(since) or (until is not None and not math.isfinite(until)):
                continue
            terms.append(
                PastTerm(
                    str(raw["name"]),
                    int(raw["token"]),
                    since,
                    None if until is None else float(until),
                    cast("TermEnd", end if end in ("resigned", "lost") else ""),
                    str(raw.get("reason", "")),
                )
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            continue
    return tuple(terms)
