"""What the commands share: exit codes, output, and the arguments for elections and stores.

Names and meta come from other processes. Text output passes them through `printable`, so that a
name cannot contain control sequences for the terminal. JSON output contains them unchanged.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import stat
import sys
import unicodedata
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol

from doyen.errors import ConfigError
from doyen.model import Kind, json_text
from doyen.stores.choice import StoreChoice, choose_store
from doyen.stores.kit.durations import parse_duration
from doyen.stores.port import split_url

if TYPE_CHECKING:
    from rich.table import Table as RichTable


class Exit(IntEnum):
    """Exit codes, as `doyen --help` documents them."""

    DONE = 0
    NO = 1
    USAGE = 2
    UNAVAILABLE = 69
    DISK = 70
    SYSTEM = 71
    TRY_AGAIN = 75
    INTERRUPTED = 130


def print_json(value: Any) -> None:
    """Print a value on one line and flush, so that a program can read a stream of them. A number
    that JSON does not have, which another program may have written into the store, is null."""
    print(json_text(value), flush=True)


class Console(Protocol):
    """The part of rich's Console that the commands use."""

    def print(self, *objects: object, style: str | None = None) -> None:
        """Print a line; `style` is a hint such as "bold red"."""
        ...


class _Plain:
    def print(self, *objects: object, style: str | None = None) -> None:
        print(*objects, flush=True)


def console() -> Console:
    """The console for text output: with colours on a terminal, if the extra `cli` is installed.

    Markup is disabled, because names come from users.
    """
    if sys.stdout.isatty():
        try:
            from rich.console import Console as RichConsole
        except ImportError:
            pass
        else:
            return RichConsole(markup=False, highlight=False, emoji=False, soft_wrap=True)
    return _Plain()


def printable(what: object) -> str:
    """Text that is safe to print: unprintable characters are escaped. A mapping becomes JSON.

    >>> printable("Zoë"), printable({"é": 1}), printable("a\\x1b[2J\\n")
    ('Zoë', '{"é": 1}', 'a\\\\x1b[2J\\\\n')
    """
    if isinstance(what, Mapping):
        what = json.dumps(dict(what), ensure_ascii=False)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in str(what)
    )


NAME, TIME, GAP = 12, 19, 3
"""The least widths of the first two columns of a table, which are names, and of the others, and the
space between two."""


