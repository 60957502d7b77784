"""The trail of an election: its last terms, which leaders leave in the store.

    trails/<name>    {"schema": 1, "terms": [{token, name, since, until, end, reason}, …]}

A leader adds its term when that has begun, and how it ended when it has, in the background. Nothing
depends on the trail: a term whose leader was killed has no end in it, and one whose leader could
not reach the store may be missing.

Terms are merged by their token, so leaders that write at the same time, or late, lose nothing of
one another: each reads, merges, and replaces exactly what it has read. The trail is bounded: by
`TERMS`, and by `TRAIL_BYTES`, beyond which the oldest terms are dropped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, cast

from doyen._waiting import BackgroundTasks
from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable
from doyen.events.log_lines import log_line
from doyen.lease.keeper import StoreCalls
from doyen.model import PastTerm, TermEnd, encode_json, trail_key

__all__ = ["TERMS", "TrailKeeper", "decode_trail", "encode_trail"]

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
ATTEMPTS = 5
"""How often a write is tried at once when another has replaced the trail since it was read."""


class TrailKeeper:
    """Records the terms of one session. Used on doyen's loop."""

    def __init__(self, calls: StoreCalls, tasks: BackgroundTasks) -> None:
        self._calls = calls
        self._tasks = tasks
        self._due: dict[str, dict[int, PastTerm]] = {}
        """By election and token: what has not been written yet."""
        self._busy: set[str] = set()
        """Elections whose trail is being written."""
        self._writers: dict[asyncio.Task[None], None] = {}
        self._closing = asyncio.Event()

    def note(self, election: str, term: PastTerm) -> None:
        """Record a term, or how it has ended."""
        self._due.setdefault(election, {})[term.token] = term
        if len(self._writers) < WRITERS:
            writer = self._tasks.start(self._write())
            self._writers[writer] = None
            writer.add_done_callback(self._writers.pop)

    async def flush(self) -> None:
        """Give what is due a request timeout to be written, at once, and accept no more
        failures."""
        self._closing.set()
        if self._writers:
            await asyncio.wait(list(self._writers), timeout=self._calls.timing.request_timeout_s)

    async def _write(self) -> None:
        while (election := self._next()) is not None:
            terms = self._due.pop(election)
            self._busy.add(election)
            try:
                await self._merge(trail_key(election), terms.values())
                continue
            except (StoreUnavailable, OutcomeUnknown):
                pass
            except StoreError as error:
                log.debug("%s", log_line(event="trail_not_written", election=election, error=error))
                continue
            finally:
                self._busy.discard(election)
            if self._closing.is_set():
                return
            # What was noted meanwhile is newer.
            self._due[election] = {**terms, **self._due.get(election, {})}
            with suppress(TimeoutError):
                async with asyncio.timeout(self._calls.timing.ttl_s / 3):
                    await self._closing.wait()

    def _next(self) -> str | None:
        """An election that no other writer is at work on; that one writes what is due then."""
        return next((each for each in self._due if each not in self._busy), None)

    async def _merge(self, key: str, terms: Iterable[PastTerm]) -> None:
        calls = self._calls
        for _ in range(ATTEMPTS):
            entry = await calls.call(calls.store.get(key))
            before = decode_trail(entry.value) if entry is not None else ()
            merged = {term.token: term for term in before}
            for term in terms:
                known = merged.get(term.token)
                if known is None or not known.end:  # an end is final
                    merged[term.token] = term
            value = encode_trail(merged.values())
            if entry is not None and entry.value == value:
                return
            version = None if entry is None else entry.version
            if await calls.call(calls.store.put(key, value, if_version=version)) is not None:
                return
        raise StoreUnavailable(f"{key} was replaced by others {ATTEMPTS} times in a row")


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
    """The terms of a trail; what is none of it is passed over."""
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
