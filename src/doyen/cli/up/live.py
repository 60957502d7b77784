"""`doyen up` in a terminal: shows the leader, the candidates and the last failovers, and has keys
that inject faults.

With rich, the alternate screen of the terminal is redrawn ten times per second; without rich,
changes are printed as lines. The state of the terminal is restored at the end, also after an error.
"""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from doyen.cli.up.candidate import ELECTION
from doyen.cli.up.cluster import CandidateGroup, CandidateProcess, Failover
from doyen.cli.up.drill import story
from doyen.cli.up.processes import RESTART_AFTER_S

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_FRAME_S = 0.1
_BAR = 24


def show(
    cluster: CandidateGroup, *, stopping: Callable[[], bool], page: Callable[[], str] = str
) -> None:
    """Show the view and handle keys until `q`, the end of the input, or `stopping`. `page` tells
    the address of the page, if there is one."""
    controls, fd = _Controls(cluster, page), sys.stdin.fileno()
    with _single_keys(fd), _view(controls) as draw:
        while not stopping():
            cluster.tick()
            draw()
            for key in _pressed(fd, _FRAME_S):
                if key in ("q", ""):
                    return
                controls.press(key)


@contextmanager
def _single_keys(fd: int) -> Iterator[None]:
    """Read single keys without echo. Ctrl-C interrupts as usual. Ctrl-Z is disabled, because the
    candidates would go on while the view is suspended."""
    before: list[Any] = termios.tcgetattr(fd)
    try:
        tty.setcbreak(fd, termios.TCSANOW)
        changed = termios.tcgetattr(fd)
        changed[6][termios.VSUSP] = b"\0"
        termios.tcsetattr(fd, termios.TCSANOW, changed)
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSANOW, before)


def _pressed(fd: int, within_s: float) -> list[str]:
    """The keys pressed within the time; an empty string stands for the end of the input."""
    if not select.select([fd], [], [], within_s)[0]:
        return []
    try:
        typed = os.read(fd, 64)
    except OSError:  # the terminal has gone
        typed = b""
    if typed.startswith(b"\x1b"):
        return []  # an arrow or function key: a sequence, not letters and digits
    return list(typed.decode("ascii", "replace")) or [""]


class _Controls:
    """Carries out keys, on the chosen candidate or on the leader."""

    def __init__(self, cluster: CandidateGroup, page: Callable[[], str]) -> None:
        self.cluster = cluster
        self._page = page
        self.chosen: CandidateProcess | None = None
        """The candidate that keys act on; None for the leader."""

    @property
    def page(self) -> str:
        """The address of the page, or why there is none any more; empty without one."""
        return self._page()

    @property
    def target(self) -> CandidateProcess | None:
        return self.chosen or self.cluster.leader

    def press(self, key: str) -> None:
        cluster, candidate, quorum = self.cluster, self.target, self.cluster.quorum
        if key in ("K", "F"):
            if quorum is not None and quorum.leader is not None:
                (quorum.kill if key == "K" else quorum.freeze)(quorum.leader)
        elif key.isdecimal() and int(key) <= len(cluster.candidates):
            self.chosen = cluster.candidates[int(key) - 1] if int(key) else None
        elif candidate is None:
            return
        elif key == "k":
            cluster.kill(candidate)
        elif key == "f":
            (cluster.freeze if candidate.frozen_at is None else cluster.thaw)(candidate)
        elif key == "r":
            cluster.resign(candidate)

    @property
    def help(self) -> str:
        whom = "the leader" if self.chosen is None else self.chosen.name
        choose = f"1-{len(self.cluster.candidates)} choose" + (", 0 leader" if self.chosen else "")
        if self.cluster.quorum:
            return f"{whom}: k kill  f freeze  r resign | {choose} | quorum: K, F | q quit"
        return f"{whom}: k kill  f freeze/thaw  r resign  |  {choose}  |  q quit"


class CandidateState(NamedTuple):
    """The state of a candidate: a label, details and a colour."""

    label: str
    detail: str
    colour: str


def state_of(cluster: CandidateGroup, candidate: CandidateProcess) -> CandidateState:
    now = cluster.now()
    term, behind = cluster.history.term(candidate.name), cluster.history.behind(candidate.name)
    if not candidate.alive:
        left_s = max(0.0, candidate.died_at + RESTART_AFTER_S - now)
        return CandidateState("dead", f"restarts in {left_s:.1f} s", "red")
    if candidate.frozen_at is not None:
        left_s = max(0.0, candidate.frozen_at + cluster.thaw_after_s - now)
        was = "ex-leader" if candidate is not cluster.leader else "leader"
        label = "frozen" if term is None else f"frozen {was}"
        return CandidateState(
            label, f"for {now - candidate.frozen_at:.1f} s, thaws in {left_s:.1f} s", "cyan"
        )
    if candidate is cluster.leader and term is not None:
        return CandidateState("leading", f"token {term.token}", "green")
    if behind is not None:
        return CandidateState("waiting", f"behind {behind}", "")
    return CandidateState("starting", "", "dim")


def _vacancy(cluster: CandidateGroup) -> str:
    """Why there is no leader."""
    fault = cluster.history.pending
    if fault is None:
        return "none yet" if cluster.history.latest is None else "none"
    return f"none: {fault.name} was {fault.kind} {cluster.now() - fault.at:.1f} s ago"


def _clock(failover: Failover) -> str:
    return time.strftime("%H:%M:%S", time.localtime(failover.to.wall))


