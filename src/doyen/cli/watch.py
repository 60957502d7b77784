"""`doyen watch ELECTION`: say who leads, then every change, a line each, until interrupted."""

from __future__ import annotations

import argparse
import asyncio
import os
import stat
import sys
from collections.abc import Callable
from datetime import datetime

from doyen.cli._output import Exit, add_store_option, console, print_json, store_url
from doyen.cli.leader import as_dict, in_words
from doyen.model import Leader
from doyen.session import connect

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.epilog = (
        "Ends with Ctrl-C, exit code 0, or when nobody reads any more. Times are when the change"
        " was seen here. Changes in quick succession may be seen as one."
    )
    parser.add_argument("election", metavar="ELECTION")
    add_store_option(parser)


def run(args: argparse.Namespace) -> int:
    """Print until interrupted, which is how it is meant to end."""
    show = _show_json if args.json else _shower()
    try:
        asyncio.run(_watch(store_url(args), args.election, show))
    except KeyboardInterrupt:
        pass
    return Exit.DONE


_Show = Callable[[str, Leader | None, datetime], None]


def _show_json(election: str, leader: Leader | None, at: datetime) -> None:
    print_json({"at": at.isoformat(timespec="milliseconds"), **as_dict(election, leader)})


def _shower() -> _Show:
    out = console()

    def show(election: str, leader: Leader | None, at: datetime) -> None:
        out.print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], in_words(election, leader))

    return show


async def _watch(url: str, election: str, show: _Show) -> None:
    watching = asyncio.ensure_future(_follow(url, election, show))
    unread = _tell_when_unread(watching)
    try:
        await watching
    except asyncio.CancelledError:
        if unread.is_set():
            raise BrokenPipeError from None
        raise


async def _follow(url: str, election: str, show: _Show) -> None:
    async with connect(url) as session:
        async for leader in session.observe(election):
            show(election, leader, datetime.now().astimezone())


def _tell_when_unread(watching: asyncio.Task[None]) -> asyncio.Event:
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
        watching.cancel()

    if is_pipe:
        loop.add_reader(stdout, gone)
    return unread
