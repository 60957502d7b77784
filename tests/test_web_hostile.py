"""The page of a store in which others have written, and of audit logs that are damaged."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from candidates import Capture
from doyen.cli._output import print_json
from doyen.cli.list import as_dict, view
from doyen.model import is_name
from doyen.web import trail as trails
from doyen.web.board import Board
from doyen.web.hub import TRAIL_S
from doyen.web.observation import StoreObservation
from doyen.web.terms import TERMS, ElectionRow
from doyen.web.trail import AuditTrail, TrailReader
from support import Place, until, virtual
from test_web_hub import observed
from test_web_server import client

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**400,
    "",
    "\ud800",
    [[]],
    {"\ud800": "\ud800", "b": 1e300},
)
"""What may stand where something else is expected."""
RAW = (b"", b"NaN", b"\xff\xfe", b"[" * 30_000, b'{"name":' * 10_000, b"Infinity", b"null", b"7")

CLAIM = {"name": "a", "attempt": "1", "meta": {"host": "h"}, "rank": 0, "since": 1.0, "ttl_s": 5.0}
DOCUMENT = {"schema": 1, "version": 1, "token": 1, "id": "i"}
PLAN: dict[str, Any] = {
    **DOCUMENT,
    "generation": 1,
    "open": True,
    "names": ["a", "b"],
    "owners": [0, 1],
    "note": "n",
    "members": {"a": [1, "up", "", 1.0]},
    "moves": {
        "0": {"to": "b", "incarnation": 1, "id": 1, "ready": True, "stuck": False, "age_s": 1.0}
    },
    "aside": {"1": "why"},
    "grace": {"b": 1.0},
}
VALUES: dict[str, dict[str, Any]] = {
    "elections/{}/leader": CLAIM,
    "elections/{}/line/1": CLAIM,
    "elections/{}/leader/order": {"token": 1, "by": "ops", "heir": "", "rank": 0},
    "semaphores/{}/slots/0/leader": CLAIM,
    "members/{}/m": {
        "name": "m",
        "attempt": "1",
        "session": "s",
        "by": "b",
        "ttl_s": 5.0,
        "since": 1.0,
        "state": "up",
        "reason": "",
        "meta": {},
        "answered": [],
    },
    "shards/{}/plan": PLAN,
    "shards/{}/spec": {**DOCUMENT, "count": 2, "weights": {"a": 0}, "pins": {}, "paused": False},
    "shards/{}/at/0/leader": CLAIM,
    "config/{}/current": {**DOCUMENT, "author": "ops", "at": 1.0, "value": {"a": 1}},
    "config/{}/history/1": {**DOCUMENT, "author": "ops", "at": 1.0, "value": {"a": 2}},
    "config/{}/applied/s": {
        "schema": 1,
        "name": "s",
        "version": 1,
        "id": "i",
        "refused": {"version": 1, "id": "i", "reason": "r"},
    },
    "trails/{}": {"schema": 1, "terms": [{"token": 1, "name": "a", "since": 1.0, "until": 2.0}]},
}


def bent(value: dict[str, Any]) -> list[bytes]:
    """The value with one field after the other replaced by something odd or left out, and values
    that are nothing of the kind."""
    odd: list[bytes] = [*RAW, json.dumps(value).encode()]
    for name in value:
        odd.append(json.dumps({k: v for k, v in value.items() if k != name}).encode())
        odd += [json.dumps({**value, name: each}).encode() for each in ODD]
        odd += [json.dumps({**value, name: each}).encode() for each in (float("nan"), 1e999)]
    return odd


def strict(text: bytes) -> Any:
    """JSON as a browser reads it."""

    def refused(word: str) -> Any:
        raise AssertionError(f"{word} is not JSON")

    return json.loads(text, parse_constant=refused)


@virtual
async def test_whatever_stands_in_the_store_the_page_is_shown(
    place: Place, capsys: Capture
) -> None:
    lease = place.server.grant(1e6).id
    for key, value in VALUES.items():
        for number, odd in enumerate(bent(value)):
            its = key.format(f"x{number}")
            if "spec" in its or "plan" in its or its.startswith(("trails", "config")):
                place.server.put(its, odd, None)
            else:
                place.server.create(its, odd, lease)
    async with observed(place) as hub:
        await until(lambda: all(topic in hub.board.topics for topic in ("shards", "configs")))
        page = hub.board.open_page()
        page.show(list(hub.board.rows)[:200])
        hub.shown_changed()
        await asyncio.sleep(5)
        while (message := hub.board.message(page)) is not None:
            strict(message.partition(b"data: ")[2])
        assert len(hub.board.rows) > 100
        observation = StoreObservation("memory://x")
        observation.board, observation.hub = hub.board, hub
        async with client(observation) as http:
            for key in [*hub.board.rows][:40]:
                found = await http.get("/api/election", params={"key": key})
                assert found.status_code == 200, key
                strict(found.content)
            for number in range(0, len(bent(VALUES["config/{}/current"])), 4):
                found = await http.get("/api/config", params={"name": f"x{number}"})
                assert found.status_code in (200, 404), number
                strict(found.content)
    session = await place.open()
    seen = await session.inventory()
    assert view(seen).parts
    capsys.readouterr()
    print_json(as_dict(seen))
    strict(capsys.readouterr().out.encode())
    for entry in [entry for key in VALUES for entry in place.server.list(key.partition("/")[0])]:
        place.server.delete(entry.key)


LONG = "%D8%AA%3Cb%3E" * 2000
KEYS = (
    *(f"{kind}/x" for kind in ("elections", "locks", "semaphores", "barriers", "members")),
    *("shards/x", "config/x", "config/x/history", "config/x/applied", "config/%0A/current"),
    *(f"{kind}/{LONG}/leader" for kind in ("elections", "locks")),
    *("elections/%0A%1B/leader", "elections/%ED%A0%80/leader", "elections//leader"),
    *(f"shards/x/at/{number}/leader" for number in ("9" * 5000, "x", "")),
    *(f"semaphores/x/slots/{number}/leader" for number in ("9" * 5000, "x", "")),
    *("semaphores/x/slots", "semaphores/x/slots/0", f"members/{LONG}/{LONG}"),
)
"""Keys that doyen does not write."""
PLANS: tuple[dict[str, Any], ...] = (
    {**PLAN, "grace": {"b": float("nan")}},
    {**PLAN, "moves": {"0": {**PLAN["moves"]["0"], "to": ""}, "-9": PLAN["moves"]["0"]}},
    {**PLAN, "members": {"": [1, "up", "", float("inf")]}, "aside": {"x" * 5000: "y" * 5000}},
)


@virtual
async def test_whatever_keys_stand_in_the_store_the_page_is_shown(
    place: Place, capsys: Capture
) -> None:
    lease = place.server.grant(1e6).id
    for key in KEYS:
        place.server.create(key, json.dumps(CLAIM).encode(), lease)
    for number, plan in enumerate(PLANS):
        place.server.put(f"shards/p{number}/plan", json.dumps(plan).encode(), None)
        nameless = json.dumps({**CLAIM, "name": ""}).encode()
        place.server.create(f"shards/p{number}/at/0/leader", nameless, lease)
    async with observed(place) as hub:
        await until(lambda: all(topic in hub.board.topics for topic in ("shards", "configs")))
        page = hub.board.open_page()
        page.show(hub.board.rows)
        hub.shown_changed()
        await asyncio.sleep(2 * TRAIL_S)
        health = hub.board.topics["health"]
        assert (health["reachable"], health["stale"]) == (True, [])
        while (message := hub.board.message(page)) is not None:
            strict(message.partition(b"data: ")[2])
        odd = [key for key, row in hub.board.rows.items() if not is_name(row.name)]
        assert len(odd) >= 4
        assert all(len(key) < 100 and hub.board.rows[key].key == key for key in odd)
        assert len(hub.board.topics["shards"]) == len(PLANS) + 1
        observation = StoreObservation("memory://x")
        observation.board, observation.hub = hub.board, hub
        async with client(observation) as http:
            for key in odd:
                found = await http.get("/api/election", params={"key": key})
                assert strict(found.content)["leader"]["name"] == "a"
            for name in ("x", "\n", "y" * 10_000):
                found = await http.get("/api/config", params={"name": name})
                assert found.status_code in (400, 404), name
    session = await place.open()
    seen = await session.inventory()
    capsys.readouterr()
    print_json(as_dict(seen))
    strict(capsys.readouterr().out.encode())
    for part in view(seen).parts:
        assert str(part).replace("\n", "").isprintable()
    for kind in {key.split("/")[0] for key in KEYS}:
        for entry in place.server.list(kind):
            place.server.delete(entry.key)


STAMP = {"boot": "b", "pid": 1, "session": "s", "lease": "l", "election": "e", "name": "a"}


def elected(token: Any, **changes: Any) -> bytes:
    wall = 1000.0 + (token if isinstance(token, int) else 0)
    line = {"event": "elected", "token": token, "at": 1.0, "wall": wall, **STAMP}
    return json.dumps({**line, **changes}).encode() + b"\n"


def resigned(token: int) -> bytes:
    line = {"event": "resigned", "token": token, "at": 1.5, "wall": 1000.5 + token, **STAMP}
    return json.dumps(line).encode() + b"\n"


def shown(board: Board) -> list[int]:
    row = board.rows["elections/e"]
    strict(json.dumps(row.as_dict()).encode())
    return [term.token for term in row.terms]


@pytest.fixture
def board() -> Board:
    board = Board(lambda: 5000.0)
    board.rows["elections/e"] = ElectionRow("elections", "e")
    return board


def test_a_damaged_log_is_read_as_far_as_it_is_sound(
    tmp_path: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trails, "PIECE", 4096)
    damage = [
        *RAW,
        *(elected(9, wall=wall) for wall in (float("nan"), 1e999, 1e300, None, "x", [1])),
        *(elected(token) for token in (1e999, 1.5, None, "9", True)),
        elected(9, election=None)[:-30],
        b"\0" * 20_000,
        b'{"event":"leaseended","lease":"l","cause":"died","wall":NaN}',
        b'{"event":"lost","election":"e","token":1,"wall":1,"at":NaN,"ended_at":"x"}',
    ]
    log = tmp_path / "log"
    lines = [elected(1), resigned(1), *(each + b"\n" for each in damage), elected(2), resigned(2)]
    log.write_bytes(b"".join(lines))
    trail = AuditTrail([log], board)
    for _ in range(40):
        trail.read()
    assert shown(board) == [1, 2]


def test_a_log_that_is_replaced_or_cut_is_read_again(tmp_path: Path, board: Board) -> None:
    log = tmp_path / "log"
    log.write_bytes(elected(1) + resigned(1))
    said: dict[str, str] = {}
    trail = AuditTrail(
        [log],
        board,
        readable=lambda part: said.update({part: ""}),
        failed=lambda part, error: said.update({part: str(error)}),
    )
    trail.read()
    log.rename(tmp_path / "log.1")
    trail.read()
    assert "No such file" in said[f"the audit log {log}"]
    log.write_bytes(elected(2) + resigned(2) + elected(3))
    trail.read()
    assert not any(said.values())
    log.write_bytes(elected(4) + resigned(4))
    trail.read()
    assert shown(board) == [1, 2, 4], "the third has not ended, and the store does not have it"


def test_what_is_kept_of_a_log_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trails, "KEPT", 10)
    reader = TrailReader()
    for token in range(1000):
        reader.add(json.loads(elected(token)))
    for number in range(100):
        reader.add(json.loads(elected(number, election=f"e{number}", lease=f"l{number}")))
    assert len(reader.terms) == 10
    assert sum(map(len, reader._open.values())) == 10
    for token in range(1000):
        reader.add(json.loads(elected(token)))
    assert len(reader.terms["elections/e"]) <= 2 * TERMS
    assert sum(map(len, reader._open.values())) <= 2 * TERMS + 10
    reader.add({"event": "leaseended", "lease": "l", "cause": "expired", "wall": 9000.0})
    assert all(term.cause == "expired" for term in reader.terms["elections/e"].values())
