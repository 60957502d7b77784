"""`Node`: one server of an embedded quorum, in the user's own process.

    async with doyen.Node("n1", peers={...}, data_dir="/var/lib/app", found=True) as node:
        await node.propose(b"...")

A node runs on a thread with an event loop of its own, so that code which blocks the caller's loop
cannot delay its heartbeats. `Node` is the bridge: what a caller proposes in one turn of its loop is
handed to that thread together, and so are the results.

    driver            one node's consensus (its docstring lists the parts)
    service           the store port for clients (its docstring lists the parts)
    lease_keeper      eras, renewals and ends of leases, on the node that leads
    replicated        commands carried out once, and the state machines behind them
    journal           the log and the snapshots on disk (with `data_directory`, `framed_files`)
    membership        the ids of nodes and clusters, founding
    roles             what peers, administrators, clients and onlookers may do
    peers, listener   connections to other nodes; the sockets that a node listens on
    server            a real node, put together

Importing this imports none of those, so msgspec is needed only when a node is made.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping, Sequence
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, Unpack

from doyen._waiting import outlast, shared
from doyen.errors import ConfigError, SessionClosed
from doyen.quorum.node.state_machine import StateMachine

if TYPE_CHECKING:
    from doyen.quorum.node.driver import Status
    from doyen.quorum.node.proposals import Proposals
    from doyen.quorum.node.server import NodeOptions, NodeServer
    from doyen.quorum.protocol.security import TLS
    from doyen.session import ConnectOptions, Session

__all__ = ["Node", "NodeRole", "StateMachine"]

T = TypeVar("T")


class NodeRole(NamedTuple):
    """What a node does, in which generation, and which node leads."""

    role: str
    generation: int
    leader: str | None


class Node:
    """One server of an embedded quorum, running in this process.

        async with doyen.Node("n1", peers=peers, data_dir="data/n1", found=True) as node:
            print(node.role, node.leader)
            total = await node.propose(b"add 1")

    `peers` names every node's address, including this one's; all nodes are started with the same
    list. With `found`, nodes with empty data directories found a cluster once all of them are
    connected. With `join`, this node waits to be added to a cluster that exists. An empty data
    directory needs one of the two; with one that has data, neither has an effect. The context is
    entered when the node runs, which may be before a leader is elected. On exit, leadership is
    transferred first. `machine` (see `StateMachine`) carries out what the quorum agrees on.
    """

    def __init__(
        self,
        id: str,  # noqa: A002  (the usual name)
        *,
        peers: Mapping[str, str],
        data_dir: str | os.PathLike[str],
        listen: str | None = None,
        cluster: str = "doyen",
        secret: str | None = None,
        peer_secret: str | None = None,
        admin_secret: str | None = None,
        onlooker_secret: str | None = None,
        tls: TLS | None = None,
        insecure: bool = False,
        join: bool = False,
        found: bool = False,
        machine: StateMachine | None = None,
        election_s: float = 1.0,
        heartbeat_s: float = 0.1,
        protocol: str = "raft",
        quota_bytes: int = 1 << 30,
    ) -> None:
        try:
            from doyen.quorum.node.server import NodeOptions
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"a node needs {error.name}: install doyen[quorum] (pip install 'doyen[quorum]')"
            ) from error
        try:
            named = all(isinstance(text, str) for pair in peers.items() for text in pair)
        except AttributeError:
            named = False
        if not named:
            raise ConfigError(
                f'peers must be a dict such as {{"n1": "10.0.0.1:7400"}}; got {peers!r}'
            )
        self._options: NodeOptions = NodeOptions(
            id=id,
            peers=dict(peers),
            data_dir=data_dir,
            listen=listen,
            cluster=cluster,
            secret=secret,
            peer_secret=peer_secret,
            admin_secret=admin_secret,
            onlooker_secret=onlooker_secret,
            tls=tls,
            insecure=insecure,
            join=join,
            found=found,
            election_s=election_s,
            heartbeat_s=heartbeat_s,
            protocol=protocol,
            quota_bytes=quota_bytes,
        )
        self._machine = machine
        self._thread: _NodeThread | None = None
        self._opened: NodeServer | None = None
        self._observers: list[Callable[[], None]] = []

    @property
    def id(self) -> str:
        """This node's name among its peers."""
        return self._options.id

    async def __aenter__(self) -> Node:
        from doyen.quorum.node.server import NodeServer

        if self._thread is not None:
            raise SessionClosed("a node is entered once; make another")
        self._thread = thread = _NodeThread(self.id)
        opening = thread.submit(NodeServer.open(self._options, self._machine))
        try:
            self._opened = await shared(opening)
        except BaseException:
            await outlast(opening)  # if the caller was cancelled, it may still succeed
            if opening.exception() is None:
                await outlast(thread.submit(opening.result().close()))
            thread.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        server = self._running
        thread = self._inside
        self._opened = None
        closing = thread.submit(self._close(server))
        try:
            await shared(closing)
        finally:
            await outlast(closing)
            thread.stop()

    async def _close(self, server: NodeServer) -> None:
        """Runs on the node's thread."""
        server.driver.report_roles()  # what happened before belongs before the end
        for end_of_changes in [*self._observers]:
            end_of_changes()
        await server.close()

    @property
    def _running(self) -> NodeServer:
        if self._opened is None:
            raise SessionClosed("the node is not running: enter it with `async with`")
        self._inside  # noqa: B018 - in a forked child, what is known of it would be stale
        return self._opened

    @property
    def _inside(self) -> _NodeThread:
        if self._thread is None:
            raise SessionClosed("the node is not running: enter it with `async with`")
        if self._thread.forked:
            raise SessionClosed("this node belongs to the parent process; a child has none")
        return self._thread

    async def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return await self._inside.submit(work)

    @property
    def role(self) -> str:
        """`looking`, `following` or `leading`."""
        return str(self._running.driver.role)

    @property
    def generation(self) -> int:
        """The number of the current leadership, or of the latest attempt at one. It only grows."""
        return self._running.driver.generation

    @property
    def leader(self) -> str | None:
        """The node that leads in this generation, as far as this node knows."""
        return self._running.driver.leader

    def status(self) -> Status:
        """The state of this node."""
        return self._running.driver.status()

    async def observe(self) -> AsyncGenerator[NodeRole, None]:
        """The role, generation and leader now, then after every change, until the node is closed.

        async for now in node.observe():
            print(now.role, now.leader)
        """
        driver, loop = self._running.driver, asyncio.get_running_loop()
        changes: asyncio.Queue[NodeRole | None] = asyncio.Queue()
        end_of_changes = partial(_NodeThread.call, loop, changes.put_nowait, None)

        def deliver(role: str, generation: int, leader: str | None) -> None:
            change = NodeRole(str(role), generation, leader)
            self._inside.call(loop, changes.put_nowait, change)

        async def begin() -> None:
            driver.observe_role(deliver)
            deliver(driver.role, driver.generation, driver.leader)

        async def end() -> None:
            driver.unobserve_role(deliver)

        self._observers.append(end_of_changes)
        try:
            await self._do(begin())
            while (change := await changes.get()) is not None:
                yield change
        finally:
            self._observers.remove(end_of_changes)
            if self._opened is not None:
                await self._do(end())

    async def propose(self, command: bytes) -> Any:
        """Have the state machine of every node carry out `command`; return its result.

        Returns once a majority has it on disk and the leader has carried it out. May be called on
        any node: the command goes to the leader, is proposed again if a leader is lost, and is
        carried out once. Raises `CommandFailed` with the machine's own error, `StoreUnavailable`
        if it was certainly not carried out, `OutcomeUnknown` if that is not known in time.
        """
        thread, server = self._thread, self._opened
        if thread is None or server is None or thread.forked:
            thread, server = self._inside, self._running
        bridge, here, home = thread.last_bridge
        # `get_running_loop` is a system call in some versions of Python.
        if here != get_ident() or not home.is_running():
            bridge = thread.bridge(server.driver.proposals)
        return await bridge.propose(command)

    async def barrier(self) -> None:
        """When this returns, the state machine of this node shows every command that was
        acknowledged before the call, so what is read from it is current."""
        await self._do(self._running.driver.barrier())

    def session(self, **options: Unpack[ConnectOptions]) -> Session:
        """A session with this quorum as its store, as `doyen.connect` returns it, with the options
        of `connect`.

            async with node.session(ttl_s=2) as session:
                async with session.campaign("billing") as term: ...

        It connects to this node, and to another one while this one knows of no leader.
        """
        from doyen.session import connect

        return connect(self._options.url, **options)

    async def transfer(self, to: str = "") -> None:
        """Transfer leadership to `to`, or to the voter with the longest log. Waits for it."""
        await self._do(self._running.driver.admin.transfer(to))

    async def add(self, node: str, address: str) -> None:
        """Add a learner: it receives the log and does not vote until it is promoted."""
        await self._do(self._running.driver.admin.perform("add", node, address))

    async def promote(self, node: str) -> None:
        """Make a learner a voter."""
        await self._do(self._running.driver.admin.perform("promote", node))

    async def remove(self, node: str) -> None:
        """Remove a member from the quorum."""
        await self._do(self._running.driver.admin.perform("remove", node))


