"""etcd with authentication: logins, and the errors of those that are refused."""

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
from test_etcd import on, opened

KEY = leader_key("e")


def b64(text: str) -> str:
    return b64encode(text.encode()).decode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Etcd]:
    """An etcd with authentication. `user` has read and write access to /doyen/."""
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
def test_a_refused_login_names_the_reason(
    guarded: Etcd, user: str, prefix: str, message: str
) -> None:
    with pytest.raises(StoreUnusable, match=message) as caught:
        on(f"etcd://{user}{guarded.address}{prefix}", nothing)
    assert guarded.address in str(caught.value)
    assert "p@ss" not in str(caught.value)


async def test_an_expired_token_is_replaced(guarded: Etcd) -> None:
    """In calls, in renewals and in the watch stream."""
    async with opened(f"etcd://user:p%40ss%2Fword@{guarded.address}") as store:

        def expire_token() -> None:
            assert store._cluster.login.token not in ("", "expired")
            store._cluster.login.token = "expired"

        expire_token()
        lease = await store.grant(60)
        expire_token()
        notified = asyncio.Event()
        await store.watch(KEY, notified.set)
        expire_token()
        assert (await store.create(KEY, b"v", lease)).won
        await notified.wait()
        expire_token()
        await store.renew(lease)
        assert store._cluster.login.token != "expired"


def test_a_password_is_accepted_without_authentication(etcd: Etcd) -> None:
    """Clients can then be configured before authentication is turned on."""
    on(f"etcd://user:password@{etcd.address}", nothing)
