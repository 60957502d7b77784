"""The page of a store in which others have written, and of audit logs that are damaged."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from doyen.cli.list import as_dict, view
from doyen.web.observation import StoreObservation
from support import Place, until, virtual
from test_web_hub import observed
from test_web_server import client

ODD: tuple[Any, ...] = (
    None,
    True,
    -1,
    10**30,
    "",
    "\ud800",
    [[]],
    {"\ud800": "\ud800", "b": 1e300},
)
"""What may stand where something else is expected."""
RAW = (b"", b"NaN", b"\xff\xfe", b"[" * 30_000, b'{"name":' * 10_000, b"Infinity", b"null", b"7")

CLAIM = {"name": "a", "attempt": "1", "meta": {"host": "h"}, "rank": 0, "since": 1.0, "ttl_s": 5.0}
DOCUMENT = {"schema": 1, "version": 1, "token": 1, "id": "i"}
PLAN = {
    **DOCUMENT,
    "generation": 1,
    "open": True,
    "names": ["a", "b"],
    "owners": [0, 1],
    "note": "n",
    "members": {"a": [1, "up", "", 1.0]},
    "moves": {"0": {"to": "b", "incarnation": 1, "id": 1, "ready": True, "stuck": False}},
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
async def test_whatever_stands_in_the_store_the_page_is_shown(place: Place) -> None:
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
    json.dumps(as_dict(seen))
    for entry in [entry for key in VALUES for entry in place.server.list(key.partition("/")[0])]:
        place.server.delete(entry.key)
