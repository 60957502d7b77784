"""A model of a Redis server with the features that doyen uses, for `adversary`.

Scripts are carried out by Lua itself (lupa), so that those of the adapter are what is tested. A
script may touch only the keys that it declares. Beyond the faults of each connection the server
may, by seed, refuse a script for a while (`TRYAGAIN`, `OOM`), redirect it (`MOVED`, `ASK`), forget
all scripts, lose or delay publications, and leave `WAIT` without its replica.

`failover` makes the replica the master. It has a clock of its own, in step with that of a master of
which it knows nothing: only clocks tell which of the two came first. It holds what `WAIT` has
confirmed, and of the rest what was written more than `LAG_S` ago. The old master becomes a replica
of it: those connected to it may go on reading, and are refused when they write.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lupa.lua51 import LuaRuntime

from adversary import Connection
from doyen.lease.clock import VirtualClock

LAG_S = 0.5
BEHIND_S = 600.0
EPOCH_S = 1_700_000_000
Value = dict[bytes, bytes] | dict[bytes, float]
Answer = bytes | int | None | Sequence["Answer"]

WRITES = {b"HSET", b"HDEL", b"HINCRBY", b"ZADD", b"ZREM"}


class Refusal(Exception):
    """An error response."""


@dataclass(frozen=True)
class Disturbance:
    """The probabilities of what a server does wrong, beside the faults of each connection."""

    refused: float = 0.01
    redirected: float = 0.01
    forgotten: float = 0.002
    unheard: float = 0.02
    """A publication is lost."""
    late: float = 0.05
    """It arrives late, and so does everything after it."""
    delay_s: float = 1.0
    apart: float = 0.02
    """The replica does not confirm a write in time."""


FAIR = Disturbance(0, 0, 0, 0, 0, 0, 0)
ROUGH = Disturbance()


@dataclass(eq=False)
class Server:
    """One server. `data` is shared by servers that have the same writes."""

    run: str
    behind_s: float = 0.0
    """How far its clock is behind the true time."""
    data: dict[bytes, Value] = field(default_factory=dict)
    is_master: bool = True


class RedisModel:
    """The servers. New connections lead to the one that is the master."""

    def __init__(
        self, clock: VirtualClock, chance: random.Random, disturbance: Disturbance = ROUGH
    ) -> None:
        self.disturbance = disturbance
        self._clock = clock
        self._random = chance
        self.master = Server(self._new_run())
        self._replicated: dict[bytes, Value] = {}
        self._replicated_at = 0.0
        self._scripts: dict[bytes, Any] = {}
        self._lua = LuaRuntime(encoding=None)
        self._subscribers: dict[bytes, dict[Connection, None]] = defaultdict(dict)
        self.failovers = 0
        self.redirections = 0

    def _new_run(self) -> str:
        return f"{self._random.getrandbits(160):040x}"

    def step_clock(self, seconds: float) -> None:
        """Step the master's clock."""
        self.master.behind_s -= seconds

    def failover(self) -> None:
        """Promote the replica, without the writes that it lacks."""
        self.failovers += 1
        behind_s = self._random.uniform(-BEHIND_S, BEHIND_S)
        counted_last = self._replicated.get(b"{doyen}:meta", {}).get(b"run", b"")
        if counted_last != self.master.run.encode():
            behind_s = self.master.behind_s
        old, self.master = self.master, Server(self._new_run(), behind_s, self._replicated)
        old.is_master, old.data = False, self.master.data
        self._replicate()

    def _replicate(self) -> None:
        self._replicated = copy.deepcopy(self.master.data)
        self._replicated_at = self._clock.now()

    async def serve(self, connection: Connection) -> None:
        client = _Client(self.master)
        try:
            while True:
                words = await _command(connection.reader)
                name = words[0].upper()
                if name == b"WAIT" and self._random.random() < self.disturbance.apart:
                    await asyncio.sleep(int(words[2]) / 1000)
                    await connection.answer("WAIT", lambda: b":0\r\n")
                    continue

                def carry_out(words: list[bytes] = words) -> bytes:
                    return self._carry_out(connection, client, words)

                await connection.answer(name.decode(), carry_out)
        finally:
            for subscribers in self._subscribers.values():
                subscribers.pop(connection, None)

    def _carry_out(self, connection: Connection, client: _Client, words: list[bytes]) -> bytes:
        name, *rest = words
        match name.upper(), rest:
            case b"CLIENT" | b"SELECT", _:
                return b"+OK\r\n"
            case b"ASKING", _:
                client.was_sent = True
                return b"+OK\r\n"
            case b"PING", _:
                return _encoded([b"pong", b""] if client.subscribed else b"PONG")
            case b"INFO", [section]:
                return _encoded(self._info(client.server, section))
            case b"WAIT", _:
                self._replicate()
                return b":1\r\n"
            case b"SUBSCRIBE" | b"UNSUBSCRIBE", _:
                return b"".join(
                    self._subscribe(connection, client, name.upper(), each) for each in rest
                )
            case b"EVAL" | b"EVALSHA", _:
                try:
                    return _encoded(self._run(client, name.upper(), rest))
                except Refusal as refusal:
                    return f"-{refusal}\r\n".encode()
        return f"-ERR unknown command '{name.decode()}'\r\n".encode()

    def _info(self, server: Server, section: bytes) -> bytes:
        facts = {
            b"server": {"redis_version": "7.0.15", "run_id": server.run},
            b"replication": {
                "role": "master" if server.is_master else "slave",
                "master_replid": server.run,
                "connected_slaves": "1",
            },
        }
        return "".join(f"{fact}:{value}\r\n" for fact, value in facts[section].items()).encode()

    def _subscribe(
        self, connection: Connection, client: _Client, verb: bytes, channel: bytes
    ) -> bytes:
        if verb == b"SUBSCRIBE":
            self._subscribers[channel][connection] = None
        else:
            self._subscribers[channel].pop(connection, None)
        client.subscribed = True
        return _encoded([verb.lower(), channel, 1])

    def _run(self, client: _Client, how: bytes, rest: list[bytes]) -> Answer:
        was_sent, client.was_sent = client.was_sent, False
        if not was_sent:
            self._interfere()
        text, count, *given = rest
        digest = text if how == b"EVALSHA" else hashlib.sha1(text).hexdigest().encode()
        if how == b"EVAL":
            body = b"function(KEYS, ARGV, redis)\n" + text + b"\nend"
            self._scripts[digest] = self._lua.eval(body)
        script = self._scripts.get(digest)
        if script is None:
            raise Refusal("NOSCRIPT No matching script. Please use EVAL.")
        keys, values = given[: int(count)], given[int(count) :]
        if self._clock.now() - self._replicated_at > LAG_S:
            self._replicate()

        def call(command: bytes, *arguments: Any) -> Any:
            return self._call(client.server, keys, command, [_bytes(each) for each in arguments])

        table = self._lua.table_from
        answer = _from_lua(script(table(keys), table(values), table({b"call": call})))
        if not self._replicated:
            self._replicate()  # a replica needs one sync to know the tokens
        return answer

    def _interfere(self) -> None:
        disturbance, draw = self.disturbance, self._random.random
        if draw() < disturbance.forgotten:
            self._scripts.clear()
        if draw() < disturbance.refused:
            raise Refusal(
                self._random.choice(
                    [
                        "TRYAGAIN Multiple keys request during rehashing of slot",
                        "OOM command not allowed when used memory > 'maxmemory'.",
                        "CLUSTERDOWN The cluster is down",
                        "LOADING Redis is loading the dataset in memory",
                    ]
                )
            )
        if draw() < disturbance.redirected:
            # Without a host, the server itself is meant.
            self.redirections += 1
            raise Refusal(f"{self._random.choice(['MOVED', 'ASK'])} 1 :1000")

    def _call(self, server: Server, keys: list[bytes], command: bytes, given: list[bytes]) -> Any:
        if command in WRITES and not server.is_master:
            raise Refusal("READONLY You can't write against a read only replica.")
        if command == b"TIME":
            now_us = round((EPOCH_S + self._clock.now() - server.behind_s) * 1e6)
            return self._lua.table_from(
                [str(now_us // 1_000_000).encode(), str(now_us % 1_000_000).encode()]
            )
        if command == b"PUBLISH":
            return self._publish(*given)
        key, *rest = given
        if key not in keys:
            raise Refusal(f"ERR {command.decode()} of {key.decode()}, which was not declared")
        if command == b"EXISTS":
            return int(key in server.data)
        answer = _COMMANDS[command](server.data.setdefault(key, {}), rest)
        if not server.data[key]:
            del server.data[key]
        if isinstance(answer, list):
            return self._lua.table_from([False if each is None else each for each in answer])
        return False if answer is None else answer

    def _publish(self, channel: bytes, message: bytes) -> int:
        for connection in self._subscribers[channel]:
            if self._random.random() >= self.disturbance.unheard:
                late = self._random.random() < self.disturbance.late
                delay_s = self._random.uniform(0, self.disturbance.delay_s) if late else 0.0
                connection.send(_encoded([b"message", channel, message]), delay_s)
        return 0


@dataclass(eq=False)
class _Client:
    """The state of one connection at the server."""

    server: Server
    was_sent: bool = False
    """The client has sent `ASKING`."""
    subscribed: bool = False


def _hset(table: Any, given: list[bytes]) -> int:
    table.update(zip(given[::2], given[1::2], strict=True))
    return len(given) // 2


def _hincrby(table: Any, given: list[bytes]) -> int:
    number = int(table.get(given[0], b"0")) + int(given[1])
    table[given[0]] = str(number).encode()
    return number


def _take(table: Any, given: list[bytes]) -> int:
    return sum(table.pop(each, None) is not None for each in given)


def _zadd(table: Any, given: list[bytes]) -> int:
    table[given[1]] = float(given[0])
    return 1


def _by_score(table: Any, given: list[bytes]) -> list[bytes]:
    low, high = float(given[0]), float(given[1])
    found = sorted((score, name) for name, score in table.items() if low <= score <= high)
    return _limited([name for _, name in found], given[2:])


def _by_name(table: Any, given: list[bytes]) -> list[bytes]:
    low, high, *rest = given
    above = {b"[": lambda name: name >= low[1:], b"(": lambda name: name > low[1:]}
    below = {b"[": lambda name: name <= high[1:], b"(": lambda name: name < high[1:]}
    found = [
        name
        for name in sorted(table)
        if above.get(low[:1], _any)(name) and below.get(high[:1], _any)(name)
    ]
    return _limited(found, rest)


def _by_name_backwards(table: Any, given: list[bytes]) -> list[bytes]:
    high, low, *rest = given
    return _limited(_by_name(table, [low, high])[::-1], rest)


def _any(_: bytes) -> bool:
    return True


def _limited(found: list[bytes], rest: list[bytes]) -> list[bytes]:
    if not rest:
        return found
    first, count = int(rest[1]), int(rest[2])
    return found[first : first + count]


_COMMANDS: dict[bytes, Callable[[Any, list[bytes]], Any]] = {
    b"HSET": _hset,
    b"HGET": lambda table, given: table.get(given[0]),
    b"HMGET": lambda table, given: [table.get(each) for each in given],
    b"HEXISTS": lambda table, given: int(given[0] in table),
    b"HINCRBY": _hincrby,
    b"HDEL": _take,
    b"ZADD": _zadd,
    b"ZREM": _take,
    b"ZRANGEBYSCORE": _by_score,
    b"ZRANGEBYLEX": _by_name,
    b"ZREVRANGEBYLEX": _by_name_backwards,
}


async def _command(reader: asyncio.StreamReader) -> list[bytes]:
    words = []
    for _ in range(int((await _line(reader))[1:])):
        size = int((await _line(reader))[1:])
        words.append((await reader.readexactly(size + 2))[:-2])
    return words


async def _line(reader: asyncio.StreamReader) -> bytes:
    return (await reader.readuntil(b"\r\n"))[:-2]


def _encoded(answer: Answer) -> bytes:
    match answer:
        case None:
            return b"$-1\r\n"
        case int():
            return b":%d\r\n" % answer
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(answer), answer)
    return b"*%d\r\n" % len(answer) + b"".join(map(_encoded, answer))


def _bytes(argument: Any) -> bytes:
    return argument if isinstance(argument, bytes) else b"%.17g" % argument


def _from_lua(result: Any) -> Answer:
    match result:
        case None | False:
            return None
        case True:
            return 1
        case int() | float():
            return int(result)
        case bytes():
            return result
    answers: list[Answer] = []
    while (each := result[len(answers) + 1]) is not None:
        answers.append(_from_lua(each))
    return answers
