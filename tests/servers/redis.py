"""Redis."""

from __future__ import annotations

from . import wire
from .fetch import Debian, Recipe, obtain
from .process import HOST, Server

RECIPE = Recipe(
    engine="redis",
    variable="DOYEN_REDIS_BIN",
    name="redis-server",
    # Debian's server is a link to a tool that plays both parts by its name.
    found=("usr/bin/redis-server",),
    sources=(Debian(("redis-server",)),),
)


class Redis(Server):
    """One server that writes every command to disk. Options are its settings."""

    engine = "redis"

    def __init__(self, **options: str) -> None:
        self._program = obtain(RECIPE)
        super().__init__()
        self.options = options

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}"

    def command(self) -> list[str]:
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            # Processes are killed here, machines are not: what was written is in the page cache.
            "appendfsync": "no",
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [str(self._program.path), *arguments]

    def environment(self) -> dict[str, str]:
        return self._program.environment()

    def ping(self) -> None:
        if wire.redis_command(self.port, "PING") != b"PONG":
            raise ValueError("Redis is not ready")

    def put(self, key: str, value: bytes) -> None:
        wire.redis_command(self.port, "SET", key, value.decode())

    def get(self, key: str) -> bytes | None:
        return wire.redis_command(self.port, "GET", key)
