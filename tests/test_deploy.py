"""The files that `doyen deploy` prints, as systemd, supervisord, HAProxy and Docker read them."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import yaml

import doyen
import servers
from candidates import Capture
from doyen.cli import deploy, main, parsers, serve
from doyen.cli.deploy import FILES, deployment
from doyen.stores.kit.durations import parse_duration
from doyen.stores.port import StoreURL
from doyen.warden.daemon import unit
from frozen import freeze
from servers.compose import check_compose
from servers.fetch import obtain
from servers.haproxy import RECIPE as HAPROXY
from servers.systemd import verify_units
from support import until_blocking

FOLDER = Path(deploy.__file__).parent / "deployment"
PROGRAM = "/usr/bin/doyen"
PATIENCE_S = 60.0


def accepted(words: list[str]) -> Any:
    """What doyen understands by a command line, which it must accept."""
    try:
        return parsers(words[0])[0].parse_args(words)
    except SystemExit:
        pytest.fail(f"doyen does not accept {shlex.join(words)}")


def test_the_files_are_listed_and_printed(capsys: Capture) -> None:
    assert {path.name for path in FOLDER.iterdir()} == {*FILES}
    assert main(["deploy"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == [*FILES]
    for name in FILES:
        assert main(["deploy", name]) == 0
        assert "@DOYEN@" not in capsys.readouterr().out
    assert main(["deploy", "haproxy.cfg", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == deployment("haproxy.cfg", PROGRAM)
    assert main(["deploy", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["files"]] == [*FILES]
    with pytest.raises(doyen.ConfigError, match="has a space"):
        deployment("supervisord.conf", "/a b/doyen")


def test_a_doyen_that_other_users_cannot_execute_is_reported(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The units have users of their own."""
    home = tmp_path / "home"
    home.mkdir(0o700)
    program = home / "doyen"
    program.touch(0o755)
    monkeypatch.setattr(sys, "argv", [str(program)])
    assert main(["deploy", "doyen-run@.service"]) == 0
    shown = capsys.readouterr()
    assert f"ExecStart={program} run" in shown.out
    assert "a user of its own, who cannot use" in shown.err
    assert main(["deploy", "supervisord.conf"]) == 0
    assert capsys.readouterr().err == ""


UNITS = {
    "doyen-run@billing": deployment("doyen-run@.service", sys.executable),
    "doyen-serve@n1": deployment("doyen-serve@.service", sys.executable),
    "doyen-warden@1000": unit("system", sys.executable),
    "doyen-warden": unit("user", sys.executable),
}


def test_units_are_what_systemd_accepts(tmp_path: Path) -> None:
    good, bad = [], []
    for name, text in UNITS.items():
        file = re.sub("@.*", "@", name) + ".service"
        (tmp_path / file).write_text(text)
        (tmp_path / f"bad-{file}").write_text(text.replace("RestartSec", "RestartAfter"))
        good.append(tmp_path / f"{name}.service")
        bad.append(tmp_path / f"bad-{name}.service")
    assert verify_units(*good) == ""
    assert verify_units(*bad).count("Unknown key") == len(bad)


@pytest.mark.parametrize("name", UNITS)
def test_units_are_restarted_without_a_limit_and_have_time_to_start(name: str) -> None:
    """systemd gives up after five restarts in ten seconds, unless the unit says otherwise, and ends
    a service that is not ready in time."""
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.read_string(UNITS[name])
    assert found["Unit"]["StartLimitIntervalSec"] == "0"
    assert found["Service"]["Restart"] in ("always", "on-failure")
    assert found["Service"]["Type"] == "notify"
    words = shlex.split(found["Service"]["ExecStart"])
    if "--store-wait" in words:
        wait_s = parse_duration(words[words.index("--store-wait") + 1])
        assert wait_s < float(found["Service"]["TimeoutStartSec"])


@pytest.mark.parametrize("name", [name for name in FILES if name.endswith(".service")])
def test_units_start_what_doyen_accepts(name: str) -> None:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(deployment(name, PROGRAM))
    program, *words = shlex.split(found["Service"]["ExecStart"].replace("$DOYEN_COMMAND", "work"))
    assert program == PROGRAM
    accepted(words)


def test_a_unit_that_is_stopped_has_not_failed() -> None:
    """systemd takes an end by SIGTERM for a success, but not the exit code that stands for it."""
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.read_string(UNITS["doyen-run@billing"])
    assert int(found["Service"]["SuccessExitStatus"]) == 128 + signal.SIGTERM


