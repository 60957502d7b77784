"""`doyen cluster …`: look at a quorum of nodes, change who belongs to it, back it up."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from doyen.cli._manual import manual
from doyen.cli._output import Exit, Table, console, print_json, printable, seconds, store_url
from doyen.errors import ConfigError, OrderFailed, StoreUnavailable, StoreUnusable
from doyen.stores.port import StoreURL

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from doyen.quorum.protocol.requests import Copied, Origin
    from doyen.stores.quorum.diagnosis import NodeAnswer
    from doyen.stores.quorum.store import QuorumStore

__all__ = ["MANUAL", "configure", "run"]

MANUAL = """\
For quorums of doyen's own nodes (doyen serve); --store names some of them:
doyen://h1:7400,h2:7400,h3:7400. Whatever node is asked, the one that leads decides.

To replace a node, or to have five instead of three: start the new one with --join, add it, wait
until status shows that it has caught up, promote it; then remove the old one. One change at a time;
each is refused until the one before it is agreed on, or if too few of those who then count answer.
To add a node that belongs already, at another address, is how it moves. To remove one that is
needed (two voters or one would be left, or none that is up to date) asks first; where nobody can be
asked it is refused, unless --force is given. Changes and backups need an administrator's secret or
certificate.

A node that has lost its data folder, or has an older copy of it, is refused by the others: remove
it, empty the folder, start it with --join, add and promote it.

A backup is taken from the running quorum, at one instant, as one checksummed file. If a majority of
the nodes is lost for good, --data-dir takes one from the folder of a node that is stopped. Take one
from each folder there is, and keep that of the latest generation, and among those of the highest
index; what only lost nodes had is lost. A backup is restored on every node of a new cluster, with
the same file and a cluster name of its own, before they are started. Tokens then go on far above
those of the backup; name --token-floor if the old cluster may have given out more than a thousand
million since.

exit codes:
  0    done; status: every node answers, and every member knows who leads
  1    the order was not carried out; status: a node is silent, or a member
       knows of no leader
  others as for every command: see doyen --help

examples:
  doyen cluster status --store doyen://h1,h2,h3
  doyen cluster add n4 h4:7400 && doyen cluster promote n4
  doyen cluster remove n1
  doyen cluster backup /backups/today
  doyen cluster backup /backups/what-is-left --data-dir /var/lib/doyen
  doyen cluster restore /backups/today --config node.toml --cluster prod-2
"""

AGAIN_S = 0.1
"""How soon an order is given again that was refused for now."""
SILENCE_S = 30.0
"""How long a backup waits for its next piece."""
TOKENS = 10**9
"""How far above a backup's tokens a restored cluster goes on."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ACTION", title="actions", help="what to do"
    )

    def action(name: str, summary: str) -> argparse.ArgumentParser:
        added = actions.add_parser(
            name, help=summary, description=f"{summary.capitalize()}.", allow_abbrev=False
        )
        added.add_argument(
            "--json",
            action="store_true",
            default=argparse.SUPPRESS,
            help="print JSON for programs",
        )
        if name != "restore":
            added.add_argument(
                "--store", metavar="URL", help="doyen://h1:7400,… (default: $DOYEN_STORE)"
            )
        if name not in ("status", "backup", "restore"):
            added.add_argument(
                "--wait",
                type=seconds,
                default=10.0,
                metavar="SECONDS",
                help="how long it may take (default: 10)",
            )
        return added

    action("status", "show every node: its role, how far along it is, what it holds")
    add = action("add", "add a node, which gets everything and counts for nothing yet")
    add.add_argument("node", metavar="NAME", help="the node's name, its --id")
    add.add_argument("address", metavar="HOST:PORT", help="where the others reach it")
    promote = action("promote", "let a node that was added count")
    promote.add_argument("node", metavar="NAME", help="the node's name")
    remove = action("remove", "take a node out")
    remove.add_argument("node", metavar="NAME", help="the node's name")
    remove.add_argument("--force", action="store_true", help="do not ask, whatever it puts at risk")
    transfer = action("transfer", "have another node lead")
    transfer.add_argument("node", metavar="NAME", nargs="?", default="", help="default: the best")
    backup = action("backup", "copy everything into a file")
    backup.add_argument("file", metavar="FILE", help="a new one")
    backup.add_argument(
        "--data-dir", metavar="FOLDER", help="from the memory of a node that is stopped"
    )
    restore = action("restore", "begin a new cluster from a backup, on this node")
    restore.add_argument("file", metavar="FILE", help="what backup has written")
    restore.add_argument(
        "--config", metavar="FILE", help="the node's settings, as for doyen serve (default: none)"
    )
    for option, looks, meaning in (
        ("--cluster", "NAME", "the new cluster's name; not the old one's"),
        ("--id", "NAME", "this node's name"),
        ("--peers", "NAME=HOST:PORT,…", "every node's address, this one's included"),
        ("--data-dir", "FOLDER", "where this node shall keep its memory; empty"),
    ):
        restore.add_argument(option, metavar=looks, help=f"{meaning} (default: as configured)")
    restore.add_argument("--token-floor", type=int, metavar="N", help="tokens go on above N")


