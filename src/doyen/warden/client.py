"""A session's side: its lease table, and the link to the warden that watches over it.

- Nothing here waits for the warden. If it is missing, frozen, late or dead, the session goes on as
  without one, and its leases expire if this process dies.
- The table exists before the first lease and outlives every link: a warden that was started anew
  receives the same table.
- A lease is in the table before it is first used, and until it is given up.

Used on doyen's loop, except `run_begins` and `run_ended`, which supervisors call.
"""

from __future__ import annotations

import asyncio
import logging
import math
import mmap
import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from doyen.events import Event, Unwarded, Warded
from doyen.events.log_lines import log_line
from doyen.model import Lease
from doyen.stores.choice import absolute
from doyen.warden.child import ChildWarden
from doyen.warden.location import check_directory, socket_path
from doyen.warden.table import TABLE_BYTES, LeaseTable, TableFull, WardedLease
from doyen.warden.warding import Form
from doyen.warden.wire import (
    BYE,
    Hello,
    Refused,
    Welcome,
    decode_number,
    decode_reply,
    encode_number,
    environment_of,
    own_pidfd,
    peer_of,
    send_hello,
)

__all__ = ["SessionWarden", "connected", "hello_for", "portable_url"]

log = logging.getLogger("doyen")

_FILES = frozenset({"ca", "cert", "key", "creds", "secret_file", "token_file"})
_FIRST_RESTART_S = 1.0
_LONGEST_RESTART_S = 60.0


