"""`doyen up`: a quorum of three nodes and a few candidates on this machine, to play with.

In a terminal it is a live view, in which the user kills and freezes candidates and watches the
failover (`live`). Without one, or with `--for`, leaders are killed and frozen in turn and the run
ends by itself (`drill`). Either way the candidates' audit logs are verified in the end.

Candidates run as modules of this package, so importing it must stay cheap and import none of them.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote

from doyen.cli._manual import manual
from doyen.cli._output import Exit, console, print_json
from doyen.errors import ConfigError

if TYPE_CHECKING:
    from doyen.cli.up.drill import DrillResult
    from doyen.cli.up.quorum import Quorum

__all__ = ["MANUAL", "configure", "run"]

_DRILL_S = 10.0

MANUAL = """\
Starts a quorum of three nodes and some candidates that meet there, each a process of this machine;
with --store the candidates meet in that store. In a terminal it is a live view, with keys that kill
and freeze the leader and the quorum's own; try `doyen line`, `watch`, `resign`, `transfer` and
`cluster status` on it from another one. Without a terminal, with --for or with --json, leaders are
killed and frozen in turn. Either way the audit logs of the candidates are verified in the end.

exit codes:
  0    the audit logs prove that there never were two leaders and that tokens
       increased, and, if unattended, each failover was within the worst case
  1    they do not; the logs are kept, and it is said where
  others as for every command: see doyen --help

examples:
  doyen up
  # half a minute unattended, with a summary for a program
  doyen up --candidates 5 --ttl 1 --for 30 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument(
        "--candidates", type=int, default=3, metavar="N", help="how many, 2 to 9 (default: 3)"
    )
    parser.add_argument(
        "--ttl",
        dest="ttl_s",
        type=float,
        default=2.0,
        metavar="SECONDS",
        help="how long a silent leader keeps its lease (default: 2)",
    )
    parser.add_argument(
        "--for",
        dest="for_s",
        type=float,
        metavar="SECONDS",
        help=f"run unattended for about this long (default without a terminal: {_DRILL_S:g})",
    )
    parser.add_argument(
        "--store",
        metavar="URL",
        help="where the candidates meet (default: three nodes of doyen's own, removed afterwards)",
    )


def run(args: argparse.Namespace) -> int:
    """Start candidates, let the user or the drill have a go at them, and judge."""
    if not 2 <= args.candidates <= 9:
        raise ConfigError(f"--candidates is 2 to 9, not {args.candidates}: one leads, one waits")
    if args.for_s is not None and not 0 < args.for_s < float("inf"):
        raise ConfigError(f"--for is a number of seconds above 0, not {args.for_s:g}")
    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    live = at_terminal and args.for_s is None and not args.json
    with _Interrupts() as interrupts:
        folder = Path(tempfile.mkdtemp(prefix="doyen-up-"))
        keep = False
        try:
            verdict = _play(args, folder, interrupts, live=live)
            keep = not verdict.ok
            _tell(verdict, args, folder, keep=keep)
        finally:
            if not keep:
                shutil.rmtree(folder)
    if interrupts.received is not None and not (live and interrupts.received == signal.SIGINT):
        return 128 + interrupts.received
    return Exit.DONE if verdict.ok else Exit.NO


def _play(
    args: argparse.Namespace, folder: Path, interrupts: _Interrupts, *, live: bool
) -> DrillResult:
    from doyen.cli.up.cluster import CandidateProcesses, timing_on
    from doyen.cli.up.drill import Drill, judge

    problems: list[str] = []
    with ExitStack() as stack:
        quorum = None if args.store else _quorum(folder, stack)
        store = args.store or (quorum.url if quorum else _file(folder))
        timing, worst_s = timing_on(store, args.ttl_s)
        cluster = CandidateProcesses(
            folder,
            candidates=args.candidates,
            store=store,
            timing=timing,
            worst_s=worst_s,
            quorum=quorum,
        )
        stack.callback(cluster.stop)
        if live:
            from doyen.cli.up.live import show

            show(cluster, stopping=interrupts.stopping)
        else:
            out = console()
            tell = _silent if args.json else out.print
            if quorum:
                tell(f"a quorum of {len(quorum.servers)} nodes: {store}")
            tell(f"{args.candidates} candidates on {'it' if quorum else store}")
            tell(f"ttl {timing.ttl_s:g} s; a failover takes {worst_s:.2f} s at worst")
            drill = Drill(
                cluster, for_s=args.for_s or _DRILL_S, stopping=interrupts.stopping, tell=tell
            )
            problems = drill.run()
    return judge(cluster, problems, bounded=not live and interrupts.received is None)


def _quorum(folder: Path, stack: ExitStack) -> Quorum | None:
    """Three nodes, running; None where they cannot be had."""
    if find_spec("msgspec") is None:
        print("doyen: no msgspec, no quorum: the candidates meet in a file;", file=sys.stderr)
        print("       pip install 'doyen[quorum]' for three nodes", file=sys.stderr)
        return None
    from doyen.cli.up.quorum import Quorum

    quorum = Quorum(folder)
    stack.callback(quorum.stop)
    quorum.start()
    return quorum


def _file(folder: Path) -> str:
    return f"sqlite://{quote(str(folder / 'doyen.db'))}"


def _silent(_: str) -> None:
    return


def _tell(verdict: DrillResult, args: argparse.Namespace, folder: Path, *, keep: bool) -> None:
    if args.json:
        print_json({**verdict.as_dict(), "evidence": str(folder) if keep else None})
        return
    from doyen.cli.up.drill import summary

    out = console()
    for line in summary(verdict):
        out.print(line)
    if keep:
        out.print(f"the audit logs are kept in {folder}")


class _Interrupts:
    """Notes a signal that asks to end, for loops to look at: nothing is torn from its work."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = self.received or number

    def stopping(self) -> bool:
        """Whether it is time to end."""
        return self.received is not None
