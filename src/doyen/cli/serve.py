"""`doyen serve`: run one node of a quorum until a signal stops it.

Settings come from a TOML file, from environment variables and from options. All three use the same
names; variables override the file, and options override both.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import gc
import logging
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from doyen.cli._output import Exit, add_option, print_json, seconds
from doyen.errors import ConfigError
from doyen.events.log_lines import iso_time, log_line
from doyen.events.service import ServiceManager
from doyen.events.telemetry import FLUSH_S, DeliveryQueue

if TYPE_CHECKING:
    from doyen.quorum.consensus.core import Role
    from doyen.quorum.etcd_api.door import EtcdDoor
    from doyen.quorum.node.server import NodeOptions, NodeServer

MANUAL = """\
Runs one node of a quorum. Three or five nodes on different machines form a store that depends on no
other service: doyen://h1:7400,h2:7400,h3:7400. Start all of them with the same peers.

The data directory holds everything that a node has to remember. With --found, nodes with empty data
directories found a cluster as soon as all of them are running; a node that has data ignores the
option. With --join, a node waits until it is added to an existing cluster. If a member has lost its
data directory, or has an older copy of it, the other nodes refuse it: remove it from the cluster
and add it again with an empty directory.

Settings come from a TOML file (--config), from environment variables (DOYEN_NODE_ID,
DOYEN_NODE_PEERS, …) and from options. Variables override the file, and options override both. On
SIGTERM or Ctrl-C the node hands over leadership and stops; on a second signal, half a second later
or more, it stops at once. It reads replaced certificates by itself; on SIGHUP it states whether
they can be used. Other settings are read when it starts. Log lines go to standard error; with
--json, changes are printed as JSON on standard output. Under systemd (Type=notify) the node reports
that it listens, its role, and that it is alive.

a configuration file:
  id = "n1"
  data_dir = "/var/lib/doyen"
  listen = "0.0.0.0:7400"           # default: this node's address in peers
  peer_secret_file = "/etc/doyen/peers"   # or TLS; not needed on one machine
  secret_file = "/etc/doyen/clients"
  [peers]
  n1 = "10.0.0.1:7400"
  n2 = "10.0.0.2:7400"
  n3 = "10.0.0.3:7400"
  [tls]
  certificate = "n1.pem"
  key = "n1.key"
  authority = "ca.pem"

HTTP, on the same port and on that of --http:
  /healthz  200 while the node runs
  /readyz   200 while the node knows a leader
  /leader   200 on the leader, 503 on other nodes
  /metrics  metrics for Prometheus

exit codes:
  0    stopped by a signal
  2    wrong usage or configuration
  69   the data directory or the address cannot be used
  70   the disk failed; the node confirmed nothing that is not on disk
  others as for every command: see doyen --help

examples:
  # a quorum on one machine, for tests: in three terminals, with n1, n2 and n3
  doyen serve --found --id n1 --data-dir n1 --peers n1=:7401,n2=:7402,n3=:7403
  doyen run billing --store doyen://localhost:7401,localhost:7402 -- ./work
