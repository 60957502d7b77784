"""The warden: watches over holders and ends the leases of those that have died.

One object serves both forms: the daemon of a host, which accepts links at its socket, and the child
of a process, which receives them over an inherited one.

Nothing is kept on disk. If the warden is started anew, sessions register again; their tables are
the same. While nothing happens it does not wake up, except for the ticks of sessions that asked for
`frozen_after_s`.

Runs on an event loop of its own, in a process of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import resource
import secrets
import socket

from doyen.events.log_lines import log_line
from doyen.lease.clock import Clock, SystemClock
from doyen.stores.port import Context, Store, load_adapter, open_store
from doyen.warden.ending import KeptStores, LeaseEnder, Opener, Witness
from doyen.warden.kernel import KernelConnection
from doyen.warden.table import WardedLease
from doyen.warden.watched import HolderConnection, WatchedSession
from doyen.warden.wire import Hello, Refused, Welcome, encode_reply, environment_of

__all__ = ["Warden"]

log = logging.getLogger("doyen.warden")

_BACKLOG = 1024
ACCEPT_AGAIN_S = 1.0
REHEARSE_S = 5.0
FINISH_S = 5.0
"""How long a warden that is stopped goes on ending leases of holders that have died."""
SUCCESSOR_S = 0.1
"""How long a warden that has ended leases waits before it closes connections or exits."""
GIVE_UP_S = 24 * 3600.0
"""How long a store that does not answer at all is tried, after a holder has died."""


class Warden:
    """Serves any number of sessions."""

    def __init__(
        self,
        opener: Opener | None = None,
        clock: Clock | None = None,
        give_up_s: float = GIVE_UP_S,
    ) -> None:
        self._clock = clock or SystemClock()
        self._loop = asyncio.get_running_loop()
        self._stores = KeptStores(opener or self._open_store)
        self.witness = Witness(self._clock, f"warden-{secrets.token_hex(8)}")
        self._ender = LeaseEnder(self._stores, self.witness, self._clock, give_up_s)
        self._greeting: set[socket.socket] = set()
        """Links over which no session has introduced itself yet."""
        self._sessions: set[WatchedSession] = set()
        self._ending: set[asyncio.Task[None]] = set()
        self._sources: set[int] = set()
        """Descriptors from which more sessions may come."""
        self._idle = asyncio.Event()
        self._hurried = False

    @property
    def sessions(self) -> int:
        """How many sessions are registered."""
        return len(self._sessions)

    def listen(self, listener: socket.socket) -> None:
        """Serve the sessions that connect to this socket."""
        _allow_many_descriptors()
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._sources.add(listener.fileno())
        self._loop.add_reader(listener, self._accept, listener)

    def attend(self, control: socket.socket, owner: int) -> None:
        """Serve the sessions whose links arrive over `control`, until that ends or the process of
        the pidfd `owner` has died."""
        control.setblocking(False)
        self._sources |= {control.fileno(), owner}
        self._loop.add_reader(control, self._receive_links, control)
        self._loop.add_reader(owner, self._owner_died, control)

    async def run(self) -> None:
        """Return when no session is left and none can come."""
        self._check_idle()
        await self._idle.wait()
        await self.stop(0.0)

    def hurry(self) -> None:
        """Once no session is left and none can come, go on ending leases for `FINISH_S` at
        most."""
        self._hurried = True
        self._check_idle()

    async def stop(self, within_s: float) -> None:
        """Stop watching holders, and go on ending leases for at most this long."""
        self._no_more_sessions()
        for link in list(self._greeting):
            self._loop.remove_reader(link)
            link.close()
        self._greeting.clear()
        for session in list(self._sessions):
            session.abandon()
        if self._ending:
            await asyncio.wait(list(self._ending), timeout=within_s)
        for task in self._ending:
            task.cancel()
        await asyncio.gather(*self._ending, return_exceptions=True)
        await self._stores.close()

    def watch(self, hello: Hello, connection: HolderConnection) -> WatchedSession:
        """Watch over a session."""
        self._stores.acquire(hello.url)
        if hello.audit is not None:
            self.witness.prepare()
        session = WatchedSession(hello, connection, self._over)
        self._sessions.add(session)
        session.start()
        return session

    def _accept(self, listener: socket.socket) -> None:
        try:
            link, _ = listener.accept()
        except OSError as error:
            # Out of descriptors, for instance. The connection stays pending and would wake this
            # loop again at once, so wait before accepting.
            log.warning("%s", log_line(event="link_refused", error=error))
            self._loop.remove_reader(listener)
            self._loop.call_later(ACCEPT_AGAIN_S, self._accept_again, listener)
            return
        self._expect_hello(link)

    def _accept_again(self, listener: socket.socket) -> None:
        if listener.fileno() in self._sources:
            self._loop.add_reader(listener, self._accept, listener)

    def _receive_links(self, control: socket.socket) -> None:
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(control, 1, 1)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
                self._expect_hello(socket.socket(fileno=descriptor))
            if not data:
                self._no_more_sessions()
                return

    def _owner_died(self, control: socket.socket) -> None:
        self._receive_links(control)  # those that it had sent before
        self._no_more_sessions()

    def _no_more_sessions(self) -> None:
        for source in self._sources:
            self._loop.remove_reader(source)
        self._sources.clear()
        self._check_idle()

    def _expect_hello(self, link: socket.socket) -> None:
        link.setblocking(False)
        self._greeting.add(link)
        self._loop.add_reader(link, self._receive_hello, link)

    def _receive_hello(self, link: socket.socket) -> None:
        try:
            hello, connection = KernelConnection.accept(link)
        except BlockingIOError:
            return
        except (Refused, OSError) as error:
            self._reply(link, Refused(str(error)))
            link.close()
            return
        try:
            _require_same_environment(hello)
        except Refused as error:
            self._reply(link, error)
            connection.close()
            return
        self._reply(link, Welcome(os.getpid()))
        log.debug("%s", log_line(event="session_registered", session=hello.session))
        self.watch(hello, connection)

    def _reply(self, link: socket.socket, reply: Welcome | Refused) -> None:
        if isinstance(reply, Refused):
            log.warning("%s", log_line(event="session_refused", reason=reply))
        self._loop.remove_reader(link)
        self._greeting.discard(link)
        with contextlib.suppress(OSError):
            link.send(encode_reply(reply), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        # Soon, not now: a session that is welcome is not among those that are watched over yet.
        self._loop.call_soon(self._check_idle)

    def _over(self, session: WatchedSession, leases: list[WardedLease] | None) -> None:
        """A session is no longer watched over: its holder has died, or closed it."""
        self._sessions.discard(session)
        task = self._loop.create_task(self._conclude(session, leases or []))
        self._ending.add(task)
        task.add_done_callback(self._concluded)
        self._check_idle()

    async def _conclude(self, session: WatchedSession, leases: list[WardedLease]) -> None:
        try:
            await self._ender.end(session.hello, leases)
            if leases:
                # The successor needs the processors now. To close a connection can keep the server
                # busy for several ms, and so can the end of this process.
                await asyncio.sleep(SUCCESSOR_S)
        finally:
            session.connection.close()
            self._stores.release(session.hello.url)

    def _concluded(self, task: asyncio.Task[None]) -> None:
        self._ending.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("%s", log_line(event="ending_failed"), exc_info=task.exception())
        self._check_idle()

    def _check_idle(self) -> None:
        if self._sources or self._greeting or self._sessions:
            return
        if not self._ending:
            self._idle.set()
        elif self._hurried:
            self._hurried = False
            self._loop.call_later(FINISH_S, self._idle.set)

    async def _open_store(self, url: str) -> Store:
        # Off the loop: to import a client library can take half a second.
        await asyncio.to_thread(load_adapter, url)
        context = Context(self._clock, lambda _: None, create=False, ends_only=True)
        store = await open_store(url, context)
        await _rehearse(store)
        return store


async def _rehearse(store: Store) -> None:
    """Do once what ends a lease: what runs for the first time is several times as slow. Then return
    the memory that only the start needed."""
    try:
        async with asyncio.timeout(REHEARSE_S):
            await store.rehearse()
    except Exception as error:  # noqa: BLE001 - nothing depends on it
        log.debug("%s", log_line(event="rehearsal_failed", error=error))
    gc.collect()
    gc.freeze()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _require_same_environment(hello: Hello) -> None:
    """Raise `Refused` if client libraries would take other credentials from the environment."""
    given = environment_of(hello.environment)
    here = environment_of(dict(os.environ))
    differing = sorted(name for name in {*given, *here} if given.get(name) != here.get(name))
    if differing:
        raise Refused(
            f"the environments of session and warden differ in {', '.join(differing)}: put the"
            ' credentials into the URL, or use warden="process"'
        )


def _allow_many_descriptors() -> None:
    """A session has three descriptors, and the limit is often 1,024 by default."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
