"""Forwarding in virtual time under faults, by seed: processes lose the store, the leader resigns,
loses its lease or its record, and requests between processes are refused, lost, delayed or carried
out without an answer.

The oracle knows every execution, and what each client was told: no request is executed twice, none
outside a valid term, none that was answered "not executed", and every one that was answered 200.
All answers come within a bound. Broken variants of the code must be seen, by it or by a single
test.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import httpcore2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import test_forwarding
from doyen import DoyenError, Session, Term
from doyen.integrations import asgi, forwarding
from doyen.integrations.forwarding import ForwardingRules, LeaderView, ServeHere, WaitForLeader
from doyen.integrations.network import UNSENT
from doyen.testing import run_virtual
from doyen.testing.faults import Faults, Odds
from forward_kit import SECRET, Pool, call
from support import TTL_S, Place
from swarm import SafetyViolated

ADDRESSES = [f"http://p{number}:80" for number in range(3)]
WAIT_S, ANSWER_S = 5.0, 20.0
DELAY_S = 2.0
LONGEST_S = WAIT_S + forwarding.FORWARDED_WAIT_S + ANSWER_S + 4 * DELAY_S
ROUGH = Odds(late=0.05, lost=0.03, unanswered=0.03, refused=0.03, delay_s=DELAY_S)


class Execution(NamedTuple):
    request: str
    token: int
    valid: bool


class Network(Pool):
    """What happens to a request on its way is drawn from the seed."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.draw = draw
        self.calm = False
        self.down: set[str] = set()
        self.hops = 0
        self._late: set[asyncio.Task[Any]] = set()

    async def handle_async_request(self, request: httpcore2.Request) -> httpcore2.Response:
        self.hops = max(self.hops, int(dict(request.headers).get(b"doyen-hops", b"0")))
        to = f"http://{request.url.host.decode()}:{request.url.port}"
        fate = "" if self.calm else self.draw.choice(("", "", "", "lost", "unanswered", "late"))
        if to in self.down:
            raise httpcore2.ConnectError("refused")
        if fate == "late":
            await asyncio.sleep(self.draw.random() * DELAY_S)
        if fate in ("lost", "unanswered"):
            if fate == "unanswered":
                task = asyncio.ensure_future(self._deliver(request))
                self._late.add(task)
                task.add_done_callback(self._late.discard)
            if self.draw.random() < 0.2:
                await asyncio.sleep(request.extensions["timeout"]["read"])
                raise httpcore2.ReadTimeout("silent")
            await asyncio.sleep(self.draw.random() * DELAY_S)
            raise httpcore2.ReadError("lost")
        return await super().handle_async_request(request)

    async def _deliver(self, request: httpcore2.Request) -> None:
        with suppress(httpcore2.NetworkError, httpcore2.ProtocolError):
            response = await super().handle_async_request(request)
            async for _ in response.aiter_stream():
                pass


class Process:
    """A process with a view, an application behind the middleware, and a session."""

    def __init__(self, world: World, address: str, seed: int) -> None:
        self.world, self.address = world, address
        self.faults = Faults(seed, ROUGH)
        self.view = LeaderView("e")
        options: dict[str, Any] = {"secret": SECRET, "trust": ADDRESSES, "view": self.view}
        options |= {"wait_s": WAIT_S, "answer_s": ANSWER_S, "pool": world.network}
        self.app = asgi.LeaderMiddleware(self._serve, **options)
        world.network.apps[address] = self.app
        self.session: Session

    async def run(self) -> None:
        meta = {"address": self.address}
        async with (
            self.world.place.session(self.faults) as self.session,
            self.view.following(self.session),
        ):
            async for campaign in self.session.campaigns("e", name=self.address, meta=meta):
                async with campaign as term:
                    await asyncio.sleep(self.world.draw.choice((0.0, 0.3)))
                    with self.view.leading(term):
                        await term.lost()

    async def _serve(self, scope: Any, receive: Any, send: Any) -> None:
        term: Term = scope["doyen.term"]
        while (await receive())["more_body"]:
            pass
        await asyncio.sleep(self.world.draw.random() * 0.5)
        request = scope["path"].removeprefix("/")
        self.world.executed.append(Execution(request, term.token, term.valid))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