"""


def read_peers(text: str) -> dict[str, str]:
    """Parse `n1=host:port,n2=host:port`. Without a host, the address is on this machine."""
    peers = {}
    for part in text.split(","):
        name, equals, address = map(str.strip, part.partition("="))
        if not (name and equals and address):
            raise ConfigError(f"peers must have the form n1=host:port,n2=host:port; got {text!r}")
        if name in peers:
            raise ConfigError(f"two peers have the name {name!r}; names must be different")
        peers[name] = f"127.0.0.1{address}" if address.startswith(":") else address
    return peers


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"the value must be true or false; got {text!r}")
    return text == "true"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"the value must be a number of bytes; got {text!r}")
    return int(text)


SETTINGS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "id": (str, "NAME", "the name of this node; one of the names in peers"),
    "peers": (read_peers, "NAME=HOST:PORT,…", "the addresses of all nodes, including this one"),
    "data_dir": (str, "DIRECTORY", "the data directory; created if it does not exist"),
    "listen": (str, "HOST:PORT", "the address to listen on (default: this node's in peers)"),
    "http": (str, "HOST:PORT", "a second address for HTTP, for probes without a certificate"),
    "etcd": (str, "HOST:PORT", "an address for clients of etcd, which speak its v3 API"),
    "etcd_url": (str, "URL", "the URL under which clients of etcd reach it (default: the address)"),
    "cluster": (
        str,
        "NAME",
        "the name of the cluster; other clusters are refused (default: doyen)",
    ),
    "secret_file": (str, "FILE", "file with the clients' shared secret"),
    "peer_secret_file": (str, "FILE", "file with the shared secret of the nodes"),
    "admin_secret_file": (str, "FILE", "file with the shared secret of administrators"),
    "onlooker_secret_file": (str, "FILE", "file with the shared secret of read-only clients"),
    "tls_certificate": (str, "FILE", "the certificate of this node, in PEM format"),
    "tls_key": (str, "FILE", "the private key of the certificate"),
    "tls_authority": (str, "FILE", "the CA that signs the certificates of nodes and clients"),
    "tls_mutual": (_boolean, "true|false", "require a certificate of every client (default: true)"),
    "insecure": (_boolean, "true|false", "listen on the network with neither a secret nor TLS"),
    "found": (_boolean, "true|false", "without data: found a new cluster together with all peers"),
    "join": (_boolean, "true|false", "without data: wait to be added to an existing cluster"),
    "election_s": (
        seconds,
        "TIME",
        "elect a new leader after this time without a message from the old one (default: 1)",
    ),
    "heartbeat_s": (seconds, "TIME", "the interval of the leader's heartbeats (default: 0.1)"),
    "quota_bytes": (_count, "BYTES", "the greatest size of the keyspace (default: 1 GiB)"),
    "protocol": (str, "NAME", "raft (default), zab, viewstamped, paxos or smallest-id"),
}
"""For each setting: the parser of its text, its form, its help."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_option(parser, "--config FILE", "a TOML file (default: $DOYEN_NODE_CONFIG)")
    for name, (_, form, meaning) in SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        if form == "true|false" and name != "tls_mutual":
            parser.add_argument(option, action="store_const", const="true", help=meaning)
        else:
            text = meaning if "default" in meaning else f"{meaning} (default: none)"
            parser.add_argument(option, metavar=form, help=text)


def run(args: argparse.Namespace) -> int:
    settings = options(vars(args), os.environ)
    http, etcd = settings.pop("http", None), settings.pop("etcd", None)
    etcd_url = settings.pop("etcd_url", None)
    try:
        from doyen.quorum.node import new_loop
        from doyen.quorum.node.server import NodeOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"a node needs {error.name}: pip install 'doyen[quorum]'") from error
    if etcd is not None:
        _check_etcd_api()
    handler = logging.StreamHandler()
    handler.setFormatter(_LogfmtFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    report = _print_json if args.json else _print_line
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_serve(NodeOptions(**settings), _Doors(http, etcd, etcd_url), report))


SAME_SIGNAL_S = 0.5
"""A second signal within this time counts as the first one sent twice, not as a second request."""


class _Doors(NamedTuple):
    """Further addresses that a node listens on."""

    http: str | None = None
    etcd: str | None = None
    etcd_url: str | None = None


def _check_etcd_api() -> None:
    try:
        import doyen.quorum.etcd_api.door  # noqa: F401
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"etcd's API needs packages that are not installed ({error.name}): pip install"
            " 'doyen[etcd-api]'"
        ) from error


