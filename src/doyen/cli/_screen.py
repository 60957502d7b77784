"""Live views: on a terminal with rich a view is redrawn in place; otherwise every state of it is
printed with its time.

A view is a title and tables or lines below it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from doyen.cli._output import Console, console

if TYPE_CHECKING:
    from rich.console import Console as RichConsole


class View(NamedTuple):
    """What a live view shows at one time."""

    title: str
    parts: Sequence[object] = ()


Show = Callable[[View], None]


def print_view(out: Console, view: View) -> None:
    out.print(view.title)
    for part in view.parts:
        out.print()
        out.print(part)


def screen() -> AbstractContextManager[Show]:
    """A function that shows a view, for the duration of a scope."""
    out: Any = console()
    if getattr(out, "is_terminal", False) and not out.is_dumb_terminal:
        return _Live(out)

    def print_state(view: View) -> None:
        out.print(now())
        print_view(out, view)
        out.print()

    return nullcontext(print_state)


def now() -> str:
    """The time, as live views and JSON lines state it."""
    return datetime.now().astimezone().isoformat(timespec="milliseconds")


class _Live:
    """Redraws the view in place after every change. The last state stays on the screen."""

    def __init__(self, out: RichConsole) -> None:
        from rich.live import Live

        self._live = Live(console=out, auto_refresh=False)

    def __enter__(self) -> Show:
        self._live.__enter__()
        return self._show

    def __exit__(self, *_: object) -> None:
        self._live.__exit__(None, None, None)

    def _show(self, view: View) -> None:
        from rich.console import Group
        from rich.text import Text

        parts: list[Any] = [
            Text(view.title, style="bold"),
            Text(f"as of {datetime.now().astimezone():%H:%M:%S}; Ctrl-C ends", style="dim"),
        ]
        for part in view.parts:
            parts += [Text(), Text(part) if isinstance(part, str) else part]
        self._live.update(Group(*parts), refresh=True)
