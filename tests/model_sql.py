"""Models of database servers, for the models of both client protocols: tables in SQLite.

The adapters' statements are turned into SQLite's dialect by replacing the few expressions that it
lacks. The replaced texts are the adapters' own constants, so a changed statement needs no change
here. A message is carried out at once and as a whole, so transactions are serialisable.

*Failover.* A promoted server begins with a copy of the primary's tables. Existing connections stay
with their server; new ones lead to the primary. With `synchronous` replication a deposed server
still answers queries, but no longer confirms writes.
"""

from __future__ import annotations

import asyncio
import random
import re
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from adversary import Connection

__all__ = ["Answer", "Cluster", "DatabaseServer"]

Answer = tuple[Sequence[str], list[tuple[Any, ...]]] | None
"""The columns and rows of a query; None for a statement that has none."""

_LITERAL = re.compile(r"(_binary|\bE)?'((?:[^'\\]|''|\\.)*)'(::bytea)?", re.S)
_ESCAPED = re.compile(r"\\(.)", re.S)
_ESCAPES = {"0": "\0", "n": "\n", "r": "\r", "Z": "\x1a"}
_TABLES = """
CREATE TABLE {meta} (one PRIMARY KEY, layout, revision, position, server);
CREATE TABLE {leases} (id PRIMARY KEY, ttl_us, counter, renewed_us);
CREATE TABLE {entries} (path PRIMARY KEY, value, revision, version, lease);
CREATE TABLE {changes} (position, path, PRIMARY KEY (position, path));
INSERT INTO {meta} VALUES (1, 1, 0, 0, '');
CREATE TRIGGER made AFTER INSERT ON {entries} BEGIN SELECT tell(NEW.path); END;
CREATE TRIGGER changed AFTER UPDATE ON {entries} BEGIN SELECT tell(NEW.path); END;
CREATE TRIGGER removed AFTER DELETE ON {entries} BEGIN SELECT tell(OLD.path); END;
"""


class DatabaseServer:
    """One server: its tables and its identity."""

    def __init__(self, number: int, names: dict[str, str], skew_s: float) -> None:
        self.number = number
        self.deposed = False
        self.changed: list[str] = []
        """The paths that the present message has changed."""
        self.skew_s = skew_s
        self._loop = asyncio.get_running_loop()
        self.tables = sqlite3.connect(":memory:", isolation_level=None)
        self._define("tell", self.changed.append)
        self._define("clock_us", lambda: round((1e6 + self._loop.time() + self.skew_s) * 1e6))
        self._define("server_number", lambda: self.number)
        self._define("server_name", lambda: f"server {self.number}")
        self._define("read_only", lambda: "0")
        self._define("greatest", lambda *given: max(given))
        self._define("concat", lambda *given: "".join(map(str, given)))
        self._define("lpad", lambda text, size, fill: text.rjust(size, fill))
        self._define("if", lambda condition, yes, no: yes if condition else no)
        self._define("there", lambda name: name)
        self._define("backend", lambda: 4242)
        self.tables.executescript(_TABLES.format(**names))

    def _define(self, name: str, function: Callable[..., Any]) -> None:
        self.tables.create_function(name, -1, function)

    def carry_out(self, statements: Iterable[str], values: dict[str, Any]) -> list[Answer]:
        """Carry out all statements, or none if one fails."""
        self.changed.clear()
        answers: list[Answer] = []
        self.tables.execute("BEGIN")
        try:
            for statement in statements:
                cursor = self.tables.execute(statement, values)
                if cursor.description is None:
                    answers.append(None)
                else:
                    answers.append(([one[0] for one in cursor.description], cursor.fetchall()))
        except BaseException:
            self.tables.execute("ROLLBACK")
            raise
        self.tables.execute("COMMIT")
        return answers


class Cluster:
    """The servers, of which one is the primary."""

    def __init__(
        self,
        names: dict[str, str],
        dialect: dict[str, str],
        *,
        seed: int = 0,
        failovers: int = 0,
        synchronous: bool = True,
    ) -> None:
        self.names = names
        self.synchronous = synchronous
        self.failed: list[str] = []
        """Messages that could not be carried out, because of a mistake in a model or an adapter."""
        self.renewing: dict[Connection, bool] = {}
        """The connections, and whether leases are renewed on them."""
        self._dialect = dialect
        self._chance = random.Random(seed)
        self._failovers = failovers
        self._servers: list[DatabaseServer] = []

    @property
    def primary(self) -> DatabaseServer:
        if not self._servers:
            self._add()
            loop = asyncio.get_running_loop()
            for _ in range(self._failovers):
                loop.call_later(self._chance.uniform(1, 40), self.fail_over)
        return self._servers[-1]

    def _add(self) -> DatabaseServer:
        number = len(self._servers) + 1
        skew_s = self._chance.uniform(-3600, 3600) if number > 1 else 0.0
        self._servers.append(DatabaseServer(number, self.names, skew_s))
        return self._servers[-1]

    async def serve(self, connection: Connection) -> None:
        """Speak the engine's protocol until the connection ends."""
        self.renewing[connection] = False
        try:
            await self.speak(connection, self.primary)
        finally:
            del self.renewing[connection]

    async def speak(self, connection: Connection, server: DatabaseServer) -> None:
        """Speak it for one server."""
        raise NotImplementedError

    def fail_over(self) -> None:
        """Promote a server with all that the primary has. The old primary does not notice."""
        old = self.primary
        new = self._add()
        old.tables.backup(new.tables)
        old.deposed = True

    def close_all_but_renewals(self, host: str) -> None:
        """End all connections except those of this host on which leases are renewed."""
        for connection, renews in list(self.renewing.items()):
            if not renews or connection.host != host:
                connection.close()

    def understand(self, text: str) -> tuple[list[str], dict[str, Any]]:
        """Statements for SQLite, and the values in them."""
        for theirs, ours in self._dialect.items():
            text = text.replace(theirs, ours)
        values: dict[str, Any] = {}

        def take(literal: re.Match[str]) -> str:
            kind, inside, cast = literal.groups()
            inside = inside.replace("''", "'")
            name = f"v{len(values)}"
            if cast:
                values[name] = bytes.fromhex(inside.removeprefix(r"\x"))
            else:
                plain = re.sub(
                    r"\\(.)", lambda one: _ESCAPES.get(one[1], one[1]), inside, flags=re.S
                )
                values[name] = (
                    plain.encode("utf-8", "surrogateescape") if kind == "_binary" else plain
                )
            return f":{name}"

        text = _LITERAL.sub(take, text)
        return [statement.strip() for statement in text.split(";") if statement.strip()], values

    def carry_out(
        self, connection: Connection, server: DatabaseServer, text: str
    ) -> list[Answer] | None:
        """Carry out a message; None if it is never answered."""
        self.renewing[connection] |= "counter = counter + 1" in text
        statements, values = self.understand(text)
        plain = [
            one for one in statements if not one.startswith(("COMMIT", "SET ", "ROLLBACK", "DO "))
        ]
        writes = any(one.startswith(("UPDATE", "INSERT", "DELETE")) for one in plain)
        if writes and server.deposed and self.synchronous:
            return None
        try:
            return server.carry_out(plain, values)
        except Exception as error:
            self.failed.append(f"{error!r}: {text}")
            raise
