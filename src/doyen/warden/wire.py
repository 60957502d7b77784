"""The messages between a holder and its warden, over a socket of their own.

    holder                                          warden
      hello: JSON, with its pidfd and its lease table ->
                                  <- welcome or refusal: JSON
      number of a run: its processes are gone (said by the guard) ->
      BYE: the session was closed ->
                                  <- number of a ping; it is answered in the table

Messages keep their boundaries (`SOCK_SEQPACKET`). Both sides check that the other is a process of
the same user. The holder passes its own pidfd, so that no process id is looked up that could have
been used again.

Imports the standard library only.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = [
    "BYE",
    "Hello",
    "Refused",
    "Welcome",
    "decode_number",
    "decode_reply",
    "encode_number",
    "encode_reply",
    "environment_of",
    "holder_pidfd",
    "own_pidfd",
    "peer_of",
    "pid_of",
    "receive_hello",
    "send_hello",
]

VERSION = 2
MESSAGE_BYTES = 1 << 16
BYE = 2**64 - 1

_NUMBER = struct.Struct("<Q")
_CREDENTIALS = struct.Struct("iII")
_SO_PEERPIDFD = 77


class Refused(Exception):
    """The other side is not trusted, or cannot serve this session."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A session, as its warden knows it."""

    session: str
    url: str
    """With the credentials of the session, which are used for its leases only. Paths in it are
    absolute."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables from which client libraries take credentials."""
    audit: str | None = None
    """The audit log of the session."""
    settle_s: float = 0.0
    """How long to wait after the holder's death before its leases are ended."""
    frozen_after_s: float | None = None
    """Kill the holder if it holds a term and does not answer for this long."""
    request_timeout_s: float = 1.0
    version: int = VERSION


def environment_of(environment: dict[str, str]) -> dict[str, str]:
    """The variables from which client libraries take credentials."""
    return {
        name: value
        for name, value in environment.items()
        if name == "CONSUL_HTTP_TOKEN" or name.startswith("PG")
    }


class Welcome(NamedTuple):
    """The warden watches over the session. `pid` is its own."""

    pid: int


def peer_of(link: socket.socket) -> int:
    """The process that opened the other end. Raises `Refused` if it is of another user."""
    raw = link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    if uid != os.geteuid():
        raise Refused(f"it is a process of user {uid}, and this one of user {os.geteuid()}")
    if uid == _unmapped_uid() and uid != 0:
        raise Refused(f"user {uid} stands for users that this namespace does not know")
    return int(pid)


def _unmapped_uid() -> int:
    try:
        with open("/proc/sys/kernel/overflowuid") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 65534


def own_pidfd() -> int:
    """A pidfd of this process. Raises `Refused` where there is none."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as error:
        raise Refused(f"this system has no pidfd: {error}") from error


def holder_pidfd(link: socket.socket, passed: int) -> int:
    """The pidfd by which the kernel reports the holder's death; takes ownership of `passed`.

    The kernel's own, of the process that opened the link, is preferred (Linux 6.5). Otherwise the
    passed one counts, if it is a pidfd of that process: one that was looked up by number could be
    of another process with the same number.
    """
    peer = peer_of(link)
    pid = pid_of(passed)
    if pid is None or pid not in (-1, peer):
        os.close(passed)
        raise Refused(f"process {peer} did not pass a pidfd of its own")
    try:
        kernels = link.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        return passed
    os.close(passed)
    os.set_inheritable(kernels, False)
    return kernels


def pid_of(pidfd: int) -> int | None:
    """The process of a pidfd, -1 if it has been reaped; None if it is not a pidfd."""
    try:
        with open(f"/proc/self/fdinfo/{pidfd}") as file:
            facts = dict(line.split(":", 1) for line in file if ":" in line)
        return int(facts["Pid"])
    except (OSError, KeyError, ValueError):
        return None


def send_hello(link: socket.socket, hello: Hello, pidfd: int, table: int) -> None:
    """Introduce a session. Does not block; raises `Refused` if the warden does not read."""
    try:
        socket.send_fds(
            link, [json.dumps(asdict(hello)).encode()], [pidfd, table], socket.MSG_DONTWAIT
        )
    except OSError as error:
        raise Refused(f"it does not take messages: {error.strerror}") from error


def receive_hello(link: socket.socket) -> tuple[Hello, int, int]:
    """The session, the holder's pidfd as it passed it, and its lease table."""
    data, descriptors, flags, _ = socket.recv_fds(link, MESSAGE_BYTES, 2)
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    try:
        if len(descriptors) != 2 or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Refused("its first message was not a whole hello")
        return _decode_hello(data), descriptors[0], descriptors[1]
    except Refused:
        for descriptor in descriptors:
            os.close(descriptor)
        raise


def _decode_hello(data: bytes) -> Hello:
    try:
        given: dict[str, Any] = json.loads(data)
        if given.get("version") != VERSION:
            raise Refused(
                f"it speaks version {given.get('version')} of the protocol, and this warden"
                f" version {VERSION}: use the same version of doyen for both"
            )
        return Hello(**given)
    except (ValueError, TypeError, AttributeError) as error:
        raise Refused(f"its first message was not a hello: {error}") from error


def encode_reply(reply: Welcome | Refused) -> bytes:
    if isinstance(reply, Welcome):
        return json.dumps({"pid": reply.pid}).encode()
    return json.dumps({"refused": str(reply)}).encode()


def decode_reply(data: bytes) -> Welcome | Refused:
    try:
        given = json.loads(data)
        return Refused(given["refused"]) if "refused" in given else Welcome(int(given["pid"]))
    except (ValueError, TypeError, KeyError) as error:
        return Refused(f"not a reply of a warden: {error}")


def encode_number(number: int) -> bytes:
    return _NUMBER.pack(number)


def decode_number(data: bytes) -> int | None:
    return _NUMBER.unpack(data)[0] if len(data) == _NUMBER.size else None