@contextmanager
def _view(controls: _Controls) -> Iterator[Callable[[], None]]:
    """Returns what draws the present state."""
    try:
        from rich.console import Console
        from rich.live import Live
    except ImportError:
        yield _LineView(controls).draw
        return
    console = Console(markup=False, highlight=False, emoji=False)
    if console.is_dumb_terminal:
        yield _LineView(controls).draw
        return
    view = _ScreenView(controls, console)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            yield lambda: live.update(view.frame(), refresh=True)
        finally:
            # Clear the screen: some terminals show parts of it afterwards if they were resized.
            live.update("", refresh=True)


class _LineView:
    """The view without rich: prints a line for each change, and the keys when they change."""

    def __init__(self, controls: _Controls) -> None:
        self._controls = controls
        self._reported = self._changes = 0
        self._states: dict[str, str] = {}
        self._help = ""
        self._page = ""

    def draw(self) -> None:
        cluster, controls = self._controls.cluster, self._controls
        if controls.page != self._page:
            self._page = controls.page
            print(f"in a browser: {self._page}", flush=True)
        if controls.help != self._help:
            self._help = controls.help
            print(self._help, flush=True)
        for candidate in cluster.candidates:
            state = state_of(cluster, candidate)
            changed = state.label != self._states.get(candidate.name)
            self._states[candidate.name] = state.label
            if changed and state.colour in ("red", "cyan"):
                print(f"{time.strftime('%H:%M:%S')}  {candidate.name} is {state.label}", flush=True)
        for failover in cluster.history.failovers[self._reported :]:
            print(f"{_clock(failover)}  {story(failover)}", flush=True)
        self._reported = len(cluster.history.failovers)
        if cluster.quorum is not None:
            for change in cluster.quorum.changes[self._changes :]:
                print(f"{time.strftime('%H:%M:%S')}  {change.story()}", flush=True)
            self._changes = len(cluster.quorum.changes)


_Line = list[str | tuple[str, str]]
"""A line of the screen: texts, some with a style."""


class _ScreenView:
    """The view with rich, redrawn in place."""

    def __init__(self, controls: _Controls, console: Console) -> None:
        self._controls = controls
        self._console = console

    def frame(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        above = [*self._title(), [], *self._leader(), *self._quorum(), []]
        above += [*self._candidates(), []]
        below: list[_Line] = [[], [(f" {self._controls.help}", "bold")]]
        room = self._console.size.height - len(below)
        lines = [*above[:room], *self._failovers(room - len(above)), *below]
        return Group(*(Text.assemble(*line, no_wrap=True, overflow="ellipsis") for line in lines))

    def _title(self) -> list[_Line]:
        cluster = self._controls.cluster
        figures = (
            f"   {len(cluster.candidates)} candidates, ttl {cluster.timing.ttl_s:g} s,"
            f" failover within {cluster.worst_s:.2f} s; work done: {cluster.work_done}"
        )
        elsewhere = f" in another terminal: doyen watch {ELECTION} --store {cluster.store}"
        title: list[_Line] = [[(" doyen up", "bold"), (figures, "dim")], [(elsewhere, "dim")]]
        if page := self._controls.page:
            title.append([(f" in a browser: {page}", "dim")])
        return title

    def _leader(self) -> list[_Line]:
        cluster = self._controls.cluster
        latest, leader = cluster.history.latest, cluster.leader
        if latest is None or leader is None:
            return [[" Leader    ", (_vacancy(cluster), "bold yellow")], [" Valid"]]
        now = cluster.now()
        left_s = max(0.0, cluster.history.valid_until(latest) - now)
        full = round(min(1.0, left_s / cluster.timing.validity_s) * _BAR)
        colour = "green" if leader.frozen_at is None else "cyan"
        on, off = "#-" if self._console.options.ascii_only else "━─"
        since = f"   token {latest.token}   for {now - latest.at:.1f} s"
        bar: _Line = [(on * full, colour), (off * (_BAR - full), "dim")]
        return [
            [" Leader    ", (leader.name, f"bold {colour}"), since],
            [" Valid     ", *bar, f"  {left_s:.1f} s more"],
        ]

    def _quorum(self) -> list[_Line]:
        quorum = self._controls.cluster.quorum
        if quorum is None:
            return []
        line: _Line = [" Quorum    "]
        for server in quorum.servers:
            frozen = server.frozen_at is not None
            label = "frozen" if frozen else server.role
            leads = server is quorum.leader and not frozen
            colour = "cyan" if frozen else {"dead": "red"}.get(label, "green" if leads else "dim")
            line.append((f"{server.name} {label:<11}", colour))
        if quorum.changes:
            line.append((f"generation {quorum.changes[-1].generation}", "dim"))
        return [line]

    def _candidates(self) -> list[_Line]:
        lines: list[_Line] = []
        for number, candidate in enumerate(self._controls.cluster.candidates, 1):
            state = state_of(self._controls.cluster, candidate)
            mark = ">" if candidate is self._controls.target else " "
            name = f" {mark} {number}  {candidate.name:<10}"
            lines.append([name, (f"{state.label:<18}", state.colour), state.detail])
        return lines

    def _failovers(self, room: int) -> list[_Line]:
        if room < 2:
            return []
        shown = self._controls.cluster.history.failovers[1 - room :]
        lines: list[_Line] = [[f"   {_clock(one)}  {story(one)}"] for one in reversed(shown)]
        lines += [[] for _ in range(room - 1 - len(lines))]
        return [[(" Failovers, newest first", "dim")], *lines]
