"""`doyen config ACTION NAME`: read, write, edit, compare, roll back and watch configurations."""

from __future__ import annotations

import argparse
import difflib
import getpass
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from doyen.blocking import connect_blocking
from doyen.cli._output import (
    Exit,
    Table,
    add_actions,
    add_option,
    add_store_option,
    console,
    follow,
    print_json,
    printable,
    store_url,
)
from doyen.cli._screen import lost_text
from doyen.errors import (
    BadDocument,
    ConfigError,
    Conflict,
    DoyenError,
    NotApplied,
    OutcomeUnknown,
    StoreUnavailable,
)
from doyen.model import Reachable, Unreachable
from doyen.session import connect

if TYPE_CHECKING:
    from collections.abc import Iterator

    from doyen.manage.config import Change, ConfigDocument
    from doyen.manage.config_session import BlockingConfig, Config

MANUAL = """\
A configuration is a JSON document in the store, with versions. Every write makes a new version,
with an author and a time; the store keeps the last 20 versions before the current one, unless a
program asked for another number. Programs read it with session.config, and refuse a version that
fails their type. This command knows no types: it takes any JSON.

With --if-version a write is refused if another version is current. edit opens the current version
in $VISUAL or $EDITOR, and writes what you save if it is still the current version. Otherwise the
editor is opened again with both texts, between the markers of a merge. If anything fails, your text
stays in a file, which the error names. With --wait-applied a write returns when all subscribers, or
a majority of them, have applied it; otherwise it names those that have not, and the new version
stays. watch says that there is no configuration yet (with --json: "change": "absent"), and waits.

exit codes:
  0    done; watch: ended by Ctrl-C
  1    there is no such configuration, another version is current, or the new
       version was written and not all have applied it
  others as for every command: see doyen --help

examples:
  doyen config set billing '{"workers": 4}'
  doyen config get billing | jq .workers
  # from a file, if version 7 is still the current one
  cat billing.json | doyen config set billing - --if-version 7
  doyen config edit billing --wait-applied all
  doyen config history billing
  # what has changed since version 3, and back to it
  doyen config diff billing --from 3
  doyen config rollback billing 3
  # every version after 7, for a script
  doyen config watch billing --from 7 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_action = add_actions(parser)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        added = add_action(name, summary)
        added.add_argument("name", metavar="NAME", help="the name of the configuration")
        add_store_option(added)
        return added

    def write(name: str, summary: str) -> argparse.ArgumentParser:
        added = action(name, summary)
        add_option(added, "--author NAME", "who writes (default: user and host name)")
        applied = "wait until the subscribers have applied it: all, majority (default: do not wait)"
        add_option(added, "--wait-applied WHICH", applied, choices=("all", "majority"))
        add_option(added, "--wait TIME", "how long to wait for the subscribers", "10")
        return added

    get = action("get", "print the value of a configuration")
    add_option(get, "--version N", "an earlier version (default: the current one)", type=int)
    setting = write("set", "write a new version")
    text = "the value as JSON, or - to read it from standard input"
    setting.add_argument("value", metavar="VALUE", help=text)
    only_if = "write only if this version is current; 0: only if there is none (default: always)"
    write("edit", "change the current version in an editor")
    action("history", "list the versions that the store has")
    diff = action("diff", "compare two versions")
    add_option(diff, "--from N", "the older version (default: the one before)", type=int)
    add_option(diff, "--to N", "the newer version (default: the current one)", type=int)
    rollback = write("rollback", "write the value of an earlier version as a new version")
    rollback.add_argument("version", metavar="VERSION", type=int, help="the earlier version")
    for each in (setting, rollback):
        add_option(each, "--if-version N", only_if, type=int)
        add_option(each, "--force", "replace a document that cannot be read")
    watch = action("watch", "print the current version, then every new one")
    add_option(watch, "--from N", "begin after this version (default: with the current)", type=int)


def run(args: argparse.Namespace) -> int:
    if args.action == "watch":
        return follow(_watch(args))
    value = _parsed(args.value) if args.action == "set" else None
    creates = args.action in ("set", "edit")
    url = store_url(args, create=creates)
    with connect_blocking(url, create=creates) as session:
        author = getattr(args, "author", None) or _author()
        config: BlockingConfig[Any] = session.config(args.name, author=author)
        if args.action in ("set", "rollback"):
            options = {"if_version": args.if_version, "force": args.force, **_waiting(args)}
            if args.action == "set":
                return _written(args, config.set(value, **options))
            return _written(args, config.rollback(args.version, **options))
        return {"get": _get, "edit": _edit, "history": _history, "diff": _diff}[args.action](
            args, config
        )


def _author() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # the user id has no name
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def _waiting(args: argparse.Namespace) -> dict[str, Any]:
    return {"wait_applied": args.wait_applied, "wait_s": args.wait}


def _parsed(value: str) -> Any:
    try:
        return _loads(sys.stdin.read() if value == "-" else value)
    except ValueError as error:
        raise ConfigError(f"the value is not JSON: {error}; nothing was written") from error


def _loads(text: str) -> Any:
    """
    >>> _loads('{"a": 1}')
    {'a': 1}
    >>> _loads("NaN")
    Traceback (most recent call last):
    ValueError: JSON has no NaN
    """

    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"JSON has no {constant}")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _dumps(value: Any) -> str:
    """A value as JSON for people. Text that a terminal might not print is escaped."""
    text = json.dumps(value, indent=2, ensure_ascii=False)
    if all(letter.isprintable() or letter == "\n" for letter in text):
        return text
    return json.dumps(value, indent=2)


def _as_dict(document: ConfigDocument[Any]) -> dict[str, Any]:
    return {
        "config": document.name,
        "version": document.version,
        "id": document.id,
        "author": document.author,
        "at": document.at.isoformat(),
        "value": document.value,
    }


def _current(config: BlockingConfig[Any], name: str) -> ConfigDocument[Any]:
    document = config.get()
    if document is None:
        raise _NoDocument(f"{name!r} has no configuration yet: write one with doyen config set")
    return document


class _NoDocument(DoyenError):
    """There is no such configuration."""


def _get(args: argparse.Namespace, config: BlockingConfig[Any]) -> int:
    if args.version is None:
        document = _current(config, args.name)
    else:
        found = config.get(args.version)
        assert found is not None
        document = found
    if args.json:
        print_json(_as_dict(document))
    else:
        print(_dumps(document.value))
    return Exit.DONE


def _written(args: argparse.Namespace, document: ConfigDocument[Any]) -> int:
    if args.json:
        print_json(_as_dict(document))
    else:
        console().print(f"{args.name} is at version {document.version}")
    return Exit.DONE


def _history(args: argparse.Namespace, config: BlockingConfig[Any]) -> int:
    documents = config.history()
    if args.json:
        print_json({"config": args.name, "history": [_as_dict(each) for each in documents]})
        return Exit.DONE if documents else Exit.NO
    if not documents:
        _current(config, args.name)
    table = Table([">version", "written at", "author", "value"])
    for each in documents:
        value = json.dumps(each.value, ensure_ascii=False)
        shown = value if len(value) <= 60 else f"{value[:59]}…"
        row = [str(each.version), _local(each.at), printable(each.author), printable(shown)]
        table.rows.append(row)
    console().print(table)
    return Exit.DONE


def _local(at: datetime) -> str:
    return f"{at.astimezone():%Y-%m-%d %H:%M:%S}"


def _diff(args: argparse.Namespace, config: BlockingConfig[Any]) -> int:
    newer = _current(config, args.name) if args.to is None else config.get(args.to)
    assert newer is not None
    since = getattr(args, "from")
    if since is None and newer.version == 1:
        raise _NoDocument(f"version 1 of {args.name!r} is the first: there is none before it")
    older = config.get(newer.version - 1 if since is None else since)
    assert older is not None
    if args.json:
        print_json({"config": args.name, "from": _as_dict(older), "to": _as_dict(newer)})
        return Exit.DONE
    before, after = (_sorted(each.value).splitlines() for each in (older, newer))
    was, is_now = (f"version {each.version} by {printable(each.author)}" for each in (older, newer))
    times = _local(older.at), _local(newer.at)
    for line in difflib.unified_diff(before, after, was, is_now, *times, lineterm=""):
        print(line)
    return Exit.DONE


def _sorted(value: Any) -> str:
    """JSON in which the order of the keys makes no difference."""
    return _dumps(json.loads(json.dumps(value, sort_keys=True)))


async def _watch(args: argparse.Namespace) -> None:
    since = getattr(args, "from")
    async with connect(store_url(args, create=False), create=False) as session:
        config: Config[Any] = session.config(args.name)
        if not since and await _is_absent(config):
            _print_change(args, None)
        async for change in config.observe(since):
            _print_change(args, change)


async def _is_absent(config: Config[Any]) -> bool:
    """Whether nothing was written yet. What makes the read fail is reported by the observer."""
    try:
        return await config.get() is None
    except (BadDocument, OutcomeUnknown, StoreUnavailable):
        return False


def _print_change(args: argparse.Namespace, change: Change[Any] | None) -> None:
    """Print a change with its time; None: there is no such configuration yet."""
    at = datetime.now().astimezone()
    if args.json:
        seen_at = at.isoformat(timespec="milliseconds")
        print_json({"seen_at": seen_at, **_change_as_dict(args.name, change)})
    else:
        console().print(f"{at:%Y-%m-%d %H:%M:%S}.{at:%f}"[:-3], _text(args.name, change))


def _change_as_dict(name: str, change: Change[Any] | None) -> dict[str, Any]:
    from doyen.manage.config import ConfigDocument, Missed

    if change is None:
        return {"config": name, "change": "absent"}
    if isinstance(change, ConfigDocument):
        return _as_dict(change)
    if isinstance(change, Unreachable):
        why = {"unreachable_since": change.since, "error": change.error}
        last = None if change.last is None else _as_dict(change.last)
        return {"config": name, "change": "unreachable", **why, "last": last}
    if isinstance(change, Reachable):
        return {"config": name, "change": "reachable", "since": change.since}
    if isinstance(change, BadDocument):
        bad = {"version": change.version, "author": change.author, "error": str(change)}
        return {"config": name, "bad": bad}
    kind = "missed" if isinstance(change, Missed) else "regressed"
    return {"config": name, kind: change._asdict()}


def _text(name: str, change: Change[Any] | None) -> str:
    from doyen.manage.config import ConfigDocument, Missed

    if change is None:
        return f"{name} does not exist yet"
    if isinstance(change, ConfigDocument):
        value = printable(json.dumps(change.value, ensure_ascii=False))
        return f"{name} version {change.version} by {printable(change.author)}: {value}"
    if isinstance(change, Unreachable):
        last = "nothing" if change.last is None else f"{name} version {change.last.version}"
        return lost_text(change, last)
    if isinstance(change, Reachable):
        return "the store answers again"
    if isinstance(change, BadDocument):
        return f"{name} cannot be read: {printable(change)}"
    if isinstance(change, Missed):
        return f"{name} versions {change.first} to {change.last} are no longer in the history"
    return f"{name} was at version {change.was}: the store has lost writes"


# Editing.


def _edit(args: argparse.Namespace, config: BlockingConfig[Any]) -> int:
    document = config.get()
    text = "{}\n" if document is None else f"{_dumps(document.value)}\n"
    handle, name = tempfile.mkstemp(prefix="doyen-config-", suffix=".json", text=True)
    os.close(handle)
    path = Path(name)
    conflict: Conflict | None = None
    with _kept(path):
        while True:
            path.write_text(text)
            _open_editor(path)
            edited = _saved(path, args.name)
            if edited == text:
                if conflict is not None:
                    raise conflict
                path.unlink()
                console().print("nothing was changed")
                return Exit.DONE
            value = _edited(path, args.name, edited)
            if document is not None and conflict is not None and value == document.value:
                break  # the other version is as it should be
            try:
                document = config.set(
                    value, if_version=document.version if document else 0, **_waiting(args)
                )
                break
            except Conflict as error:
                if error.current is None:
                    raise
                conflict, document = error, error.current
                text = _both(edited, document)
                print(f"doyen: {error}; both are in the editor", file=sys.stderr)
    path.unlink()
    return _written(args, document)


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Name the file with the text if something fails."""
    try:
        yield
    except NotApplied:  # it was written
        path.unlink()
        raise
    except (DoyenError, OSError):
        print(f"doyen: your text is kept in {path}", file=sys.stderr)
        raise


