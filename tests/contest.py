"""An election among real processes on a real store, each behind a proxy that injects faults.

Run as a program, this file is one candidate: it campaigns, again after every loss, prints every
event of its session as a line of JSON, and resigns when its standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import doyen
import servers
from candidates import eventually
from doyen.audit import Report, verify
from doyen.events import Record
from doyen.lease.clock import SystemClock
from servers import Proxy
from servers.janitor import family_of
from servers.proxy import Addressed
from servers.tally import fault, tally, tidying
from stalls import Waits, stalled_s, waits_of

ELECTION = "contest"
PATIENCE_S = 30.0
GOOD = (None, 0, -signal.SIGKILL)
now = SystemClock().now


@dataclass(frozen=True)
class Place:
    """A store that is reached without a proxy."""

    url: str
    port: int = 0


class Candidate:
    """One process that campaigns."""

    def __init__(
        self, contest: Contest, name: str, url: str, link: Proxy | None, inside: list[str]
    ) -> None:
        self.name, self.link = name, link
        self.audit = contest.folder / f"{name}.audit"
        self._contest = contest
        self.process = subprocess.Popen(
            [
                *inside,
                *(sys.executable, __file__, url, name, str(contest.ttl_s), str(self.audit)),
                json.dumps(contest.options),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout:
            for line in self.process.stdout:
                self._contest.hear(self, json.loads(line))
        self._contest.hear(self, {"event": "ended", "code": self.process.wait()})

    def written(self) -> str:
        """Its audit log. Events are printed before they are written there."""
        return self.audit.read_text() if self.audit.exists() else ""

    @fault
    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @fault
    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def let_go(self) -> None:
        """Ask it to resign and end; `close` waits for that."""
        self.thaw()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def close(self) -> int:
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            self._reader.join()
            if self.link is not None:
                self.link.__exit__(None, None, None)
        return code


class Contest:
    """Candidates of one election, and the events that they have printed."""

    def __init__(
        self,
        server: Addressed,
        folder: Path,
        *,
        ttl_s: float,
        size: int = 3,
        links: bool = False,
        inside: Callable[[str], list[str]] = lambda name: [],
        **options: Any,
    ) -> None:
        """`inside` returns the prefix of a candidate's command, which decides where it runs.
        `options` are those of the sessions."""
        self.folder, self.ttl_s, self.options = folder, ttl_s, options
        self._inside = inside
        self.candidates: list[Candidate] = []
        self.elected: list[tuple[Candidate, dict[str, Any]]] = []
        self.events: list[tuple[Candidate, dict[str, Any]]] = []
        self._server, self._size, self._links = server, size, links
        self._heard = threading.Condition()

    def hear(self, candidate: Candidate, event: dict[str, Any]) -> None:
        with self._heard:
            self.events.append((candidate, event))
            if event["event"] == "elected":
                self.elected.append((candidate, event))
            self._heard.notify_all()

    def add(self) -> Candidate:
        link = Proxy(self._server).__enter__() if self._links else None
        url = self._server.url if link is None else link.url
        name = f"c{len(self.candidates) + 1}"
        candidate = Candidate(self, name, url, link, self._inside(name))
        self.candidates.append(candidate)
        return candidate

    def join(self) -> Candidate:
        """Add a candidate, and wait until it has a lease."""
        candidate = self.add()
        self.wait("the new candidate has no lease", lambda: self.seen(candidate, "granted"))
        return candidate

    def wait(self, what: str, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; fail at once if a candidate ends by itself or logs an
        error."""

        def failed() -> list[str]:
            ended = [each.name for each in self.candidates if each.process.returncode not in GOOD]
            return ended + [event["text"] for _, event in self.events if event["event"] == "error"]

        with self._heard:
            self._heard.wait_for(lambda: failed() or condition(), max(PATIENCE_S, 4 * self.ttl_s))
            last = [f"{who.name}: {event}" for who, event in self.events[-20:]]
            assert not failed(), f"candidates failed: {failed()}; last events: {last}"
            assert condition(), f"{what}; last events: {last}"

    def listen(self, seconds: float) -> None:
        """Let time pass; fail at once if a candidate ends by itself."""
        until = now() + seconds
        while (left := until - now()) > 0:
            with self._heard:
                self._heard.wait(left)
            self.wait("", lambda: True)

    def settle(self, seconds: float) -> None:
        """Let this much time pass, and then more until there is a leader."""
        instant = now() + seconds

        def leads() -> bool:
            if not any(event.get("at", 0.0) >= instant for _, event in self.events):
                return False
            leader, term = self.elected[-1]
            lost = [event["token"] for event in self.seen(leader, "lost")]
            return leader.process.returncode is None and term["token"] not in lost

        self.wait("there is no leader", leads)

    def leader(self, after: int = 0) -> tuple[Candidate, dict[str, Any]]:
        """The candidate elected last, once its token is above `after`."""
        self.wait(
            "no candidate was elected",
            lambda: self.elected and self.elected[-1][1]["token"] > after,
        )
        return self.elected[-1]

    def seen(self, candidate: Candidate, kind: str) -> list[dict[str, Any]]:
        return [event for who, event in self.events if who is candidate and event["event"] == kind]

    def failover_s(self, hurt: Callable[[Candidate], object]) -> float:
        """Inject a fault into the leader. Returns the time until another was elected, less the time
        for which the successor, the servers and the proxies were ready to run and got no
        processor."""
        leader, term = self.leader()
        line = f'"token":{term["token"]},'
        eventually(lambda: line in leader.written(), "its term is in its log")
        before = {each: self._waits(each) for each in self.candidates if each is not leader}
        began = now()
        hurt(leader)
        successor, new = self.leader(after=term["token"])
        stalled = stalled_s(before[successor], self._waits(successor))
        took_s = float(new["at"]) - began
        since = [event for _, event in self.events if event.get("at", 0.0) >= began]
        print(f"elected after {took_s:.2f} s, {stalled:.2f} s of it without a processor: {since}")
        return took_s - stalled

    def _waits(self, candidate: Candidate) -> tuple[Waits, ...]:
        alive = [pid for each in servers.running() if each.alive for pid in family_of(each.pid)]
        proxies = [os.getpid()] if self._links else []
        return waits_of([candidate.process.pid]), waits_of(alive), waits_of(proxies)

    def report(self) -> Report:
        """Stop all candidates, and verify their audit logs."""
        for candidate in self.candidates:
            if candidate.process.poll() is None:
                candidate.let_go()
        for candidate in self.candidates:
            assert candidate.close() in GOOD, f"{candidate.name} failed"
        report = verify([each.audit for each in self.candidates if each.audit.exists()])
        tally.elections += report.terms
        tally.violations += len(report.violations)
        return report

    def __enter__(self) -> Self:
        try:
            for _ in range(self._size):
                self.add()
            self.wait(
                "not all candidates have a lease",
                lambda: (
                    all(self.seen(each, "granted") for each in self.candidates) and self.elected
                ),
            )
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @tidying()
    def close(self) -> None:
        for candidate in self.candidates:
            if candidate.process.poll() is None:
                candidate.kill()
            candidate.close()
            if candidate.process.stdin is not None:
                try:
                    candidate.process.stdin.close()
                except BrokenPipeError:
                    pass