def run(args: argparse.Namespace) -> int:
    """Do one of them."""
    try:
        import msgspec  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError("doyen cluster needs msgspec: pip install 'doyen[quorum]'") from error
    if args.action == "restore":
        return _restore(args)
    if args.action == "backup" and Path(args.file).exists():
        raise ConfigError(f"{args.file} is there already: name a new file")
    if args.action == "backup" and args.data_dir:
        return _backup_folder(args)
    code: int = asyncio.run(ACTIONS.get(args.action, _arrange)(args))
    return code


@asynccontextmanager
async def _quorum(args: argparse.Namespace) -> AsyncIterator[QuorumStore]:
    """The quorum, whether or not it has a leader."""
    url = StoreURL.parse(store_url(args))
    if url.parts.scheme != "doyen":
        raise ConfigError(f"{url.text} is not a quorum: --store doyen://h1:7400,h2:7400,h3:7400")
    from doyen.stores.quorum import make_store

    store = make_store(url)
    try:
        yield store
    finally:
        await store.close()


async def _insist(order: Callable[[], Awaitable[None]], args: argparse.Namespace) -> None:
    """Give the order, again while it is refused for now only: a learner is behind, say."""
    refusal: StoreUnusable | None = None
    try:
        async with asyncio.timeout(args.wait):
            while True:
                try:
                    return await order()
                except StoreUnusable as error:
                    if "ask again" not in str(error):
                        raise OrderFailed(str(error)) from error
                    refusal = error
                    await asyncio.sleep(AGAIN_S)
    except TimeoutError as error:
        if refusal is not None:
            raise OrderFailed(f"not within {args.wait:g} s: {refusal}") from refusal
        raise OrderFailed(
            f"not known to be done within {args.wait:g} s: look with doyen cluster status"
        ) from error


