"""`doyen serve`: one node of a quorum, in a process of its own, until it is told to stop.

What a node is to be comes from a file, the environment and options, each prevailing over the one
before it; the three know the same names.
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
import tomllib
from collections.abc import Callable, Collection, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from doyen.cli._manual import manual
from doyen.cli._output import Exit, print_json, seconds
from doyen.errors import ConfigError
from doyen.telemetry import FLUSH_S, DeliveryQueue

if TYPE_CHECKING:
    from doyen.quorum.consensus.core import Role
    from doyen.quorum.node.server import NodeOptions, NodeServer

__all__ = ["MANUAL", "configure", "options", "read_peers", "run"]

MANUAL = """\
Runs one node of a quorum. Three or five of them, each on a machine of its own, are a store that
needs nothing else: doyen://h1:7400,h2:7400,h3:7400. All of them are started with the same peers.

A node's data folder is its memory. With --found, nodes whose folders are empty found a cluster,
once all of them are there; a node whose folder has data takes no notice of it. With --join, a node
waits until it is added to a cluster that exists. A node that is a member and has lost its folder,
or has an older copy of it, is refused by the others: remove it, and add it anew with an empty
folder.

Settings come from a TOML file (--config), from the environment (DOYEN_NODE_ID, DOYEN_NODE_PEERS,
…) and from options; the later prevail. SIGTERM or Ctrl-C hands leadership over, then stops; a
second one stops at once. Changes are told on standard error, a line each; with --json on standard
output.

the same as a file:
  id = "n1"
  data_dir = "/var/lib/doyen"
  listen = "0.0.0.0:7400"           # default: its own address among the peers
  peer_secret_file = "/etc/doyen/peers"   # or TLS, unless all is on one machine
  secret_file = "/etc/doyen/clients"
  [peers]
  n1 = "10.0.0.1:7400"
  n2 = "10.0.0.2:7400"
  n3 = "10.0.0.3:7400"
  [tls]
  certificate = "n1.pem"
  key = "n1.key"
  authority = "ca.pem"

over HTTP, on the same port (and on that of --http):
  /healthz  200 while it runs
  /readyz   200 once it knows a leader
  /leader   200 on the leader, 503 elsewhere
  /metrics  for Prometheus

exit codes:
  0    told to stop, and stopped
  2    wrong usage or configuration
  69   the folder or the address cannot be used
  70   the disk failed: nothing was said that is not on it
  others as for every command: see doyen --help

examples:
  # a quorum on one machine, to try; in three terminals, with n1, n2 and n3
  doyen serve --found --id n1 --data-dir n1 --peers n1=:7401,n2=:7402,n3=:7403
  doyen run billing --store doyen://localhost:7401,localhost:7402 -- ./work
