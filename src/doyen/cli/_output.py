"""What the commands share: exit codes, ways to print and to follow, and the option that names the
store.

Names and meta come from other processes. Whatever is shown to people goes through `printable`, so
that nobody's name can move the cursor or break a table; JSON has it as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import signal
import stat
import sys
import unicodedata
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from doyen.errors import ConfigError
from doyen.stores.port import split_url

if TYPE_CHECKING:
    from rich.table import Table as RichTable

__all__ = [
    "Console",
    "Exit",
    "Table",
    "add_store_option",
    "console",
    "follow",
    "print_json",
    "printable",
    "seconds",
    "store_url",
    "without_password",
]


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
    """One value on one line, at once, so that a program can follow a stream of them."""
    print(json.dumps(value), flush=True)


class Console(Protocol):
    """The part of rich's Console that needs no rich."""

    def print(self, *objects: object, style: str | None = None) -> None:
        """Print a line; `style` is a hint such as "bold red"."""
        ...


class _Plain:
    def print(self, *objects: object, style: str | None = None) -> None:
        print(*objects, flush=True)


def console() -> Console:
    """Where to print for people: coloured on a terminal if the extra `cli` is installed.

    Names come from users, so nothing in them is taken as markup.
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
    """For people: text as it is, anything else as JSON, and what cannot be printed escaped.

    >>> printable("Zoë"), printable({"é": 1}), printable("a\\x1b[2J\\n")
    ('Zoë', '{"é": 1}', 'a\\\\x1b[2J\\\\n')
    """
    if isinstance(what, Mapping):
        what = json.dumps(dict(what), ensure_ascii=False)
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in str(what)
    )


@dataclass(slots=True)
class Table:
    """Columns under headings, for either console. Cells are printable as they stand.

    >>> print(Table(["name", ">priority"], [["server1", "0"], ["b", "10"]]))
    name     priority
    server1         0
    b              10
    """

    headings: Sequence[str]
    """One that begins with ">" has its column to the right."""
    rows: list[Sequence[str]] = field(default_factory=list)
    styles: dict[int, str] = field(default_factory=dict)
    """Hints for rows, by number."""

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
        for heading in self.headings:
            right = heading.startswith(">")
            table.add_column(
                Text(heading.lstrip(">")), justify="right" if right else "left", overflow="fold"
            )
        for number, row in enumerate(self.rows):
            table.add_row(*map(Text, row), style=self.styles.get(number))
        return table


def _width(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return sum(
        0 if unicodedata.combining(letter) else 1 + (unicodedata.east_asian_width(letter) in "WF")
        for letter in text
    )


def seconds(text: str) -> float:
    """The type of an option that takes a time: a number from 0 up."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def follow(work: Coroutine[Any, Any, None]) -> int:
    """Run what goes on until it is interrupted, which is how it is meant to end.

    It also ends, by `BrokenPipeError`, once nobody reads our output any more; and on SIGTERM,
    having put the terminal right.
    """
    try:
        return asyncio.run(_until_unwanted(work))
    except KeyboardInterrupt:
        return Exit.DONE


async def _until_unwanted(work: Coroutine[Any, Any, None]) -> int:
    following = asyncio.ensure_future(work)
    loop, terminated = asyncio.get_running_loop(), asyncio.Event()

    def terminate() -> None:
        terminated.set()
        following.cancel()

    loop.add_signal_handler(signal.SIGTERM, terminate)
    unread = _tell_when_unread(following)
    try:
        await following
    except asyncio.CancelledError:
        if unread.is_set():
            raise BrokenPipeError from None
        if not terminated.is_set():
            raise
        return 128 + signal.SIGTERM
    return Exit.DONE


def _tell_when_unread(following: asyncio.Future[None]) -> asyncio.Event:
    """End when the reader of our pipe has gone, instead of at the next change, which may be a
    long time coming: a pipe's writing end becomes "readable" only by an error."""
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


def add_store_option(parser: argparse.ArgumentParser) -> None:
    """Add `--store`. Read it with `store_url`."""
    parser.add_argument(
        "--store",
        metavar="URL",
        help="where candidates meet, such as sqlite:///var/lib/app/doyen.db"
        " (default: $DOYEN_STORE, else a file of this user's)",
    )


def store_url(args: argparse.Namespace) -> str:
    """The store that the command line, the environment, or else the default names.

    An empty option is a variable that somebody forgot to set, and must not elect a leader in a
    store where nobody else is. The default's folder is made for this user alone.
    """
    if args.store == "":
        raise ConfigError("--store is empty: name a store, or leave the option out")
    named = args.store or os.environ.get("DOYEN_STORE")
    if named:
        return str(named)
    path = _state_home() / "doyen" / "doyen.db"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the folder of the default store, {path.parent}, cannot be made: {error.strerror};"
            " name another store with --store"
        ) from error
    return f"sqlite://{quote(str(path))}"


def _state_home() -> Path:
    named = Path(os.environ.get("XDG_STATE_HOME", ""))
    if named.is_absolute():
        return named
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise ConfigError("this user has no home folder; name a store with --store") from error


def without_password(url: str) -> str:
    """The address of a store, fit to be shown.

    >>> without_password("postgresql://app:secret@db:5432/x")
    'postgresql://app:…@db:5432/x'
    """
    parts = split_url(url)
    user, at, host = parts.netloc.rpartition("@")
    name, colon, _ = user.partition(":")
    return parts._replace(netloc=f"{name}:…@{host}").geturl() if at and colon else url
