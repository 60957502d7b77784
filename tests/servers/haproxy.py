"""HAProxy, with a configuration that is given."""

from __future__ import annotations

import socket

from .fetch import Debian, Recipe
from .process import HOST, Server

RECIPE = Recipe(
    engine="haproxy",
    variable="DOYEN_HAPROXY_BIN",
    name="haproxy",
    found=("usr/sbin/haproxy",),
    minimum=(2, 2),
    version=("-v",),
    sources=(Debian(("haproxy",)),),
)


class HAProxy(Server):
    """A load balancer. `:8000` in the configuration stands for its port."""

    engine = "haproxy"
    recipe = RECIPE

    def __init__(self, configuration: str) -> None:
        self._configuration = configuration
        super().__init__()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def prepare(self) -> None:
        text = self._configuration.replace("bind :8000", f"bind {HOST}:{self.port}")
        (self.folder / "haproxy.cfg").write_text(text)

    def command(self) -> list[str]:
        return [str(self._program.path), "-db", "-f", str(self.folder / "haproxy.cfg")]

    def ping(self) -> None:
        socket.create_connection((HOST, self.port), 1.0).close()

    def put(self, key: str, value: bytes) -> None:
        raise NotImplementedError("a load balancer keeps no data")

    def get(self, key: str) -> bytes | None:
        raise NotImplementedError("a load balancer keeps no data")
