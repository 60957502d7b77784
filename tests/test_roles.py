"""What each role may do: a test for each cell of the table in docs/stores/quorum.md."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import doyen
from doyen.errors import StoreUnusable
from doyen.quorum.keyspace.commands import AdvanceRevision, Delete, encode
from doyen.quorum.node import roles
from doyen.quorum.node.replicated import KEYSPACE, Command
from doyen.quorum.node.server import NodeOptions, NodeServer
from doyen.quorum.protocol.connection import dial
from doyen.quorum.protocol.frames import CloseReason, ConnectionRefused
from doyen.quorum.protocol.handshake import ConnectionIdentity
from doyen.quorum.protocol.security import TLS, Security
from doyen.stores.port import StoreURL
from doyen.stores.quorum import make_store
from doyen.stores.quorum.store import QuorumStore
from nodes import addresses
from servers.certificates import Certificates

SECRETS = {role: f"the secret of every {role}" for role in ("peer", "admin", "client", "onlooker")}
LEAST_FIRST = ("onlooker", "client", "admin")
DOCUMENT = Path(__file__).parents[1] / "docs" / "stores" / "quorum.md"


def table() -> dict[str, dict[str, bool]]:
    """Action → role → whether it is allowed, as the document says."""
    text = DOCUMENT.read_text()
    head, *rows = re.findall(r"^\| (?:action|`\w+`).*$", text[text.index("## Roles") :], re.M)
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    found = {}
    for row in rows:
        action, *cells = (cell.strip() for cell in row.strip("|").split("|"))
        allowed = [cell == "yes" for cell in cells[1:]]
        found[action.strip("`")] = dict(zip(names[1:], allowed, strict=True))
    return found


async def status(store: QuorumStore) -> None:
    (state,) = await store.inspect()
    if state.condition is None:
        raise StoreUnusable(state.silent_because)


async def read(store: QuorumStore) -> None:
    await store.get("key")
    await store.list("")


async def watch(store: QuorumStore) -> None:
    (await store.watch("key", lambda: None)).close()


async def write(store: QuorumStore) -> None:
    await store.put("key", b"value", if_version=None)


async def lease(store: QuorumStore) -> None:
    granted = await store.grant(5)
    await store.renew(granted)
    await store.revoke(granted)


async def token_floor(store: QuorumStore) -> None:
    await store._write(AdvanceRevision(10))


async def members(store: QuorumStore) -> None:
    await store.administer("transfer", "n1")


async def backup(store: QuorumStore) -> None:
    await store.backup(lambda piece: None)


ACTIONS: dict[str, Callable[[QuorumStore], Awaitable[None]]] = {
    action.__name__: action
    for action in (status, read, watch, write, lease, token_floor, members, backup)
}


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    made = Certificates(tmp_path_factory.mktemp("certificates"))
    for role in ("admin", "client", "onlooker"):
        made.sign(role, f"doyen-{role}")
    made.sign("peer", "doyen-peer")
    made.sign("n1", "doyen-peer")
    return made


def tls(certificates: Certificates, name: str) -> TLS:
    return TLS(
        certificate=certificates.certificate(name),
        key=certificates.key(name),
        authority=certificates.certificate("ca"),
    )


@asynccontextmanager
async def one_node(folder: Path, **settings: object) -> AsyncIterator[str]:
    (address,) = addresses(1)
    options = NodeOptions(id="n1", peers={"n1": address}, data_dir=folder, found=True, **settings)  # type: ignore[arg-type]
    server = await NodeServer.open(options)
    try:
        while not server.service.serving:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        yield address
    finally:
        await server.close()


@pytest.mark.parametrize("by", ["secret", "certificate"])
async def test_every_cell_of_the_table(tmp_path: Path, certificates: Certificates, by: str) -> None:
    expected = table()
    assert expected.keys() == {"peer", *ACTIONS}
    settings: dict[str, object] = {
        "secret": SECRETS["client"],
        **{f"{role}_secret": SECRETS[role] for role in ("peer", "admin", "onlooker")},
    }
    if by == "certificate":
        settings = {"tls": tls(certificates, "n1")}

    async def check(address: str, role: str) -> None:
        url = f"doyen://{SECRETS[role].replace(' ', '%20')}@{address}"
        security = Security(peer_secret=SECRETS[role].encode())
        if by == "certificate":
            url = f"doyen://{address}?{certificates.options(own=role)}"
            security = Security(tls=tls(certificates, role))
        store = make_store(StoreURL.parse(url))
        for name, action in ACTIONS.items():
            if expected[name][role]:
                await action(store)
                continue
            needed = next(each for each in LEAST_FIRST if expected[name][each])
            with pytest.raises(StoreUnusable, match=f"needs the role {needed!r}, .* {role!r}"):
                await action(store)
        await store.close()
        with pytest.raises(ConnectionRefused) as refused:
            await dial(
                address,
                ConnectionIdentity("doyen", "n2", 7),
                role="peer",
                security=security,
                on_frames=lambda *_: None,
                on_end=lambda *_: None,
            )
        # A peer's credentials get past this, and are then asked for the id of a member.
        heard = expected["peer"][role]
        if by == "certificate" and heard:
            assert "certificate is for" in str(refused.value)
        else:
            assert refused.value.reason is (CloseReason.MEMBER if heard else CloseReason.ROLE)

    async with asyncio.timeout(60), one_node(tmp_path / "n1", **settings) as address:
        for role in SECRETS:
            await check(address, role)


def test_every_request_is_in_the_table() -> None:
    from typing import get_args

    from doyen.quorum.protocol.requests import Requests

    assert {*get_args(Requests)} == roles.NEEDED.keys()


async def test_without_credentials_every_client_may_do_everything(tmp_path: Path) -> None:
    async with asyncio.timeout(60), one_node(tmp_path / "n1") as address:
        store = make_store(StoreURL.parse(f"doyen://{address}"))
        for action in ACTIONS.values():
            await action(store)
        await store.close()


async def test_secrets_are_rotated_by_having_two(tmp_path: Path) -> None:
    both = "the secret from now on\nthe secret until now"
    async with asyncio.timeout(60), one_node(tmp_path / "n1", secret=both) as address:
        for secret in both.splitlines():
            url = f"doyen://{secret.replace(' ', '%20')}@{address}"
            store = make_store(StoreURL.parse(url))
            await write(store)
            await store.close()


def forwarded(command: AdvanceRevision | Delete) -> list[Command]:
    return [Command("client", 1, 1, KEYSPACE, encode(command))]


def test_the_leader_knows_an_administrators_command_however_it_is_encoded() -> None:
    assert roles.needs_admin(forwarded(AdvanceRevision(5)))
    assert not roles.needs_admin(forwarded(Delete("key", 0)))
    for body in (b"\xdc\x00\x03\x09\x05\x00", b"\x92\x09\x05", b"\x92\xcc\x09\x05"):
        assert roles.needs_admin([Command("client", 1, 1, KEYSPACE, body)])
    for body in (b"", b"\x93", b"\xc1\xc1\xc1"):
        assert not roles.needs_admin([Command("client", 1, 1, KEYSPACE, body)])


async def test_certificates_are_reloaded_without_a_restart(
    tmp_path: Path, certificates: Certificates
) -> None:
    """The authority is replaced; clients of the old one are then refused, those of the new one let
    in, and files that cannot be used change nothing."""
    (tmp_path / "new").mkdir()
    new = Certificates(tmp_path / "new")
    files = {name: tmp_path / name for name in ("certificate", "key", "authority")}

    def install(source: Certificates, name: str) -> None:
        for which, file in (
            ("certificate", source.certificate(name)),
            ("key", source.key(name)),
            ("authority", source.certificate("ca")),
        ):
            shutil.copy(file, tmp_path / "incoming")
            os.replace(tmp_path / "incoming", files[which])

    install(certificates, "n1")
    installed = TLS(
        certificate=files["certificate"], key=files["key"], authority=files["authority"]
    )

    async def reaches(address: str, source: Certificates) -> bool:
        store = make_store(StoreURL.parse(f"doyen://{address}?{source.options()}"))
        try:
            await store.get("key")
        except doyen.StoreError:
            return False
        finally:
            await store.close()
        return True

    async with asyncio.timeout(60), one_node(tmp_path / "n1", tls=installed) as address:
        assert await reaches(address, certificates)
        files["certificate"].write_text("half a certifi")
        assert await reaches(address, certificates)
        install(new, "server")
        assert await reaches(address, new)
        assert not await reaches(address, certificates)
