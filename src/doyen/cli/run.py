"""`doyen run ELECTION -- CMD…`: run a command while this process leads, never otherwise.

What keeps the command from outliving its term is `doyen.supervise`. This module is the policy
around it: when to campaign again, when to start the command again, what a signal means, and what
the exit code is. Standard output is the command's alone; doyen speaks on standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shutil
import signal
import socket
import sys
from types import TracebackType

import doyen
from doyen.cli._manual import manual
from doyen.cli._output import add_store_option, seconds, store_url
from doyen.errors import ConfigError, LeadershipLost
from doyen.events import Elected, Hindered, Lost, Overrun, Record, Resigned, Unsure, Waiting
from doyen.supervise import Supervisor

ENDING = (signal.SIGTERM, signal.SIGINT)
"""Asks for the end: passed on once, and then the command is waited for. The second time kills."""
FATAL = (*ENDING, signal.SIGHUP, signal.SIGQUIT)
"""Ends doyen while no command runs."""
FORWARDED = (*FATAL, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
"""Between two starts with --restart; each pause doubles unless the command ran for so long."""

MANUAL = """\
Stands for ELECTION, runs the command once elected, and campaigns again after a loss. The command
is told DOYEN_TOKEN, DOYEN_NAME and DOYEN_ELECTION in its environment. It should stay in the
foreground: whatever it has started is stopped when it ends, or when leadership is lost, with
SIGTERM first and SIGKILL when 70 % of the stop budget have gone.

SIGTERM and SIGINT are passed on, and the command has all the time it takes, as leader, to end;
a second one kills it. SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and SIGWINCH are passed on as they come.
A leader cannot be suspended: Ctrl-Z does nothing. The command has no controlling terminal.

Standard output is the command's alone. doyen speaks on standard error; with --json, in one JSON
object for each event.

exit codes:
  the command's own, or 128 + the signal it died of
  75   not elected within --wait; or leadership lost, with --once
  126  the command cannot be executed
  127  the command was not found
  128 + the signal that ended doyen while no command ran
  2 and 69 as for every command: see doyen --help

examples:
  # started twice: one of them works, the other stands by
  doyen run billing --store sqlite:///var/lib/app/doyen.db -- python worker.py
  # give up if another leads for the whole of the next minute
  doyen run billing --wait 60 --once -- ./worker --verbose
  # ahead of others in line; started again whenever it ends; with an audit log
  doyen run billing --priority 10 --restart --audit billing.jsonl -- ./worker
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.usage = "doyen run [options] ELECTION -- CMD [ARG ...]"
    manual(parser, MANUAL)
    parser.add_argument("election", metavar="ELECTION", help="what to compete for")
    parser.add_argument("command", nargs="+", metavar="CMD", help="what to run while leading")
    add_store_option(parser)
    parser.add_argument("--name", help="who this is (default: host name and process id)")
    parser.add_argument(
        "--priority", type=int, default=0, help="higher stands further ahead in line (default: 0)"
    )
    parser.add_argument(
        "--preempt",
        action="store_true",
        help="have a leader of lower priority hand over, instead of waiting for its end",
    )
    parser.add_argument(
        "--cooldown",
        type=seconds,
        default=60.0,
        metavar="SECONDS",
        help="with --preempt: how long a leader is left alone (default: 60)",
    )
    parser.add_argument(
        "--ttl",
        type=seconds,
        metavar="SECONDS",
        help="how long the store waits for a silent leader (default: the store's)",
    )
    parser.add_argument(
        "--stop-budget",
        type=seconds,
        metavar="SECONDS",
        help="how long the command has to end after a loss (default: a sixth of the ttl)",
    )
    parser.add_argument(
        "--wait",
        type=seconds,
        metavar="SECONDS",
        help="give up if not elected within this time (default: wait for ever)",
    )
    parser.add_argument(
        "--once", action="store_true", help="end on loss, rather than campaign again"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start the command again whenever it ends while this process leads",
    )
    parser.add_argument(
        "--audit", metavar="FILE", help="append to this audit log, for verify (default: none)"
    )
    parser.add_argument(
        "--verbose", action="store_true", help="say when waiting, elected and resigned"
    )


def run(args: argparse.Namespace) -> int:
    """Campaign, run, and return the exit code."""
    program = args.command[0]
    if shutil.which(program) is None:
        there = os.path.dirname(program) and os.path.exists(program)
        reason = "cannot be executed" if there else "command not found"
        print(f"doyen: {program}: {reason}", file=sys.stderr)
        return 126 if there else 127
    return asyncio.run(_Run(args).main())


