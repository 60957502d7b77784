"""PgBouncer in front of a PostgreSQL server, in transaction mode: each transaction may use another
server connection."""

from __future__ import annotations

from . import wire
from .fetch import Debian, Recipe
from .postgres import Postgres
from .process import HOST, Server

RECIPE = Recipe(
    engine="postgresql",
    variable="DOYEN_PGBOUNCER_BIN",
    name="pgbouncer",
    found=("usr/sbin/pgbouncer",),
    minimum=(1, 15),
    sources=(Debian(("pgbouncer",), without=("postgresql-common",)),),
)


class PgBouncer(Server):
    """A pooler without authentication, in front of a server without authentication."""

    engine = "pgbouncer"
    recipe = RECIPE
    user = "nobody"

    def __init__(self, server: Postgres) -> None:
        self._server = server
        super().__init__()

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{HOST}:{self.port}/postgres"

    def prepare(self) -> None:
        settings = {
            "listen_addr": HOST,
            "listen_port": str(self.port),
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "max_client_conn": "500",
            "default_pool_size": "8",
        }
        lines = [
            "[databases]",
            f"* = host={HOST} port={self._server.port} user=postgres",
            "[pgbouncer]",
            *(f"{name} = {value}" for name, value in settings.items()),
        ]
        file = self.folder / "pgbouncer.ini"
        file.write_text("\n".join(lines) + "\n")
        file.chmod(0o644)

    def command(self) -> list[str]:
        return [str(self._program.path), str(self.folder / "pgbouncer.ini")]

    def ping(self) -> None:
        wire.postgres_query(self.port, "SELECT 1")

    def put(self, key: str, value: bytes) -> None:
        self._server.put(key, value)

    def get(self, key: str) -> bytes | None:
        return self._server.get(key)
