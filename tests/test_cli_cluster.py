"""`doyen cluster`, on a quorum of real processes."""

from __future__ import annotations

import gc
import io
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import doyen
from candidates import Capture
from doyen.cli import main
from doyen.quorum.protocol.requests import NodeStatus
from doyen.stores.quorum.diagnosis import NodeAnswer, risks_of_removal
from doyen.stores.quorum.store import QuorumStore
from served import Quorum

NAMES = [("n1", "leading"), ("n2", "following")]


def output(capsys: Capture, *arguments: str, code: int = 0) -> Any:
    assert main(["cluster", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_a_node_is_replaced(tmp_path: Path, capsys: Capture) -> None:
    with Quorum(tmp_path) as quorum:
        old = quorum.leader()
        store = ["--store", quorum.url]
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            token = term.token
        new = quorum.join("n4")
        assert main(["cluster", "add", "n4", new.address, *store]) == 0
        assert "is a member: a learner" in capsys.readouterr().out
        new.hear("role", role="following")
        assert output(capsys, "promote", "n4", *store)["voters"] == ["n1", "n2", "n3", "n4"]
        done = output(capsys, "remove", old.name, *store)
        assert old.name not in done["voters"]
        status = output(capsys, "status", *store)
        assert [node["node"] for node in status["nodes"] if node["outside"]] == [old.name]
        assert main(["cluster", "status", *store]) == 0
        assert f"{old.name}    {old.address}  outside" in capsys.readouterr().out
        assert old.stop() == 0
        store = ["--store", quorum.url]
        status = output(capsys, "status", *store, code=1)  # the removed node does not answer
        assert sum("silent_because" in node for node in status["nodes"]) == 1
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            assert term.token > token


def test_what_is_not_the_node_that_is_added_is_refused(tmp_path: Path, capsys: Capture) -> None:
    """A member whose address is written differently, a node of another cluster, another service."""

    def refusal(*arguments: str) -> str:
        assert main(["cluster", *arguments, *store]) == 1
        return capsys.readouterr().err

    class Page(BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with (
        Quorum(tmp_path / "one") as quorum,
        Quorum(tmp_path / "other", 1, cluster="other") as other,
        HTTPServer(("127.0.0.1", 0), Page) as page,
    ):
        store = ["--store", quorum.url]
        leader = quorum.leader().name
        port = quorum.peers[leader].rpartition(":")[2]
        threading.Thread(target=page.serve_forever, args=(0.01,), daemon=True).start()
        same = f"127.0.1:{port}"  # 127.0.0.1, for a resolver
        assert f"this is node '{leader}', not 'n4'" in refusal("add", "n4", same)
        (moved,) = sorted(quorum.peers.keys() - {leader})[:1]
        assert f"this is node '{leader}', not '{moved}'" in refusal("add", moved, same)
        foreign = other.peers["n1"]
        assert "belongs to cluster 'other', not to 'test'" in refusal("add", "n4", foreign)
        somewhere = f"127.0.0.1:{page.server_port}"
        assert "not a node of doyen: check host and port" in refusal("add", "n4", somewhere)
        page.shutdown()
        assert "n4 is not a member, so it was not removed" in refusal("remove", "n4")
        assert output(capsys, "status", *store)["well"]


def test_a_risky_removal_needs_confirmation(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Quorum(tmp_path) as quorum:
        quorum.leader()
        store = ["--store", quorum.url]
        assert main(["cluster", "remove", "n1", *store]) == 1
        said = capsys.readouterr().err
        assert "2 voters would be left, n2, n3: if one of them fails" in said
        assert "--force" in said

        class Terminal(io.StringIO):
            def isatty(self) -> bool:
                return True

        monkeypatch.setattr("sys.stderr", Terminal())
        monkeypatch.setattr("sys.stdin", Terminal("n\n"))
        assert main(["cluster", "remove", "n1", *store]) == 1
        monkeypatch.setattr("sys.stdin", Terminal("y\n"))
        assert main(["cluster", "remove", "n1", *store]) == 0
        capsys.readouterr()
        assert output(capsys, "remove", "n2", "--force", *store)["voters"] == ["n3"]


def test_the_risks_of_a_removal_are_for_those_who_may_remove(
    tmp_path: Path, capsys: Capture
) -> None:
    def refusal(role: str) -> str:
        secret = f"the%20secret%20of%20every%20{role}@"
        store = ["--store", quorum.url.replace("://", f"://{secret}")]
        assert main(["cluster", "remove", "n1", *store]) == 1
        return capsys.readouterr().err

    options = []
    for option, role in (("", "client"), ("peer-", "peer"), ("admin-", "admin")):
        file = tmp_path / role
        file.write_text(f"the secret of every {role}")
        options += [f"--{option}secret-file", str(file)]
    with Quorum(tmp_path / "nodes", 3, *options) as quorum:
        quorum.leader()
        refused = refusal("client")
        assert "needs the role 'admin', and this connection has 'client'" in refused
        assert "dangerous" not in refused
        assert "dangerous" in refusal("admin")


def condition(node: str, role: str = "following", applied: int = 5000, **other: Any) -> NodeAnswer:
    start = (0, node, "", role, 1, "n1", 5000, applied, 0, False)
    status = NodeStatus(*start, ("n1", "n2", "n3"), ("n4",), {}, 1, 1, 1, 1, 1)
    return NodeAnswer(f"{node}:1", replace(status, **other))


@pytest.mark.parametrize(
    ("states", "node", "expected"),
    [
        ([condition("n1", "leading"), condition("n2"), condition("n3")], "n2", ["2 voters"]),
        ([condition("n1", "leading"), condition("n2"), condition("n3")], "n4", []),
        ([condition("n1", "leading"), condition("n2"), condition("n3")], "n9", []),
        # Removing a dead node is no risk: as many failures are survived as before.
        ([condition("n1", "leading"), condition("n2"), NodeAnswer("n3:1", None)], "n3", []),
        (
            [condition(name, role, voters=("n1", "n2")) for name, role in NAMES],
            "n2",
            ["n1 would be the only voter"],
        ),
        (
            [condition("n1", "leading"), *(condition(name, applied=3000) for name in ("n2", "n3"))],
            "n1",
            ["2 voters", "n1 may have the only up-to-date copy"],
        ),
        # Without a leader no change is possible anyway.
        ([condition("n2"), condition("n3")], "n2", []),
    ],
)
def test_what_a_removal_puts_at_risk(
    states: list[NodeAnswer], node: str, expected: list[str]
) -> None:
    risks = risks_of_removal(states, node)
    assert len(risks) == len(expected)
    assert all(part in risk for part, risk in zip(expected, risks, strict=True))


def test_leadership_is_transferred(tmp_path: Path, capsys: Capture) -> None:
    with Quorum(tmp_path) as quorum:
        before = quorum.leader().name
        successor = next(name for name in quorum.nodes if name != before)
        assert output(capsys, "transfer", successor, "--store", quorum.url)["leader"] == successor
        assert quorum.leader().name == successor
        assert main(["cluster", "transfer", "nobody", "--store", quorum.url]) == 1
        assert "nobody" in capsys.readouterr().err


def test_status_as_text_and_without_a_leader(tmp_path: Path, capsys: Capture) -> None:
    with Quorum(tmp_path) as quorum:
        leader = quorum.leader()
        assert main(["cluster", "status", "--store", quorum.url]) == 0
        out = capsys.readouterr().out
        assert out.splitlines()[0].split() == [
            *("node", "address", "role", "generation"),
            *("applied", "keys", "clients", "disk"),
        ]
        assert f"{leader.name}    {leader.address}  leading" in out
        leader.hear("role", role="leading")
        for name in list(quorum.nodes):
            if name != leader.name:
                quorum.nodes[name].kill()
        leader.hear("role", role="looking")
        assert main(["cluster", "status", "--store", quorum.url]) == 1
        out = capsys.readouterr().out
        assert f"{leader.name}    {leader.address}  looking" in out
        assert "there is no leader, and nothing can be read or written: 1 of 3 voters answer" in out
        assert out.count("silent") == 2
        silent = next(node for node in quorum.nodes.values() if node is not leader)
        assert out.count(silent.address) == 2  # in the table and in the reason


def test_status_of_nodes_that_do_not_all_know_who_leads(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that runs and knows no leader makes the exit code 1, like a silent one. A node that
    is not a member does not."""
    states: list[NodeAnswer] = []

    async def inspect(self: QuorumStore) -> list[NodeAnswer]:
        return states

    monkeypatch.setattr(QuorumStore, "inspect", inspect)
    store = ["--store", "doyen://h1"]
    odd = condition("n2", "loo\x1b[2Jking", leader=None).condition
    states += [condition("n1", "leading"), NodeAnswer("h2\x1b[2J:7400", odd)]
    assert main(["cluster", "status", *store]) == 1
    out = capsys.readouterr().out
    assert "h2\\x1b[2J:7400  loo\\x1b[2Jking" in out
    assert "\x1b" not in out
    refused = {"n2": "h2:7400: \x1b[2Jempty; remove n2"}
    states[:] = [
        condition("n1", "leading", learners=(), refused=refused),
        condition("n2", "looking", leader=None, missing=("n3",)),
    ]
    assert main(["cluster", "status", *store]) == 1
    out = capsys.readouterr().out
    assert "n2 is not connected to n1: h2:7400: \\x1b[2Jempty; remove n2\n" in out
    assert "n2 waits for n3: start every node of its --peers with --found" in out
    # A node of another cluster has a leader of its own.
    states[1:] = [condition("n2", leader="n2")]
    assert main(["cluster", "status", *store]) == 1
    capsys.readouterr()
    states[:] = [
        condition("n1", "leading", learners=()),
        condition("n4", "looking", leader=None),
    ]
    assert main(["cluster", "status", *store]) == 0
    assert "outside" in capsys.readouterr().out


def test_a_silent_node_is_listed_once(tmp_path: Path, capsys: Capture) -> None:
    """The nodes know each other as 127.0.0.1, while the user writes localhost."""
    with Quorum(tmp_path) as quorum:
        store = ["--store", quorum.url.replace("127.0.0.1", "localhost")]
        leader = quorum.leader()
        silent = next(name for name in quorum.nodes if name != leader.name)
        quorum.nodes[silent].kill()
        nodes = output(capsys, "status", *store, code=1)["nodes"]
        assert len(nodes) == 3
        assert [node["node"] for node in nodes if "silent_because" in node] == [silent]
        (kept,) = {*quorum.nodes} - {silent, leader.name}
        # A node waits as long as the command does by default, before it refuses.
        assert main(["cluster", "remove", kept, "--wait", "60", *store]) == 1
        assert f"without {silent}" in capsys.readouterr().err
        for address in ("nowhere", ":7400", "h:0"):
            assert main(["cluster", "add", "n4", address, *store]) == 1
            assert "is not an address" in capsys.readouterr().err
        taken = quorum.nodes[kept].address.replace("127.0.0.1", "localhost")
        assert main(["cluster", "add", "n4", taken, *store]) == 1
        assert f"is the address of {kept}: give n4 another one" in capsys.readouterr().err
        assert main(["cluster", "remove", silent, *store]) == 0


def test_a_backup_is_restored_as_another_cluster(tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "backup"
    with Quorum(tmp_path / "old") as quorum:
        quorum.leader()
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            token = term.token
            made = output(capsys, "backup", str(file), "--store", quorum.url)
        assert made["bytes"] == file.stat().st_size
        assert main(["cluster", "backup", str(file), "--store", quorum.url]) == 2
        assert "exists: choose another name" in capsys.readouterr().err
    new = Quorum(tmp_path / "new", cluster="test-2")
    arguments = ["restore", str(file), "--peers", new.peers_text]
    same = [*arguments, "--cluster", "test", "--id", "n1", "--data-dir", str(tmp_path / "x")]
    assert main(["cluster", *same]) == 69
    assert "--cluster" in capsys.readouterr().err
    for name in new.peers:
        folder = str(tmp_path / "new" / name)
        output(capsys, *arguments, "--cluster", "test-2", "--id", name, "--data-dir", folder)
    with new:
        new.leader()
        with doyen.connect_blocking(new.url) as session:
            with session.campaign("e") as term:
                assert term.token > token + 10**9
            leader = session.leader("e")
        assert leader is None


def test_when_the_majority_is_lost_a_folder_is_a_backup(tmp_path: Path, capsys: Capture) -> None:
    with Quorum(tmp_path / "old") as quorum:
        quorum.leader()
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            token = term.token
            running = ["--data-dir", str(tmp_path / "old" / "n1")]
            assert main(["cluster", "backup", str(tmp_path / "none"), *running]) == 69
            assert "in use by process" in capsys.readouterr().err
    made = {
        name: output(capsys, "backup", str(tmp_path / name), "--data-dir", f"{tmp_path}/old/{name}")
        for name in quorum.peers
    }
    best = max(made, key=lambda name: (made[name]["generation"], made[name]["index"]))
    new = Quorum(tmp_path / "new", cluster="test-2")
    for name in new.peers:
        where = ["--id", name, "--data-dir", str(tmp_path / "new" / name)]
        shared = ["--peers", new.peers_text, "--cluster", "test-2"]
        output(capsys, "restore", str(tmp_path / best), *shared, *where)
    with new:
        new.leader()
        with doyen.connect_blocking(new.url) as session, session.campaign("e") as term:
            assert term.token > token + 10**9


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["backup", "/nowhere/x", "--data-dir", "/nowhere"], 69, "does not exist"),
        (["status", "--store", "sqlite:///tmp/x.db"], 2, "is not the URL of a quorum"),
        (["add", "n4", "h", "--store", "doyen://127.0.0.1:1"], 69, "can be reached"),
        (["status", "--store", "doyen://127.0.0.1:1"], 1, ""),
    ],
)
def test_impossible_requests_are_refused_with_the_reason(
    arguments: list[str], code: int, complaint: str, capsys: Capture
) -> None:
    assert main(["cluster", *arguments]) == code
    assert complaint in capsys.readouterr().err


def test_a_backup_that_is_refused_is_refused_in_one_line(
    tmp_path: Path,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(store: QuorumStore, take: object) -> None:
        raise doyen.StoreUnusable("this needs the role 'admin'")

    monkeypatch.setattr(QuorumStore, "backup", refused)
    file = tmp_path / "backup"
    assert main(["cluster", "backup", str(file), "--store", "doyen://localhost:1"]) == 69
    gc.collect()  # an exception of a task that was not retrieved is logged at its deletion
    assert capsys.readouterr().err.splitlines()[1:] == ["doyen: this needs the role 'admin'"]
    assert not caplog.records
    assert not file.exists()


def test_without_the_extra_every_action_names_it(tmp_path: Path) -> None:
    peers = ["--id", "n1", "--peers", "n1=localhost:1", "--data-dir", str(tmp_path / "n1")]
    folder = ["--data-dir", str(tmp_path)]
    actions = [["status"], ["add", "n4", "h4"], ["remove", "n1"], ["transfer", "n1"]]
    actions += [["backup", "new"], ["backup", "new", *folder], ["restore", "old", *peers]]
    program = (
        "import os, sys\n"
        "sys.modules['msgspec'] = None\n"
        "from doyen.cli import main\n"
        "os.environ['DOYEN_STORE'] = 'doyen://localhost:1'\n"
        f"print([int(main(['cluster', *action])) for action in {actions!r}])\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ran.stdout.strip() == str([2] * len(actions)), ran.stderr
    assert ran.stderr.count("pip install 'doyen[quorum]'") == len(actions)
