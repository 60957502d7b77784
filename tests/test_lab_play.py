"""`doyen lab play`: the core runs what a reader does, and only the server's own pages may ask."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from candidates import Capture
from doyen.cli import main
from doyen.errors import ConfigError
from doyen.lab import runner
from doyen.lab.pages.play import PlayedRun, PlayServer, plan_of, played_film
from doyen.lab.plan import Fault, Plan
from doyen.web.server import BODY_BYTES, Access
from test_lab_pages import film_in

HOST = "127.0.0.1:8037"
SAVED = {
    "one.json": Plan(protocol="raft", nodes=3, seed=4, for_s=2.0),
    "whole.json": runner.plan_for("quorum", "raft", 3, 4, for_s=1.0),
}


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def ask(
    path: str,
    body: Any = None,
    *,
    saved: dict[str, Plan] = SAVED,
    **headers: str,
) -> Answer:
    """One request to the server, as a browser sends it."""
    app = PlayServer(saved).app(Access(hosts=frozenset([HOST]), token=""))
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"host": HOST, "content_type": "application/json", **headers}
    got: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        got.append(message)

    path, _, query = path.partition("?")
    scope = {
        "type": "http",
        "method": "GET" if body is None else "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [
            (name.replace("_", "-").encode(), value.encode()) for name, value in given.items()
        ],
        "server": ("127.0.0.1", 8037),
        "scheme": "http",
        "http_version": "1.1",
    }

    async def served() -> None:
        await app(scope, receive, send)

    asyncio.run(served())
    start = got[0]
    sent = {name.decode(): value.decode() for name, value in start["headers"]}
    return Answer(start["status"], sent, b"".join(each.get("body", b"") for each in got[1:]))


def test_up_to_what_the_reader_does_the_run_is_the_same() -> None:
    before = played_film(PlayedRun(nodes=3), {})["scenes"][0]
    led = next(row for row in before["roles"] if row[2] == 3)
    leader, at = before["lanes"][led[0]], led[1] / 1e6 + 0.5
    kill = Fault("crash", at, 60.0, (leader,))
    after = played_film(PlayedRun(nodes=3, faults=[kill]), {})["scenes"][0]
    upto = at * 1e6
    for rows in ("messages", "roles"):
        place = 0 if rows == "messages" else 1
        first, second = (
            [row for row in each[rows] if row[place] < upto] for each in (before, after)
        )
        assert [row[:4] for row in first] == [row[:4] for row in second]
    others = [row for row in after["roles"] if row[2] == 3 and row[1] > upto]
    assert others
    assert {after["lanes"][row[0]] for row in others}.isdisjoint({leader})
    assert f"{leader} is killed" in [text for _, _, text in after["story"]]


def test_a_page_asks_for_a_run_and_can_save_it(tmp_path: Path, capsys: Capture) -> None:
    page = film_in(ask("/play/raft?nodes=3").body.decode())
    run = {
        **page["play"]["run"],
        "faults": [{"kind": "pause", "at": 2.0, "for_s": 1, "nodes": ["n1"]}],
    }
    answer = ask("/run", run)
    assert answer.status == 200
    assert answer.json["play"]["run"] == run
    assert "n1 is paused" in [text for _, _, text in answer.json["scenes"][0]["story"]]
    file = tmp_path / "run.json"
    file.write_text(answer.json["play"]["file"])
    assert main(["lab", "replay", str(file), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["same"]


def test_saved_runs_and_scenarios_are_served_too() -> None:
    index = film_in(ask("/").body.decode())
    assert [each["name"] for each in index["saved"]] == ["one.json", "whole.json"]
    assert {"name": "paxos", "href": "/play/paxos"}.items() <= index["play"][3].items()
    saved = film_in(ask("/saved/0").body.decode())
    assert saved["play"]["run"]["saved"] == "one.json"
    again = ask("/run", saved["play"]["run"]).json
    assert again["trace"] == saved["trace"]
    assert "play" not in film_in(ask("/saved/1").body.decode())
    assert film_in(ask("/scenario/no-majority").body.decode())["facts"]
    for path in ("/saved/2", "/scenario/none", "/nothing"):
        assert ask(path).status == 404


def test_a_foreign_page_can_neither_read_nor_do_anything() -> None:
    assert ask("/", host="evil.example:8037").status == 421
    assert ask("/", host="127.0.0.1:1").status == 421
    run = {"protocol": "raft", "nodes": 3}
    assert ask("/run", run, origin="http://evil.example").status == 403
    assert ask("/run", run, origin="null").status == 403
    assert ask("/run", run, sec_fetch_site="cross-site").status == 403
    assert ask("/play/raft", sec_fetch_site="cross-site").status == 403
    assert ask("/run", run, content_type="text/plain").status == 400
    assert ask("/run", run, origin=f"http://{HOST}", sec_fetch_site="same-origin").status == 200
    headers = ask("/").headers
    assert headers["content-security-policy"] == "frame-ancestors 'none'"
    assert headers["cross-origin-resource-policy"] == "same-origin"


@pytest.mark.parametrize(
    ("run", "says"),
    [
        ({"protocol": "none"}, "unknown protocol"),
        ({"nodes": 1000}, "this is not a run"),
        ({"else": 1}, "this is not a run"),
        ({"saved": "/etc/passwd"}, "no saved run"),
        ({"faults": [{"kind": "rot", "at": 1, "nodes": ["n1"]}]}, "cannot be done here"),
        ({"faults": [{"kind": "rate", "at": 1, "nodes": ["n1"], "amount": 1e9}]}, "limits"),
        ({"faults": [{"kind": "rate", "at": 1, "nodes": ["n1"]}]}, "stops a clock"),
        ({"faults": [{"kind": "crash", "at": 1}]}, "names no nodes"),
        ({"faults": [{"kind": "crash", "at": 1e9, "nodes": ["n1"]}]}, "limits"),
        (b"{", "is not JSON"),
        (b" " * (BODY_BYTES + 1), "too large"),
    ],
)
def test_what_the_lab_does_not_run_is_refused(run: Any, says: str) -> None:
    answer = ask("/run", run)
    assert answer.status == 400
    assert says in answer.json["error"]


def test_a_run_continues_after_the_last_thing_that_was_done() -> None:
    assert plan_of(PlayedRun(), {}).for_s == 8.0
    late = PlayedRun(faults=[Fault("crash", 20.0, 1.0, ("n1",))])
    assert plan_of(late, {}).for_s == 26.0
    unknown = PlayedRun(saved="other.json")
    with pytest.raises(ConfigError, match="no saved run"):
        plan_of(unknown, SAVED)


def test_the_command_prints_its_address_and_serves_until_it_is_told_to_stop(
    tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "run.json"
    assert main(["lab", "run", "--nodes", "3", "--for", "1s", "--save", str(file)]) == 0
    command = [sys.executable, "-m", "doyen", "lab", "play", "--listen", "127.0.0.1:0", "--json"]
    with subprocess.Popen([*command, str(file)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert json.loads(process.stdout.readline())["url"].startswith("http://127.0.0.1:")
        finally:
            process.terminate()
            process.wait()
    assert process.returncode == 143
    capsys.readouterr()
    assert main(["lab", "play", str(tmp_path / "none.json")]) == 2
    assert main(["lab", "play", "--listen", "0.0.0.0:0"]) == 2
    err = capsys.readouterr().err
    assert "does not exist" in err
    assert "this machine only" in err