class World:
    """One run: trouble, then calm."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.place = Place()
        self.network = Network(self.draw)
        self.executed: list[Execution] = []
        self.told: dict[str, tuple[int, bytes]] = {}
        self.processes = [Process(self, address, seed) for address in ADDRESSES]

    async def live(self) -> None:
        running = [asyncio.create_task(process.run()) for process in self.processes]
        clients = [asyncio.create_task(self._client(number)) for number in range(6)]
        for _ in range(12):
            await asyncio.sleep(self.draw.random() * TTL_S)
            await self._trouble()
        self.network.calm, self.network.down = True, set()
        for process in self.processes:
            process.faults.heal()
            process.faults.odds = Odds()
        await asyncio.gather(*clients)
        await asyncio.sleep(3 * TTL_S)
        for number, process in enumerate(self.processes):
            await self._ask(process, f"calm{number}")
            if self.told[f"calm{number}"][0] != 200:
                raise SafetyViolated(f"not served when calm: {self.told[f'calm{number}']}")
        for task in running:
            task.cancel()
        await asyncio.wait(running)

    async def _trouble(self) -> None:
        process = self.draw.choice(self.processes)
        match self.draw.choice(("cut", "heal", "down", "up", "expire", "resign", "force")):
            case "cut":
                process.faults.cut()
            case "heal":
                process.faults.heal()
            case "down":
                self.network.down.add(process.address)
            case "up":
                self.network.down.clear()
            case "expire":
                with suppress(Exception):
                    self.place.end_lease(process.session)
            case order:
                with suppress(DoyenError, TimeoutError):
                    async with asyncio.timeout(TTL_S):
                        await process.session.resign("e", force=order == "force")

    async def _client(self, number: int) -> None:
        for count in range(12):
            await asyncio.sleep(self.draw.random() * 3)
            await self._ask(self.draw.choice(self.processes), f"c{number}-{count}")

    async def _ask(self, process: Process, request: str) -> None:
        try:
            async with asyncio.timeout(LONGEST_S):
                status, body, _ = await call(process.app, f"/{request}".encode(), "POST")
        except TimeoutError:
            raise SafetyViolated(f"{request} was not answered within {LONGEST_S} s") from None
        except httpcore2.RemoteProtocolError as error:
            status, body = 0, str(error).encode()
        self.told[request] = status, body

    def judge(self) -> None:
        times = Counter(each.request for each in self.executed)
        twice = [request for request, count in times.items() if count > 1]
        if twice:
            raise SafetyViolated(f"executed twice: {twice}")
        if not all(each.valid for each in self.executed):
            raise SafetyViolated("executed outside a valid term")
        if self.network.hops > 2:
            raise SafetyViolated("forwarded more than twice")
        for request, (status, body) in self.told.items():
            if status == 200 and times[request] != 1:
                raise SafetyViolated(f"{request} was answered 200, and not executed")
            if body.startswith(b"not executed") and times[request]:
                raise SafetyViolated(f"{request} was answered {body!r}, and executed")
            if status not in (0, 200, 502, 503, 504, 508):
                raise SafetyViolated(f"{request} was answered {status} {body!r}")


def run(seed: int) -> World:
    world = World(seed)
    run_virtual(world.live(), clock=world.place.clock)
    world.judge()
    return world


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_requests_are_executed_once_in_much_trouble(seed: int) -> None:
    run(seed)


def test_the_world_is_troubled_and_requests_are_served() -> None:
    """Every kind of answer occurs, and requests are forwarded. Sessions vary their renewals at
    random, so the counts vary, too."""
    worlds = [run(seed) for seed in range(12)]
    statuses = Counter(status for world in worlds for status, _ in world.told.values())
    assert {200, 502, 503, 504} <= {*statuses}
    assert statuses[200] > sum(statuses.values()) / 3
    assert max(world.network.hops for world in worlds) == 2
    assert (
        len({(seed, each.token) for seed, world in enumerate(worlds) for each in world.executed})
        > 30
    )


@pytest.mark.chaos
@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_many_seeds(seed: int) -> None:
    run(seed)


# Broken variants.

Patch = pytest.MonkeyPatch


def sends_again(patch: Patch) -> None:
    """Sends again what may have been carried out."""
    patch.setattr(asgi, "UNSENT", (*UNSENT, httpcore2.ReadError, httpcore2.ReadTimeout))


class Unchecked:
    """Passes for a term, and never ends what is served during it."""

    def __init__(self, term: Term | None) -> None:
        self._term = term
        self.token = 0 if term is None else term.token

    @property
    def valid(self) -> bool:
        return self._term is not None and self._term.valid

    def check(self) -> None: ...

    def on_end(self, listener: Any) -> None: ...

    _forget = on_end


def serves_after_its_term(patch: Patch) -> None:
    """A process that has led serves while it knows of no other leader."""
    decide, leading = ForwardingRules.decide, LeaderView.leading
    last: dict[LeaderView, Term] = {}

    def remember(self: LeaderView, term: Term) -> Any:
        last[self] = term
        return leading(self, term)

    def hopeful(self: ForwardingRules, forwarded: Any) -> Any:
        decision = decide(self, forwarded)
        term = last.get(self.view)
        if isinstance(decision, WaitForLeader) and term is not None:
            return ServeHere(Unchecked(term))  # type: ignore[arg-type]
        return decision

    patch.setattr(LeaderView, "leading", remember)
    patch.setattr(ForwardingRules, "decide", hopeful)


def serves_before_there_is_a_leader(patch: Patch) -> None:
    """A process that is alone serves."""
    decide = ForwardingRules.decide

    def alone(self: ForwardingRules, forwarded: Any) -> Any:
        decision = decide(self, forwarded)
        alone = isinstance(decision, WaitForLeader) and self.view.leader is None
        return ServeHere(Unchecked(None)) if alone else decision  # type: ignore[arg-type]

    patch.setattr(ForwardingRules, "decide", alone)


def outlives_its_term(patch: Patch) -> None:
    """Does not end requests when the term ends."""
    patch.setattr(Term, "on_end", lambda self, listener: None)


def says_not_executed(patch: Patch) -> None:
    """Answers "not executed" whatever happened."""
    answer = asgi._answer

    async def careless(send: Any, status: int, text: str, *more: Any, **named: Any) -> None:
        if status >= 500 and not text.startswith("not executed"):
            text = f"not executed: {text}"
        await answer(send, status, text, *more, **named)

    patch.setattr(asgi, "_answer", careless)


@pytest.mark.parametrize(
    "mutant",
    [sends_again, serves_after_its_term, says_not_executed, serves_before_there_is_a_leader],
    ids=lambda each: each.__name__,
)
def test_broken_variants_are_seen(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(SafetyViolated):
        for seed in range(30):
            run(seed)


def drops_the_token(patch: Patch) -> None:
    patch.setattr(ForwardingRules, "read", lambda self, headers, method, target: None)


def forgets_hops(patch: Patch) -> None:
    patch.setattr(forwarding, "MAX_HOPS", 99)


def waits_for_ever(patch: Patch) -> None:
    """For the answer of a leader that was replaced."""
    patch.setattr(asgi, "LAST_WORDS_S", 1e6)


def forwards_to_an_earlier_leader(patch: Patch) -> None:
    decide = ForwardingRules.decide

    def again(self: ForwardingRules, forwarded: Any) -> Any:
        if forwarded is not None:
            forwarded = forwarded._replace(token=-1)
        return decide(self, forwarded)

    patch.setattr(ForwardingRules, "decide", again)


@pytest.mark.parametrize(
    ("mutant", "test"),
    [
        (
            drops_the_token,
            test_forwarding.test_requests_for_an_earlier_term_are_served_and_for_a_later_one_not,
        ),
        (forgets_hops, test_forwarding.test_a_loop_ends_after_two_hops),
        (
            forwards_to_an_earlier_leader,
            test_forwarding.test_a_request_is_forwarded_again_only_to_a_later_leader,
        ),
        (
            serves_before_there_is_a_leader,
            test_forwarding.test_waiting_is_bounded_in_time_and_number,
        ),
        (outlives_its_term, test_forwarding.test_the_end_of_the_term_ends_what_is_being_served),
        (
            waits_for_ever,
            partial(test_forwarding.test_nobody_waits_for_a_leader_that_was_replaced, starts=False),
        ),
    ],
    ids=lambda each: getattr(each, "__name__", "replaced"),
)
def test_broken_variants_fail_a_single_test(
    mutant: Callable[[Patch], None], test: Callable[[], None], monkeypatch: Patch
) -> None:
    mutant(monkeypatch)
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception)):
        test()
