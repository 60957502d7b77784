"""The guard: a small process that starts a command and makes sure that it ends in time.

It is the parent of the command, so that neither a frozen nor a killed `doyen` can leave work
running after its lease has ended. It knows nothing of elections, only one instant on the boot-time
clock: `valid_until`, moved forward by each renewal.

    asked to stop, or `valid_until` reached,
    or `doyen` gone, or the command ended
                      |-------- grace_s --------|
                   SIGTERM                   SIGKILL,
             to all processes          until none is left

Invariants:

- The *tree* is the command and all processes that descend from it, also those in another group or
  session, and orphans: the guard is the subreaper of all of them. None of them outlives the run.
- A warden's link is among the proof of life. The warden is told that a run is over after its tree
  has been reaped, and never before.
- Copies of the proof of life are held from before the command starts until the tree has been
  reaped, and the tree never inherits them.
- SIGKILL is sent no later than `valid_until + grace_s`, whatever `doyen` sends or does not send.
- If the guard itself is killed, the kernel kills the command with it, and `doyen`, the next
  subreaper above, kills the rest.
- It writes to its socket only, and never blocks there: a full pipe cannot stop it.

Run as a script by path, isolated and without site packages, so that it starts within milliseconds.
It imports only the standard library, and little of that. `doyen.supervise` imports it for `Tree`
and the format of messages.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from math import ceil, inf

FRAME = struct.Struct("<cQddQ")
"""Every message, in both directions: type, a number, `valid_until`, `grace_s`, the number of the
run; zero if unused."""
WORD = struct.Struct("<Q")
"""What a warden is told over its link when the processes of a run are gone: the run's number."""

START = b"S"
"""Start the command. Token, `valid_until`, `grace_s`, run; the descriptors of the proof are
attached."""
EXTEND = b"E"
"""Renewed. `valid_until`."""
FORWARD = b"F"
"""Send a signal to the command's group. Its number."""
STOP = b"T"
"""SIGTERM now, SIGKILL after the grace."""
KILL = b"K"
"""SIGKILL now."""

READY = b"R"
"""The guard has started. 1 if it sees whole trees, 0 if process groups only."""
STARTED = b"P"
"""The command runs. Its process id, which is also its group's."""
ENDED = b"X"
"""The tree has been reaped. The command's wait status."""
EXPIRED = b"L"
"""The same, after the deadline passed while the command ran."""

MAX_PROOF = 16
"""How many descriptors may be attached to `START`."""

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_SLICE_S = 0.1
"""Waits run on the monotonic clock, which halts in suspend: wait briefly, decide by boot time."""
_KILL_SLICE_S = 0.005
"""The same between two rounds of SIGKILL, for the first second of them."""

_NOT_FOR_THE_GUARD = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGALRM,
)
"""Service managers send these to every process. The guard ignores them: it obeys `doyen` only."""

try:
    _libc: ctypes.CDLL | None = ctypes.CDLL(None)
except OSError:
    _libc = None

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    return time.clock_gettime(_CLOCK)


def _prctl(option: int, value: int | bytes) -> bool:
    argument = ctypes.c_ulong(value) if isinstance(value, int) else value
    try:
        return _libc is not None and _libc.prctl(option, argument, *[ctypes.c_ulong()] * 3) == 0
    except AttributeError:
        return False


def adopt_orphans() -> bool:
    """Become the subreaper of all that descends from this process.

    False where the system does not support it; then only process groups can be watched.
    """
    return _prctl(_PR_SET_CHILD_SUBREAPER, 1) and os.path.exists("/proc/thread-self/children")


