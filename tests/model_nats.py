"""A model of a NATS server with the features that doyen uses, for `adversary`.

It implements the client protocol, streams with one message per subject,
`Nats-Expected-Last-Subject-Sequence`, `Nats-TTL` and push consumers. Beyond the faults of each
connection it may, by seed, deliver changes late, lose single deliveries, place a consumer on a
replica that lacks the latest messages, and end a connection with an error. A real server does all
of that.
"""

from __future__ import annotations

import asyncio
import json
import random
from base64 import b64encode
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Any

from adversary import Connection, WireWorld

PORT = 1000
INFO = {"version": "2.12.0", "max_payload": 1 << 20, "headers": True, "proto": 1}
NO_RESPONDERS = b"NATS/1.0 503\r\n\r\n"
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Disturbance:
    """The probabilities of what the server does wrong, beside the faults of each connection."""

    late: float = 0.05
    """A change is delivered up to `delay_s` late, and so are the changes after it."""
    lost: float = 0.01
    """A change is not delivered."""
    error: float = 0.005
    """A request is answered by an error that ends the connection."""
    behind: float = 0.2
    """A consumer is placed on a replica that lacks the latest messages, until `delay_s` or half of
    that has passed. The server places a consumer with one replica on any of those of the stream."""
    behind_by: tuple[int, int] = (1, 10)
    """How many messages, at least and at most."""
    delay_s: float = 1.0


FAIR = Disturbance(late=0.0, lost=0.0, error=0.0, behind=0.0)
ROUGH = Disturbance()


@dataclass(frozen=True)
class Stored:
    sequence: int
    headers: bytes
    data: bytes


@dataclass(eq=False)
class Stream:
    config: dict[str, Any]
    last: int = 0
    created: str = ""
    messages: dict[str, Stored] = field(default_factory=dict)
    consumers: dict[str, Consumer] = field(default_factory=dict)
    expiring: list[tuple[float, int, str]] = field(default_factory=list)
    recent: deque[tuple[str, Stored]] = field(default_factory=lambda: deque(maxlen=100))
    """The latest messages, including those that were replaced."""

    def find(self, request: dict[str, Any]) -> tuple[str, Stored | None]:
        """The message that a request names, and its subject."""
        if "next_by_subj" in request:
            return next(
                (each for each in self.messages.items() if each[1].sequence >= request["seq"]),
                ("", None),
            )
        wanted: str = request["last_by_subj"]
        if wanted.endswith(">"):
            return next(reversed(self.messages.items()), ("", None))
        return wanted, self.messages.get(wanted)

    def before(self, horizon: int) -> list[tuple[str, Stored]]:
        """The last message of each subject, on a replica that has reached `horizon`."""
        found = {s: each for s, each in self.messages.items() if each.sequence <= horizon}
        found |= {s: each for s, each in self.recent if each.sequence <= horizon}
        return sorted(found.items(), key=lambda each: each[1].sequence)


@dataclass(eq=False)
class Consumer:
    name: str
    stream: str
    connection: Connection
    sid: str
    subject: str
    delivered: int = 0
    due: float = 0.0


