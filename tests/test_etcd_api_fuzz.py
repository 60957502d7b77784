"""Malformed requests to etcd's API: messages, HTTP/2 and HTTP/1.1, drawn from a seed. The node
answers each with an error or closes the connection, and serves the next client."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from doyen.quorum.etcd_api import rpc
from etcd_door import Doors, EtcdClient, doors

METHODS = [each for each in vars(rpc).values() if isinstance(each, rpc.EtcdMethod)]
NUMBERS = [0, 1, -1, 2, 127, 128, 2**31, 2**63 - 1, -(2**63)]
ANSWER_S = 0.3
EXPECTED = {
    "DEADLINE_EXCEEDED",  # it waits for a lock, or the stream is open
    "FAILED_PRECONDITION",
    "INTERNAL",  # gRPC's own, for bytes that are not a message
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "OUT_OF_RANGE",
    "RESOURCE_EXHAUSTED",
    "UNIMPLEMENTED",
}
SETTINGS = b"\0\0\0\4\0\0\0\0\0"
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


def fill(rng: random.Random, message: Any, depth: int = 0) -> Any:
    """Set some of the fields of a message to anything that can be encoded."""
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.4:
            continue
        if field.message_type is not None:
            if depth < 4:
                target = getattr(message, field.name)
                if hasattr(target, "add"):
                    for _ in range(rng.choice([1, 2, 5])):
                        fill(rng, target.add(), depth + 1)
                else:
                    target.SetInParent()
                    fill(rng, target, depth + 1)
            continue
        values = [value(rng, field) for _ in range(rng.choice([1, 3]))]
        target = getattr(message, field.name)
        if hasattr(target, "extend"):
            target.extend(values)
        else:
            setattr(message, field.name, values[0])
    return message


def value(rng: random.Random, field: Any) -> Any:
    kinds: dict[int, Callable[[], Any]] = {
        field.CPPTYPE_INT64: lambda: rng.choice(NUMBERS),
        field.CPPTYPE_UINT64: lambda: rng.choice([0, 1, 2**64 - 1]),
        field.CPPTYPE_INT32: lambda: rng.choice([0, 1, -1, 2**31 - 1]),
        field.CPPTYPE_UINT32: lambda: rng.choice([0, 1, 2**32 - 1]),
        field.CPPTYPE_BOOL: lambda: rng.random() < 0.5,
        field.CPPTYPE_ENUM: lambda: rng.choice([0, 1, 2, 3, 4, 99, -1]),
        field.CPPTYPE_STRING: lambda: rng.choice(["", "é", "x" * 1000]),
    }
    if field.type == field.TYPE_BYTES:
        return rng.choice([b"", b"\0", b"a", b"\xff", rng.randbytes(40)])
    return kinds[field.cpp_type]()


def damaged(rng: random.Random, data: bytes) -> bytes:
    """The data with some bytes changed, removed, repeated or cut off."""
    mutable = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(mutable) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(mutable):
            mutable[at] = rng.randrange(256)
        elif kind == 1:
            del mutable[at : at + rng.choice([1, 4, 100])]
        elif kind == 2:
            mutable[at:at] = rng.randbytes(rng.choice([1, 4, 30]))
        else:
            del mutable[at:]
    return bytes(mutable)


class Fuzz:
    """Sends malformed requests to one node."""

    def __init__(self, seed: int, quorum: Doors) -> None:
        self._rng = random.Random(seed)
        (self._address,) = quorum.addresses
        self._channel = grpc.aio.insecure_channel(self._address)
        self.codes: dict[str, int] = {}

    async def message(self) -> None:
        """One request over gRPC, the message of which is meaningless or damaged."""
        rng, method = self._rng, self._rng.choice(METHODS)
        data = fill(rng, method.request()).SerializeToString()
        if rng.random() < 0.5:
            data = damaged(rng, data)
        try:
            if method.streams:
                call = self._channel.stream_stream(method.path)(iter([data]), timeout=ANSWER_S)
                async for answer in call:
                    method.response.FromString(answer)
            else:
                answer = await self._channel.unary_unary(method.path)(data, timeout=ANSWER_S)
                method.response.FromString(answer)
            code = "OK"
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            own = code == "UNKNOWN" and (error.details() or "").startswith("election: ")
            if not own and code not in EXPECTED:
                raise
        self.codes[code] = self.codes.get(code, 0) + 1

    async def http1(self) -> None:
        """One request to the gateway."""
        rng, method = self._rng, self._rng.choice(METHODS)
        body = json.dumps(MessageToDict(fill(rng, method.request()))).encode()
        if rng.random() < 0.3:
            body = rng.choice([b"[]", b"null", b"[" * 10_000, b'{"key": 1e999}', b"\xff\xfe"])
        head = f"POST {method.json_path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        data = head.encode() + b"Connection: close\r\n\r\n" + body
        answer = await self.raw(damaged(rng, data) if rng.random() < 0.7 else data)
        assert not answer or answer.startswith(b"HTTP/1.1 "), answer
        assert b" 500 " not in answer.partition(b"\r\n")[0] or b"election: " in answer, answer

    async def http2(self) -> None:
        """A connection that begins as HTTP/2 and goes on with frames that are damaged or senseless,
        or with a flood of them."""
        rng = self._rng
        frames = SETTINGS
        for _ in range(rng.choice([1, 5, 300])):
            payload = rng.randbytes(rng.choice([0, 4, 8, 40]))
            kind, flags = rng.choice([*range(10), 200]), rng.randrange(256)
            stream = rng.choice([0, 1, 2, 3, 2**31 - 1])
            head = len(payload).to_bytes(3, "big") + bytes([kind, flags])
            frames += head + stream.to_bytes(4, "big") + payload
        await self.raw(PREFACE + (damaged(rng, frames) if rng.random() < 0.5 else frames))

    async def raw(self, data: bytes) -> bytes:
        """Send this and wait for the end of the answer, or until there is no more of it."""
        host, port = self._address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        answer = b""
        try:
            writer.write(data)
            if self._rng.random() < 0.5:
                writer.write_eof()
            async with asyncio.timeout(ANSWER_S):
                while more := await reader.read(1 << 16):
                    answer += more
        except (OSError, TimeoutError):
            pass
        finally:
            writer.transport.abort()
        return answer

    async def run(self, count: int) -> None:
        """Several at a time, since some wait."""
        kinds = [self.message, self.message, self.http1, self.http2]
        for start in range(0, count, 64):
            some = min(64, count - start)
            await asyncio.gather(*(self._rng.choice(kinds)() for _ in range(some)))
            async with EtcdClient(self._address) as client:
                await client.call(rpc.PUT, key=b"next", value=b"%d" % start)
                assert (await client.call(rpc.RANGE, key=b"next")).kvs[0].value == b"%d" % start
        await self._channel.close()


def trial(folder: Path, seed: int, count: int) -> None:
    failures: list[Any] = []

    async def whole() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: failures.append(context))
        async with asyncio.timeout(240), doors(folder) as quorum:
            fuzz = Fuzz(seed, quorum)
            await fuzz.run(count)
            assert not quorum.doors["n1"].api.watches.streams, "streams end with their connections"
            print(fuzz.codes)

    asyncio.run(whole())
    assert not failures, failures


def test_malformed_requests(tmp_path: Path) -> None:
    trial(tmp_path, 1, 192)


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(2, 4))
def test_many_malformed_requests(tmp_path: Path, seed: int) -> None:
    trial(tmp_path, seed, 5000)
