"""`doyen cluster …`: show the state of a quorum, change its members, back it up and restore it, and
copy keys from etcd or to it."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from doyen.cli._output import (
    Exit,
    Table,
    add_actions,
    add_option,
    console,
    print_json,
    print_note,
    printable,
    store_url,
)
from doyen.errors import ConfigError, OrderFailed, StoreUnavailable, StoreUnusable
from doyen.stores.choice import without_password
from doyen.stores.kit.url import TLS_OPTIONS, requires
from doyen.stores.port import StoreURL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from doyen.quorum.protocol.requests import BackupChunk, BackupOrigin
    from doyen.stores.quorum.diagnosis import NodeAnswer
    from doyen.stores.quorum.store import QuorumStore

MANUAL = """\
For quorums of doyen's own nodes (doyen serve). --store names one or more of the nodes, such as
doyen://h1:7400,h2:7400,h3:7400; requests are forwarded to the leader.

To replace a node, or to grow from three nodes to five, start the new node with --join, add it as a
learner, wait until status shows that it has caught up, and promote it to a voter; then remove the
old node. Make one change at a time: a change waits some seconds until the previous one is
committed, and is refused if it is not, or if too few of the new voters answer. To move a node, add
it again with its new address. Before the removal of a node that is needed (one or two voters would
be left, or none that is up to date) the command asks for confirmation; without a terminal, such a
removal needs --force. Changes and backups need the secret or certificate of an administrator.

If a node has lost its data directory, or has an older copy of it, the other nodes refuse it: remove
it, empty the directory, start it with --join, add it and promote it.

A backup is one checksummed file with a consistent copy of the running quorum. If a majority of the
nodes is permanently lost, --data-dir makes a backup from the data directory of a stopped node. In
that case make one of every remaining directory and use the backup with the highest generation and,
within it, the highest index; data that only the lost nodes had is lost. To restore, run restore
with the same file on every node of a new cluster with another cluster name, then start the nodes.
The tokens of the restored cluster begin 10^9 above those of the backup; use --token-floor if the
old cluster may have issued more tokens since the backup.

import copies all keys of an etcd cluster to the quorum, for clients of etcd (doyen serve --etcd),
and export copies them to an etcd cluster. Leases keep their ids and what is left of them; revisions
and versions begin anew. If a copy is interrupted, run the command again: it writes what is missing.
At the end both sides are compared by a count and a checksum. Programs may write meanwhile, but what
they change is not copied: stop them, and run the command again with --replace, before you switch.
--store names nodes of the quorum, or where they serve etcd's API (etcd://h1:2379,…). The URL of the
etcd cluster may have a user, a password and certificates, as for every store. The user needs access
to all keys, or to those of --prefix. Users and roles are not copied.

exit codes:
  0    done; status: every node answers, and every member knows the leader
  1    the change was not made; status: a node does not answer, or a member
       knows no leader or is refused by the others
  others as for every command: see doyen --help

examples:
  doyen cluster status --store doyen://h1,h2,h3
  doyen cluster add n4 h4:7400 && doyen cluster promote n4
  doyen cluster remove n1
  doyen cluster backup /backups/today
  doyen cluster backup /backups/what-is-left --data-dir /var/lib/doyen
  doyen cluster restore /backups/today --config node.toml --cluster prod-2
  doyen cluster import etcd://e1:2379,e2:2379,e3:2379
  doyen cluster export etcd://e1:2379,e2:2379,e3:2379 --prefix /service/
