"""Live views: on a terminal with rich a view is redrawn in place; otherwise every state of it is
printed with its time. With `--json` every state is a JSON object.

A view is a title and tables or lines below it. Every view says when the store last answered ("as
of"), and says so if the store does not answer: "unreachable since …, last known …".
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from doyen.cli._output import Console, Table, console, print_json, printable
from doyen.model import Unreachable
from doyen.session import Session

if TYPE_CHECKING:
    from rich.console import Console as RichConsole

T = TypeVar("T")
REDRAWN_EVERY_S = 1.0


class View(NamedTuple):
    """What a live view shows at one time."""

    title: str
    parts: Sequence[object] = ()


def print_view(out: Console, view: View) -> None:
    out.print(view.title)
    for part in view.parts:
        out.print()
        out.print(part)


async def show_stream(
    session: Session,
    items: AsyncGenerator[T | Unreachable[T], None],
    view: Callable[[T], View],
    as_dict: Callable[[T | None], dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    """Show what an observer of `session` gets, until cancelled."""
    out: Any = console()
    live = getattr(out, "is_terminal", False) and not out.is_dumb_terminal and not as_json
    with _Live(out, session) if live else nullcontext() as screen:
        async with aclosing(items) as stream:
            redrawing = asyncio.create_task(screen.keep_current()) if screen else None
            try:
                async for item in stream:
                    if as_json:
                        print_json(stated(session, item, as_dict))
                        continue
                    shown = _view(item, view)
                    if screen is not None:
                        screen.show(shown, lost=isinstance(item, Unreachable))
                    else:
                        out.print(now())
                        print_view(out, shown)
                        out.print()
            finally:
                if redrawing is not None:
                    redrawing.cancel()


def stated(
    session: Session, item: T | Unreachable[T], as_dict: Callable[[T | None], dict[str, Any]]
) -> dict[str, Any]:
    """A state as a line of JSON. If the store is unreachable, it is the last known one."""
    lost = isinstance(item, Unreachable)
    fields = as_dict(item.last if isinstance(item, Unreachable) else item)
    as_of = item.since if isinstance(item, Unreachable) else session.as_of
    return {
        "at": now(),
        **fields,
        "as_of": as_of,
        "unreachable_since": as_of if lost else None,
        **({"error": item.error} if isinstance(item, Unreachable) else {}),
    }


def lost_text(lost: Unreachable[Any], last: str) -> str:
    """How a view says that the store does not answer."""
    error = f" ({printable(lost.error)})" if lost.error else ""
    return f"unreachable since {clock_time(lost.since)}{error}; last known: {last}"


def _view(item: T | Unreachable[T], view: Callable[[T], View]) -> View:
    if not isinstance(item, Unreachable):
        return view(item)
    if item.last is None:
        return View(lost_text(item, "nothing"))
    last = view(item.last)
    return View(lost_text(item, last.title), last.parts)


def now() -> str:
    """The time, as live views and JSON lines state it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


def clock_time(at: float | None) -> str:
    """A time of the last day or so, in seconds since 1970, as text."""
    return "-" if at is None else f"{datetime.fromtimestamp(at).astimezone():%H:%M:%S}"


class _Live:
    """Redraws the view in place after every change, and once a second the time at which the store
    last answered. The last state stays on the screen."""

    def __init__(self, out: RichConsole, session: Session) -> None:
        from rich.live import Live

        self._live = Live(console=out, auto_refresh=False)
        self._session = session
        self._view: View | None = None
        self._lost = False

    def __enter__(self) -> _Live:
        self._live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def show(self, view: View, *, lost: bool) -> None:
        self._view, self._lost = view, lost
        self._draw()

    async def keep_current(self) -> None:
        while True:
            await asyncio.sleep(REDRAWN_EVERY_S)
            self._draw()

    def _draw(self) -> None:
        from rich.console import Group
        from rich.text import Text

        if self._view is None:
            return
        as_of = clock_time(self._session.as_of)
        parts: list[Any] = [
            Text(self._view.title, style="bold red" if self._lost else "bold"),
            Text(f"as of {as_of}; Ctrl-C ends", style="dim"),
        ]
        size = self._live.console.size
        above = sum(-(-len(line) // max(1, size.width)) or 1 for line in parts)
        for part in fitting(self._view.parts, size.height - above, size.width):
            parts += [Text(), Text(part) if isinstance(part, str) else part]
        self._live.update(Group(*parts), refresh=True)


def fitting(parts: Sequence[object], lines: int, width: int) -> list[object]:
    """What fits on a screen of so many lines and columns: of a long table the notable rows, and as
    many of the others as there is room for. Thousands of rows would take seconds to draw."""
    shown: list[object] = []
    for part in parts:
        if not isinstance(part, Table):
            shown.append(part)
            lines -= 2
            continue
        part = replace(part, within=width)  # noqa: PLW2901
        room = max(1, lines - 5)  # an empty line, two of headings, and an empty one before the rest
        if len(part.rows) <= room:
            shown.append(part)
        else:
            shown += [part.first(room), f"and {len(part.rows) - room} more"]
        lines -= 3 + min(room, len(part.rows))
    return shown