def disown_orphans() -> None:
    """Stop being the subreaper."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def children(pid: int) -> list[int]:
    """The children of a process, the dead but unreaped ones included."""
    found: list[int] = []
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return found
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/children") as listing:
                found += map(int, listing.read().split())
        except OSError:
            continue  # it has just ended: its children are those of the subreaper now
    return found


def wardens() -> frozenset[int]:
    """The children of this process that are wardens of its sessions. They are orphans of their
    own, and adopted by a process that adopts orphans."""
    found = []
    for pid in children(os.getpid()):
        try:
            with open(f"/proc/{pid}/comm") as file:
                if file.read().strip() == "doyen-warden":
                    found.append(pid)
        except OSError:
            continue
    return frozenset(found)


class Tree:
    """A command's process and all that descend from it, as the subreaper above them sees them.

    `main` is None if the command's process is not known. `sees_trees` is the result of
    `adopt_orphans`. `unrelated` are children of this process that do not belong to the tree.
    """

    def __init__(
        self, main: int | None, *, sees_trees: bool, unrelated: frozenset[int] = frozenset()
    ) -> None:
        self.main = main
        self.status: int | None = None
        """The command's wait status, once it has ended."""
        self._sees_trees = sees_trees
        self._unrelated = unrelated

    def reap(self) -> bool:
        """Reap processes that have died. True once none is left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.main:
                    self.status = ended[1]
        except ChildProcessError:
            return self._sees_trees or self._group_gone()
        return bool(self._unrelated) and self._unrelated.issuperset(children(os.getpid()))

    def _group_gone(self) -> bool:
        if self.main is None:
            return True
        try:
            os.killpg(self.main, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def forward(self, signum: int) -> None:
        """Signal the command's group, as a terminal would."""
        if self.main is not None and self.status is None:
            _kill(os.killpg, self.main, signum)

    def signal(self, signum: int) -> None:
        """Signal every process once, whatever group or session it is in."""
        # Once its leader is reaped, the group's number may be used by another group.
        grouped = self.main is not None and self.status is None
        if self.main is not None and (grouped or not self._sees_trees):
            _kill(os.killpg, self.main, signum)
        for pid in self._descendants() if self._sees_trees else ():
            try:
                reached = grouped and os.getpgid(pid) == self.main
            except ProcessLookupError:
                continue
            if not reached:
                _kill(os.kill, pid, signum)

    def _descendants(self) -> list[int]:
        found = [pid for pid in children(os.getpid()) if pid not in self._unrelated]
        for pid in found:  # the list grows meanwhile
            found += children(pid)
        return found


def _kill(send: Callable[[int, int], None], target: int, signum: int) -> None:
    try:
        send(target, signum)
    except ProcessLookupError:
        pass
    except PermissionError:
        pass  # it has changed its user: the proof of life is held for as long as it lives


