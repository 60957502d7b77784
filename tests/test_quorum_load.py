"""Clients served under load, in virtual time."""

from __future__ import annotations

import asyncio

from doyen.quorum.keyspace import Put, Written, encode
from doyen.quorum.requests import Found, Get, Write
from test_quorum_service import Client, Quorum, on_quorum


def test_answers_wait_until_the_client_takes_them() -> None:
    async def test(quorum: Quorum) -> None:
        service = quorum.services["n1"]
        client, other = Client(service), Client(service, "another-client")
        await client.do(1, Put("k", b"old", 0))
        client.congested = True
        client.put(*(Get(-n, "k") for n in range(1, 41)))
        await asyncio.sleep(0.1)
        assert not any(isinstance(each, Found) for each in client.told)
        # Nothing more is taken from this client, and others are served.
        client.put(Write(1, [2], [encode(Put("k", b"unread", 0))]))
        await asyncio.sleep(0.1)
        assert 2 not in client.results
        assert isinstance(await other.do(1, Put("l", b"", 0)), Written)
        client.congested = False
        for n in range(1, 41):
            assert (await client.answer_to(-n)).record.value == b"old"
        await client.answer_to(2)
        assert not client.faults

    on_quorum(test)