def options(given: Mapping[str, str | None], environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a node, from the file, the environment and the options."""
    config = given.get("config") or environment.get("DOYEN_NODE_CONFIG")
    found = _from_file(Path(config)) if config else {}
    for name, (parse, _, _) in SETTINGS.items():
        variable = f"DOYEN_NODE_{name.upper()}"
        text = given.get(name) if given.get(name) is not None else environment.get(variable)
        if text is not None:
            try:
                found[name] = parse(text)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{name}: {error}") from error
    _check_variables(environment)
    for name in ("id", "peers", "data_dir"):
        if not found.get(name):
            raise ConfigError(
                f"the setting {name} is missing: use --{name.replace('_', '-')}, the variable"
                f" DOYEN_NODE_{name.upper()}, or {name} in the file of --config"
            )
    for name in SECRETS:
        if (variable := f"DOYEN_NODE_{name.upper()}") in environment:
            found[name] = environment[variable]
        if file := found.pop(f"{name}_file", None):
            found[name] = _secret(Path(file))
    if tls := {name: found.pop(f"tls_{name}") for name in TLS_PARTS if f"tls_{name}" in found}:
        from doyen.quorum.protocol.security import TLS

        found["tls"] = TLS(**tls)
    return found


def _check_variables(environment: Mapping[str, str]) -> None:
    """Refuse unknown variables, which are probably misspelt."""
    known = [f"DOYEN_NODE_{name.upper()}" for name in (*SETTINGS, "config", *SECRETS)]
    for variable in environment:
        if variable.startswith("DOYEN_NODE_") and variable not in known:
            raise ConfigError(f"unknown variable {variable}; {_hint(variable, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


SECRETS = ("secret", "peer_secret", "admin_secret", "onlooker_secret")
TLS_PARTS = ("certificate", "key", "authority", "mutual")


_KINDS: dict[Callable[[str], Any], tuple[type, ...]] = {
    read_peers: (dict,),
    _boolean: (bool,),
    seconds: (int, float, str),
    _count: (int,),
}
"""The TOML types of settings that are not strings."""


def _from_file(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"the file {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"the file {path} is not valid TOML: {error}") from error
    tls = raw.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"{path}: tls must be a table: [tls], then certificate, key, authority")
    found = {**raw, **{f"tls_{name}": value for name, value in tls.items()}}
    for name, value in found.items():
        if name not in SETTINGS:
            raise ConfigError(f"{path}: unknown setting {name!r}; {_hint(name, SETTINGS)}")
        kind = _KINDS.get(SETTINGS[name][0], (str,))
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            raise ConfigError(f"{path}: {name} must have the form {_form(name)}; got {value!r}")
        if SETTINGS[name][0] is seconds and isinstance(value, str):
            try:
                found[name] = seconds(value)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{path}: {name}: {error}") from None
    if not all(isinstance(address, str) for address in found.get("peers", {}).values()):
        raise ConfigError(f'{path}: the address of a peer must be text, such as "10.0.0.1:7400"')
    return found


def _form(name: str) -> str:
    return '[peers], then n1 = "host:port"' if name == "peers" else SETTINGS[name][1]


def _secret(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"the secret file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the secret file {path} is not text: write hex or base64 to it"
        ) from error
    if not secret:
        raise ConfigError(f"the secret file {path} is empty: write a long random line to it")
    return secret


Report = Callable[..., object]
"""Prints one change: a sentence, and its fields."""


def _now() -> str:
    return iso_time(time.time())


def _print_line(_: str, **fields: object) -> None:
    line = log_line(time=_now(), level="info", **fields)
    print(line, file=sys.stderr, flush=True)


def _print_json(words: str, **fields: object) -> None:
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    shown = {name: value for name, value in fields.items() if name != "data_dir"}
    print_json({"at": at, **shown, "words": words})


class _LogfmtFormatter(logging.Formatter):
    """Formats log lines as `key=value`, with time and level."""

    def format(self, record: logging.LogRecord) -> str:
        start = log_line(time=iso_time(record.created), level=record.levelname.lower())
        text = record.getMessage()
        line = f"{start} {text if text.startswith('event=') else log_line(msg=text)}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


async def _serve(settings: NodeOptions, doors: _Doors, report: Report) -> int:
    """Run the node. Lines are printed by a thread, so that a pipe that is not read cannot block
    the node."""
    lines = DeliveryQueue(_call, merge=lambda _, line: line, name="doyen-serve")
    try:
        return await _serve_until_stopped(
            settings, doors, lambda words, **fields: lines.put(partial(report, words, **fields))
        )
    finally:
        await lines.close(FLUSH_S)


def _call(print_line: Callable[[], object]) -> None:
    print_line()


async def _serve_until_stopped(settings: NodeOptions, doors: _Doors, report: Report) -> int:
    from doyen.quorum.node.server import NodeServer

    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    node, manager = settings.id, ServiceManager.of_environment()
    impatient_at = 0.0

    def on_signal(number: signal.Signals) -> None:
        nonlocal impatient_at
        if stop.is_set():
            if number is signal.SIGHUP or loop.time() < impatient_at:
                return  # a terminal that is closed, or a wrapper such as timeout, may send it twice
            os._exit(128 + number)
        impatient_at = loop.time() + SAME_SIGNAL_S
        words = f"node {node} hands over leadership and stops"
        manager.tell(STOPPING=1, STATUS=words)
        report(words, event="stopping", node=node)
        stop.set()

    ending = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        if os.isatty(0):
            ending.append(signal.SIGHUP)  # the terminal is closed
        else:
            loop.add_signal_handler(signal.SIGHUP, _state_certificates, settings, report)
    for number in ending:
        loop.add_signal_handler(number, on_signal, number)
    server = await NodeServer.open(settings, http=doors.http)
    door: EtcdDoor | None = None
    if doors.etcd is not None:
        from doyen.quorum.etcd_api.door import EtcdDoor

        try:
            door = await EtcdDoor.open(server, settings, doors.etcd, url=doors.etcd_url)
        except BaseException:
            await server.close()
            raise
    # The objects that exist now will live as long as the node. Freezing them keeps collections
    # short; a long one would delay heartbeats until the followers elect another leader.
    gc.collect()
    gc.freeze()
    # A node that waits for a majority is as it should be, so it is ready.
    manager.tell(READY=1, STATUS=f"node {node} listens")
    _report_roles(server, settings, report, manager)
    watching = asyncio.create_task(manager.keep_watchdog())
    try:
        await stop.wait()
    finally:
        watching.cancel()
        if door is not None:
            await door.close()
        await server.close()
    report(f"node {node} has stopped", event="stopped", node=node)
    return Exit.DONE


def _state_certificates(settings: NodeOptions, report: Report) -> None:
    """On SIGHUP: state whether the certificates on disk can be used. The node reads them again by
    itself, for the next connection, so nothing else has to be done."""
    node, tls = settings.id, settings.tls
    try:
        if tls is not None:
            tls.for_listening()
            tls.for_dialling()
    except ConfigError as error:
        effect = "the earlier certificates stay in use"
        line = log_line(event="certificates_refused", node=node, error=error, effect=effect)
        logging.getLogger("doyen").warning("%s", line)
        return
    uses = "its certificates as they are on disk" if tls else "no certificates"
    words = f"node {node} uses {uses}; other settings are read when it starts"
    report(words, event="reloaded", node=node, certificates=tls is not None)


def _report_roles(
    server: NodeServer, settings: NodeOptions, report: Report, manager: ServiceManager
) -> None:
    node, address = settings.id, settings.listen or settings.peers[settings.id]
    report(
        f"node {node} of cluster {settings.cluster} listens on {address};"
        f" its data directory is {settings.data_dir}",
        event="listening",
        node=node,
        address=address,
        port=server.port,
        cluster=settings.cluster,
        data_dir=settings.data_dir,
    )

    def on_role(role: Role, generation: int, leader: str | None) -> None:
        known = f"the leader is {leader}" if leader else "it knows no leader"
        removed = {}
        if node not in server.driver.membership.everyone:
            known = (
                "it is being removed from the cluster, or is not a member any more: stop it when"
                " doyen cluster status on another node does not list it"
            )
            removed["reason"] = known
        words = f"node {node} is {role} in generation {generation}: {known}"
        manager.tell(STATUS=words)
        report(
            words,
            event="role",
            node=node,
            role=str(role),
            generation=generation,
            leader=leader,
            **removed,
        )

    server.driver.observe_role(on_role)
