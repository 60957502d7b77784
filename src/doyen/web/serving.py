"""Runs the server of the page: in the foreground (`doyen dash`) or on a thread (`doyen up`)."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from doyen.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp

    from doyen.web.observation import StoreObservation
    from doyen.web.server import Access

__all__ = ["PageListener", "PageThread", "http_server", "listen", "require_web", "serve"]

TRIED_S = 3.0
"""How long the address is held back while it is open whether there is such a store."""
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def require_web() -> None:
    """Raise `ConfigError` if the extra is not installed."""
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"the page needs {error.name}, which is not installed: pip install 'doyen[web]'"
        ) from error


@dataclass(frozen=True, slots=True)
class PageListener:
    """The socket of the server, and how the server may be reached."""

    socket: socket.socket
    host: str
    port: int
    access: Access

    @property
    def url(self) -> str:
        """The address for a browser. With actions, or away from loopback, it has the token."""
        access = self.access
        needed = access.allow_actions or access.reading_needs_token
        shown = "localhost" if self.host in ("0.0.0.0", "::") else self.host
        name = f"[{shown}]" if ":" in shown else shown
        return f"http://{name}:{self.port}/" + (f"#token={access.token}" if needed else "")


def listen(
    address: str,
    *,
    hosts: Sequence[str] = (),
    allow_actions: bool = False,
    token: str = "",
) -> PageListener:
    """Bind the address, which is HOST:PORT. Port 0 is any free one."""
    from doyen.web.server import Access

    host, colon, number = address.rpartition(":")
    host = host.strip("[]")
    if not colon or not host or not number.isdecimal() or int(number) > 65535:
        raise ConfigError(f"the address to listen on is HOST:PORT, not {address!r}")
    try:
        family = socket.getaddrinfo(host, int(number), type=socket.SOCK_STREAM)[0]
        bound = socket.socket(*family[:3])  # asyncio sets TCP_NODELAY if the protocol is named
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(family[4])
        bound.listen(128)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"cannot listen on {address}: {error.strerror}; choose another with --listen"
        ) from error
    port = bound.getsockname()[1]
    local = ipaddress.ip_address(bound.getsockname()[0]).is_loopback
    own = {*LOOPBACK, f"[{host}]" if ":" in host else host.lower()}
    accepted = {f"{name}:{port}" for name in own} | {name.lower() for name in hosts}
    if port == 80:
        accepted |= own
    access = Access(
        hosts=frozenset(accepted),
        token=token or secrets.token_urlsafe(24),
        allow_actions=allow_actions,
        reading_needs_token=not local,
    )
    return PageListener(bound, host, port, access)


async def serve(
    observation: StoreObservation, listener: PageListener, ready: Callable[[], None] = lambda: None
) -> None:
    """Serve until cancelled. `ready` is called when the page is served and the store was tried, so
    not if there is no such store; for one that takes long to answer it does not wait."""
    from doyen.web.observation import only_error
    from doyen.web.server import make_app

    started = asyncio.Event()

    async def announce() -> None:
        await started.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TRIED_S):
                await observation.tried.wait()
        ready()

    server = http_server(make_app(observation, listener.access), started.set)
    serving = asyncio.ensure_future(server.serve(sockets=[listener.socket]))
    observing = asyncio.ensure_future(observation.run())
    announcing = asyncio.ensure_future(announce())
    try:
        ends = {serving, observing}
        await asyncio.wait({*ends, announcing}, return_when=asyncio.FIRST_COMPLETED)
        if announcing.done() and announcing.exception() is None:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        observation.board.close()
        server.should_exit = True
        observing.cancel()
        announcing.cancel()
        await asyncio.wait({serving, observing, announcing})
    for task in (serving, observing, announcing):
        if not task.cancelled() and (error := task.exception()) is not None:
            raise only_error(error)


def http_server(app: ASGIApp, ready: Callable[[], None]) -> uvicorn.Server:
    """A server for an application. It handles no signals; `ready` is called when it serves."""
    import uvicorn

    class CommandServer(uvicorn.Server):
        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # signals are handled by the command

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready()

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        http="h11",
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    return CommandServer(config)


class PageThread:
    """Serves the page on a thread of its own, beside a program that does not use asyncio."""

    def __init__(self, observation: Callable[[], StoreObservation], listener: PageListener) -> None:
        self._make = observation
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._ready = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="doyen-page", daemon=True)

    def start(self) -> None:
        """Start the thread; returns when the page is served. Raises what prevents that."""
        self._thread.start()
        self._ready.wait()
        if self.error is not None:
            raise self.error

    @property
    def address(self) -> str:
        """The address for a browser, or why there is none any more."""
        return self._listener.url if self.error is None else f"the page has ended: {self.error}"

    def stop(self) -> None:
        """Stop serving, and wait for the end."""
        if self._loop is not None and self._task is not None:
            with contextlib.suppress(RuntimeError):  # it has ended
                self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except (asyncio.CancelledError, KeyboardInterrupt):
            pass
        except BaseException as error:  # noqa: BLE001 - kept for the owner
            self.error = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        await serve(self._make(), self._listener, self._ready.set)