def unexplained(report: Report, noticed_s: float = 0.25) -> list[str]:
    """The violations that a defect of etcd does not explain. A leader of etcd that was suspended
    can revoke live leases when it resumes (etcd#18428). Their holders must end their terms within
    `noticed_s`."""
    revoked = "lost (its record was removed from the store by another process)"
    return [
        each.story
        for each in report.violations
        if each.kind != "overlap" or each.by_s > noticed_s or each.terms[0].end.what != revoked
    ]


def sound(report: Report, terms: int) -> None:
    assert not report.violations, report.violations[0].story
    assert report.terms >= terms


async def run_candidate(url: str, name: str, options: dict[str, Any]) -> None:
    """Campaign until standard input ends."""

    class Printer(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            event: Record | None = getattr(record, "doyen", None)
            if event is not None:
                os.write(1, json.dumps({**event.fields(), "at": event.at}).encode() + b"\n")
            elif record.levelno >= logging.ERROR:
                line = {"event": "error", "text": logging.Formatter().format(record)}
                os.write(1, json.dumps(line).encode() + b"\n")

    logging.getLogger("doyen").addHandler(Printer())
    logging.getLogger("doyen").setLevel(logging.DEBUG)

    async def campaign(session: doyen.Session) -> None:
        async for each in session.campaigns(ELECTION, name=name):
            async with each as term:
                while True:
                    term.check()
                    await asyncio.sleep(0.01)

    # A server that is being restarted may refuse the first connection.
    async with doyen.connect(url, wait_s=60, **options) as session:
        running = asyncio.ensure_future(campaign(session))
        asyncio.get_running_loop().add_reader(0, running.cancel)
        await asyncio.wait({running})
    if not running.cancelled():
        running.result()


if __name__ == "__main__":
    _, url, name, ttl_s, audit, more = sys.argv
    asked = {"ttl_s": float(ttl_s), "audit": audit, **json.loads(more)}
    asyncio.run(run_candidate(url, name, asked))