class SessionWarden:
    """The warden of one session, as the session knows it."""

    def __init__(self, hello: Hello, form: Form, emit: Callable[[Event], None]) -> None:
        self._hello = hello
        self._form: Form = form
        self._emit = emit
        self._loop = asyncio.get_running_loop()
        self._table: LeaseTable | None = None
        self._memory = self._memory_inode = -1
        self._link: socket.socket | None = None
        self._link_inode = -1
        self._greeted = False
        self._child: ChildWarden | None = None
        self._restart_at = -1.0
        self._restart_s = _FIRST_RESTART_S
        self._served_since = math.inf
        """When the warden welcomed this session."""
        self._missed = ""
        self._host_refused = False
        self._closed = False

    def begin(self) -> None:
        if self._table is None and not self._closed:
            try:
                self._memory = os.memfd_create("doyen-leases", os.MFD_CLOEXEC)
                os.ftruncate(self._memory, TABLE_BYTES)
                self._memory_inode = os.fstat(self._memory).st_ino
                self._table = LeaseTable(memoryview(mmap.mmap(self._memory, TABLE_BYTES)))
            except (AttributeError, OSError) as error:
                self._closed = True
                if self._form != "found":
                    self._report_missing(f"this system has no shared memory for it: {error}")
                return
        self.renewed()

    def register(self, lease: Lease, warrant: bytes) -> None:
        if self._table is not None and warrant:
            try:
                self._table.register(WardedLease(lease.id, lease.ttl_s, warrant))
            except TableFull as error:
                log.warning("%s", log_line(event="lease_without_warden", reason=error))

    def withdraw(self, lease: Lease) -> None:
        if self._table is not None:
            self._table.withdraw(lease.id)

    def bodies(self, number: int) -> None:
        if self._table is not None:
            self._table.bodies(number)

    def renewed(self) -> None:
        if self._link is not None or self._closed or self._table is None:
            return
        if self._loop.time() < self._restart_at:
            return
        try:
            self._connect()
        except (Refused, OSError) as error:
            self._disconnect()
            self._report_missing(str(error))

    def _connect(self) -> None:
        path = None if self._form == "process" or self._host_refused else socket_path()
        if path is not None:
            try:
                self._link = connected(path)
            except Refused:
                if self._form != "auto":
                    raise
        elif self._form == "host":
            raise Refused("no warden runs on this host: start one with `doyen warden`")
        if self._link is None:
            if self._form in ("host", "found"):
                return
            self._restart_at = self._loop.time() + self._restart_s
            self._restart_s = min(2 * self._restart_s, _LONGEST_RESTART_S)
            self._child = ChildWarden.acquire()
            self._link = self._child.link()
        self._link_inode = os.fstat(self._link.fileno()).st_ino
        if not _is_still(self._memory, self._memory_inode):
            raise Refused("the descriptor of the lease table was closed by this process")
        pidfd = own_pidfd()
        try:
            send_hello(self._link, self._hello, pidfd, self._memory)
        finally:
            os.close(pidfd)
        self._greeted = False
        self._loop.add_reader(self._link, self._receive)

    def _receive(self) -> None:
        link = self._link
        if link is None:
            return
        try:
            data = link.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._disconnect()
            self._report_missing("it has ended")
        elif not self._greeted:
            reply = decode_reply(data)
            if isinstance(reply, Welcome):
                self._greeted, self._missed = True, ""
                self._served_since = self._loop.time()
                self._emit(Warded(warden=reply.pid))
            else:
                if self._form == "auto" and self._child is None:
                    self._host_refused = True  # the next renewal starts one for this process
                else:
                    self._restart_at = self._loop.time() + _LONGEST_RESTART_S
                self._disconnect()
                self._report_missing(f"it refuses: {reply}")
        elif (ping := decode_number(data)) is not None and self._table is not None:
            self._table.answer(ping)

    def _report_missing(self, reason: str) -> None:
        if reason != self._missed:
            self._missed = reason
            self._emit(Unwarded(reason=reason))

    def _disconnect(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._loop.remove_reader(link.fileno())
            if _is_still(link.fileno(), self._link_inode):
                link.close()
            else:
                link.detach()
        if self._loop.time() - self._served_since > _LONGEST_RESTART_S:
            self._restart_s = _FIRST_RESTART_S  # it ran for long: restart soon
        self._served_since = math.inf
        child, self._child = self._child, None
        if child is not None:
            child.release()

    def proof(self) -> tuple[int, ...]:
        link = self._link
        return (
            (link.fileno(),)
            if link is not None and _is_still(link.fileno(), self._link_inode)
            else ()
        )

    def run_begins(self) -> int:
        return 0 if self._table is None else self._table.run_begins()

    def run_ended(self, run: int) -> None:
        if self._table is not None and run:
            self._table.run_ended(run)

    def close(self) -> None:
        self._closed = True
        if self._table is not None:
            self._table.close()
            self._table = None
            if _is_still(self._memory, self._memory_inode):
                os.close(self._memory)
        link = self._link
        if link is not None and _is_still(link.fileno(), self._link_inode):
            try:
                link.send(encode_number(BYE), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except OSError:
                pass  # the end of the link and the table show it too
        self._disconnect()

    def forked(self) -> None:
        """In the child of a fork: link and table are the parent's."""
        self._closed = True
        self._table = None
        link, self._link, self._child = self._link, None, None
        if link is not None and _is_still(link.fileno(), self._link_inode):
            link.close()
        ChildWarden.forked()


def _is_still(descriptor: int, inode: int) -> bool:
    """Whether a descriptor still is what it was: code that closes all descriptors of a process may
    have caused its number to be used for another file."""
    try:
        return os.fstat(descriptor).st_ino == inode
    except OSError:
        return False


def connected(path: Path) -> socket.socket:
    """A link to the warden of the host."""
    check_directory(path.parent)
    link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        link.setblocking(False)
        link.connect(str(path))
        peer_of(link)
    except BaseException as error:
        link.close()
        if isinstance(error, OSError):
            raise Refused(f"{path} does not answer: {error.strerror}") from error
        raise
    return link


def portable_url(url: str, directory: str) -> str:
    """The URL with absolute paths of files, for a process with another working directory.

    >>> portable_url("etcd://h1?ca=ca.pem", "/srv/app")
    'etcd://h1?ca=%2Fsrv%2Fapp%2Fca.pem'
    """
    from urllib.parse import parse_qsl, urlencode  # imported late, as in `model`

    base, question, query = url.partition("?")
    given = parse_qsl(query, keep_blank_values=True)
    if not any(name in _FILES and not os.path.isabs(value) for name, value in given):
        return url
    absolute = [
        (name, os.path.join(directory, value) if name in _FILES else value) for name, value in given
    ]
    return f"{base}{question}{urlencode(absolute)}"


def hello_for(
    *,
    session: str,
    url: str,
    audit: str | None,
    settle_s: float,
    frozen_after_s: float | None,
    request_timeout_s: float,
) -> Hello:
    """What a warden is told of a session of this process."""
    try:
        directory = os.getcwd()
        url = absolute(url)
    except OSError:  # it was removed: then the URL has no relative paths that could be used
        directory = "/"
    return replace(
        Hello(session=session, url=portable_url(url, directory)),
        environment=environment_of(dict(os.environ)),
        audit=None if audit is None else os.path.join(directory, audit),
        settle_s=settle_s,
        frozen_after_s=frozen_after_s,
        request_timeout_s=request_timeout_s,
    )
