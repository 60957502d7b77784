"""etcd with users: who is let in, and what the rest are told."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator

import pytest

from doyen.errors import StoreUnusable
from doyen.model import leader_key
from doyen.stores.etcd.store import EtcdStore
from servers import Etcd
from servers.wire import http_json
from test_etcd import on

KEY = leader_key("e")


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """An etcd with authentication. `user` may do with /doyen/ as it likes."""
    with Etcd() as server:
        prefix = {"permType": "READWRITE", "key": b64("/doyen/"), "range_end": b64("/doyen0")}
        for path, body in (
            ("user/add", {"name": "root", "password": "r"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "user", "password": "p@ss/word"}),
            ("role/add", {"name": "candidate"}),
            ("role/grant", {"name": "candidate", "perm": prefix}),
            ("user/grant", {"user": "user", "role": "candidate"}),
            ("enable", {}),
        ):
            http_json(server.port, "POST", f"/v3/auth/{path}", body)
        yield server


async def nothing(store: EtcdStore) -> None:
    pass


@pytest.mark.parametrize(
    ("user", "prefix", "message"),
    [
        ("", "", "requires a user and a password"),
        ("user:wrong@", "", "knows no user 'user' with this password"),
        ("nobody:x@", "", "knows no user 'nobody'"),
        ("user:p%40ss%2Fword@", "/elsewhere", "does not permit this"),
    ],
)
def test_who_is_not_let_in_is_told_why(guarded: Etcd, user: str, prefix: str, message: str) -> None:
    with pytest.raises(StoreUnusable, match=message) as caught:
        on(f"etcd://{user}{guarded.address}{prefix}", nothing)
    assert guarded.address in str(caught.value)
    assert "p@ss" not in str(caught.value)


def test_a_token_that_etcd_no_longer_knows_is_replaced(guarded: Etcd) -> None:
    """In calls, renewals and the watch stream alike."""

    async def body(store: EtcdStore) -> None:
        def lose_the_token() -> None:
            assert store._cluster.login.token not in ("", "expired")
            store._cluster.login.token = "expired"

        lose_the_token()
        lease = await store.grant(60)
        lose_the_token()
        told = asyncio.Event()
        await store.watch(KEY, told.set)
        lose_the_token()
        assert (await store.create(KEY, b"v", lease)).won
        await told.wait()
        lose_the_token()
        await store.renew(lease)
        assert store._cluster.login.token != "expired"

    on(f"etcd://user:p%40ss%2Fword@{guarded.address}", body)


def test_a_password_is_no_hindrance_where_there_are_no_users(etcd: Etcd) -> None:
    """So that clients can be given theirs before authentication is turned on."""
    on(f"etcd://user:password@{etcd.address}", nothing)