@dataclass(slots=True)
class Table:
    """A table for either console. Cells must be printable.

    >>> print(Table(["name", ">priority"], [["server1", "0"], ["b", "10"]]))
    name     priority
    server1         0
    b              10
    """

    headings: Sequence[str]
    """A heading that begins with ">" aligns its column to the right."""
    rows: list[Sequence[str]] = field(default_factory=list)
    styles: dict[int, str] = field(default_factory=dict)
    """Styles of rows, by row number."""
    within: int | None = field(default=None, repr=False)
    """The width of a terminal on which each row is one line: names are clipped, and columns that
    find no room are left out. Without it, long cells take several lines."""

    def first(self, number: int) -> Table:
        """A table of that many rows: those with a style, which are notable, and then the others.

        >>> Table(["name"], [["a"], ["b"], ["c"]], {2: "red"}).first(2)
        Table(headings=['name'], rows=[['c'], ['a']], styles={0: 'red'})
        """
        others = (row for row in range(len(self.rows)) if row not in self.styles)
        kept = [*sorted(self.styles), *others][:number]
        styles = {at: self.styles[row] for at, row in enumerate(kept) if row in self.styles}
        return Table(self.headings, [self.rows[row] for row in kept], styles, self.within)

    def __str__(self) -> str:
        lines = [[heading.lstrip(">") for heading in self.headings], *self.rows]
        widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
        return "\n".join(self._plain(cells, widths) for cells in lines)

    def _plain(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        padded = []
        for heading, cell, width in zip(self.headings, cells, widths, strict=True):
            padding = " " * (width - _width(cell))
            padded.append(padding + cell if heading.startswith(">") else cell + padding)
        return "  ".join(padded).rstrip()

    def __rich__(self) -> RichTable:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        widths = None if self.within is None else self._clipped(self.within)
        given: Sequence[int | None] = widths or [None] * len(self.headings)
        for heading, width in zip(self.headings, given, strict=False):
            right = heading.startswith(">")
            table.add_column(
                Text(heading.lstrip(">")),
                justify="right" if right else "left",
                overflow="fold" if width is None else "ellipsis",
                width=width,
                no_wrap=width is not None,
            )
        for number, row in enumerate(self.rows):
            shown = row if widths is None else row[: len(widths)]
            table.add_row(*map(Text, shown), style=self.styles.get(number))
        return table

    def _clipped(self, within: int) -> list[int]:
        """The widths of the columns that find room in so many columns of a terminal.

        >>> table = Table(["name", "leader", ">token", "since"], [["x" * 50, "a", "7", "x" * 19]])
        >>> table._clipped(40)
        [23, 6, 5]
        >>> table._clipped(20)
        [11, 6]
        """
        lines = [[heading.lstrip(">") for heading in self.headings], *self.rows]
        widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
        least = [min(width, NAME if at < 2 else TIME) for at, width in enumerate(widths)]
        while len(widths) > 2 and sum(least) + GAP * (len(widths) - 1) > within:
            del widths[-1], least[-1]
        if len(widths) == 2 and sum(least) + GAP > within:
            least = [min(width, max(1, (within - GAP) // 2)) for width in widths]
        over = sum(widths) + GAP * (len(widths) - 1) - within
        for at in sorted(range(len(widths)), key=lambda at: least[at] - widths[at]):
            cut = max(0, min(over, widths[at] - least[at]))
            widths[at] -= cut
            over -= cut
        return [max(1, width) for width in widths]


def _width(text: str) -> int:
    """The width of a text in columns of a terminal."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def seconds(text: str) -> float:
    """The argparse type of a duration, in seconds."""
    try:
        value = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if value == math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is too long")
    return value


def follow(work: Coroutine[Any, Any, None]) -> int:
    """Run work that ends by Ctrl-C, which is the usual way to end it.

    It also ends on SIGTERM, and by `BrokenPipeError` when the reader of a pipe on standard output
    has gone. In all cases `work` is cancelled and can restore the terminal.
    """
    try:
        return asyncio.run(_until_ended(work))
    except KeyboardInterrupt:
        return Exit.DONE


async def _until_ended(work: Coroutine[Any, Any, None]) -> int:
    following = asyncio.ensure_future(work)
    loop, terminated = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        terminated.set()
        following.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    unread = _cancel_when_unread(following)
    try:
        await following
    except asyncio.CancelledError:
        if unread.is_set():
            raise BrokenPipeError from None
        if not terminated.is_set():
            raise
        return 128 + signal.SIGTERM
    return Exit.DONE


def _cancel_when_unread(following: asyncio.Future[None]) -> asyncio.Event:
    """Cancel the work when the reader of the pipe has gone, without waiting for the next write to
    fail. The writing end of a pipe becomes readable only by that error."""
    loop, unread = asyncio.get_running_loop(), asyncio.Event()
    try:
        stdout = sys.stdout.fileno()
        is_pipe = stat.S_ISFIFO(os.fstat(stdout).st_mode)
    except (OSError, ValueError):
        return unread

    def gone() -> None:
        loop.remove_reader(stdout)
        unread.set()
        following.cancel()

    if is_pipe:
        loop.add_reader(stdout, gone)
    return unread


def duration(seconds: float) -> str:
    """
    >>> duration(0.0417), duration(75), duration(93784)
    ('42 ms', '1 m 15 s', '1 d 2 h')
    """
    if seconds < 10:
        return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
    whole = int(seconds)
    parts: list[str] = []
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        count, whole = divmod(whole, size)
        if count or parts:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def add_option(
    parser: argparse.ArgumentParser, spec: str, text: str, default: str | None = None, **more: Any
) -> None:
    """Add an option. `spec` is its name and the form of its value, such as `--wait TIME`; an
    option without a form is a flag. The default is as a user would write it; the help states it."""
    name, _, form = spec.partition(" ")
    if not form:
        parser.add_argument(name, action="store_true", help=text)
        return
    if form == "TIME":
        more.setdefault("type", seconds)
    if default is not None and "(default" not in text:
        text = f"{text} (default: {default})"
    parser.add_argument(name, metavar=form, help=text, default=default, **more)


def add_actions(
    parser: argparse.ArgumentParser,
) -> Callable[[str, str], argparse.ArgumentParser]:
    """Give a command actions. Returns a function that adds one, with its name and its summary."""
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", title="actions", help="the action"
    )

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(
            name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False
        )
        added.add_argument(
            "--json", action="store_true", default=argparse.SUPPRESS, help="print JSON for programs"
        )
        return added

    return action


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """Add `--store`. Read it with `store_url`."""
    add_option(
        parser,
        "--store URL",
        "the store, such as sqlite:///var/lib/app/doyen.db"
        " (default: $DOYEN_STORE, else a file that only this machine has)",
    )


def add_lease_options(parser: argparse.ArgumentParser, work: str) -> None:
    """Add `--ttl` and `--stop-budget`. `work` is what must end after a loss."""
    lives = "how long the lease lives without a renewal (default: depends on the store)"
    add_option(parser, "--ttl TIME", lives)
    ends = f"the time in which the {work} must end after a loss (default: a sixth of the ttl)"
    add_option(parser, "--stop-budget TIME", ends)


def add_election_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the election's name, `--lock` and `--store`. Read the kind with `kind_of`."""
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    add_option(parser, "--lock", "the name is that of a lock; its holder is shown as its leader")
    add_store_option(parser)


def kind_of(args: argparse.Namespace) -> Kind:
    """Whether the name on the command line is that of an election or of a lock."""
    return "locks" if args.lock else "elections"


def store_url(args: argparse.Namespace, *, create: bool = True) -> str:
    """The URL of the store: from the command line, the environment, or the default. The first call
    states on standard error which one it is.

    Commands that only look pass `create=False`, here and to `connect`, so that they create nothing.
    """
    if getattr(args, "chosen_store", None) is None:
        chosen = args.chosen_store = choose_for(args, create=create)
        print_note(str(chosen))
    url: str = args.chosen_store.url
    return url


def choose_for(args: argparse.Namespace, *, create: bool = True) -> StoreChoice:
    """The store for a command. A store within one process is refused: its data would be gone when
    the command ends, and every `doyen run` would lead."""
    if args.store == "":
        raise ConfigError("--store is empty: give the URL of a store, or leave the option out")
    chosen = choose_store(args.store, "--store", create=create)
    if split_url(chosen.url).scheme == "memory":
        raise ConfigError(
            "a memory: store exists within one process only, so no command can share it with"
            " another process: use a store that all processes can reach, such as sqlite:doyen.db"
        )
    return chosen


def print_note(text: str) -> None:
    """Print a line for people on standard error. It is no failure if standard error is closed."""
    with contextlib.suppress(OSError):
        print(f"doyen: {text}", file=sys.stderr, flush=True)
