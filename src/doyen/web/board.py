"""What the page shows, and for each open page what it has not been sent yet. Pure.

The hub writes to the board; pages read from it. A page that reads slowly, or not at all, costs one
set of names: what it has missed is not queued, it gets the newest state when it reads again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable
from typing import Any

from doyen.model import json_text
from doyen.web.terms import ElectionRow, LeaseSight

__all__ = ["Board", "OpenPage"]

ROWS_AT_ONCE = 1000
"""How many rows one message has at most, so that a page can draw between messages."""
SHOWN = 200
"""How many rows one page may declare as shown."""


class OpenPage:
    """One open page."""

    def __init__(self, number: int) -> None:
        self.id = f"p{number}"
        self.rows: dict[str, None] = {}
        self.topics: dict[str, None] = {}
        self.shown: tuple[str, ...] = ()
        """The rows that the page shows at present. Only their leases are looked at."""
        self.wake = asyncio.Event()
        self.began = False

    @property
    def caught_up(self) -> bool:
        """Whether it has been sent everything."""
        return not self.rows and not self.topics

    def show(self, keys: Iterable[str]) -> None:
        self.shown = tuple(itertools.islice(keys, SHOWN))


class Board:
    """The state of all that is shown."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self.wall = wall
        self.rows: dict[str, ElectionRow] = {}
        self.leases: dict[str, LeaseSight] = {}
        self.topics: dict[str, Any] = {}
        self.pages: dict[str, OpenPage] = {}
        self.closed = False
        self._numbers = itertools.count(1)
        self._encoded: dict[str, str] = {}
        """Rows and topics as JSON, made once for all pages."""

    def open_page(self) -> OpenPage:
        page = OpenPage(next(self._numbers))
        page.topics = dict.fromkeys(self.topics)
        page.rows = dict.fromkeys(self.rows)
        page.wake.set()
        self.pages[page.id] = page
        return page

    def close_page(self, page: OpenPage) -> None:
        self.pages.pop(page.id, None)

    def close(self) -> None:
        """End the streams of all pages."""
        self.closed = True
        for page in self.pages.values():
            page.wake.set()

    def shown(self) -> list[str]:
        """The rows that any page shows."""
        return list(dict.fromkeys(key for page in self.pages.values() for key in page.shown))

    def is_shown(self, key: str) -> bool:
        """Whether any page shows this row."""
        return any(key in page.shown for page in self.pages.values())

    def row_changed(self, key: str) -> None:
        """A row is new, has changed, or is gone."""
        self._encoded.pop(key, None)
        for page in self.pages.values():
            page.rows[key] = None
            page.wake.set()

    def forget_rows(self) -> None:
        """All rows are gone."""
        for key in list(self.rows):
            del self.rows[key]
            self.row_changed(key)
        self.leases.clear()

    def set(self, topic: str, value: Any) -> None:
        """Replace a topic; pages are told if it differs."""
        if topic in self.topics and self.topics[topic] == value:
            return
        self.topics[topic] = value
        self._encoded.pop(f"topic {topic}", None)
        for page in self.pages.values():
            page.topics[topic] = None
            page.wake.set()

    def message(self, page: OpenPage) -> bytes | None:
        """The next message for a page, as one server-sent event; None if there is nothing new."""
        if page.caught_up and page.began:
            return None
        parts = [f'"now":{self.wall():.3f}']
        if not page.began:
            page.began = True
            parts.append(f'"page":"{page.id}"')
            parts.append(f'"rows_in_all":{len(self.rows)}')
        if page.topics:
            topics, page.topics = page.topics, {}
            parts += [f"{json.dumps(topic)}:{self._topic(topic)}" for topic in topics]
        keys = list(itertools.islice(page.rows, ROWS_AT_ONCE))
        for key in keys:
            del page.rows[key]
        rows = [self._row(key) for key in keys if key in self.rows]
        gone = [key for key in keys if key not in self.rows]
        if rows:
            parts.append(f'"rows":[{",".join(rows)}]')
        if gone:
            parts.append(f'"gone":{json.dumps(gone)}')
        if not page.caught_up:
            page.wake.set()
        return f"data: {{{','.join(parts)}}}\n\n".encode()

    def _topic(self, topic: str) -> str:
        name = f"topic {topic}"
        if name not in self._encoded:
            self._encoded[name] = json_text(self.topics[topic], compact=True)
        return self._encoded[name]

    def _row(self, key: str) -> str:
        if key not in self._encoded:
            self._encoded[key] = json_text(self.rows[key].as_dict(), compact=True)
        return self._encoded[key]