class _NodeThread:
    """A thread with an event loop of its own."""

    def __init__(self, node: str) -> None:
        self.forked = False
        self.loop = new_loop()
        self.last_bridge: tuple[Any, int, Any] = None, 0, None
        """The bridge that was used last, the thread and the loop that it is for."""
        self._bridges: dict[asyncio.AbstractEventLoop, _ProposalBridge] = {}
        self._thread = threading.Thread(target=self._run, name=f"doyen-{node}", daemon=True)
        self._thread.start()
        _track(self)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        leftover = asyncio.all_tasks(self.loop)
        for task in leftover:
            task.cancel()
        if leftover:
            self.loop.run_until_complete(asyncio.wait(leftover))
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def submit(self, work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
        """Run this on the thread; the result is for the calling loop."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()

    def bridge(self, proposals: Proposals) -> _ProposalBridge:
        """The bridge for the calling loop's proposals."""
        loop = asyncio.get_running_loop()
        bridge = self._bridges.get(loop)
        if bridge is None:
            for each in [each for each in [*self._bridges] if each.is_closed()]:
                self._bridges.pop(each, None)
            bridge = self._bridges[loop] = _ProposalBridge(loop, self.loop, proposals)
        self.last_bridge = bridge, get_ident(), loop
        return bridge

    @staticmethod
    def call(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *given: object) -> None:
        try:
            loop.call_soon_threadsafe(call, *given)
        except RuntimeError:
            pass  # that loop is closed: nothing waits there any more


_threads: weakref.WeakSet[_NodeThread] = weakref.WeakSet()
_fork_hook_installed = False


def _track(thread: _NodeThread) -> None:
    """Mark the thread in forked children, in which it does not exist."""
    global _fork_hook_installed
    if not _fork_hook_installed:
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_after_fork_in_child)
    _threads.add(thread)