def _open_editor(path: Path) -> None:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        code = subprocess.call([*shlex.split(editor), str(path)])
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the editor {editor!r} cannot be started: {error}; set $EDITOR"
        ) from error
    if code != 0:
        raise ConfigError(f"the editor {editor!r} ended with {code}; nothing was written")


def _saved(path: Path, name: str) -> str:
    try:
        return path.read_text()
    except UnicodeDecodeError as error:
        raise _unusable(path, name, f"text in {error.encoding}", error) from error


def _edited(path: Path, name: str, text: str) -> Any:
    try:
        return _loads(text)
    except ValueError as error:
        raise _unusable(path, name, "JSON", error) from error


def _unusable(path: Path, name: str, kind: str, error: ValueError) -> ConfigError:
    return ConfigError(
        f"{path} is not {kind}: {error}; nothing was written. Correct it, and run"
        f" doyen config set {shlex.quote(name)} - with it as standard input"
    )


def _both(mine: str, theirs: ConfigDocument[Any]) -> str:
    ours = mine if mine.endswith("\n") else f"{mine}\n"
    return (
        f"<<<<<<< version {theirs.version} by {printable(theirs.author)}\n"
        f"{_dumps(theirs.value)}\n=======\n{ours}>>>>>>> yours\n"
    )