"""


def read_peers(text: str) -> dict[str, str]:
    """`n1=host:port,n2=host:port`; without a host, of this machine."""
    peers = {}
    for part in text.split(","):
        name, equals, address = part.strip().partition("=")
        if not (name and equals and address):
            raise ConfigError(f"peers are given as n1=host:port,n2=host:port, not {text!r}")
        if name in peers:
            raise ConfigError(f"two peers are called {name!r}")
        peers[name] = f"127.0.0.1{address}" if address.startswith(":") else address
    return peers


def _truth(text: str) -> bool:
    if text not in ("true", "false"):
        raise ConfigError(f"{text!r} is neither true nor false")
    return text == "true"


def _count(text: str) -> int:
    if not text.isdecimal():
        raise ConfigError(f"{text!r} is not a number of bytes")
    return int(text)


SETTINGS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "id": (str, "NAME", "this node's name among its peers"),
    "peers": (read_peers, "NAME=HOST:PORT,…", "every node's address, this one's included"),
    "data_dir": (str, "FOLDER", "where this node keeps its memory; made if it is not there"),
    "listen": (str, "HOST:PORT", "where to listen (default: its own address among the peers)"),
    "http": (str, "HOST:PORT", "a second port, for probes that have no certificate"),
    "cluster": (str, "NAME", "nodes of one name talk to one another only (default: doyen)"),
    "secret_file": (str, "FILE", "a file with what clients prove they know"),
    "peer_secret_file": (str, "FILE", "a file with what nodes prove to one another"),
    "admin_secret_file": (str, "FILE", "a file with what administrators prove they know"),
    "onlooker_secret_file": (str, "FILE", "a file with what those prove who only read"),
    "tls_certificate": (str, "FILE", "this node's certificate, PEM"),
    "tls_key": (str, "FILE", "its key"),
    "tls_authority": (str, "FILE", "who signs the others' certificates"),
    "tls_mutual": (_truth, "true|false", "let in only who has a certificate (default: true)"),
    "insecure": (_truth, "true|false", "listen beyond this machine with neither secret nor TLS"),
    "found": (_truth, "true|false", "with an empty folder: found a cluster, with all peers"),
    "join": (_truth, "true|false", "with an empty folder: wait to be added to a cluster"),
    "election_s": (seconds, "SECONDS", "how long a leader may be silent (default: 1)"),
    "heartbeat_s": (seconds, "SECONDS", "how often a leader speaks (default: 0.1)"),
    "quota_bytes": (_count, "BYTES", "how large the keyspace may become (default: 1 GiB)"),
    "protocol": (str, "NAME", "raft (default), zab, viewstamped, paxos or smallest-id"),
}
"""Each with how its text is read, what it looks like, and what it means."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    manual(parser, MANUAL)
    parser.add_argument(
        "--config", metavar="FILE", help="a TOML file (default: $DOYEN_NODE_CONFIG)"
    )
    for name, (_, looks, meaning) in SETTINGS.items():
        option = f"--{name.replace('_', '-')}"
        if looks == "true|false" and name != "tls_mutual":
            parser.add_argument(option, action="store_const", const="true", help=meaning)
        else:
            told = meaning if "default" in meaning else f"{meaning} (default: none)"
            parser.add_argument(option, metavar=looks, help=told)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    asked = options(vars(args), os.environ)
    http = asked.pop("http", None)
    try:
        from doyen.quorum.node import new_loop
        from doyen.quorum.node.server import NodeOptions
    except ModuleNotFoundError as error:
        raise ConfigError(f"a node needs {error.name}: pip install 'doyen[quorum]'") from error
    if not args.json:
        logging.basicConfig(
            format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S", level=logging.WARNING
        )
    with asyncio.Runner(loop_factory=new_loop) as runner:
        return runner.run(_serve(NodeOptions(**asked), http, _tell_json if args.json else _tell))


def options(given: Mapping[str, str | None], environment: Mapping[str, str]) -> dict[str, Any]:
    """What a node is to be, from all three sources."""
    config = given.get("config") or environment.get("DOYEN_NODE_CONFIG")
    asked = _from_file(Path(config)) if config else {}
    for name, (read, _, _) in SETTINGS.items():
        variable = f"DOYEN_NODE_{name.upper()}"
        text = given.get(name) if given.get(name) is not None else environment.get(variable)
        if text is not None:
            try:
                asked[name] = read(text)
            except argparse.ArgumentTypeError as error:
                raise ConfigError(f"{name}: {error}") from error
    _check_variables(environment)
    for name in ("id", "peers", "data_dir"):
        if not asked.get(name):
            raise ConfigError(
                f"a node needs {name}: --{name.replace('_', '-')}, DOYEN_NODE_{name.upper()},"
                f" or {name} in a file (--config)"
            )
    for name in SECRETS:
        if (variable := f"DOYEN_NODE_{name.upper()}") in environment:
            asked[name] = environment[variable]
        if file := asked.pop(f"{name}_file", None):
            asked[name] = _secret(Path(file))
    if tls := {name: asked.pop(f"tls_{name}") for name in TLS_PARTS if f"tls_{name}" in asked}:
        from doyen.quorum.protocol.security import TLS

        asked["tls"] = TLS(**tls)
    return asked


def _check_variables(environment: Mapping[str, str]) -> None:
    """Refuse one that nobody reads: it was meant to do something."""
    known = [f"DOYEN_NODE_{name.upper()}" for name in (*SETTINGS, "config", *SECRETS)]
    for variable in environment:
        if variable.startswith("DOYEN_NODE_") and variable not in known:
            raise ConfigError(f"nothing reads the variable {variable}; {_hint(variable, known)}")


