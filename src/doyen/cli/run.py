"""`doyen run ELECTION -- CMD…`: run a command only while this process leads.

`doyen.supervise` ensures that the command does not outlive its term. This module decides when to
campaign again, when to restart the command, how to treat signals, and which exit code to return.
Standard output belongs to the command; doyen writes to standard error.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import shutil
import signal
import socket
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from types import TracebackType

import doyen
from doyen.cli._output import add_lease_options, add_option, add_store_option, choose_for, duration
from doyen.errors import ConfigError, LeadershipLost
from doyen.events import (
    Elected,
    Hindered,
    Lost,
    Overrun,
    Record,
    Resigned,
    Unsure,
    Unwarded,
    Waiting,
)
from doyen.events.log_lines import LogfmtLine, OutageEnded
from doyen.events.service import ServiceManager
from doyen.stores.choice import without_password
from doyen.supervise import Supervisor
from doyen.supervise.once import RunResult, run_once

ENDING = (signal.SIGTERM, signal.SIGINT)
"""The first of these signals is forwarded to the command; the second kills the command."""
FATAL = (*ENDING, signal.SIGHUP, signal.SIGQUIT)
"""These signals end doyen while no command runs."""
FORWARDED = (*FATAL, signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 30.0
"""The pause before a restart doubles each time, up to this, and starts over after a run that was
longer than this."""

MANUAL = """\
Campaigns in ELECTION, runs the command once elected, and campaigns again after a loss. The
environment of the command contains DOYEN_TOKEN, DOYEN_NAME, DOYEN_ELECTION and DOYEN_STORE, the URL
of the store, so that doyen within the command uses the same one. The command should stay in the
foreground: when it ends, or when leadership is lost, all processes that it started are stopped,
with SIGTERM first and with SIGKILL after 70 % of the stop budget.

The first SIGTERM or SIGINT is forwarded to the command, which may take as long as it needs to end
and remains leader until then; the second kills it. SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2 and SIGWINCH
are always forwarded. A leader cannot be suspended: Ctrl-Z has no effect. The command has no
controlling terminal.

Under systemd (Type=notify) it reports that it campaigns, what it does, and that it is alive
(WatchdogSec=); see doyen deploy.

Standard output belongs to the command. doyen writes to standard error: which store it uses, which
candidate it waits for, and warnings; with --json, one JSON object for each event.

With --once-in, for cron: all hosts run the same line. The leader runs the command, and the others
wait and return the exit code of that run, unless it began longer ago than the given time. A command
whose host crashed, or that was stopped, is run again by the next leader.

exit codes:
  the command's own, or 128 + the number of the signal that ended it
  75   not elected within --wait; or leadership lost, with --once
  126  the command cannot be executed
  127  the command was not found
  128 + the number of the signal that ended doyen while no command ran
  2 and 69 as for every command: see doyen --help

examples:
  # started twice: one runs the worker, the other waits to take over
  doyen run billing --store sqlite:///var/lib/app/doyen.db -- python worker.py
  # give up if not elected within a minute
  doyen run billing --wait 60 --once -- ./worker --verbose
  # in the crontab of every host: it runs once a night, and all return its code
  doyen run nightly --once-in 12h --wait 2h -- ./nightly
  # ahead of others in line; restarted whenever it ends; with an audit log
  doyen run billing --priority 10 --restart --audit billing.jsonl -- ./worker
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.usage = "doyen run [options] ELECTION -- CMD [ARG ...]"
    parser.add_argument("election", metavar="ELECTION", help="the election's name")
    parser.add_argument("command", nargs="+", metavar="CMD", help="the command to run")
    add_store_option(parser)
    parser.add_argument("--name", help="the candidate's name (default: host name and process id)")
    first = "candidates with a higher priority lead first"
    add_option(parser, "--priority PRIORITY", first, "0", type=int)
    add_option(
        parser, "--preempt", "order a leader of lower priority to hand over, instead of waiting"
    )
    least = "with --preempt: the least time for which a leader may lead"
    add_option(parser, "--cooldown TIME", least, "60")
    add_lease_options(parser, "command")
    give_up = "give up if not elected within this time (default: no limit)"
    add_option(parser, "--wait TIME", give_up)
    wait = "how long to wait for a store that cannot be reached at first"
    add_option(parser, "--store-wait TIME", wait, "0")
    add_option(parser, "--once", "end after a loss instead of campaigning again")
    seldom = "run the command at most once in this time, on any one of the hosts: see below"
    add_option(parser, "--once-in TIME", f"{seldom} (default: no limit)")
    add_option(parser, "--restart", "restart the command whenever it ends while this process leads")
    frozen = "have a frozen doyen killed after this time; the command ends too (default: never)"
    add_option(parser, "--frozen-after TIME", frozen)
    add_option(parser, "--audit FILE", "append events to this audit log (default: none)")
    add_option(parser, "--verbose", "also report elections and resignations")