"""

RETRY_S = 0.1
"""The pause before a change that was refused temporarily is requested again."""
SILENCE_S = 30.0
"""How long a backup waits for the next piece."""
TOKENS = 10**9
"""The distance of a restored cluster's tokens from those of the backup."""
PROGRESS_S = 0.1
"""How often the progress of a copy is shown."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_action = add_actions(parser)

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        added = add_action(name, summary)
        if name != "restore":
            add_option(added, "--store URL", "such as doyen://h1:7400,… (default: $DOYEN_STORE)")
        if name not in ("status", "backup", "restore", "import", "export"):
            add_option(added, "--wait TIME", "the time limit", "10")
        return added

    action("status", "show the role, progress and contents of every node")
    add = action("add", "add a node as a learner, which receives all data and does not vote")
    add.add_argument("node", metavar="NAME", help="the node's name, its --id")
    add.add_argument("address", metavar="HOST:PORT", help="the node's address for other nodes")
    promote = action("promote", "promote a learner to a voter")
    promote.add_argument("node", metavar="NAME", help="the node's name")
    remove = action("remove", "remove a node")
    remove.add_argument("node", metavar="NAME", help="the node's name")
    add_option(remove, "--force", "remove a node that is needed without confirmation")
    transfer = action("transfer", "transfer leadership to another node")
    most = "the node's name (default: the most up-to-date)"
    transfer.add_argument("node", metavar="NAME", nargs="?", default="", help=most)
    backup = action("backup", "copy all data to a file")
    backup.add_argument("file", metavar="FILE", help="the file to create")
    stopped = "copy from the data directory of a stopped node (default: from the running quorum)"
    add_option(backup, "--data-dir DIRECTORY", stopped)
    restore = action("restore", "restore a backup on this node, as part of a new cluster")
    restore.add_argument("file", metavar="FILE", help="a file written by backup")
    add_option(restore, "--config FILE", "the node's settings, as for doyen serve (default: none)")
    for option, meaning in (
        ("--cluster NAME", "the name of the new cluster; not that of the old one"),
        ("--id NAME", "this node's name"),
        ("--peers NAME=HOST:PORT,…", "the addresses of all nodes, including this one"),
        ("--data-dir DIRECTORY", "the data directory of this node; must be empty"),
    ):
        add_option(restore, option, f"{meaning} (default: as configured)")
    add_option(restore, "--token-floor N", "issue only tokens above N (default: none)", type=int)
    for name, summary in (
        ("import", "copy the keys of an etcd cluster to the quorum"),
        ("export", "copy the keys that clients of etcd have on the quorum to an etcd cluster"),
    ):
        copies = action(name, summary)
        copies.add_argument("etcd", metavar="URL", help="the cluster, such as etcd://h1:2379,…")
        add_option(copies, "--prefix KEY", "copy only keys that begin with this (default: all)")
        add_option(copies, "--replace", "overwrite and delete what the other side has besides")


def run(args: argparse.Namespace) -> int:
    try:
        import msgspec  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("doyen cluster needs msgspec: pip install 'doyen[quorum]'") from error
    if args.action == "restore":
        return _restore(args)
    if args.action == "backup" and Path(args.file).exists():
        raise ConfigError(f"the file {args.file} exists: choose another name")
    if args.action == "backup" and args.data_dir:
        return _backup_directory(args)
    code: int = asyncio.run(ACTIONS.get(args.action, _change)(args))
    return code


@asynccontextmanager
async def _quorum(args: argparse.Namespace) -> AsyncIterator[QuorumStore]:
    """A client of the quorum, which needs no leader yet."""
    url = StoreURL.parse(store_url(args))
    if url.parts.scheme != "doyen":
        raise ConfigError(
            f"{without_password(url.text)} is not the URL of a quorum; use --store doyen://h1:7400,h2:7400,h3:7400"
        )
    from doyen.stores.quorum import make_store

    store = make_store(url)
    try:
        yield store
    finally:
        await store.close()


async def _retried(change: Callable[[], Awaitable[None]], args: argparse.Namespace) -> None:
    """Request a change, repeatedly while it is refused for a temporary reason, such as a learner
    that has not caught up."""
    refusal: StoreUnusable | None = None
    try:
        async with asyncio.timeout(args.wait):
            while True:
                try:
                    return await change()
                except StoreUnusable as error:
                    if "ask again" not in str(error):
                        raise OrderFailed(str(error)) from error
                    refusal = error
                    await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        if refusal is not None:
            raise OrderFailed(f"not done within {args.wait:g} s: {refusal}") from refusal
        raise OrderFailed(
            f"no confirmation within {args.wait:g} s; the change may have been made: check with"
            " doyen cluster status"
        ) from error


def _confirm_removal(node: str, risks: list[str]) -> None:
    """Ask for confirmation. Raises `OrderFailed` unless the answer is yes."""
    text = f"removing {node} is dangerous: {'; '.join(risks)}"
    remedy = "Add another node first (doyen cluster add, promote), or use --force"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise OrderFailed(f"{text}. Nothing was done. {remedy}")
    print(f"{text}.\nRemove {node} anyway? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OrderFailed(f"{node} was not removed. {remedy}")


async def _change(args: argparse.Namespace) -> int:
    """Add, promote or remove a node, or transfer leadership."""
    from doyen.stores.quorum.diagnosis import leading, risks_of_removal

    async with _quorum(args) as store:
        address = getattr(args, "address", "")
        if args.action == "remove":
            states = await store.inspect()
            leads = leading(states)
            if leads is not None and args.node not in (*leads.voters, *leads.learners):
                present = ", ".join([*leads.voters, *leads.learners])
                raise OrderFailed(
                    f"{args.node} is not a member, so it was not removed: the members are {present}"
                )
            risks = [] if args.force else risks_of_removal(states, args.node)
            if risks:
                await _retried(store.check_administrator, args)
                await asyncio.to_thread(_confirm_removal, args.node, risks)
        await _retried(lambda: store.administer(args.action, args.node, address), args)
        states = await store.inspect()
    leader = leading(states)
    if args.json:
        members = (
            {"voters": list(leader.voters), "learners": list(leader.learners)} if leader else {}
        )
        done = {"done": args.action, "node": args.node}
        print_json({**done, **members, "leader": leader and leader.node})
        return Exit.DONE
    voter = leader is not None and args.node in leader.voters
    console().print(
        {
            "add": f"node {args.node} at {address} is a member: "
            + ("a voter" if voter else "a learner; promote it to make it a voter"),
            "promote": f"node {args.node} is a voter now",
            "remove": f"node {args.node} is not a member any more and may be stopped",
            "transfer": f"the leader is {leader.node}" if leader else "no leader is known yet",
        }[args.action]
    )
    return Exit.DONE


async def _status(args: argparse.Namespace) -> int:
    from doyen.stores.quorum.diagnosis import all_well, outsiders, remarks

    async with _quorum(args) as store:
        states = await store.inspect()
    outside, well = outsiders(states), all_well(states)
    if args.json:
        print_json({"well": well, "nodes": [_as_dict(state, outside) for state in states]})
    else:
        table = Table(
            ["node", "address", "role", ">generation", ">applied", ">keys", ">clients", "disk"]
        )
        for state in states:
            table.rows.append(_row(state, outside))
            if state.condition is None:
                table.styles[len(table.rows) - 1] = "red"
            elif state.condition.role == "leading":
                table.styles[len(table.rows) - 1] = "bold"
        console().print(table)
        for state in states:
            if state.condition is None:
                console().print(printable(state.silent_because))
            elif state.condition.alarm and state.condition.role == "leading":
                used, quota = state.condition.bytes, state.condition.quota
                console().print(
                    f"the quota is exhausted ({used} of {quota} bytes); writes are refused"
                )
        for line in remarks(states):
            console().print(printable(line))
    return Exit.DONE if well else Exit.NO


def _as_dict(state: NodeAnswer, outside: set[str]) -> dict[str, Any]:
    if state.condition is None:
        node = {"node": state.node} if state.node else {}
        return {"address": state.address, **node, "silent_because": state.silent_because}
    condition = state.condition
    shown = {name: getattr(condition, name) for name in condition.__struct_fields__ if name != "id"}
    return {"address": state.address, "outside": condition.node in outside, **shown}


def _row(state: NodeAnswer, outside: set[str]) -> list[str]:
    node, address = state.condition, printable(state.address)
    if node is None:
        return [printable(state.node) or "?", address, "silent", "", "", "", "", ""]
    role = "learning" if node.node in node.learners else node.role
    role = "outside" if node.node in outside else role
    numbers = map(str, (node.generation, node.applied, node.keys, node.clients))
    disk = "full" if node.full else "ok"
    return [printable(node.node), address, printable(role), *numbers, disk]


async def _backup(args: argparse.Namespace) -> int:
    """Copy the running quorum to a file. A thread writes the pieces as they arrive."""
    from doyen.quorum.node.backup import write_backup
    from doyen.quorum.node.data_directory import DirectoryIdentity

    target = Path(args.file)
    pieces: SimpleQueue[BackupChunk | None] = SimpleQueue()
    origins: list[BackupOrigin] = []
    loop = asyncio.get_running_loop()
    patience = asyncio.timeout(SILENCE_S)

    def take(piece: BackupChunk) -> None:
        patience.reschedule(loop.time() + SILENCE_S)
        if piece.origin is not None:
            origins.append(piece.origin)
            if len(origins) > 1:
                pieces.put(None)
        pieces.put(piece)

    def write() -> int:
        first = pieces.get()
        if first is None or first.origin is None:
            raise StoreUnavailable(INTERRUPTED)
        origin = first.origin
        identity = DirectoryIdentity(origin.cluster, origin.node, origin.protocol)
        return write_backup(target, identity, b"", origin.snapshot, _contents(pieces)).bytes

    async with _quorum(args) as store:
        writing = asyncio.create_task(asyncio.to_thread(write))
        try:
            async with patience:
                await store.backup(take)
        except BaseException as error:
            pieces.put(None)
            await asyncio.gather(writing, return_exceptions=True)  # `error` is the cause
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(
                    f"no node sent data for {SILENCE_S:g} s; no file was written: try again"
                ) from error
            raise
        size = await writing
    upto = origins[-1].snapshot
    return _backed_up(args, size, upto.index, upto.generation)


def _backup_directory(args: argparse.Namespace) -> int:
    from doyen.quorum.node.backup import backup

    contents = backup(Path(args.data_dir), Path(args.file))
    return _backed_up(args, contents.bytes, contents.last, contents.generation)


def _backed_up(args: argparse.Namespace, size: int, index: int, generation: int) -> int:
    if args.json:
        print_json({"file": args.file, "bytes": size, "index": index, "generation": generation})
    else:
        console().print(
            f"{args.file} contains all data up to index {index} of generation {generation},"
            f" {size:,} bytes"
        )
    return Exit.DONE


INTERRUPTED = "the copy was interrupted; no file was written: try again"


def _contents(pieces: SimpleQueue[BackupChunk | None]) -> Iterator[bytes]:
    while True:
        piece = pieces.get()
        if piece is None:
            raise StoreUnavailable(INTERRUPTED)
        if piece.piece:
            yield piece.piece
        if not piece.more:
            return


def _restore(args: argparse.Namespace) -> int:
    from doyen.cli.serve import options
    from doyen.quorum.consensus.core import Membership
    from doyen.quorum.keyspace.commands import AdvanceRevision, encode
    from doyen.quorum.node.backup import restore
    from doyen.quorum.node.data_directory import DirectoryIdentity
    from doyen.quorum.node.replicated import KEYSPACE, Command, encode_batch

    settings = options(vars(args), os.environ)
    node, peers, directory = settings["id"], settings["peers"], settings["data_dir"]
    cluster = settings.get("cluster", "doyen")
    if node not in peers:
        raise ConfigError(f"the id {node!r} is not one of the peers {', '.join(peers)}")
    lift = AdvanceRevision(args.token_floor or 0, TOKENS)
    contents = restore(
        Path(args.file),
        Path(directory),
        DirectoryIdentity(cluster, node, settings.get("protocol", "raft")),
        Membership(tuple(sorted(peers)), (), peers),
        [encode_batch([Command("restore", 1, 1, KEYSPACE, encode(lift))])],
    )
    if args.json:
        print_json({"node": node, "cluster": cluster, "last": contents.last})
    else:
        console().print(
            f"the backup was restored to {directory} for node {node} of cluster {cluster};"
            " restore it on the other nodes too, then start all of them with"
            f" doyen serve --cluster {cluster}"
        )
    print("do not start the old cluster again: both would elect leaders", file=sys.stderr)
    return Exit.DONE


async def _copy(args: argparse.Namespace) -> int:
    """Copy the keys of clients of etcd, to the quorum or from it."""
    with requires("etcd-api", "grpcio", "etcd"):
        from doyen.quorum.etcd_api.copying import KeyspaceSide, copy

    outer = StoreURL.parse(args.etcd) if "://" in args.etcd else None
    if outer is None or outer.parts.scheme != "etcd":
        raise ConfigError(
            f"{without_password(args.etcd)} is not the URL of an etcd cluster, such as"
            " etcd://h1:2379,h2:2379"
        )
    prefix = os.fsencode(args.prefix or "")
    inner = await _door(args)
    sides = [KeyspaceSide(outer, prefix), KeyspaceSide(inner, prefix)]
    source, target = sides if args.action == "import" else sides[::-1]
    try:
        done = await copy(source, target, replace=args.replace, progress=_progress())
    except asyncio.CancelledError:
        print_note("interrupted: what was copied stays there; run the same command again to go on")
        raise
    finally:
        for side in sides:
            await side.close()
    if args.json:
        print_json({each: getattr(done, each) for each in done.__slots__})
        return Exit.DONE
    ended = f"; {done.ended:,} are gone because their leases have ended" if done.ended else ""
    which = f"all keys that begin with {printable(args.prefix)}" if args.prefix else "all keys"
    console().print(
        f"{target.name} has {which} ({done.keys:,}{ended}) and leases ({done.leases:,}) of"
        f" {source.name} at revision {done.revision}: {done.written:,} written,"
        f" {done.deleted:,} deleted, checksum {done.checksum[:16]} on both sides"
    )
    if done.changed:
        print_note(
            "the source has been changed meanwhile: stop the programs that write to it, and run"
            " the command again with --replace"
        )
    return Exit.DONE


async def _door(args: argparse.Namespace) -> StoreURL:
    """Where the nodes of the quorum serve etcd's API."""
    url = StoreURL.parse(store_url(args))
    if url.parts.scheme == "etcd":
        return url
    async with _quorum(args) as store:
        entries = await store.list("nodes")
    found = [each.value.decode() for each in entries if each.key.endswith("/etcd")]
    hosts = sorted(each.partition("://")[2] for each in found)
    if not hosts:
        raise ConfigError(
            "no node of this quorum serves etcd's API: start its nodes with --etcd HOST:PORT"
        )
    kept = {name: url.options[name] for name in TLS_OPTIONS if name in url.options}
    if any(each.startswith("https:") for each in found):
        kept.setdefault("tls", "true")
    return StoreURL.parse(f"etcd://{','.join(hosts)}?{urlencode(kept)}")


def _progress() -> Callable[[str, int, int], None]:
    """Shows how far a copy is: on one line of a terminal, or as a line now and then."""
    terminal = sys.stderr.isatty()
    every = PROGRESS_S if terminal else PROGRESS_S * 20
    last = time.monotonic()

    def show(what: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last < every and not (terminal and done == total):
            return
        last = now
        line = f"{what}: {done:,} of {max(done, total):,}"
        if terminal:
            end = "\n" if done >= total else ""
            print(f"\r\x1b[K{line}", end=end, file=sys.stderr, flush=True)
        else:
            print_note(line)

    return show


ACTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {
    "status": _status,
    "backup": _backup,
    "import": _copy,
    "export": _copy,
}
