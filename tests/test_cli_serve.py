"""`doyen serve`: the sources of its settings, its log lines, and a quorum of real processes."""

from __future__ import annotations

import asyncio
import logging
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path

import pytest

import doyen
from candidates import DOYEN, eventually
from doyen.cli.serve import _LogfmtFormatter, _state_certificates, options
from doyen.errors import ConfigError
from doyen.quorum.node.server import NodeOptions
from doyen.quorum.protocol.security import TLS
from nodes import addresses
from served import Quorum, Served

PEERS = "n1=10.0.0.1:7400,n2=10.0.0.2:7400,n3=10.0.0.3:7400"
ADDRESSES = {f"n{n}": f"10.0.0.{n}:7400" for n in (1, 2, 3)}

FILE = """
id = "n1"
data_dir = "from-file"
election_s = 2
[peers]
n1 = "10.0.0.1:7400"
n2 = "10.0.0.2:7400"
n3 = "10.0.0.3:7400"
[tls]
certificate = "n1.pem"
key = "n1.key"
authority = "ca.pem"
"""


def test_a_settings_file_is_sufficient(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(FILE)
    asked = options({"config": str(tmp_path / "node.toml")}, {})
    tls = asked.pop("tls")
    assert asked == {"id": "n1", "data_dir": "from-file", "election_s": 2, "peers": ADDRESSES}
    assert (tls.certificate, tls.key, tls.authority, tls.mutual) == (
        "n1.pem",
        "n1.key",
        "ca.pem",
        True,
    )


def test_the_environment_prevails_over_the_file_and_options_over_both(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text(FILE)
    environment = {
        "DOYEN_NODE_CONFIG": str(tmp_path / "node.toml"),
        "DOYEN_NODE_DATA_DIR": "from-environment",
        "DOYEN_NODE_ID": "n2",
        "DOYEN_NODE_JOIN": "true",
    }
    asked = options({"id": "n3", "election_s": "0.5"}, environment)
    assert (asked["id"], asked["data_dir"], asked["election_s"], asked["join"]) == (
        "n3",
        "from-environment",
        0.5,
        True,
    )


def test_an_address_without_a_host_is_of_this_machine() -> None:
    asked = options({"id": "a", "data_dir": "d", "peers": "a=:7401, b=:7402"}, {})
    assert asked["peers"] == {"a": "127.0.0.1:7401", "b": "127.0.0.1:7402"}


def test_a_secret_is_read_from_its_file_or_the_environment(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("swordfish\n")
    basics = {"id": "n1", "data_dir": "d", "peers": PEERS}
    assert options({**basics, "secret_file": str(tmp_path / "secret")}, {})["secret"] == "swordfish"
    assert options(basics, {"DOYEN_NODE_SECRET": "s"})["secret"] == "s"


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"id": None}, "the setting id is missing: use --id, the variable DOYEN_NODE_ID, or id in"),
        (
            {"data_dir": None},
            "the setting data_dir is missing: use --data-dir, the variable DOYEN_NODE_DATA_DIR",
        ),
        ({"peers": "n1"}, "peers must have the form n1=host:port,n2=host:port; got 'n1'"),
        ({"peers": "a=:1,a=:2"}, "two peers have the name 'a'"),
        ({"peers": "a = :1, a=:2"}, "two peers have the name 'a'"),
        ({"secret_file": sys.executable}, "is not text: write hex or base64 to it"),
        ({"election_s": "soon"}, "election_s: 'soon' is not a duration"),
        ({"join": "perhaps"}, "the value must be true or false; got 'perhaps'"),
        ({"secret_file": "/nowhere"}, "secret file /nowhere cannot be read"),
        ({"config": "/nowhere.toml"}, "/nowhere.toml cannot be read: No such file"),
    ],
)
def test_what_makes_no_sense_is_refused(change: dict[str, str | None], complaint: str) -> None:
    given = {"id": "n1", "data_dir": "d", "peers": PEERS, **change}
    with pytest.raises(ConfigError, match=complaint):
        options(given, {})