def check_arguments(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Explain a forgotten name or `--`. The parser would take the command's name for that of the
    election, or the command's options for doyen's."""
    divided = "--" in arguments
    before = [*takewhile(lambda each: each != "--", arguments)]
    command = [*arguments[len(before) + 1 :]]
    words = _words(parser, before)
    begins = words[1] if len(words) > 1 else len(before)
    options = {each.partition("=")[0] for each in before[:begins] if each.startswith("-")}
    if {"-h", "--help"} & options or options - {*parser._option_string_actions}:
        return  # the parser explains unknown options
    name = before[words[0]] if words else "ELECTION"
    if not divided and len(words) > 1:
        command, problem = before[begins:], "-- is missing before the command"
    elif not divided:
        command = ["CMD"]
        problem = "the command is missing" if words else "the election and the command are missing"
    elif not words:
        problem = "the name of the election is missing before --"
    elif len(words) > 1:
        problem = f"only the name of the election comes before --, not also {before[begins]!r}"
    elif not command:
        command, problem = ["CMD"], "the command is missing after --"
    else:
        return
    raise ConfigError(f"{problem}: doyen run {shlex.join([name])} -- {shlex.join(command)}")


def _words(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> list[int]:
    """Where the arguments stand that are neither options nor their values."""
    words, is_value = [], False
    for position, each in enumerate(arguments):
        if is_value:
            is_value = False
        elif not each.startswith("-"):
            words.append(position)
        else:
            option = parser._option_string_actions.get(each)
            is_value = option is not None and option.nargs != 0
    return words


def run(args: argparse.Namespace) -> int:
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
            raise ConfigError("--name is empty: give a name, or leave the option out")
        if args.once_in is not None and args.restart:
            raise ConfigError("--once-in and --restart contradict each other: leave one out")
        self._store = choose_for(args)
        # Before the environment of the command is copied, which has no part in this.
        self._manager = ServiceManager.of_environment()
        self._name = args.name or f"{socket.gethostname()}-{os.getpid()}"
        given = {"DOYEN_NAME": self._name, "DOYEN_ELECTION": args.election}
        self._supervisor = Supervisor(
            args.command, environ={**given, "DOYEN_STORE": self._store.url}
        )
        self._asked_to_end: signal.Signals | None = None
        self._forwarded: set[int] = set()
        self._code: int | None = None
        self._session: doyen.Session | None = None

    async def main(self) -> int:
        args = self._args
        self._task = asyncio.current_task()
        self._catch_signals()
        self._state_store()
        self._manager.tell(STATUS=f"connecting to {without_password(self._store.url)}")
        watching = asyncio.create_task(self._manager.keep_watchdog(self._alive))
        reporter = _StderrReporter(
            as_json=args.json, verbose=args.verbose or args.json, manager=self._manager
        )
        with reporter:
            try:
                async with (
                    self._supervisor,
                    doyen.connect(
                        self._store.url,
                        ttl_s=args.ttl,
                        stop_budget_s=args.stop_budget,
                        audit=args.audit,
                        wait_s=args.store_wait,
                        warden="auto",
                        frozen_after_s=args.frozen_after,
                    ) as session,
                ):
                    self._session = session
                    # A candidate that waits is as it should be, so it is ready.
                    self._manager.tell(READY=1, STATUS=f"campaigning for {args.election!r}")
                    return await self._campaign(session)
            except asyncio.CancelledError:
                if self._asked_to_end is None:
                    raise
                return 128 + self._asked_to_end
            finally:
                watching.cancel()
                self._manager.tell(STOPPING=1)
                self._ignore_signals()

    async def _alive(self) -> None:
        """Returns if doyen's thread, which renews the lease, does its work."""
        if self._session is not None:
            await self._session._opened.runtime.do(asyncio.sleep(0))

    def _state_store(self) -> None:
        """State on standard error which store is used."""
        if self._args.json:
            shown, origin = without_password(self._store.url), self._store.origin
            fields = {"event": "store", "store": shown, "origin": origin or "default"}
            _print(json.dumps({**fields, "this_machine_only": self._store.defaulted}))
        else:
            _print(f"doyen: {self._store}")

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
                    self._code = await self._lead_once(session, term)
            except LeadershipLost:
                # If the command had already ended by itself, its exit code counts.
                if self._code is None and self._asked_to_end is not None:
                    return 128 + self._asked_to_end
                if self._code is None and args.once:
                    raise
            if self._code is not None:
                return self._code

    async def _lead_once(self, session: doyen.Session, term: doyen.Term) -> int:
        """Run the command, unless its result is known."""
        if self._args.once_in is None:
            return await self._lead(term)

        async def work() -> int | None:
            code = self._code = await self._lead(term)
            # A command that was stopped has no result.
            return None if self._asked_to_end or code - 128 in self._forwarded else code

        result = await run_once(session, term, within_s=self._args.once_in, work=work)
        if self._code is None:
            assert result is not None
            self._state_result(result)
            return result.code
        return self._code

    def _state_result(self, result: RunResult) -> None:
        if self._args.json:
            fields = {"event": "has_run", "election": self._args.election, **result._asdict()}
            _print(json.dumps(fields))
        else:
            ago_s = max(0.0, time.time() - result.began)
            _print(
                f"doyen: {result.name!r} has run it {duration(ago_s)} ago, for"
                f" {duration(result.ended - result.began)}, with exit code {result.code}"
            )

    async def _lead(self, term: doyen.Term) -> int:
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        while True:
            started_at = loop.time()
            self._forwarded.clear()
            code = await self._supervisor.run(term)
            ended_as_asked = self._asked_to_end is not None or code - 128 in self._forwarded
            if not self._args.restart or ended_as_asked:
                return code
            if loop.time() - started_at > LONGEST_PAUSE_S:
                pause_s = FIRST_PAUSE_S
            logging.getLogger("doyen").warning(
                "the command ended with exit code %d; restarting it in %g s", code, pause_s
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
        # The exit code is decided: a further signal must not replace it while the interpreter
        # shuts down.
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
                self._manager.tell(STOPPING=1, STATUS="waiting for the command to end")
            self._forwarded.add(signum)
            self._supervisor.forward(signum)
        elif signum in FATAL and self._asked_to_end is None and self._code is None:
            self._asked_to_end = signum
            if self._task is not None:
                self._task.cancel()


class _StderrReporter(logging.Handler):
    """Prints doyen's events and warnings on standard error.

    It is called on doyen's own threads, which a full pipe must not block. So the lines are printed
    by the main loop, which does not renew leases.
    """

    def __init__(self, *, as_json: bool, verbose: bool, manager: ServiceManager) -> None:
        super().__init__(logging.DEBUG)
        self._manager = manager
        self._role = ""
        self._least = logging.DEBUG if verbose else logging.WARNING
        self._announced = False
        """The user has read that the candidate waits, or that it has lost its term."""
        self._as_json = as_json
        self._loop = asyncio.get_running_loop()
        self._logger = logging.getLogger("doyen")
        self._level_before = logging.NOTSET

    def __enter__(self) -> None:
        others = self._others()
        self._level_before = others[0]._level_before if others else self._logger.level
        self._logger.setLevel(self.level)
        self._logger.addHandler(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._logger.removeHandler(self)
        if not self._others():
            self._logger.setLevel(self._level_before)

    def _others(self) -> list[_StderrReporter]:
        """Commands may run at the same time in one process. The last restores the logger."""
        return [each for each in self._logger.handlers if isinstance(each, _StderrReporter)]

    def emit(self, record: logging.LogRecord) -> None:
        event: Record | None = getattr(record, "doyen", None)
        if event is not None:
            self._tell_status(event)
        if not self._is_shown(record.levelno, event):
            return
        if self._as_json:
            fields = event.fields() if event else {"event": "message", "text": _sentence(record)}
            self._loop.call_soon_threadsafe(_print, json.dumps(fields))
        elif text := _as_text(event) if event else _sentence(record):
            self._loop.call_soon_threadsafe(_print, f"doyen: {text}")

    def _tell_status(self, record: Record) -> None:
        """Tell the service manager what this candidate does."""
        text = _as_text(record)
        if isinstance(record.event, Waiting | Elected | Resigned | Lost) and text:
            self._role = text
        if isinstance(record.event, OutageEnded):
            text = self._role
        if text:
            self._manager.tell(STATUS=text)

    def _is_shown(self, level: int, record: Record | None) -> bool:
        """Warnings, what the candidate waits for, and that it leads after that or after a loss;
        with `verbose` every event."""
        if record is None:
            return level >= logging.WARNING
        shown = level >= self._least
        if isinstance(record.event, Waiting) or (isinstance(record.event, Lost) and shown):
            self._announced = True
            return True
        if isinstance(record.event, Elected) and self._announced:
            self._announced = False
            return True
        return shown


_SENTENCES = {
    "store_waited_for": "the store does not answer yet, waiting for up to {for_s:.0f} s: {error}",
    "guard_died": "the guard process {pid} was killed; the command is being killed with it",
    "descendants_unknown": "this system does not show which processes descend from the command:"
    " those that leave its process group are not stopped with it",
    "audit_log_failed": "the audit log {path} cannot be written: {error}; events are missing from"
    " it until it can be written again",
    "audit_log_restored": "the audit log {path} can be written again; it states how many events"
    " are missing",
}
"""Log lines that are not events of a session, in words for a terminal."""


def _sentence(record: logging.LogRecord) -> str:
    """A log line in words: what has happened, and what else it states."""
    line = record.args[0] if isinstance(record.args, tuple) and record.args else record.msg
    fields = dict(line.fields) if isinstance(line, LogfmtLine) else {}
    event = str(fields.pop("event", record.getMessage().removeprefix("event=")))
    if event in _SENTENCES:
        return _SENTENCES[event].format_map(fields)
    stated = [f"{name} {value}" for name, value in fields.items()]
    if record.exc_info and record.exc_info[1] is not None:
        stated.append(repr(record.exc_info[1]))
    what = event.replace("_", " ") if event.isidentifier() else event
    return f"{what}: {', '.join(stated)}" if stated else what


def _as_text(record: Record) -> str | None:
    match record.event:
        case Waiting(election=election, behind=behind):
            return f"waiting to lead {election!r}, behind {behind!r}"
        case Hindered(election=election, error=error):
            return f"the campaign for {election!r} is delayed, trying again: {error}"
        case Elected(election=election, token=token):
            return f"leading {election!r}, token {token}"
        case Unsure(remaining_s=remaining_s, error=error):
            return (
                f"renewals fail, the lease ends in {remaining_s:g} s unless one succeeds: {error}"
            )
        case Unwarded(reason=reason):
            return f"no warden ({reason}): if this process dies, its lease expires"
        case OutageEnded(after_s=after_s):
            return f"the store is available again after {after_s:g} s"
        case Lost(election=election, reason=reason):
            return f"no longer leading {election!r}: {reason}"
        case Resigned(election=election):
            return f"resigned from {election!r}"
        case Overrun(election=election, token=token):
            return (
                f"the end of the term in {election!r} (token {token}) was noticed after its stop"
                " budget, probably because this process was paused; the guard process has ended"
                " the command in time, unless it was paused as well"
            )
        case event if event.level >= logging.ERROR:
            return str(event)
    return None


def _print(line: str) -> None:
    try:
        print(line, file=sys.stderr, flush=True)
    except OSError:
        pass  # standard error was closed; the command goes on
