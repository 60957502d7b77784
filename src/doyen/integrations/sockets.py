"""A websocket that is passed on to the leader, message by message. Needs the library websockets.

The client's connection is accepted when the leader has accepted, with its subprotocol and headers.
A refusal is passed on as far as the server can. Whichever side closes, its code and reason are
passed on; if the leader dies or is replaced, the client gets 1012 and connects again. Each of the
two connections has pings of its own.
"""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import Iterable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus, InvalidURI
from websockets.typing import Subprotocol

from doyen.events.log_lines import log_line
from doyen.integrations.asgi import SERVICE_RESTART, Receive, Scope, SendMessage, deny
from doyen.integrations.forwarding import CONNECT_S, ForwardingRules, Headers, SendTo, returned

__all__ = ["PassedSocket"]

GOING_AWAY = 1001
WITHOUT_CODE = frozenset({1004, 1005, 1006, 1015})
"""Codes that are never sent: they stand for a connection that was closed without a code."""
log = logging.getLogger("doyen")


class _Connect(connect):
    unsent = False
    """Whether there is no connection yet, so that no byte can have been sent."""

    async def open_tcp_connection(self) -> ClientConnection:
        self.unsent = True
        connection = await super().open_tcp_connection()
        self.unsent = False
        return connection

    def process_redirect(self, exc: Exception) -> Exception | str:
        return exc  # not followed: it could lead anywhere


class PassedSocket:
    """One websocket, whose message `websocket.connect` has been received."""

    def __init__(
        self,
        rules: ForwardingRules,
        to: SendTo,
        target: bytes,
        scope: Scope,
        receive: Receive,
        send: SendMessage,
    ) -> None:
        self._to, self._scope, self._receive, self._send = to, scope, receive, send
        self._target = target
        self._accepted = False
        client = scope.get("client")
        secure = scope.get("scheme") == "wss"
        self._headers = rules.outgoing(
            to,
            scope["headers"],
            b"GET",
            target,
            body=False,
            client=client and client[0],
            scheme="https" if secure else "http",
        )

    def _connect(self) -> _Connect:
        """Raises `ValueError` or `InvalidURI` if the client's host and target are no URI."""
        to = self._to
        text = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in self._headers]
        host = dict(text)["host"] or to.netloc
        if not re.fullmatch(r"[\w.:\[\]-]+", host, re.ASCII):
            raise ValueError("the Host of the request is not a host and a port")
        scheme = "wss" if to.scheme == "https" else "ws"
        # The address is separate, because the application sees the host that its client asked for.
        tls: dict[str, Any] = {"server_hostname": to.host} if scheme == "wss" else {}
        return _Connect(
            f"{scheme}://{host}{self._target.decode('latin-1')}",
            host=to.host,
            port=to.port,
            **tls,
            additional_headers=[
                (name, value)
                for name, value in text
                if name != "host" and not name.startswith("sec-websocket-")
            ],
            subprotocols=[Subprotocol(each) for each in self._scope.get("subprotocols", ())]
            or None,
            compression=None,
            user_agent_header=None,
            proxy=None,
            open_timeout=CONNECT_S,
            close_timeout=CONNECT_S,
            max_size=None,  # the leader's server has limited what the client sends
        )

    async def run(self) -> str | None:
        """Pass it on. Returns the reason if no byte of it was sent."""
        try:
            connecting = self._connect()
        except (InvalidURI, ValueError) as error:
            text = f"not executed: it cannot be passed on: {error}"
            await deny(self._scope, self._send, 400, text, [])
            return None
        try:
            leader = await connecting
        except (ConnectionRefusedError, socket.gaierror) as error:
            return f"the leader cannot be reached: {error}"
        except InvalidStatus as error:
            response = error.response
            body = bytes(response.body or b"").decode(errors="replace").rstrip()
            headers = _visible(response.headers.raw_items())
            await deny(self._scope, self._send, response.status_code, body, headers)
            return None
        except (InvalidHandshake, OSError, EOFError) as error:
            if connecting.unsent:  # such as no route, or no answer within CONNECT_S
                return f"the leader cannot be reached: {error}"
            log.warning("%s", log_line(event="forwarding_failed", to=self._to.origin, error=error))
            await self.fail(502, "the leader did not answer")
            return None
        try:
            await self._accept(leader)
            await self._relay(leader)
        except BaseException:
            leader.transport.abort()
            raise
        return None

    async def client_gone(self) -> None:
        """`run` ends when the client goes."""
        await asyncio.Event().wait()

    async def fail(self, status: int, why: str) -> None:
        """The leader has been replaced, or has not answered."""
        if self._accepted:
            await self._send({"type": "websocket.close", "code": SERVICE_RESTART, "reason": why})
        else:
            text = f"{why}; the request may have been carried out"
            await deny(self._scope, self._send, status, text, [])

    async def _accept(self, leader: ClientConnection) -> None:
        assert leader.response is not None
        self._accepted = True
        await self._send(
            {
                "type": "websocket.accept",
                "subprotocol": leader.subprotocol,
                "headers": _visible(leader.response.headers.raw_items()),
            }
        )

    async def _relay(self, leader: ClientConnection) -> None:
        tasks = {
            asyncio.ensure_future(self._from_client(leader)),
            asyncio.ensure_future(self._from_leader(leader)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in done:
            task.result()

    async def _from_client(self, leader: ClientConnection) -> None:
        while True:
            message = await self._receive()
            if message["type"] == "websocket.disconnect":
                code = message.get("code") or GOING_AWAY
                if code in WITHOUT_CODE:
                    code = GOING_AWAY
                await leader.close(code, message.get("reason") or "")
                return
            data = message.get("text")
            try:
                await leader.send(message["bytes"] if data is None else data)
            except ConnectionClosed:
                await asyncio.Event().wait()  # until the other direction has passed on the close

    async def _from_leader(self, leader: ClientConnection) -> None:
        try:
            async for message in leader:
                kind = "text" if isinstance(message, str) else "bytes"
                await self._send({"type": "websocket.send", kind: message})
        except ConnectionClosed:
            pass
        code, reason = leader.close_code, leader.close_reason
        if code is None or code in WITHOUT_CODE:
            code, reason = SERVICE_RESTART, "the leader's connection ended"
        await self._send({"type": "websocket.close", "code": code, "reason": reason or ""})


def _visible(headers: Iterable[tuple[str, str]]) -> Headers:
    """The headers of the leader's response to the handshake that its client gets."""
    raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    framing = (b"content-length", b"content-type")
    return [
        (name, value)
        for name, value in returned(raw)
        if name not in framing and not name.startswith(b"sec-websocket-")
    ]
