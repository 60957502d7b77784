"""Types of configurations that have code of the user, and values that JSON does not keep."""

from __future__ import annotations

import asyncio
import datetime
import sys
import threading
from typing import Any, ClassVar

import msgspec
import pydantic
import pytest

import doyen
from configs import Subscriber
from doyen import BadDocument, Config, NotApplied
from support import Place, until, virtual

PRICES = {"basic": 1}


class Plan(pydantic.BaseModel):
    tier: str

    @pydantic.model_validator(mode="after")
    def known(self) -> Plan:
        PRICES[self.tier]
        return self


class PlanStruct(msgspec.Struct):
    tier: str

    def __post_init__(self) -> None:
        PRICES[self.tier]


class Exiting(pydantic.BaseModel):
    tier: str

    @pydantic.field_validator("tier")
    @classmethod
    def known(cls, tier: str) -> str:
        if tier not in PRICES:
            sys.exit(f"unknown tier {tier}")
        return tier


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Plan, r"its type raised KeyError\('gold'\)"),
        (PlanStruct, r"its type raised KeyError\('gold'\)"),
        (Exiting, r"its type raised SystemExit\('unknown tier gold'\)"),
    ],
)
def test_whatever_a_type_raises_is_a_refusal(kind: Any, reason: str) -> None:
    @virtual
    async def refused(place: Place) -> None:
        plain = (await place.open()).config("limits", author="bob")
        config: Config[Any] = (await place.open()).config("limits", type=kind)
        await config.set(kind(tier="basic"))
        subscriber = Subscriber(config, "server1")
        await until(lambda: subscriber.applied == [1])
        with pytest.raises(NotApplied, match=f"'server1' refused it .*{reason}"):
            await plain.set({"tier": "gold"}, wait_applied="all", wait_s=1)
        if kind is not Exiting:  # on the caller's thread, an exit is one
            with pytest.raises(BadDocument, match=f"fails its type: {reason}") as bad:
                await config.get()
            assert bad.value.__cause__ is not None
            assert isinstance(bad.value.__cause__.__cause__, KeyError)
            with pytest.raises(BadDocument, match=f"was not written: {reason}"):
                await config.set({"tier": "gold"})
        await config.set(kind(tier="basic"), wait_applied="all")
        assert subscriber.applied == [1, 3]
        await subscriber.leave()

    refused()


class Traced(pydantic.BaseModel):
    threads: ClassVar[set[str]] = set()
    workers: int

    @pydantic.field_validator("workers")
    @classmethod
    def trace(cls, workers: int) -> int:
        cls.threads.add(threading.current_thread().name)
        return workers


def test_the_code_of_a_type_never_runs_on_doyens_loop() -> None:
    async def used() -> None:
        async with doyen.connect("memory://") as session:
            config = session.config("limits", type=Traced)
            await config.set(Traced(workers=1))
            await config.set(Traced(workers=2))
            await config.rollback(1)
            await config.get()
            assert Traced.threads == {threading.current_thread().name}
            async for _ in config.observe(since=1):
                break
            async with config.subscribe() as documents:
                await anext(documents)
        assert Traced.threads == {threading.current_thread().name, "doyen-aside"}

    asyncio.run(used())
    with doyen.connect_blocking("memory://") as session:
        config = session.config("limits", type=Traced)
        config.set(Traced(workers=1))
        config.rollback(1)
        config.get()
    assert Traced.threads == {threading.current_thread().name, "doyen-aside"}


class Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(strict=True)
    since: datetime.date
    hosts: tuple[str, ...] = ()


@virtual
async def test_a_version_of_a_strict_model_is_rolled_back_to(place: Place) -> None:
    config = (await place.open()).config("limits", type=Strict)
    first = await config.set(Strict(since=datetime.date(2020, 1, 1), hosts=("a",)))
    await config.set(Strict(since=datetime.date(2021, 1, 1)))
    restored = await config.rollback(1)
    assert (restored.version, restored.value) == (3, first.value)
    assert await config.get() == restored


class Secret(pydantic.BaseModel):
    password: pydantic.SecretStr


class OpenSecret(Secret):
    @pydantic.field_serializer("password")
    def plainly(self, password: pydantic.SecretStr) -> str:
        return password.get_secret_value()


class Aliased(pydantic.BaseModel):
    workers: int = pydantic.Field(4, alias="w")


class Rich(pydantic.BaseModel):
    """What is not stored, and is not lost either."""

    workers: int
    cache: dict[str, int] = pydantic.Field(default_factory=dict, exclude=True)
    _calls: int = 0

    @pydantic.computed_field  # type: ignore[prop-decorator]
    @property
    def asked(self) -> int:
        Rich._asked += 1
        return Rich._asked

    _asked: ClassVar[int] = 0


@virtual
async def test_what_would_be_read_as_another_value_is_not_written(place: Place) -> None:
    session = await place.open()
    for value in (Secret(password=pydantic.SecretStr("x")), Aliased(w=8)):
        config: Config[Any] = session.config("limits", type=type(value))
        with pytest.raises(BadDocument, match="readers would get another value than this one"):
            await config.set(value)
    assert place.server.list("config") == []
    secrets = session.config("secrets", type=OpenSecret)
    document = await secrets.set(OpenSecret(password=pydantic.SecretStr("x")))
    assert document.value.password.get_secret_value() == "x"
    rich = Rich(workers=1, cache={"a": 1})
    rich._calls = 7
    assert (await session.config("rich", type=Rich).set(rich)).value.workers == 1