class Balanced:
    """Processes that campaign for `app`, behind HAProxy on a local store."""

    def __init__(self, url: str, ttl_s: float) -> None:
        self.url = url
        addresses = {name: f"127.0.0.1:{servers.free_port()}" for name in ("app1", "app2")}
        self.processes = {
            name: subprocess.Popen(application(url, name, address, ttl_s))
            for name, address in addresses.items()
        }
        self._haproxy = servers.HAProxy(balancer(addresses).replace("500ms", "50ms"))

    def __enter__(self) -> Self:
        self._haproxy.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        self._haproxy.__exit__()

    def served_by(self) -> str | None:
        """Which process answers a request."""
        try:
            with urlopen(self._haproxy.url, timeout=10) as answer:
                return str(answer.read().decode())
        except HTTPError as refusal:
            refusal.close()  # from Python 3.14 on, one that is not closed is a warning
            return None
        except OSError:
            return None

    def followed(self, after: str = "") -> str:
        """The leader, another one than `after`, once it serves the requests."""
        with doyen.connect_blocking(self.url) as session:

            def leader() -> str | None:
                found = session.leader("app")
                return found.name if found else None

            until_blocking(lambda: leader() not in (None, after) and self.served_by() == leader())
            until_blocking(lambda: after or len(session.line("app")) == 2)
            found = leader()
            assert found is not None
            return found


def application(url: str, name: str, address: str, ttl_s: float) -> list[str]:
    """The command of a process behind HAProxy."""
    return [sys.executable, "tests/balanced.py", url, name, address, str(ttl_s)]


def balancer(addresses: dict[str, str]) -> str:
    """The configuration that is shipped, with these servers."""
    shown = deployment("haproxy.cfg", PROGRAM)
    lines = re.sub(r"(    server app\d .*\n)+", "SERVERS", shown)
    assert lines.count("SERVERS") == 1
    servers = "".join(f"    server {name} {at}\n" for name, at in addresses.items())
    return lines.replace("SERVERS", servers)


def test_haproxy_follows_the_leader(store: str) -> None:
    """It is killed, and the requests go to the next one. Those that come before wait for it."""
    with Balanced(store, ttl_s=5) as balanced:
        first = balanced.followed()
        balanced.processes[first].kill()
        balanced.processes[first].wait()
        (second,) = {*balanced.processes} - {first}
        assert balanced.served_by() == second
        assert balanced.followed(after=first) == second


@pytest.mark.chaos(engine="sqlite")
def test_haproxy_leaves_a_frozen_leader(store: str) -> None:
    """Also when it goes on: it finds its term over, and answers that it does not lead."""
    with Balanced(store, ttl_s=4) as balanced:
        leader = balanced.followed()
        for _ in range(5):
            frozen, process = leader, balanced.processes[leader]
            freeze(process.pid, store.removeprefix("sqlite://"))
            leader = balanced.followed(after=frozen)
            process.send_signal(signal.SIGCONT)
            with doyen.connect_blocking(store) as session:
                until_blocking(lambda: len(session.line("app")) == 2)
                answers = [balanced.served_by() for _ in range(20)]
            assert {*answers} <= {leader, None}


ASK = """
import urllib.request
try:
    print(urllib.request.urlopen("http://127.0.0.1:8000", timeout=10).read().decode())
except OSError:
    print("nobody")
"""


@pytest.mark.chaos(engine="quorum")
def test_haproxy_leaves_a_leader_whose_host_is_cut_off(tmp_path: Path) -> None:
    """HAProxy, the store and two applications, each on a host of its own."""
    haproxy, configuration = obtain(HAPROXY), tmp_path / "haproxy.cfg"
    with servers.Lan("app1", "app2", "store", "proxy") as lan, ExitStack() as ends:

        def start(host: str, command: list[str], **environ: str) -> None:
            process = subprocess.Popen([*lan.inside(host), *command], env={**os.environ, **environ})
            ends.callback(process.wait)
            ends.callback(process.kill)

        def served_by() -> str:
            ask = [*lan.inside("proxy"), sys.executable, "-S", "-c", ASK]
            return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()

        serve = [sys.executable, "-m", "doyen", "serve", "--id", "n1", "--found"]
        node = f"{lan.address('store')}:7878"
        secret = tmp_path / "secret"
        secret.write_text("a secret of the nodes")
        serve += ["--peers", f"n1={node}", "--data-dir", str(tmp_path / "n1")]
        start("store", [*serve, "--secret-file", str(secret), "--peer-secret-file", str(secret)])
        addresses = {name: f"{lan.address(name)}:8000" for name in ("app1", "app2")}
        for name, address in addresses.items():
            url = f"doyen://a%20secret%20of%20the%20nodes@{node}"
            start(name, application(url, name, address, ttl_s=4))
        configuration.write_text(balancer(addresses))
        start(
            "proxy", [str(haproxy.path), "-db", "-f", str(configuration)], **haproxy.environment()
        )
        until_blocking(lambda: served_by() in addresses, PATIENCE_S)
        leader = served_by()
        for _ in range(4):
            (other,) = {*addresses} - {leader}
            lan.part([leader], [other, "store", "proxy"])
            until_blocking(partial(lambda other: served_by() == other, other), PATIENCE_S)
            lan.heal()
            assert {served_by() for _ in range(20)} <= {other, "nobody"}
            leader = other