def _hint(name: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"


SECRETS = ("secret", "peer_secret", "admin_secret", "onlooker_secret")
TLS_PARTS = ("certificate", "key", "authority", "mutual")


_KINDS: dict[Callable[[str], Any], tuple[type, ...]] = {
    read_peers: (dict,),
    _truth: (bool,),
    seconds: (int, float),
    _count: (int,),
}
"""What TOML has for each; text for the rest."""


def _from_file(path: Path) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from error
    tls = raw.pop("tls", {})
    if not isinstance(tls, dict):
        raise ConfigError(f"{path}: tls is a table: [tls], then certificate, key, authority")
    found = {**raw, **{f"tls_{name}": value for name, value in tls.items()}}
    for name, value in found.items():
        if name not in SETTINGS:
            raise ConfigError(f"{path}: there is no setting {name!r}; {_hint(name, SETTINGS)}")
        kind = _KINDS.get(SETTINGS[name][0], (str,))
        if not isinstance(value, kind) or (isinstance(value, bool) and bool not in kind):
            raise ConfigError(f"{path}: {name} cannot be {value!r}; it looks like {_example(name)}")
    if not all(isinstance(address, str) for address in found.get("peers", {}).values()):
        raise ConfigError(f'{path}: a peer\'s address is text, such as "10.0.0.1:7400"')
    return found


def _example(name: str) -> str:
    return '[peers], then n1 = "host:port"' if name == "peers" else SETTINGS[name][1]


def _secret(path: Path) -> str:
    try:
        secret = path.read_text().strip()
    except OSError as error:
        raise ConfigError(f"secret file {path} cannot be read: {error.strerror}") from error
    if not secret:
        raise ConfigError(f"secret file {path} is empty: put a long random line into it")
    return secret


Tell = Callable[..., object]


def _tell(words: str, **_: object) -> None:
    at = datetime.now().astimezone()
    print(f"{at:%H:%M:%S}.{at:%f}"[:-3], words, file=sys.stderr, flush=True)


def _tell_json(words: str, **fields: object) -> None:
    at = datetime.now().astimezone().isoformat(timespec="milliseconds")
    print_json({"at": at, **fields, "words": words})


async def _serve(asked: NodeOptions, http: str | None, tell: Tell) -> int:
    """What it says is written by a thread: a pipe that nobody reads must not stop the node."""
    lines = DeliveryQueue(_write, merge=lambda _, line: line, name="doyen-serve")
    try:
        return await _serve_until_told(
            asked, http, lambda words, **fields: lines.put(partial(tell, words, **fields))
        )
    finally:
        await lines.close(FLUSH_S)


def _write(line: Callable[[], object]) -> None:
    line()


async def _serve_until_told(asked: NodeOptions, http: str | None, tell: Tell) -> int:
    from doyen.quorum.node.server import NodeServer

    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def told(number: signal.Signals) -> None:
        if stop.is_set():
            os._exit(128 + number)
        tell(f"{asked.id} stops: handing over first", event="stopping", node=asked.id)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    server = await NodeServer.open(asked, http=http)
    # What exists by now will stay: the collector need not look at it again, and its pauses are
    # what makes a healthy leader look dead.
    gc.collect()
    gc.freeze()
    _tell_of_roles(server, asked, tell)
    try:
        await stop.wait()
    finally:
        await server.close()
    tell(f"{asked.id} has stopped", event="stopped", node=asked.id)
    return Exit.DONE


def _tell_of_roles(server: NodeServer, asked: NodeOptions, tell: Tell) -> None:
    at = asked.listen or asked.peers[asked.id]
    tell(
        f"{asked.id} listens at {at}, cluster {asked.cluster}, memory in {asked.data_dir}",
        event="listening",
        node=asked.id,
        address=at,
        port=server.port,
        cluster=asked.cluster,
    )

    def role(role: Role, generation: int, leader: str | None) -> None:
        who = f"{leader} leads" if leader else "nobody leads as far as it knows"
        if asked.id not in server.driver.membership.everyone:
            who = "it does not belong to the quorum any more, and may be stopped"
        tell(
            f"{asked.id} is {role}: {who}, generation {generation}",
            event="role",
            node=asked.id,
            role=str(role),
            generation=generation,
            leader=leader,
        )

    server.driver.on_role(role)
