"""Redis with replicas and sentinels, and Valkey."""

from __future__ import annotations

import re
from typing import Any

from . import wire
from .fetch import Debian, Recipe, machine_suite
from .process import HOST, Server

RECIPE = Recipe(
    engine="redis",
    variable="DOYEN_REDIS_BIN",
    name="redis-server",
    found=("usr/bin/redis-server",),
    minimum=(6, 0),
    sources=(Debian(("redis-server",)),),
)
VALKEY = Recipe(
    engine="valkey",
    variable="DOYEN_VALKEY_BIN",
    name="valkey-server",
    found=("usr/bin/valkey-server",),
    # Debian has it from trixie on, built for a newer libc than that of bookworm. For bookworm
    # there is a backport. The program itself is in the package valkey-tools.
    sources=(
        Debian(("valkey-server", "valkey-tools"), suite="bookworm-backports")
        if machine_suite() == "bookworm"
        else Debian(("valkey-server",)),
    ),
)


class Redis(Server):
    """One server that writes every command to disk."""

    engine = scheme = "redis"
    recipe = RECIPE

    def command(self) -> list[str]:
        settings = {
            "bind": HOST,
            "port": str(self.port),
            "dir": str(self.folder),
            "save": "",
            "appendonly": "yes",
            # Tests kill processes, not machines, so written data survives in the page cache.
            "appendfsync": "no",
            **{name.replace("_", "-"): value for name, value in self.options.items()},
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return [str(self._program.path), *arguments]

    def ping(self) -> None:
        if wire.redis_command(self.port, "PING") != b"PONG":
            raise ValueError("Redis is not ready")

    def put(self, key: str, value: bytes) -> None:
        wire.redis_command(self.port, "SET", key, value.decode())

    def get(self, key: str) -> bytes | None:
        return wire.redis_command(self.port, "GET", key)


class Valkey(Redis):
    """Valkey, a fork of Redis 7.2."""

    engine = "valkey"
    recipe = VALKEY


class RedisReplica(Redis):
    """A replica of a master."""

    def __init__(self, master: Redis, **options: Any) -> None:
        super().__init__(**options)
        self._master = master

    def command(self) -> list[str]:
        return [*super().command(), "--replicaof", HOST, str(self._master.port)]

    def ping(self) -> None:
        """Ready when it is synchronised with the master."""
        answer = wire.redis_command(self.port, "INFO", "replication") or b""
        if b"role:slave" in answer and b"master_link_status:up" not in answer:
            raise ValueError("the replica is not synchronised yet")


class RedisSentinel(Server):
    """Monitors a master, and promotes a replica when the master has failed."""

    engine = "redis"
    recipe = RECIPE
    service = "doyen"

    def __init__(self, master: Redis, *, quorum: int = 1) -> None:
        super().__init__()
        self._master = master
        self._quorum = quorum

    @property
    def url(self) -> str:
        return f"redis+sentinel://{HOST}:{self.port}/{self.service}"

    def prepare(self) -> None:
        name = self.service
        (self.folder / "sentinel.conf").write_text(
            f"bind {HOST}\nport {self.port}\ndir {self.folder}\n"
            f"sentinel monitor {name} {HOST} {self._master.port} {self._quorum}\n"
            f"sentinel down-after-milliseconds {name} 1000\n"
            f"sentinel failover-timeout {name} 3000\n"
        )

    def command(self) -> list[str]:
        return [str(self._program.path), str(self.folder / "sentinel.conf"), "--sentinel"]

    def ping(self) -> None:
        """Ready when it has found a replica that it can promote."""
        if b",slaves=0," in self._info():
            raise ValueError("the sentinel has found no replica yet")

    def master_port(self) -> int:
        """The port of the master that this sentinel knows."""
        found = re.search(rb"name=doyen,.*address=[^,]*:(\d+)", self._info())
        if found is None:
            raise ValueError("the sentinel knows no master")
        return int(found[1])

    def _info(self) -> bytes:
        return wire.redis_command(self.port, "INFO", "sentinel") or b""

    def put(self, key: str, value: bytes) -> None:
        wire.redis_command(self.master_port(), "SET", key, value.decode())

    def get(self, key: str) -> bytes | None:
        return wire.redis_command(self.master_port(), "GET", key)