def test_supervisord_runs_the_command_at_the_leader(tmp_path: Path, store: str) -> None:
    """Two programs as on two hosts: one works. Its doyen is killed: the other works, and the first
    is started again, as a candidate. A program that is stopped hands over."""
    work = tmp_path / "work.py"
    work.write_text(
        "import os, signal; print(os.environ['DOYEN_NAME'], flush=True); signal.pause()"
    )
    shown = configparser.RawConfigParser()
    shown.read_string(deployment("supervisord.conf", PROGRAM))
    [section] = shown.sections()
    words = shlex.split(shown[section]["command"])
    assert accepted(words[1:]).command == ["/usr/bin/python3", "/srv/app/worker.py"]
    lines = [
        f"[supervisord]\nnodaemon=true\nlogfile={tmp_path}/log\npidfile={tmp_path}/pid",
        f"childlogdir={tmp_path}\nuser={'root' if os.getuid() == 0 else ''}".removesuffix(
            "\nuser="
        ),
        f"[unix_http_server]\nfile={tmp_path}/socket",
        "[rpcinterface:supervisor]",
        "supervisor.rpcinterface_factory=supervisor.rpcinterface:make_main_rpcinterface",
        f"[supervisorctl]\nserverurl=unix://{tmp_path}/socket",
    ]
    command = [sys.executable, "-m", "doyen", "run", "billing"]
    for name in ("host1", "host2"):
        settings = dict(shown[section])
        whole = [*command, "--name", name, "--", sys.executable, str(work)]
        settings["command"] = shlex.join(whole)
        settings["environment"] = f'DOYEN_STORE="{store}",DOYEN_REQUIRE_STORE="1"'
        lines += [f"[program:{name}]", *(f"{key}={value}" for key, value in settings.items())]
    (tmp_path / "supervisord.conf").write_text("\n".join(lines))
    python = [sys.executable, "-W", "ignore", "-m"]
    conf = ["-c", str(tmp_path / "supervisord.conf")]
    supervisord = subprocess.Popen(
        [*python, "supervisor.supervisord", *conf], stdout=subprocess.DEVNULL
    )

    def control(*words: str) -> str:
        result = subprocess.run(
            [*python, "supervisor.supervisorctl", *conf, *words],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )
        return result.stdout

    try:
        with doyen.connect_blocking(store) as session:

            def line() -> list[str]:
                return [each.name for each in session.line("billing")]

            until_blocking(lambda: len(line()) == 2)
            first, second = line()
            running = rf"{first}\s+RUNNING\s+pid (\d+)"
            until_blocking(lambda: re.search(running, control("status")))
            found = re.search(running, control("status"))
            assert found is not None
            os.kill(int(found[1]), signal.SIGKILL)
            until_blocking(lambda: line() == [second, first])
            control("stop", second)
            until_blocking(lambda: line() == [first])
    finally:
        supervisord.terminate()
        supervisord.wait(PATIENCE_S)


def compose() -> Any:
    return yaml.safe_load(deployment("compose.yaml", PROGRAM))


def test_the_compose_file_is_what_docker_compose_accepts(tmp_path: Path) -> None:
    file = tmp_path / "compose.yaml"
    file.write_text(deployment("compose.yaml", PROGRAM))
    assert check_compose(file) == ""
    file.write_text(file.read_text().replace("stop_grace_period", "stop_grace"))
    assert "stop_grace is not allowed" in check_compose(file)


