"""What the commands share: exit codes, ways to print, and the option that names the store."""

from __future__ import annotations

import argparse
import json
import os
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

from doyen.errors import ConfigError

__all__ = ["Console", "Exit", "add_store_option", "console", "print_json", "store_url"]


class Exit(IntEnum):
    """Exit codes, as `doyen --help` documents them."""

    DONE = 0
    NO = 1
    USAGE = 2
    UNAVAILABLE = 69
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

    The folder of the default is made if need be; of any other it is the user's to make.
    """
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