class NatsModel:
    """The server. `now` is its clock."""

    def __init__(
        self, now: Callable[[], float], seed: int = 0, disturbance: Disturbance = FAIR
    ) -> None:
        self._now = now
        self._random = random.Random(seed)
        self.disturbance = disturbance
        self.streams: dict[str, Stream] = {}
        self.requests: list[str] = []
        """Subjects of all requests that were carried out."""
        self.connected: dict[Connection, dict[str, str]] = {}
        """The subscriptions of each connection: subjects by sid."""
        self._starts = 0
        self._names = count(1)
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, connection: Connection) -> None:
        if not self.connected:
            self._starts += 1  # the server may have been restarted in between
        subscriptions = self.connected[connection] = {}
        info = INFO | {"server_id": f"server-{self._starts}"}
        connection.send(b"INFO " + json.dumps(info).encode() + b"\r\n")
        try:
            while line := await connection.reader.readline():
                verb, *args = line.decode().split()
                if verb == "PING":
                    if not connection.ignores_requests:
                        connection.send(b"PONG\r\n")
                elif verb == "SUB":
                    subscriptions[args[-1]] = args[0]
                elif verb == "UNSUB":
                    subscriptions.pop(args[0], None)
                elif verb in ("PUB", "HPUB"):
                    await self._published(connection, verb, args)
        finally:
            del self.connected[connection]

    async def _published(self, connection: Connection, verb: str, args: list[str]) -> None:
        total = int(args[-1])
        header_size = int(args[-2]) if verb == "HPUB" else 0
        body = (await connection.reader.readexactly(total + 2))[:-2]
        subject = args[0]
        reply = args[1] if len(args) == (4 if verb == "HPUB" else 3) else ""
        headers, data = body[:header_size], body[header_size:]
        if self._chance(self.disturbance.error):
            connection.send(b"-ERR 'User Authentication Expired'\r\n")
            connection.close()
            return

        def do() -> bytes:
            answer_headers, answer = self.carry_out(connection, subject, headers, data)
            return self._to(connection, reply, "", answer_headers, answer) if reply else b""

        await connection.answer(_operation(subject), do, subject)

    def _chance(self, chance: float) -> bool:
        return chance > 0 and self._random.random() < chance

    def _to(
        self, connection: Connection, subject: str, reply: str, headers: bytes, data: bytes
    ) -> bytes:
        """The bytes of a message, if the connection has subscribed to the subject."""
        sid = next(
            (
                sid
                for sid, pattern in self.connected.get(connection, {}).items()
                if pattern == subject
                or (pattern.endswith("*") and subject.startswith(pattern[:-1]))
            ),
            None,
        )
        return b"" if sid is None else _message(subject, sid, reply, headers, data)

    def carry_out(
        self, connection: Connection | None, subject: str, headers: bytes, data: bytes
    ) -> tuple[bytes, bytes]:
        """Carry out a request; the headers and the body of the response."""
        self.requests.append(subject)
        if not subject.startswith("$JS.API."):
            name = next(
                (name for name, stream in self.streams.items() if _covers(stream, subject)), None
            )
            if name is None:
                return NO_RESPONDERS, b""
            return b"", json.dumps(self.write(name, subject, headers, data)).encode()
        action, _, rest = subject.removeprefix("$JS.API.").rpartition(".")
        request = json.loads(data) if data else {}
        if action.startswith("CONSUMER.DELETE"):
            stream = self.streams.get(action.rpartition(".")[2])
            if stream is not None:
                stream.consumers.pop(rest, None)
            return b"", b"{}"
        if action == "STREAM.CREATE":
            new = Stream(request, request["first_seq"] - 1, created=f"at {self._now()}")
            if self.streams.setdefault(rest, new).config != request:
                return b"", _error(400, 10058, "stream name already in use")
        if rest not in self.streams:
            return b"", _error(404, 10059, "stream not found")
        stream = self.streams[rest]
        self._forget(stream)
        match action:
            case "STREAM.DELETE":
                self.delete(rest)
                answer: dict[str, Any] = {"success": True}
            case "STREAM.CREATE" | "STREAM.INFO":
                state = {"last_seq": stream.last, "messages": len(stream.messages)}
                answer = {"config": stream.config, "state": state, "created": stream.created}
            case "STREAM.MSG.GET":
                path, found = stream.find(request)
                if found is None:
                    return b"", _error(404, 10037, "no message found")
                hdrs = {"hdrs": b64encode(found.headers).decode()} if found.headers else {}
                message = {"subject": path, "seq": found.sequence, **hdrs}
                answer = {"message": {**message, "data": b64encode(found.data).decode()}}
            case "CONSUMER.CREATE":
                assert connection is not None
                answer = self._consume(connection, rest, request["config"])
            case _:
                raise NotImplementedError(subject)
        return b"", json.dumps(answer).encode()

    def write(self, name: str, subject: str, headers: bytes, data: bytes) -> dict[str, Any]:
        """Write a message to a stream, and return the acknowledgement."""
        stream = self.streams[name]
        self._forget(stream)
        parsed = parse(headers)
        expected = parsed.get("Nats-Expected-Last-Subject-Sequence")
        before = stream.messages.get(subject)
        last = before.sequence if before else 0
        if expected is not None and int(expected) != last:
            problem: dict[str, Any] = json.loads(_error(400, 10071, f"wrong last sequence: {last}"))
            return problem
        stream.last += 1
        if ttl := parsed.get("Nats-TTL"):
            expires = self._now() + float(ttl[:-1]) * _UNITS[ttl[-1]]
            heappush(stream.expiring, (expires, stream.last, subject))
        stored = Stored(stream.last, headers, data)
        stream.messages.pop(subject, None)
        stream.messages[subject] = stored
        stream.recent.append((subject, stored))
        for consumer in list(stream.consumers.values()):
            self._deliver(consumer, subject, stored, 0)
        return {"stream": name, "seq": stream.last}

    def delete(self, name: str) -> None:
        """An operator deletes a stream. Its consumers end without notice."""
        self.streams.pop(name).consumers.clear()

    def _forget(self, stream: Stream) -> None:
        while stream.expiring and stream.expiring[0][0] <= self._now():
            _, sequence, subject = heappop(stream.expiring)
            found = stream.messages.get(subject)
            if found is not None and found.sequence == sequence:
                del stream.messages[subject]

    def _consume(self, connection: Connection, name: str, config: dict[str, Any]) -> dict[str, Any]:
        stream, inbox = self.streams[name], config["deliver_subject"]
        subscriptions = self.connected.get(connection, {})
        sid = next((sid for sid, each in subscriptions.items() if each == inbox), "0")
        consumer = Consumer(f"c{next(self._names)}", name, connection, sid, inbox)
        stream.consumers[consumer.name] = consumer
        horizon = stream.last
        if self._chance(self.disturbance.behind):
            horizon -= self._random.randint(*self.disturbance.behind_by)
        waiting = stream.before(horizon) if horizon < stream.last else list(stream.messages.items())
        since = config.get("opt_start_seq", 0)
        waiting = [each for each in waiting if each[1].sequence >= since]
        for number, (subject, stored) in enumerate(waiting, 1):
            self._deliver(consumer, subject, stored, len(waiting) - number)
        if horizon < stream.last:
            lag_s = self.disturbance.delay_s * self._random.uniform(0.5, 1)
            consumer.due = self._now() + lag_s
            for subject, stored in stream.recent:
                if stored.sequence > horizon:
                    self._deliver(consumer, subject, stored, 0)
        pulse_s = config["idle_heartbeat"] / 1e9
        task = asyncio.get_running_loop().create_task(self._beat(stream, consumer, pulse_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return {"name": consumer.name, "num_pending": len(waiting)}

    def _deliver(self, consumer: Consumer, subject: str, stored: Stored, pending: int) -> None:
        consumer.delivered += 1
        if self._chance(self.disturbance.lost):
            return
        numbers = f"1.{stored.sequence}.{consumer.delivered}.0.{pending}"
        reply = f"$JS.ACK.{consumer.stream}.{consumer.name}.{numbers}"
        late = self._chance(self.disturbance.late)
        self._send(
            consumer,
            _message(subject, consumer.sid, reply, stored.headers, stored.data),
            self._random.uniform(0, self.disturbance.delay_s) if late else 0.0,
        )

    def _send(self, consumer: Consumer, message: bytes, delay_s: float = 0.0) -> None:
        """Send in the order of the consumer. Responses may overtake late deliveries."""
        now = self._now()
        consumer.due = max(consumer.due, now + delay_s)
        if consumer.due > now:
            loop = asyncio.get_running_loop()
            loop.call_later(consumer.due - now, consumer.connection.send, message)
        else:
            consumer.connection.send(message)

    async def _beat(self, stream: Stream, consumer: Consumer, pulse_s: float) -> None:
        while consumer.name in stream.consumers and not consumer.connection.closed:
            await asyncio.sleep(pulse_s)
            status = (
                f"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: {consumer.delivered}\r\n"
                f"Nats-Last-Stream: {stream.last}\r\n\r\n"
            )
            self._send(consumer, _message(consumer.subject, consumer.sid, "", status.encode(), b""))
        stream.consumers.pop(consumer.name, None)


def build(
    disturbance: Disturbance = ROUGH, kind: type[NatsModel] = NatsModel
) -> Callable[[WireWorld], NatsModel]:
    """For `run_contest`. The disturbance ends together with the faults of the connections."""

    def make(world: WireWorld) -> NatsModel:
        model, calm = kind(world.clock.now, world.rng.getrandbits(32), disturbance), world.calm

        def calmed() -> None:
            model.disturbance = FAIR
            calm()

        world.calm = calmed  # type: ignore[method-assign]
        return model

    return make


def headers_of(pairs: Iterable[tuple[str, str]]) -> bytes:
    return b"NATS/1.0\r\n" + "".join(f"{k}: {v}\r\n" for k, v in pairs).encode() + b"\r\n"


def parse(headers: bytes) -> dict[str, str]:
    lines = headers.decode(errors="replace").split("\r\n")[1:]
    return dict(line.split(": ", 1) for line in lines if ": " in line)


def _covers(stream: Stream, subject: str) -> bool:
    return any(subject.startswith(each.removesuffix(">")) for each in stream.config["subjects"])


def _error(code: int, err_code: int, description: str) -> bytes:
    problem = {"code": code, "err_code": err_code, "description": description}
    return json.dumps({"error": problem}).encode()


def _message(subject: str, sid: str, reply: str, headers: bytes, data: bytes) -> bytes:
    route = f"{subject} {sid} {reply}".rstrip()
    total = len(headers) + len(data)
    if headers:
        return f"HMSG {route} {len(headers)} {total}\r\n".encode() + headers + data + b"\r\n"
    return f"MSG {route} {total}\r\n".encode() + data + b"\r\n"


def _operation(subject: str) -> str:
    if subject.startswith("$JS.API."):
        return subject.split(".")[2]
    return "write"
