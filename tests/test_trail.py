"""The trail that leaders leave: complete as far as it can be, bounded, and never in the way."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

import doyen
from candidates import Capture
from doyen import LeadershipLost, PastTerm, Session
from doyen.cli import main
from doyen.cli._output import Table
from doyen.cli.history import view
from doyen.election.trail import TERMS, TRAIL_BYTES, decode_trail, encode_trail
from doyen.model import trail_key
from doyen.stores.memory import MemoryStore
from doyen.testing.faults import Faults, Odds, RefusedCall
from doyen.web.trail import recorded_terms
from support import TTL_S, Place, core_of, lead_until_set, now, until_blocking, virtual


def lines(terms: list[PastTerm]) -> list[tuple[str, str, str]]:
    return [(term.name, "leads" if term.leads else term.end, term.reason) for term in terms]


@virtual
async def test_terms_with_their_ends_and_causes(place: Place) -> None:
    one, two, looking = await place.open(), await place.open(), await place.open()
    assert await looking.history("e") == []
    began = place.clock.wall()
    async with one.campaign("e", name="a") as term:
        await asyncio.sleep(10.0)
        (first,) = await looking.history("e")
        assert (first.name, first.token, first.until, first.leads) == ("a", term.token, None, True)
        assert first.since == pytest.approx(began, abs=0.1)
    await asyncio.sleep(5.0)
    with pytest.raises(LeadershipLost):
        async with two.campaign("e", name="b"):
            ordered = asyncio.create_task(looking.resign("e"))
            await asyncio.sleep(100.0)
    await ordered
    with pytest.raises(LeadershipLost):
        async with one.campaign("e", name="c"):
            await asyncio.sleep(1.0)
            place.end_lease(one)
            await asyncio.sleep(100.0)
    async with two.campaign("e", name="d"):
        await asyncio.sleep(TTL_S)
        seen = await looking.history("e")
    assert [line[:2] for line in lines(seen)] == [
        ("d", "leads"),
        ("c", "lost"),
        ("b", "lost"),
        ("a", "resigned"),
    ]
    assert "ordered it to resign" in seen[2].reason
    assert "removed from the store" in seen[1].reason
    assert seen[3].until == pytest.approx(began + 10.0, abs=0.1)
    assert seen[2].since == pytest.approx(began + 15.0, abs=0.1)
    tokens = [term.token for term in seen]
    assert tokens == sorted(tokens, reverse=True)


@virtual
async def test_a_page_that_missed_an_order_learns_of_the_transfer(place: Place) -> None:
    one, two = await place.open(), await place.open()

    async def stand(session: Session, name: str) -> None:
        async for campaign in session.campaigns("e", name=name):
            async with campaign:
                await asyncio.sleep(1000.0)

    standing = [asyncio.create_task(stand(one, "a"))]
    await asyncio.sleep(1.0)
    standing.append(asyncio.create_task(stand(two, "b")))
    await asyncio.sleep(1.0)
    await two.transfer("e", to="b")
    await asyncio.sleep(1.0)
    await two.resign("e")
    await asyncio.sleep(1.0)
    past = recorded_terms(await two.history("e"))
    assert [(each.name, each.cause) for each in past[:2]] == [
        ("a", "transferred"),
        ("b", "resigned"),
    ]
    for task in standing:
        task.cancel()
    await asyncio.gather(*standing, return_exceptions=True)


@virtual
async def test_a_trail_that_others_keep_replacing_is_not_written_without_a_pause(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    async def lose(store: MemoryStore, key: str, value: bytes, **condition: object) -> None:
        tried.append(key)

    monkeypatch.setattr(MemoryStore, "put", lose)
    session = await place.open()
    async with session.campaign("e", name="a") as term:
        await asyncio.sleep(2 * TTL_S)
        assert term.valid
    assert 10 <= len(tried) <= 50


@virtual
async def test_a_handover_costs_three_requests_more_and_none_before_it_is_over(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []

    def counted(name: str) -> None:
        call = getattr(MemoryStore, name)

        async def count(store: MemoryStore, key: str, *args: Any, **options: Any) -> Any:
            if key == trail_key("e"):
                asked.append(now())
            return await call(store, key, *args, **options)

        monkeypatch.setattr(MemoryStore, name, count)

    counted("get")
    counted("put")
    sessions = [await place.open(), await place.open()]
    begun: list[float] = []
    for number in range(20):
        async with sessions[number % 2].campaign("e", name="ab"[number % 2]):
            begun.append(now())
            await asyncio.sleep(1.0)
    await asyncio.sleep(1.0)
    assert len(asked) == 3 * len(begun)
    assert min(abs(at - began) for at in asked for began in begun) > 0.04
    assert len(await sessions[0].history("e")) == 20


@virtual
async def test_locks_leave_none_and_neither_do_those_who_do_not_want_it(place: Place) -> None:
    session = await place.open()
    async with session.lock("e", name="a"), session.campaign("f", trail=False):
        await asyncio.sleep(1.0)
    assert place.server.list("trails") == []


@virtual
async def test_a_leader_that_was_cut_off_records_its_end_late(place: Place) -> None:
    faults, stop = Faults(), asyncio.Event()
    one, two = await place.open(faults), await place.open()
    with pytest.raises(LeadershipLost):
        async with one.campaign("e", name="a"):
            await asyncio.sleep(1.0)
            faults.cut()
            await asyncio.sleep(100.0)
    leading = asyncio.create_task(lead_until_set(two, stop, name="b"))
    await asyncio.sleep(3 * TTL_S)
    assert lines(await two.history("e")) == [("b", "leads", ""), ("a", "", "")]
    faults.heal()
    await asyncio.sleep(TTL_S)
    newest, oldest = await two.history("e")
    assert (newest.name, oldest.end) == ("b", "lost")
    assert oldest.until is not None
    assert oldest.until < newest.since
    stop.set()
    await leading


@virtual
async def test_a_session_that_closes_writes_at_once_what_was_refused_before(place: Place) -> None:
    faults = Faults()
    session = await place.open(faults)
    async with session.campaign("e", name="a"):
        await asyncio.sleep(1.0)
        faults.next("put", RefusedCall())
    await asyncio.sleep(0.1)
    began = place.clock.now()
    await session.close()
    assert place.clock.now() - began < 0.1
    entry = place.server.get(trail_key("e"))
    assert entry is not None
    assert [term.end for term in decode_trail(entry.value)] == ["resigned"]


@pytest.mark.parametrize("seed", range(10))
@virtual
async def test_no_term_is_lost_between_leaders_that_write_at_once(place: Place, seed: int) -> None:
    """Whatever is lost on the way, the trail never shows a term that was not, and in the end shows
    every one: each writer replaces exactly what it has read."""
    faults = [Faults(seed * 10 + n, Odds(lost=0.1, unanswered=0.1, refused=0.1)) for n in range(3)]
    sessions = [await place.open(each) for each in faults]
    led: set[tuple[str, int]] = set()

    async def candidate(session: doyen.Session, name: str) -> None:
        for _ in range(5):
            try:
                async with session.campaign("e", name=name) as term:
                    led.add((name, term.token))
                    await asyncio.sleep(0.1)
            except LeadershipLost:
                pass

    await asyncio.gather(*(candidate(each, f"s{n}") for n, each in enumerate(sessions)))
    for each in faults:
        each.odds = Odds()
    await asyncio.sleep(3 * TTL_S)
    entry = place.server.get(trail_key("e"))
    assert entry is not None
    terms = decode_trail(entry.value)
    assert {(term.name, term.token) for term in terms} == led
    assert [term for term in terms if not term.end] == []


@virtual
async def test_it_costs_nothing_that_others_wait_for(place: Place) -> None:
    """A thousand leaders at once write a few trails at a time; closing waits for the last."""
    session = await place.open()
    core = core_of(session)
    terms = [session.campaign(f"e{n}", name="a") for n in range(200)]
    await asyncio.gather(*(term.__aenter__() for term in terms))
    assert len(core.trail._writers) <= 4
    await asyncio.gather(*(term.__aexit__(None, None, None) for term in terms))
    await session.close()
    assert len(place.server.list("trails")) == 200
    assert all(decode_trail(each.value)[0].end for each in place.server.list("trails"))


def test_a_trail_is_bounded_and_what_is_none_is_passed_over() -> None:
    terms = [PastTerm(f"n{n}", n, 1.0, 2.0, "lost", "why") for n in range(TERMS + 10)]
    kept = decode_trail(encode_trail(terms))
    assert [term.token for term in kept] == list(range(10, TERMS + 10))
    assert kept[-1] == terms[-1]
    long = [PastTerm("é" * 5000, n, 1.0, None, "", "ü" * 5000) for n in range(TERMS)]
    value = encode_trail(long)
    assert len(value) <= TRAIL_BYTES
    assert decode_trail(value)[-1].token == TERMS - 1
    for odd in (b"", b"\xff", b"[]", b'{"terms": 7}', b'{"terms": [7, {}, {"token": "x"}]}'):
        assert decode_trail(odd) == ()
    assert decode_trail(b'{"terms":' + b"[" * 100_000) == ()
    for time in (b"NaN", b"Infinity", b'1, "until": NaN'):
        odd = b'{"terms": [{"name": "a", "token": 1, "since": %s}]}' % time
        assert decode_trail(odd) == (), "it could not be written again"


@virtual
async def test_the_end_of_a_term_in_the_trail_is_final(place: Place) -> None:
    """Also for a session whose own note of that term is older, and has not been written."""
    session = await place.open()
    ended = PastTerm("a", 7, 100.0, 200.0, "resigned")
    place.server.put(trail_key("e"), encode_trail([ended]), None)
    core_of(session).trail.note("e", PastTerm("a", 7, 100.0))
    assert await session.history("e") == [ended]


def test_the_history_shows_a_term_that_an_order_ended_as_resigned() -> None:
    ordered = PastTerm("a", 1, 1.0, 2.0, "lost", "'ops' ordered it to resign in favour of another")
    lost = PastTerm("b", 2, 3.0, 4.0, "lost", "no renewal was confirmed in time")
    quoting = "the member 'c' of 'web' is unhealthy: it says that 'ops' ordered it to resign"
    unhealthy = PastTerm("c", 3, 5.0, 6.0, "lost", quoting)
    (table,) = view("e", [unhealthy, lost, ordered]).parts
    assert isinstance(table, Table)
    assert [row[-1].partition(":")[0] for row in table.rows] == ["lost", "lost", "resigned"]
    assert [*table.styles] == [0, 1]


def test_history_as_text_json_and_from_audit_logs(tmp_path: Path, capsys: Capture) -> None:
    store, log = f"sqlite://{tmp_path}/doyen.db", tmp_path / "audit.jsonl"
    command = ["history", "billing", "--store", store]
    with doyen.connect_blocking(store, audit=log) as session:
        assert main(command) == 1
        assert capsys.readouterr().out == "billing has no recorded terms\n"
        with session.campaign("billing", name="server1") as first:
            pass
        with session.lock("billing", name="worker"):
            pass
        with session.campaign("billing", name="server2") as second:
            assert [term.leads for term in session.history("billing")] == [True, False]
            with doyen.connect_blocking(store) as other:  # which sees what was written
                until_blocking(lambda: len(other.history("billing")) == 2)
            assert main(command) == 0
            title, _, heading, *rows = capsys.readouterr().out.splitlines()
            assert title == "billing: 2 terms"
            assert heading.split()[:3] == ["leader", "token", "since"]
            assert re.match(rf"server2 +{second.token} +20.* leads$", rows[0])
            assert re.match(rf"server1 +{first.token} +20.* ms .*resigned$", rows[1])
    assert main([*command, "--json"]) == 0
    terms = json.loads(capsys.readouterr().out)["terms"]
    assert [(term["name"], term["end"]) for term in terms] == [
        ("server2", "resigned"),
        ("server1", "resigned"),
    ]
    assert main(["history", "billing", "--audit", str(log), "--json"]) == 0
    logged = json.loads(capsys.readouterr().out)["terms"]
    assert [(term["name"], term["token"]) for term in logged] == [
        (term["name"], term["token"]) for term in terms
    ]
    assert logged[1]["until"] == pytest.approx(terms[1]["until"], abs=0.1)
    assert main(["history", "billing", "--lock", "--audit", str(log)]) == 0
    assert "worker" in capsys.readouterr().out
    assert main(["history", "billing", "--lock", "--store", store]) == 2
    assert "--audit" in capsys.readouterr().err