def _spawn(command: list[str], token: int) -> int:
    """Start the command in a group of its own; it dies when this process does."""
    guard = os.getpid()
    # Until the child has executed the command it has our handlers. A signal that is sent to it must
    # wait until then, or it would be lost.
    unhandled = signal.pthread_sigmask(signal.SIG_BLOCK, _NOT_FOR_THE_GUARD)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, unhandled)
        try:
            os.setpgid(pid, pid)  # both processes do it, because either may be first
        except OSError:
            pass
        return pid
    try:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == guard:
            for signum in _NOT_FOR_THE_GUARD:
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    signal.signal(signum, signal.SIG_DFL)
            # Python ignores these, and exec would keep that.
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, unhandled)
            os.execvpe(command[0], command, {**os.environ, "DOYEN_TOKEN": str(token)})
    except OSError as error:
        os.write(2, f"doyen: {command[0]}: {error.strerror}\n".encode(errors="surrogateescape"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os._exit(126)


class _Guard:
    """Runs the command, once for each `START`."""

    def __init__(self, connection: socket.socket, command: list[str]) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._command = command
        self._sees_trees = adopt_orphans()
        self._tree: Tree | None = None
        self._valid_until = -inf
        self._grace_s = 0.0
        self._kill_at = inf
        self._report = ENDED
        self._proof: list[int] = []
        self._run = 0
        self._orphaned = False
        self._wake = _wake_on_child()

    def serve(self) -> None:
        self._send(READY, int(self._sees_trees))
        poller = select.poll()
        poller.register(self._connection, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        while self._tree is not None or not self._orphaned:
            for descriptor, _ in poller.poll(self._timeout_ms()):
                if descriptor == self._wake:
                    os.read(self._wake, 512)
                elif not self._receive_all():
                    self._orphaned = True
                    poller.unregister(self._connection)
                    self._stop()
            self._watch()

    def _timeout_ms(self) -> int | None:
        if self._tree is None:
            return None
        stopping = self._kill_at != inf
        left_s = (self._kill_at if stopping else self._valid_until) - now()
        if stopping and left_s <= 0:  # between two rounds of SIGKILL
            return ceil(1000 * (_KILL_SLICE_S if left_s > -1 else _SLICE_S))
        return ceil(1000 * min(max(left_s, 0.0), _SLICE_S))

    def _watch(self) -> None:
        """Act on the deadline and on children that have ended."""
        tree = self._tree
        if tree is None:
            return
        gone = tree.reap()
        if (
            not gone
            and self._kill_at == inf
            and (tree.status is not None or now() >= self._valid_until)
        ):
            if tree.status is None:
                self._report = EXPIRED
            self._stop()
        if not gone and now() >= self._kill_at:
            tree.signal(signal.SIGKILL)
            gone = tree.reap()
        if gone:
            self._finish(tree.status or 0)

    def _start(self, token: int) -> None:
        self._kill_at = inf
        if now() >= self._valid_until:
            self._report = EXPIRED
            self._finish(signal.SIGTERM)
            return
        self._report = ENDED
        main = _spawn(self._command, token)
        self._tree = Tree(main, sees_trees=self._sees_trees)
        self._send(STARTED, main)

    def _stop(self) -> None:
        """Send SIGTERM. The grace is counted from now, or from the deadline if that was earlier."""
        if self._tree is not None and self._kill_at == inf:
            self._kill_at = min(now(), self._valid_until) + self._grace_s
            self._tree.signal(signal.SIGTERM)
            self._tree.signal(signal.SIGCONT)

    def _finish(self, status: int) -> None:
        self._tree = None
        for descriptor in self._proof:
            self._tell_warden(descriptor)
            os.close(descriptor)
        self._proof = []
        self._send(self._report, status)

    def _tell_warden(self, descriptor: int) -> None:
        """If this is the link to a warden, report that every process of the run is gone. Until
        then, and if this process dies before, the warden does not end the lease."""
        try:
            # Where only process groups are seen, some of its processes may be left.
            whole = self._run and self._sees_trees
            if whole and stat.S_ISSOCK(os.fstat(descriptor).st_mode):
                with socket.socket(fileno=os.dup(descriptor)) as link:
                    link.send(WORD.pack(self._run), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except OSError:
            pass  # the warden is gone: the lease expires, if `doyen` is gone too

    def _receive_all(self) -> bool:
        """Handle all messages that have arrived, before the deadline is checked: a renewal may be
        among them. False once `doyen` is gone."""
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._connection, FRAME.size, MAX_PROOF)
            except BlockingIOError:
                return True
            except OSError:
                return False
            for descriptor in descriptors:
                os.set_inheritable(descriptor, False)
            self._proof += descriptors
            if len(data) != FRAME.size:
                return False
            self._obey(*FRAME.unpack(data))

    def _obey(self, what: bytes, number: int, valid_until: float, grace_s: float, run: int) -> None:
        if what in (START, EXTEND):
            self._valid_until = valid_until
        if what == START and self._tree is None:
            self._grace_s = grace_s
            self._run = run
            self._start(number)
        elif what == FORWARD and self._tree is not None:
            self._tree.forward(number)
        elif what == STOP:
            self._stop()
        elif what == KILL and self._tree is not None:
            self._stop()
            self._kill_at = min(now(), self._kill_at)

    def _send(self, what: bytes, number: int) -> None:
        try:
            self._connection.send(FRAME.pack(what, number, 0.0, 0.0, 0))
        except OSError:
            pass  # `doyen` is gone, or does not read; the end of the connection is noticed


def _wake_on_child() -> int:
    """A descriptor that becomes readable when a child ends."""
    wake, poke = os.pipe()
    os.set_blocking(poke, False)
    signal.set_wakeup_fd(poke, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    return wake


def main(arguments: list[str]) -> None:
    descriptor, *command = arguments
    for signum in _NOT_FOR_THE_GUARD:
        if signal.getsignal(signum) is not signal.SIG_IGN:  # the command must inherit that
            signal.signal(signum, lambda *_: None)
    _prctl(_PR_SET_NAME, b"doyen-guard")
    os.set_inheritable(int(descriptor), False)
    _Guard(socket.socket(fileno=int(descriptor)), command).serve()


if __name__ == "__main__":
    main(sys.argv[1:])