def _confirm_removal(node: str, risks: list[str]) -> None:
    """Ask if something is at risk. Raises `OrderFailed` unless the answer is yes."""
    if not risks:
        return
    text = f"removing {node} is dangerous: {'; '.join(risks)}"
    remedy = "Add another node first (doyen cluster add, promote), or use --force"
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise OrderFailed(f"{text}. Nothing was done. {remedy}")
    print(f"{text}.\nRemove {node} all the same? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise OrderFailed(f"{node} was not removed. {remedy}")


async def _arrange(args: argparse.Namespace) -> int:
    from doyen.stores.quorum.diagnosis import risks_of_removal

    async with _quorum(args) as store:
        address = getattr(args, "address", "")
        if args.action == "remove" and not args.force:
            risks = risks_of_removal(await store.inspect(), args.node)
            await asyncio.to_thread(_confirm_removal, args.node, risks)
        await _insist(lambda: store.arrange(args.action, args.node, address), args)
        states = await store.inspect()
    conditions = [state.condition for state in states if state.condition is not None]
    leads = next((each for each in conditions if each.role == "leading"), None)
    if args.json:
        told = {"voters": list(leads.voters), "learners": list(leads.learners)} if leads else {}
        print_json({"done": args.action, "node": args.node, **told, "leader": leads and leads.node})
        return Exit.DONE
    leader = leads.node if leads else "nobody"
    console().print(
        {
            "add": f"{args.node} belongs to the quorum, at {address};"
            f" it {'counts' if leads and args.node in leads.voters else 'counts once promoted'}",
            "promote": f"{args.node} counts now",
            "remove": f"{args.node} does not belong to the quorum: it may be stopped",
            "transfer": f"{leader} leads now",
        }[args.action]
    )
    return Exit.DONE


async def _status(args: argparse.Namespace) -> int:
    from doyen.stores.quorum.diagnosis import outsiders

    async with _quorum(args) as store:
        states = await store.inspect()
    outside = outsiders(states)  # there are some only if somebody leads
    well = all(
        state.condition and (state.condition.leader or state.condition.node in outside)
        for state in states
    )
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
                console().print(f"quota: writes are refused, {used} of {quota} bytes are in use")
    return Exit.DONE if well else Exit.NO


def _as_dict(state: NodeAnswer, outside: set[str]) -> dict[str, Any]:
    if state.condition is None:
        node = {"node": state.node} if state.node else {}
        return {"address": state.address, **node, "silent_because": state.silent_because}
    condition = state.condition
    told = {name: getattr(condition, name) for name in condition.__struct_fields__ if name != "id"}
    return {"address": state.address, "outside": condition.node in outside, **told}


def _row(state: NodeAnswer, outside: set[str]) -> list[str]:
    told, address = state.condition, printable(state.address)
    if told is None:
        return [printable(state.node) or "?", address, "silent", "", "", "", "", ""]
    role = "learning" if told.node in told.learners else told.role
    role = "outside" if told.node in outside else role
    numbers = map(str, (told.generation, told.applied, told.keys, told.clients))
    disk = "full" if told.full else "ok"
    return [printable(told.node), address, printable(role), *numbers, disk]


async def _backup(args: argparse.Namespace) -> int:
    """Pieces go to a thread that writes them, as they come."""
    from doyen.quorum.node.backup import write_backup
    from doyen.quorum.node.data_directory import DirectoryIdentity

    target = Path(args.file)
    pieces: SimpleQueue[Copied | None] = SimpleQueue()
    origins: list[Origin] = []
    loop = asyncio.get_running_loop()
    patience = asyncio.timeout(SILENCE_S)

    def take(piece: Copied) -> None:
        patience.reschedule(loop.time() + SILENCE_S)
        if piece.origin is not None:
            origins.append(piece.origin)
            if len(origins) > 1:
                pieces.put(None)
        pieces.put(piece)

    def write() -> int:
        first = pieces.get()
        if first is None or first.origin is None:
            raise StoreUnavailable("the quorum broke off; nothing was written: try again")
        origin = first.origin
        identity = DirectoryIdentity(origin.cluster, origin.node, origin.protocol)
        return write_backup(target, identity, b"", origin.snapshot, _until_the_end(pieces)).bytes

    async with _quorum(args) as store:
        writing = asyncio.create_task(asyncio.to_thread(write))
        try:
            async with patience:
                await store.copy(take)
        except BaseException as error:
            pieces.put(None)
            await asyncio.gather(writing, return_exceptions=True)  # `error` says more
            if isinstance(error, TimeoutError):
                raise StoreUnavailable(
                    f"no node has sent anything for {SILENCE_S:g} s; nothing was written"
                ) from error
            raise
        size = await writing
    upto = origins[-1].snapshot
    return _backed_up(args, size, upto.index, upto.generation)


def _backup_folder(args: argparse.Namespace) -> int:
    from doyen.quorum.node.backup import backup

    contents = backup(Path(args.data_dir), Path(args.file))
    return _backed_up(args, contents.bytes, contents.last, contents.generation)


def _backed_up(args: argparse.Namespace, size: int, index: int, generation: int) -> int:
    if args.json:
        print_json({"file": args.file, "bytes": size, "index": index, "generation": generation})
    else:
        console().print(
            f"{args.file} has everything up to index {index} of generation {generation},"
            f" {size:,} bytes"
        )
    return Exit.DONE


def _until_the_end(pieces: SimpleQueue[Copied | None]) -> Iterator[bytes]:
    while True:
        piece = pieces.get()
        if piece is None:
            raise StoreUnavailable("the quorum broke off; nothing was written: try again")
        if piece.piece:
            yield piece.piece
        if not piece.more:
            return


def _restore(args: argparse.Namespace) -> int:
    from doyen.cli.serve import options
    from doyen.quorum.consensus.core import Membership
    from doyen.quorum.keyspace.state import Advance, encode
    from doyen.quorum.node.backup import restore
    from doyen.quorum.node.data_directory import DirectoryIdentity
    from doyen.quorum.node.replicated import KEYSPACE, Command, encode_batch

    asked = options(vars(args), os.environ)
    node, peers, folder = asked["id"], asked["peers"], asked["data_dir"]
    cluster = asked.get("cluster", "doyen")
    if node not in peers:
        raise ConfigError(f"node {node!r} is not among the peers {', '.join(peers)}")
    lift = Advance(args.token_floor or 0, TOKENS)
    contents = restore(
        Path(args.file),
        Path(folder),
        DirectoryIdentity(cluster, node, asked.get("protocol", "raft")),
        Membership(tuple(sorted(peers)), (), peers),
        [encode_batch([Command("restore", 1, 1, KEYSPACE, encode(lift))])],
    )
    if args.json:
        print_json({"node": node, "cluster": cluster, "last": contents.last})
    else:
        console().print(
            f"{folder} holds the backup for {node} of cluster {cluster};"
            " do the same on the others, then start them all with doyen serve"
        )
    print("the old cluster must not be started again beside this one", file=sys.stderr)
    return Exit.DONE


ACTIONS: dict[str, Callable[[argparse.Namespace], Any]] = {"status": _status, "backup": _backup}
