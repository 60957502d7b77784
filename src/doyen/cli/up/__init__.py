"""`doyen up`: a quorum of three nodes and some candidates on this machine, for demonstration.

In a terminal it shows a live view in which the user kills and freezes candidates (`live`). Without
a terminal, or with `--for`, leaders are killed and frozen in turn and the run ends by itself
(`drill`). In both cases the audit logs of the candidates are verified at the end.

Candidates run as modules of this package, so importing it must be cheap and import none of them.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING
from urllib.parse import quote

from doyen.cli._output import Exit, add_option, console, print_json
from doyen.errors import ConfigError

if TYPE_CHECKING:
    from doyen.cli.up.cluster import CandidateGroup
    from doyen.cli.up.drill import DrillResult
    from doyen.cli.up.quorum import NodeGroup

_DRILL_S = 10.0

MANUAL = """\
Starts a quorum of three nodes and some candidates that use it as their store, each as a process on
this machine; with --store the candidates use that store instead. In a terminal it shows a live
view, with keys that kill and freeze the leader of the election and the leader of the quorum; try
`doyen line`, `watch`, `resign`, `transfer` and `cluster status` from another terminal. The same is
served as a page for the browser, as by `doyen dash`, on which processes can be killed and frozen,
too; its address is shown. Without a terminal, with --for or with --json, leaders are killed and
frozen in turn, and the page is served only with --listen. In both cases the audit logs of the
candidates are verified at the end.

exit codes:
  0    the audit logs prove that there were never two leaders at a time and that
       tokens increased; unattended, no failover exceeded the worst case
  1    otherwise; the logs are kept, and their directory is printed
  others as for every command: see doyen --help

examples:
  doyen up
  # half a minute unattended, with a summary in JSON
  doyen up --candidates 5 --ttl 1 --for 30 --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--candidates N", "the number of candidates, 2 to 9", "3", type=int)
    lives = "how long a lease lives without a renewal"
    add_option(parser, "--ttl TIME", lives, "2", dest="ttl_s")
    lasts = f"run unattended for about this long (default without a terminal: {_DRILL_S:g})"
    add_option(parser, "--for TIME", lasts, dest="for_s")
    page = "serve the page there (default: in a terminal, on a free port of this machine)"
    add_option(parser, "--listen HOST:PORT", page)
    store = "the store of the candidates (default: a quorum of three nodes, removed afterwards)"
    add_option(parser, "--store URL", store)


def run(args: argparse.Namespace) -> int:
    if not 2 <= args.candidates <= 9:
        raise ConfigError(f"--candidates must be from 2 to 9; got {args.candidates}")
    if args.for_s is not None and not 0 < args.for_s < float("inf"):
        raise ConfigError(f"--for must be a number of seconds above 0; got {args.for_s:g}")
    from doyen.cli.up.processes import Stopped

    at_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    live = at_terminal and args.for_s is None and not args.json
    with _Interrupts() as interrupts:
        directory = Path(tempfile.mkdtemp(prefix="doyen-up-"))
        keep = False
        try:
            verdict = _run(args, directory, interrupts, live=live)
            keep = not verdict.ok
            _print(verdict, args, directory, keep=keep)
        except Stopped:
            assert interrupts.received is not None
            return 128 + interrupts.received
        finally:
            if not keep:
                shutil.rmtree(directory)
    if interrupts.received is not None and not (live and interrupts.received == signal.SIGINT):
        return 128 + interrupts.received
    return Exit.DONE if verdict.ok else Exit.NO


def _run(
    args: argparse.Namespace, directory: Path, interrupts: _Interrupts, *, live: bool
) -> DrillResult:
    from doyen.cli.up.cluster import CandidateGroup, timing_on
    from doyen.cli.up.drill import Drill, judge

    problems: list[str] = []
    with ExitStack() as stack:
        stopping = interrupts.stopping
        quorum = None if args.store else _quorum(directory, stack, stopping)
        local = f"sqlite://{quote(str(directory / 'doyen.db'))}"
        store = args.store or (quorum.url if quorum else local)
        timing, worst_s = timing_on(store, args.ttl_s, stopping)
        cluster = CandidateGroup(
            directory,
            candidates=args.candidates,
            store=store,
            timing=timing,
            worst_s=worst_s,
            quorum=quorum,
        )
        stack.callback(cluster.stop)
        page = _page(cluster, args.listen, stack, live=live)
        if live:
            from doyen.cli.up.live import show

            show(cluster, stopping=stopping, page=page)
        else:
            out = console()
            report_line = (lambda _: None) if args.json else out.print
            if quorum:
                report_line(f"a quorum of {len(quorum.servers)} nodes: {store}")
            report_line(f"{args.candidates} candidates on {'it' if quorum else store}")
            if page():
                report_line(f"in a browser: {page()}")
            report_line(f"ttl {timing.ttl_s:g} s; a failover takes at most {worst_s:.2f} s")
            drill = Drill(
                cluster,
                for_s=args.for_s or _DRILL_S,
                stopping=stopping,
                report_line=report_line,
            )
            problems = drill.run()
    return judge(cluster, problems, bounded=not live and interrupts.received is None)


def _quorum(directory: Path, stack: ExitStack, stopping: Callable[[], bool]) -> NodeGroup | None:
    """Start three nodes; None if msgspec is not installed."""
    if find_spec("msgspec") is None:
        print("doyen: msgspec is not installed, so a sqlite file is the store;", file=sys.stderr)
        print("       pip install 'doyen[quorum]' to run a quorum", file=sys.stderr)
        return None
    from doyen.cli.up.quorum import NodeGroup

    quorum = NodeGroup(directory)
    stack.callback(quorum.stop)
    quorum.start(stopping)
    return quorum


def _page(
    cluster: CandidateGroup, address: str | None, stack: ExitStack, *, live: bool
) -> Callable[[], str]:
    """Serve the page. Returns what tells its address, or an empty string without one."""
    if not address and not (live and find_spec("uvicorn") and find_spec("starlette")):
        return str
    from doyen.cli.up.page import open_page
    from doyen.web.serving import require_web

    require_web()
    thread = open_page(cluster, address or "127.0.0.1:0")
    stack.callback(thread.stop)
    return lambda: thread.address


def _print(verdict: DrillResult, args: argparse.Namespace, directory: Path, *, keep: bool) -> None:
    if args.json:
        print_json({**verdict.as_dict(), "evidence": str(directory) if keep else None})
        return
    from doyen.cli.up.drill import summary

    out = console()
    for line in summary(verdict):
        out.print(line)
    if keep:
        out.print(f"the audit logs are kept in {directory}")


class _Interrupts:
    """Records signals that ask to end. Loops check for them, so nothing is interrupted midway."""

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
        """Whether a signal was received."""
        return self.received is not None