class _Run:
    """One `doyen run`, from campaign to exit code."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        if args.name == "":
            raise ConfigError("--name is empty: say who this is, or leave the option out")
        if store_url(args).startswith("memory:"):
            raise ConfigError(
                "a memory:// store is within one process, so every `doyen run` would lead:"
                " name a store that others can reach"
            )
        self._name = args.name or f"{socket.gethostname()}-{os.getpid()}"
        self._supervisor = Supervisor(
            args.command, environ={"DOYEN_NAME": self._name, "DOYEN_ELECTION": args.election}
        )
        self._asked_to_end: signal.Signals | None = None
        self._passed_on: set[int] = set()
        self._code: int | None = None

    async def main(self) -> int:
        args = self._args
        self._task = asyncio.current_task()
        self._catch_signals()
        with _Voice(as_json=args.json, verbose=args.verbose or args.json):
            try:
                async with (
                    self._supervisor,
                    doyen.connect(
                        store_url(args),
                        ttl_s=args.ttl,
                        stop_budget_s=args.stop_budget,
                        audit=args.audit,
                    ) as session,
                ):
                    return await self._campaign(session)
            except asyncio.CancelledError:
                if self._asked_to_end is None:
                    raise
                return 128 + self._asked_to_end
            finally:
                self._ignore_signals()

    async def _campaign(self, session: doyen.Session) -> int:
        args = self._args
        while True:
            try:
                async with session.campaign(
                    args.election,
                    name=self._name,
                    priority=args.priority,
                    preempt=args.preempt,
                    cooldown_s=args.cooldown,
                    wait_s=args.wait,
                ) as term:
                    self._code = await self._lead(term)
            except LeadershipLost:
                # A command that had ended by itself had nothing to lose.
                if self._code is None and self._asked_to_end is not None:
                    return 128 + self._asked_to_end
                if self._code is None and args.once:
                    raise
            if self._code is not None:
                return self._code

    async def _lead(self, term: doyen.Term) -> int:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            started_at = loop.time()
            self._passed_on.clear()
            code = await self._supervisor.run(term)
            ended_as_asked = self._asked_to_end is not None or code - 128 in self._passed_on
            if not self._args.restart or ended_as_asked:
                return code
            if loop.time() - started_at > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            logging.getLogger("doyen").warning(
                "the command ended with %d; it is started again in %g s", code, pause_s
            )
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _catch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup, or a shell's `&`
                loop.add_signal_handler(signum, self._signalled, signum)
        loop.add_signal_handler(signal.SIGTSTP, lambda: None)

    def _ignore_signals(self) -> None:
        # The outcome is settled: an impatient second signal must not replace the exit code while
        # the interpreter shuts down.
        loop = asyncio.get_running_loop()
        for signum in FORWARDED:
            loop.remove_signal_handler(signum)
            signal.signal(signum, signal.SIG_IGN)

    def _signalled(self, signum: signal.Signals) -> None:
        if self._supervisor.running:
            if signum in ENDING and self._asked_to_end is not None:
                self._supervisor.kill()
                return
            if signum in ENDING:
                self._asked_to_end = signum
            self._passed_on.add(signum)
            self._supervisor.forward(signum)
        elif signum in FATAL and self._asked_to_end is None and self._code is None:
            self._asked_to_end = signum
            if self._task is not None:
                self._task.cancel()


class _Voice(logging.Handler):
    """What doyen has to say, on standard error.

    Events come from doyen's own threads, where nothing may block; a full pipe blocks. So lines are
    handed to the main loop, whose stalling costs no lease.
    """

    def __init__(self, *, as_json: bool, verbose: bool) -> None:
        super().__init__(logging.DEBUG if verbose else logging.WARNING)
        self._as_json = as_json
        self._loop = asyncio.get_running_loop()
        self._logger = logging.getLogger("doyen")

    def __enter__(self) -> None:
        self._before = self._logger.level, self._logger.propagate
        self._logger.setLevel(self.level)
        self._logger.propagate = False
        self._logger.addHandler(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._logger.removeHandler(self)
        level, self._logger.propagate = self._before
        self._logger.setLevel(level)

    def emit(self, record: logging.LogRecord) -> None:
        event: Record | None = getattr(record, "doyen", None)
        if event is None and record.levelno < logging.WARNING:
            return
        if self._as_json:
            fields = event.fields() if event else {"event": "message", "text": record.getMessage()}
            self._loop.call_soon_threadsafe(_say, json.dumps(fields))
        elif words := _in_words(event) if event else record.getMessage():
            self._loop.call_soon_threadsafe(_say, f"doyen: {words}")


def _in_words(record: Record) -> str | None:
    match record.event:
        case Waiting(election=election, behind=behind):
            return f"waiting to lead {election!r}, behind {behind!r}"
        case Hindered(election=election, error=error):
            return f"cannot stand for {election!r} yet, and tries again: {error}"
        case Elected(election=election, token=token):
            return f"leading {election!r}, token {token}"
        case Unsure(remaining_s=remaining_s, error=error):
            return f"renewals are failing, {remaining_s:g} s are left: {error}"
        case Lost(election=election, reason=reason):
            return f"no longer leading {election!r}: {reason}"
        case Resigned(election=election):
            return f"resigned from {election!r}"
        case Overrun(election=election, token=token):
            return (
                f"the end of the term in {election!r} (token {token}) was dealt with later than the"
                " stop budget allows, as by a process that was frozen; its guard, unless frozen as"
                " well, ended the command in time"
            )
        case event if event.level >= logging.ERROR:
            return str(event)
    return None


def _say(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # nobody is listening, and the command need not suffer for it
