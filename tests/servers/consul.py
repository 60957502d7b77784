"""Consul: one server agent, or several that form a datacentre."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path

from . import wire
from .cluster import Cluster, Member
from .fetch import Debian, Recipe
from .process import HOST

RECIPE = Recipe(
    engine="consul",
    variable="DOYEN_CONSUL_BIN",
    name="consul",
    found=("usr/bin/consul",),
    version=("version",),
    minimum=(1, 7),
    # From 1.14 on servers open another port, which can be closed only by a setting that earlier
    # versions refuse.
    below=(1, 14),
    sources=(Debian(("consul",), suite="bullseye"),),  # the last suite that has it
)
STRAY = Path("/tmp/consul-test")
"""Debian's build always creates this empty directory."""


class Consul(Member):
    """One server agent, by default a datacentre of one. Options are keys of its configuration."""

    engine = scheme = "consul"
    recipe = RECIPE
    port_count = 3

    def prepare(self) -> None:
        http, server, serf, *_ = self.ports
        closed = dict.fromkeys(("https", "grpc", "dns", "serf_wan"), -1)
        settings = {
            "server": True,
            "node_name": f"node-{http}",
            "bootstrap_expect": len(self.peers),
            "retry_join": [f"{HOST}:{peer.ports[2]}" for peer in self.peers if peer is not self],
            "retry_interval": "1s",
            "bind_addr": HOST,
            "client_addr": HOST,
            "data_dir": str(self.folder / "data"),
            "ports": {"http": http, "server": server, "serf_lan": serf, **closed},
            "performance": {"raft_multiplier": 1},
            # Otherwise a server that returns has lost its vote and regains it only after a while.
            "autopilot": {"cleanup_dead_servers": False},
            "disable_update_check": True,
            "log_level": "WARN",
            **self.options,
        }
        (self.folder / "consul.json").write_text(json.dumps(settings))

    def command(self) -> list[str]:
        config = f"-config-file={self.folder / 'consul.json'}"
        return [str(self._program.path), "agent", config]

    def ping(self) -> None:
        """Ready when its catalogue has all nodes, to which sessions are bound."""
        if len(wire.http_json(self.port, "GET", "/v1/catalog/nodes")) < len(self.peers):
            raise ValueError("Consul is not ready")

    def leads(self) -> bool:
        leader: str = wire.http_json(self.port, "GET", "/v1/status/leader")
        return leader == f"{HOST}:{self.ports[1]}"

    def close(self) -> None:
        super().close()
        try:
            STRAY.rmdir()
        except OSError:
            pass

    def put(self, key: str, value: bytes) -> None:
        status, answer = wire.http(self.port, "PUT", f"/v1/kv/{key}", value)
        if status != 200:
            raise ValueError(f"{status} {answer!r}")

    def get(self, key: str) -> bytes | None:
        return b64decode(wire.http_json(self.port, "GET", f"/v1/kv/{key}")[0]["Value"])


class ConsulCluster(Cluster[Consul]):
    """Servers of one datacentre."""

    member = Consul