def test_compose_refers_to_what_exists() -> None:
    file = compose()
    services = file["services"]
    assert {*file} - {"x-node", "x-settings"} == {"services", "volumes", "secrets"}
    peers = serve.read_peers(services["n1"]["environment"]["DOYEN_NODE_PEERS"])
    assert peers == {name: f"{name}:7400" for name in services if name != "worker"}
    for name, service in services.items():
        assert {*service.get("depends_on", [])} <= {*services}
        assert {*service["secrets"]} <= {*file["secrets"]}
        for volume in service.get("volumes", []):
            assert volume.split(":")[0] in file["volumes"]
        environ = service["environment"]
        assert all(isinstance(value, str) for value in environ.values())
        for value in environ.values():
            for secret in re.findall("/run/secrets/(\\w+)", value):
                assert secret in service["secrets"]
        if name == "worker":
            args = accepted(service["command"])
            assert args.command == ["sleep", "infinity"]
            # It has no port, so the health check of the image would find it unhealthy.
            assert "HEALTHCHECK" in dict(instructions())
            assert service["healthcheck"] == {"disable": True}
            url = StoreURL.parse(environ["DOYEN_STORE"])
            assert url.parts.netloc == ",".join(peers.values())
        else:
            serve._check_variables(environ)
            assert environ["DOYEN_NODE_ID"] == name


def instructions() -> list[tuple[str, str]]:
    text = deployment("Dockerfile", PROGRAM).replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines)]


def test_the_dockerfile_starts_a_node() -> None:
    found = dict(instructions())
    entry, command = json.loads(found["ENTRYPOINT"]), json.loads(found["CMD"])
    assert entry == ["doyen"]
    environ = dict(each.split("=", 1) for each in found["ENV"].split())
    peers = {"DOYEN_NODE_ID": "n1", "DOYEN_NODE_PEERS": "n1=n1:7400"}
    assert (
        serve.options(vars(accepted(command)), {**environ, **peers})["data_dir"] == found["VOLUME"]
    )
    assert environ["DOYEN_NODE_LISTEN"].endswith(f":{found['EXPOSE']}")
    assert found["USER"] == "doyen"
    assert found["STOPSIGNAL"] == "SIGTERM"
    extras = found["ARG"].removeprefix("EXTRAS=").split(",")
    project = Path(__file__).parents[1] / "pyproject.toml"
    assert all(f"\n{extra} = [" in project.read_text() for extra in extras)
    # One wheel, the name of which the shell completes.
    wheel, folder = found["COPY"].split()
    assert found["RUN"].startswith(f'pip install --no-cache-dir "$(ls {folder}{wheel})[$EXTRAS]"')


@contextmanager
def composed(folder: Path) -> Iterator[list[int]]:
    """The nodes of the compose file as processes of this machine, with their ports."""
    services = compose()["services"]
    image = dict(each.split("=", 1) for each in dict(instructions())["ENV"].split())
    ports = {name: servers.free_port() for name in services if name != "worker"}
    for secret in ("peers", "clients"):
        (folder / secret).write_text(f"a long random secret of {secret}")
    processes = []
    for name, port in ports.items():
        environ = {**image, **services[name]["environment"]}
        environ["DOYEN_NODE_LISTEN"] = f"127.0.0.1:{port}"
        environ["DOYEN_NODE_DATA_DIR"] = str(folder / name)
        for other, its_port in ports.items():
            environ["DOYEN_NODE_PEERS"] = environ["DOYEN_NODE_PEERS"].replace(
                f"={other}:7400", f"=127.0.0.1:{its_port}"
            )
        placed = {key: value.replace("/run/secrets", str(folder)) for key, value in environ.items()}
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "doyen", "serve"],
                env={**os.environ, **placed},
                stderr=subprocess.DEVNULL,
            )
        )
    try:
        yield [*ports.values()]
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.chaos
def test_the_nodes_of_the_compose_file_form_a_quorum(tmp_path: Path) -> None:
    with composed(tmp_path) as ports:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        url = f"doyen://{hosts}?secret_file={tmp_path}/clients"
        check = json.loads(dict(instructions())["HEALTHCHECK"].partition("CMD ")[2])
        with (
            doyen.connect_blocking(url, wait_s=PATIENCE_S) as session,
            session.campaign("billing", name="worker"),
        ):
            leader = session.leader("billing")
            assert leader is not None
            assert leader.name == "worker"
        code = check[2].replace("7400", str(ports[0]))
        assert subprocess.run([sys.executable, *check[1:2], code]).returncode == 0