def _after_fork_in_child() -> None:
    for thread in _threads:
        thread.forked = True


def new_loop() -> asyncio.AbstractEventLoop:
    """The fastest kind of loop that is installed."""
    try:
        from uvloop import new_event_loop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    return new_event_loop()


class _ProposalBridge:
    """Takes proposals of one loop to the node's loop, and the results back: one call between the
    threads per turn and direction. `propose`, `_hand_in` and `_set_results` run on the caller's
    loop, the rest on the node's."""

    def __init__(
        self,
        home: asyncio.AbstractEventLoop,
        node: asyncio.AbstractEventLoop,
        proposals: Proposals,
    ) -> None:
        self._home = home
        self._node = node
        self._proposals = proposals
        self._commands: list[bytes] = []
        self._futures: list[asyncio.Future[Any]] = []
        """Of the commands, in their order."""
        self._outbox: list[_Outcomes] = []

    def propose(self, command: bytes) -> asyncio.Future[Any]:
        future: asyncio.Future[Any] = self._home.create_future()
        if not self._commands:
            self._home.call_soon(self._hand_in)
        self._commands.append(command)
        self._futures.append(future)
        return future

    def _hand_in(self) -> None:
        commands, self._commands = self._commands, []
        futures, self._futures = self._futures, []
        try:
            self._node.call_soon_threadsafe(self._take_in, commands, futures)
        except RuntimeError:
            for future in futures:
                _set_results([((future,), (), SessionClosed("the node has stopped"))])

    def _take_in(self, commands: list[bytes], futures: list[asyncio.Future[Any]]) -> None:
        proposals, settle = self._proposals, self._settle
        if proposals.submit_all(_USER, commands, futures, settle, self._settle_all):
            return
        for command, future in zip(commands, futures, strict=True):
            try:
                proposals.submit(_USER, command, settle, tag=future)
            except Exception as error:  # noqa: BLE001 - the proposer receives it
                settle(future, None, error)

    def _settle(self, future: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
        self._put_out(((future,), (value,), error))

    def _settle_all(self, futures: Sequence[asyncio.Future[Any]], values: Sequence[Any]) -> None:
        self._put_out((futures, values, None))

    def _put_out(self, outcomes: _Outcomes) -> None:
        if not self._outbox:
            self._node.call_soon(self._hand_out)
        self._outbox.append(outcomes)

    def _hand_out(self) -> None:
        outbox, self._outbox = self._outbox, []
        _NodeThread.call(self._home, _set_results, outbox)


_Outcomes = tuple[Sequence[asyncio.Future[Any]], Sequence[Any], BaseException | None]
"""Futures of proposals, and the result of each or the error of all."""


def _set_results(outbox: list[_Outcomes]) -> None:
    for futures, values, error in outbox:
        if error is not None:
            for future in futures:
                if not future.done():
                    future.set_exception(error)
            continue
        for future, value in zip(futures, values, strict=True):
            if not future.done():
                future.set_result(value)


_USER = 1
"""The number of the user's state machine (see `replicated`)."""
