"""`doyen up` in a terminal: who leads, how everyone is, the last failovers, and keys to disturb
them with.

With rich the screen is redrawn ten times a second on the terminal's second page, so that nothing
of the user's is lost; without it, changes are printed as lines. The terminal is given back as it
was, whatever happens.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from doyen.cli.up.candidate import ELECTION
from doyen.cli.up.cluster import RESTART_AFTER_S, CandidateProcesses, Failover, Seat
from doyen.cli.up.drill import story

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

__all__ = ["show"]

_FRAME_S = 0.1
_BAR = 24


def show(cluster: CandidateProcesses, *, stopping: Callable[[], bool]) -> None:
    """Show the cluster and obey keys until `q`, the end of the input, or until told to stop."""
    desk = _Desk(cluster)
    with _Keys(sys.stdin.fileno()) as keys, _view(desk) as view:
        while not stopping():
            cluster.tick()
            view.draw()
            for key in keys.pressed(_FRAME_S):
                if key in ("q", ""):
                    return
                desk.press(key)


class _Keys:
    """Single keys of a terminal, unechoed. Ctrl-C still interrupts; Ctrl-Z does nothing, since
    candidates that go on while nobody watches would be a surprise."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._before: list[Any] = termios.tcgetattr(fd)

    def __enter__(self) -> _Keys:
        tty.setcbreak(self._fd, termios.TCSANOW)
        changed = termios.tcgetattr(self._fd)
        changed[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(self._fd, termios.TCSANOW, changed)
        return self

    def __exit__(self, *_: object) -> None:
        termios.tcsetattr(self._fd, termios.TCSANOW, self._before)

    def pressed(self, within_s: float) -> list[str]:
        """The keys pressed by then, or at once those that wait; an empty one at the end."""
        if not select.select([self._fd], [], [], within_s)[0]:
            return []
        try:
            typed = os.read(self._fd, 64)
        except OSError:  # the terminal has gone
            typed = b""
        if typed.startswith(b"\x1b"):
            return []  # an arrow or function key: a sequence, not letters and digits
        return list(typed.decode("ascii", "replace")) or [""]


class _Desk:
    """What the keys act on, and what they did."""

    def __init__(self, cluster: CandidateProcesses) -> None:
        self.cluster = cluster
        self.chosen: Seat | None = None
        """None: whoever leads."""

    @property
    def target(self) -> Seat | None:
        return self.chosen or self.cluster.leader

    def press(self, key: str) -> None:
        cluster, seat, quorum = self.cluster, self.target, self.cluster.quorum
        if key in ("K", "F"):
            if quorum is not None and quorum.leader is not None:
                (quorum.kill if key == "K" else quorum.freeze)(quorum.leader)
        elif key.isdecimal() and int(key) <= len(cluster.seats):
            self.chosen = cluster.seats[int(key) - 1] if int(key) else None
        elif seat is None:
            return
        elif key == "k":
            cluster.kill(seat)
        elif key == "f":
            (cluster.freeze if seat.frozen_at is None else cluster.thaw)(seat)
        elif key == "r":
            cluster.resign(seat)

    @property
    def help(self) -> str:
        whom = "the leader" if self.chosen is None else self.chosen.name
        choose = f"1-{len(self.cluster.seats)} choose" + (", 0 leader" if self.chosen else "")
        if self.cluster.quorum:
            return f"{whom}: k kill  f freeze  r resign | {choose} | quorum: K, F | q quit"
        return f"{whom}: k kill  f freeze/thaw  r resign  |  {choose}  |  q quit"


class _State(NamedTuple):
    """How a candidate is: a word, the figures that go with it, and a colour."""

    word: str
    detail: str
    colour: str


def _state(cluster: CandidateProcesses, seat: Seat) -> _State:
    now = cluster.now()
    reign, behind = cluster.chronicle.reign(seat.name), cluster.chronicle.behind(seat.name)
    if not seat.alive:
        left_s = max(0.0, seat.died_at + RESTART_AFTER_S - now)
        return _State("dead", f"starts again in {left_s:.1f} s", "red")
    if seat.frozen_at is not None:
        left_s = max(0.0, seat.frozen_at + cluster.thaw_after_s - now)
        was = "ex-leader" if seat is not cluster.leader else "leader"
        word = "frozen" if reign is None else f"frozen {was}"
        return _State(word, f"for {now - seat.frozen_at:.1f} s, thaws in {left_s:.1f} s", "cyan")
    if seat is cluster.leader and reign is not None:
        return _State("leading", f"token {reign.token}", "green")
    if behind is not None:
        return _State("waiting", f"behind {behind}", "")
    return _State("starting", "", "dim")


def _vacancy(cluster: CandidateProcesses) -> str:
    """Why nobody leads."""
    fault = cluster.chronicle.pending
    if fault is None:
        return "nobody yet" if cluster.chronicle.latest is None else "nobody"
    return f"nobody: {fault.name} was {fault.kind} {cluster.now() - fault.at:.1f} s ago"


def _clock(failover: Failover) -> str:
    return time.strftime("%H:%M:%S", time.localtime(failover.to.wall))


class _View(Protocol):
    def __enter__(self) -> _View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> bool | None: ...

    def draw(self) -> None: ...


def _view(desk: _Desk) -> _View:
    try:
        from rich.console import Console
    except ImportError:
        return _Lines(desk)
    console = Console(markup=False, highlight=False, emoji=False)
    return _Lines(desk) if console.is_dumb_terminal else _Screen(desk, console)


class _Lines:
    """For terminals without rich: a line for each change, and one for the keys when they change."""

    def __init__(self, desk: _Desk) -> None:
        self._desk = desk
        self._told = self._changes = 0
        self._states: dict[str, str] = {}
        self._help = ""

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def draw(self) -> None:
        cluster, desk = self._desk.cluster, self._desk
        if desk.help != self._help:
            self._help = desk.help
            print(self._help, flush=True)
        for seat in cluster.seats:
            state = _state(cluster, seat)
            changed = state.word != self._states.get(seat.name)
            self._states[seat.name] = state.word
            if changed and state.colour in ("red", "cyan"):
                print(f"{time.strftime('%H:%M:%S')}  {seat.name} is {state.word}", flush=True)
        for failover in cluster.chronicle.failovers[self._told :]:
            print(f"{_clock(failover)}  {story(failover)}", flush=True)
        self._told = len(cluster.chronicle.failovers)
        if cluster.quorum is not None:
            for change in cluster.quorum.changes[self._changes :]:
                print(f"{time.strftime('%H:%M:%S')}  {change.story()}", flush=True)
            self._changes = len(cluster.quorum.changes)


class _Screen:
    """The live view proper, drawn by rich."""

    def __init__(self, desk: _Desk, console: Console) -> None:
        from rich.live import Live

        self._desk = desk
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)

    def __enter__(self) -> _Screen:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            # Left blank: some terminals that were resized meanwhile show a part of it afterwards.
            self._live.update("", refresh=True)
        finally:
            self._live.__exit__(kind, error, traceback)

    def draw(self) -> None:
        self._live.update(self._frame(), refresh=True)

    def _frame(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        above = [*self._title(), Text(), *self._leader(), *self._quorum(), Text()]
        above += [*self._candidates(), Text()]
        below = [Text(), Text(f" {self._desk.help}", style="bold")]
        room = self._console.size.height - len(below)
        lines = [*above[:room], *self._failovers(room - len(above)), *below]
        for line in lines:
            line.no_wrap = True
            line.overflow = "ellipsis"
        return Group(*lines)

    def _title(self) -> list[Text]:
        from rich.text import Text

        cluster = self._desk.cluster
        figures = (
            f"   {len(cluster.seats)} candidates, ttl {cluster.timing.ttl_s:g} s,"
            f" failover within {cluster.worst_s:.2f} s; work done: {cluster.work_done}"
        )
        elsewhere = f" try also: doyen watch {ELECTION} --store {cluster.store}"
        return [
            Text.assemble((" doyen up", "bold"), (figures, "dim")),
            Text(elsewhere, style="dim"),
        ]

    def _leader(self) -> list[Text]:
        from rich.text import Text

        cluster = self._desk.cluster
        latest, leader = cluster.chronicle.latest, cluster.leader
        if latest is None or leader is None:
            return [
                Text.assemble(" Leader    ", (_vacancy(cluster), "bold yellow")),
                Text(" Valid"),
            ]
        now = cluster.now()
        left_s = max(0.0, cluster.chronicle.valid_until(latest) - now)
        full = round(min(1.0, left_s / cluster.timing.validity_s) * _BAR)
        colour = "green" if leader.frozen_at is None else "cyan"
        on, off = "#-" if self._console.options.ascii_only else "━─"
        return [
            Text.assemble(
                " Leader    ",
                (leader.name, f"bold {colour}"),
                f"   token {latest.token}   for {now - latest.at:.1f} s",
            ),
            Text.assemble(
                " Valid     ",
                (on * full, colour),
                (off * (_BAR - full), "dim"),
                f"  {left_s:.1f} s more",
            ),
        ]

    def _quorum(self) -> list[Text]:
        from rich.text import Text

        quorum = self._desk.cluster.quorum
        if quorum is None:
            return []
        line = Text(" Quorum    ")
        for server in quorum.servers:
            frozen = server.frozen_at is not None
            word = "frozen" if frozen else server.role
            leads = server is quorum.leader and not frozen
            colour = "cyan" if frozen else {"dead": "red"}.get(word, "green" if leads else "dim")
            line.append(f"{server.name} {word:<11}", colour)
        if quorum.changes:
            line.append(f"generation {quorum.changes[-1].generation}", "dim")
        return [line]

    def _candidates(self) -> list[Text]:
        from rich.text import Text

        cluster = self._desk.cluster
        lines = []
        for number, seat in enumerate(cluster.seats, 1):
            state = _state(cluster, seat)
            mark = ">" if seat is self._desk.target else " "
            lines.append(
                Text.assemble(
                    f" {mark} {number}  {seat.name:<10}",
                    (f"{state.word:<18}", state.colour),
                    state.detail,
                )
            )
        return lines

    def _failovers(self, room: int) -> list[Text]:
        from rich.text import Text

        if room < 2:
            return []
        shown = self._desk.cluster.chronicle.failovers[1 - room :]
        lines = [Text(f"   {_clock(one)}  {story(one)}") for one in reversed(shown)]
        lines += [Text()] * (room - 1 - len(lines))
        return [Text(" Failovers, the last one first", style="dim"), *lines]
