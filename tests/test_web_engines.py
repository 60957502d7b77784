"""The page of every engine: an election, its lease where the store tells of it, and its line."""

from __future__ import annotations

import asyncio

import pytest

import doyen
from doyen.web.observation import StoreObservation
from support import until

ENGINES = ("consul", "etcd", "mysql", "nats", "postgresql", "redis", "zookeeper")
TELLS = {"etcd", "mysql", "postgresql", "redis"}
ELECTION = "page/of an engine"
KEY = f"elections/{ELECTION}"


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param, str(request.getfixturevalue(request.param).url)


async def test_a_transfer_is_seen_with_its_cause(engine: tuple[str, str]) -> None:
    name, url = engine
    async with doyen.connect(url):  # the page does not create a store that is not there
        pass
    observation = StoreObservation(url)
    board = observation.board
    observing = asyncio.ensure_future(observation.run())
    await until(lambda: "health" in board.topics)
    board.open_page().show([KEY])

    async def stand(session: doyen.Session, name: str) -> None:
        async for campaign in session.campaigns(ELECTION, name=name):
            async with campaign:
                await asyncio.sleep(600)

    async with doyen.connect(url) as one, doyen.connect(url) as two:
        standing = [asyncio.ensure_future(stand(one, "a"))]
        await until(lambda: KEY in board.rows and board.rows[KEY].record)
        standing.append(asyncio.ensure_future(stand(two, "b")))
        row = board.rows[KEY]
        await until(lambda: [each.name for each in row.waiting] == ["b"])
        if name in TELLS:
            await until(lambda: board.topics.get("leases"))
        # One watch for each. Other tests of this server may leave some with no row, or several.
        hub = observation.hub
        assert hub is not None
        await until(lambda: hub.watches == len(hub._scopes))
        await two.transfer(ELECTION, to="b")
        await until(lambda: row.current and row.current.name == "b")
        before = row.terms[-2]
        assert before.name == "a"
        # A quick transfer is over before the order is read; the trail says only that there was one.
        await until(
            lambda: (
                {"transferred", "resigned"}
                & {each.cause for each in row.terms if each.token == before.token}
            )
        )
        for task in standing:
            task.cancel()
        await asyncio.gather(*standing, return_exceptions=True)
    await until(lambda: row.idle)
    observing.cancel()
    await asyncio.gather(observing, return_exceptions=True)