@pytest.mark.parametrize(
    ("variable", "hint"),
    [("DOYEN_NODE_ELECTIONS_S", "did you mean DOYEN_NODE_ELECTION_S"), ("DOYEN_NODE_X", "ID")],
)
def test_an_unknown_variable_is_refused(variable: str, hint: str) -> None:
    given = {"id": "n1", "data_dir": "d", "peers": PEERS}
    with pytest.raises(ConfigError, match=f"unknown variable {variable}; .*{hint}"):
        options(given, {"DOYEN_NODE_ID": "n1", variable: "1"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("id = ", "is not valid TOML"),
        ("elction_s = 1", "unknown setting 'elction_s'; did you mean election_s?"),
        ("wings = 1", "unknown setting 'wings'; known are id, peers"),
        ("election_s = true", "election_s must have the form TIME; got True"),
        ("id = 7", "id must have the form NAME; got 7"),
        ("tls = 1", "tls must be a table"),
        ("[peers]\nn1 = 7400", "the address of a peer must be text"),
        ('peers = "n1=:1"', r"must have the form \[peers\], then n1 ="),
    ],
)
def test_what_makes_no_sense_in_a_file_is_refused(
    tmp_path: Path, text: str, complaint: str
) -> None:
    (tmp_path / "node.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        options({"config": str(tmp_path / "node.toml")}, {})


def test_a_quorum_serves_and_its_nodes_stop_in_good_order(tmp_path: Path) -> None:
    with Quorum(tmp_path) as quorum:
        leader = quorum.leader()
        leader.process.send_signal(signal.SIGHUP)
        leader.hear("reloaded", certificates=False)
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            token = term.token
        assert leader.stop() == 0
        successor = quorum.leader()
        assert successor is not leader
        with doyen.connect_blocking(quorum.url) as session, session.campaign("e") as term:
            assert term.token > token
        leader.start()
        leader.hear("role", leader=quorum.leader().name)
        for node in quorum.nodes.values():
            assert node.stop() == 0


def test_a_signal_that_arrives_twice_is_one(tmp_path: Path) -> None:
    """`timeout`, for instance, sends it to the process and to its group."""
    with Quorum(tmp_path, 1) as quorum:
        node = quorum.leader()
        for _ in range(2):
            node.process.send_signal(signal.SIGSTOP)
            node.process.send_signal(signal.SIGTERM)
            node.process.send_signal(signal.SIGINT)
            node.process.send_signal(signal.SIGCONT)
        node.hear("stopped")
        assert node.process.wait(30) == 0


def test_its_log_lines_are_keys_and_values_with_time_and_level(tmp_path: Path) -> None:
    command = [*DOYEN, "serve", "--id", "n1", "--peers", f"n1={addresses(1)[0]}", "--found"]
    command += ["--data-dir", str(tmp_path / "a b")]
    terminal, stdin = pty.openpty()
    process = subprocess.Popen(command, stdin=stdin, stderr=subprocess.PIPE, text=True)
    os.close(stdin)
    assert process.stderr is not None
    lines: list[str] = []
    with process, process.stderr as stderr:
        for line in stderr:
            lines.append(line)
            if "role=leading" in line:
                process.send_signal(signal.SIGHUP)  # as when its terminal is closed
    os.close(terminal)
    assert process.returncode == 0
    start = r"time=\S+Z level=\w+ event=\w+ node=n1"
    value = r"([\w.:/@+-]+|\"[^\"]*\")"
    for line in lines:
        assert re.fullmatch(rf"{start}( \w+={value})*\n", line), line
    assert f'data_dir="{tmp_path / "a b"}"' in lines[0]
    assert "event=stopped" in lines[-1]


def test_lines_of_logging_have_the_same_form() -> None:
    plain = logging.LogRecord("doyen", logging.WARNING, "", 0, "a %s", ("fault",), None)
    ready = logging.LogRecord("doyen", logging.ERROR, "", 0, "event=x a=1", (), None)
    form = _LogfmtFormatter().format
    assert re.fullmatch(r'time=\S+Z level=warning msg="a fault"', form(plain))
    assert re.fullmatch(r"time=\S+Z level=error event=x a=1", form(ready))


def test_certificates_that_cannot_be_used_are_reported_on_sighup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tls = TLS(certificate=tmp_path / "n1.pem", key=tmp_path / "n1.key", authority=tmp_path / "ca")
    settings = NodeOptions(id="n1", peers=ADDRESSES, data_dir=str(tmp_path), tls=tls)
    _state_certificates(settings, lambda words, **fields: pytest.fail(words))
    assert "event=certificates_refused node=n1" in caplog.text
    assert "the earlier certificates stay in use" in caplog.text


def has_committed(node: Served) -> bool:
    (count,) = re.findall(r"doyen_node_commit_seconds_count (\S+)", fetch(node, "/metrics")[1])
    return float(count) > 0


def test_pages_for_probes_and_load_balancers(tmp_path: Path) -> None:
    with Quorum(tmp_path) as quorum:
        leader = quorum.leader()
        for node in quorum.nodes.values():
            node.hear("role", leader=leader.name)
            assert fetch(node, "/healthz") == (200, "ok\n")
            assert fetch(node, "/readyz") == (200, "ready\n")
            leads = node is leader
            assert fetch(node, "/leader") == (200 if leads else 503, f"{leader.name}\n")
            status, text = fetch(node, "/metrics")
            assert status == 200
            assert f"doyen_node_leading {float(leads)}\n" in text
            assert "doyen_node_voters 3.0\n" in text
            (synced,) = re.findall(r"doyen_node_fsync_seconds_count (\S+)", text)
            assert float(synced) > 0
            if leads:
                eventually(partial(has_committed, node), "the leader measures its entries")
            else:
                assert not has_committed(node)
            assert fetch(node, "/nothing")[0] == 404


def test_a_second_node_on_the_same_folder_is_refused(tmp_path: Path) -> None:
    with Quorum(tmp_path, 1) as quorum:
        command = [*DOYEN, "serve", "--id", "n1", "--peers", f"n1={addresses(1)[0]}"]
        command += ["--data-dir", str(tmp_path / "n1"), "--cluster", "test"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        assert done.returncode == 69
        assert str(quorum.nodes["n1"].process.pid) in done.stderr


def test_to_listen_to_the_world_takes_a_secret_or_tls(tmp_path: Path) -> None:
    command = [*DOYEN, "serve", "--id", "n1", "--peers", "n1=10.0.0.1:7400"]
    command += ["--listen", "0.0.0.0:0", "--data-dir", str(tmp_path / "n1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "secret" in done.stderr
    assert "--insecure" in done.stderr
    assert not (tmp_path / "n1").exists()


def test_a_port_that_is_taken_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        command = [*DOYEN, "serve", "--id", "n1", "--peers", f"n1={address}"]
        command += ["--found", "--data-dir", str(tmp_path / "n1")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 69
    assert "Address already in use. Stop whatever listens there" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("place", ["n1", "n1/identity"])
def test_a_data_directory_that_cannot_be_used(tmp_path: Path, place: str) -> None:
    (tmp_path / "n1").mkdir()
    if place == "n1":
        (tmp_path / "n1").rmdir()
        (tmp_path / "n1").touch()
    else:
        (tmp_path / place).mkdir()
    command = [*DOYEN, "serve", "--found", "--id", "n1", "--peers", f"n1={addresses(1)[0]}"]
    command += ["--data-dir", str(tmp_path / "n1")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 69
    assert f"{tmp_path / 'n1'} cannot be used" in done.stderr
    assert re.search("(Not|Is) a directory", done.stderr)


def test_peers_that_differ_from_those_on_disk_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = addresses(2)

    async def begin(**peers: str) -> None:
        async with doyen.Node("n1", peers=peers, data_dir=tmp_path, found=True) as node:
            await node.barrier()

    asyncio.run(begin(n1=one))
    asyncio.run(begin(n1=one))
    assert "quorum is" not in caplog.text
    asyncio.run(begin(n1=other, n2=one))
    assert f'event=peers_differ node=n1 used="n1={one}"' in caplog.text


def fetch(node: Served, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{node.address}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
