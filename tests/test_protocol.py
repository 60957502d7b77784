"""The protocol without sockets: frames however they are split, the handshake, secrets, settings."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doyen.errors import ConfigError
from doyen.quorum.protocol import handshake
from doyen.quorum.protocol.frames import (
    FIRST_FREE,
    MAX_GREETING,
    CloseReason,
    ConnectionRefused,
    FrameDecoder,
    FrameError,
    FrameKind,
    frame,
)
from doyen.quorum.protocol.handshake import (
    ANY,
    ClientHandshake,
    ConnectionIdentity,
    ServerHandshake,
)
from doyen.quorum.protocol.security import TLS, Security, check_exposure, parse_address
from servers.certificates import Certificates

SECRET = b"a secret long enough"
N1, N2 = ConnectionIdentity("c", "n1", 11), ConnectionIdentity("c", "n2", 22)

some_frames = st.lists(st.tuples(st.integers(FIRST_FREE, 255), st.binary(max_size=40)), max_size=6)


@given(frames=some_frames, cuts=st.lists(st.integers(0, 300)), most=st.integers(1, 3))
def test_frames_come_out_as_they_went_in_however_they_are_cut(
    frames: list[tuple[int, bytes]], cuts: list[int], most: int
) -> None:
    data = b"".join(frame(*each) for each in frames)
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    in_bulk, one_by_one = FrameDecoder(100), FrameDecoder(100)
    all_at_once: list[tuple[int, bytes]] = []
    a_few: list[tuple[int, bytes]] = []
    for start, stop in pairwise(places):
        all_at_once.extend(in_bulk.feed(data[start:stop]))
        a_few.extend(one_by_one.feed(data[start:stop], most))
    while more := one_by_one.feed(b"", most):
        a_few.extend(more)
    assert all_at_once == a_few == frames


@given(frames=some_frames)
def test_frames_that_come_byte_by_byte(frames: list[tuple[int, bytes]]) -> None:
    reader = FrameDecoder(100)
    got: list[tuple[int, bytes]] = []
    for byte in b"".join(frame(*each) for each in frames):
        got.extend(reader.feed(bytes([byte])))
    assert got == frames


@given(data=st.binary(max_size=200), cut=st.integers(0, 200))
def test_no_bytes_do_anything_but_frames_or_an_error(data: bytes, cut: int) -> None:
    reader = FrameDecoder(64)
    with suppress(FrameError):
        for part in (data[:cut], data[cut:]):
            assert all(len(payload) < 64 for _, payload in reader.feed(part))


@pytest.mark.parametrize(
    ("length", "fault"), [(0, "malformed"), (101, "too-large"), (2**32 - 1, "too-large")]
)
def test_a_length_that_cannot_be_is_refused_before_anything_is_held(
    length: int, fault: str
) -> None:
    with pytest.raises(FrameError) as caught:
        FrameDecoder(100).feed(length.to_bytes(4, "big") + b"\x20")
    assert caught.value.reason == fault


def test_the_wires_own_frames_are_kept_apart() -> None:
    reader = FrameDecoder(100)
    assert reader.feed(frame(FrameKind.PING) + frame(20, b"x")) == [(20, b"x")]
    assert reader.control == [(FrameKind.PING, b"")]


def shake(dialler: ClientHandshake, listener: ServerHandshake) -> tuple[bytes, ...]:
    """Run the whole handshake; returns the frames that were sent, in turn."""
    said = [dialler.begin()]
    while said[-1]:
        side: ClientHandshake | ServerHandshake = listener if len(said) % 2 else dialler
        said.append(side.receive(*only(said[-1])))
    if listener.authenticated:
        said[-1] = listener.welcome()
        dialler.receive(*only(said[-1]))
    return tuple(said)


def only(data: bytes) -> tuple[int, bytes]:
    reader = FrameDecoder(MAX_GREETING)
    assert not reader.feed(data)
    (found,) = reader.control
    return found


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("role", ["peer", "client"])
def test_a_handshake_yields_the_identity_of_the_other_side(role: Any, secret: Any) -> None:
    dialler, listener = ClientHandshake(N1, role, "n2", secret), ServerHandshake(N2, secret)
    shake(dialler, listener)
    assert (dialler.done, listener.authenticated) == (True, True)
    assert (dialler.remote, listener.remote, listener.role) == (N2, N1, role)
    assert dialler.version == listener.version == handshake.NEWEST


def test_a_client_may_connect_without_naming_the_cluster() -> None:
    dialler = ClientHandshake(ConnectionIdentity(ANY, "me", 1), "client")
    shake(dialler, ServerHandshake(N2))
    assert dialler.remote == N2


@pytest.mark.parametrize(
    ("dialler", "listener", "fault", "text"),
    [
        (
            ClientHandshake(N1, "peer", "n3"),
            ServerHandshake(N2),
            "node",
            "this is node 'n2', not 'n3'",
        ),
        (
            ClientHandshake(ConnectionIdentity("d", "n1", 1), "peer", "n2"),
            ServerHandshake(N2),
            "cluster",
            "belongs to cluster 'c', not to 'd'",
        ),
        (
            ClientHandshake(ConnectionIdentity(ANY, "n1", 1), "peer"),
            ServerHandshake(N2),
            "cluster",
            "not to ''",
        ),
        (
            ClientHandshake(ConnectionIdentity("d", "x", 1), "client"),
            ServerHandshake(N2),
            "cluster",
            "not to 'd'",
        ),
        (
            ClientHandshake(ConnectionIdentity("c", "", 1), "peer"),
            ServerHandshake(N2),
            "node",
            "must send its id",
        ),
        (
            ClientHandshake(ConnectionIdentity("c", "n2", 1), "peer"),
            ServerHandshake(N2),
            "duplicate",
            "another process",
        ),
        (ClientHandshake(N2, "peer", "n2"), ServerHandshake(N2), "duplicate", "has dialled itself"),
        (ClientHandshake(N1, "peer"), ServerHandshake(N2, SECRET), "secret", "none is set here"),
        (
            ClientHandshake(N1, "peer", ANY, SECRET),
            ServerHandshake(N2),
            "secret",
            "the node has none",
        ),
        (
            ClientHandshake(N1, "peer", ANY, SECRET + b"?"),
            ServerHandshake(N2, SECRET),
            "secret",
            "not the one that is set here",
        ),
    ],
)
def test_a_refused_handshake_has_a_reason(
    dialler: ClientHandshake, listener: ServerHandshake, fault: str, text: str
) -> None:
    with pytest.raises(ConnectionRefused, match=text) as caught:
        shake(dialler, listener)
    assert caught.value.reason == fault
    assert not dialler.done


@pytest.mark.parametrize(
    ("theirs", "chosen"),
    [((1, 1), 1), ((1, 9), 2), ((2, 2), 2), ((3, 9), None), ((0, 0), None), ((-5, 99), 2)],
)
def test_the_newest_version_that_both_support(
    theirs: tuple[int, int], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "NEWEST", 2)
    me, later = ["c", "x", 1], "of a later version"
    hello = ["doyen", *theirs, "client", me, "", bytes(32), [1, 2], [], later]
    listener = ServerHandshake(N2)
    if chosen is not None:
        listener.receive(FrameKind.HELLO, msgspec.msgpack.encode(hello))
        assert listener.version == chosen
        return
    with pytest.raises(ConnectionRefused, match="upgrade the older one") as caught:
        listener.receive(FrameKind.HELLO, msgspec.msgpack.encode([*hello[:3], "as it may be then"]))
    assert caught.value.reason == CloseReason.VERSION


def test_a_listener_cannot_choose_a_version_that_was_not_offered() -> None:
    dialler = ClientHandshake(N1, "peer")
    challenge = [9, ["c", "n2", 22], False, bytes(32)]
    with pytest.raises(FrameError, match="version 9"):
        dialler.receive(FrameKind.CHALLENGE, msgspec.msgpack.encode(challenge))


def test_a_refusal_is_reported_to_the_dialler() -> None:
    dialler = ClientHandshake(N1, "client")
    with pytest.raises(ConnectionRefused, match="no leader") as caught:
        dialler.receive(
            *only(handshake.refusal(ConnectionRefused(CloseReason.NOT_SERVING, "no leader")))
        )
    assert caught.value.reason is CloseReason.NOT_SERVING
    assert not caught.value.lasting
    assert ConnectionRefused(CloseReason.SECRET, "").lasting


def test_a_recorded_handshake_is_refused_on_another_connection() -> None:
    """Replay: everything that the client sent, once more."""
    dialler, listener = ClientHandshake(N1, "peer", "n2", SECRET), ServerHandshake(N2, SECRET)
    hello, _, proof, _ = shake(dialler, listener)
    again = ServerHandshake(N2, SECRET)
    again.receive(*only(hello))
    with pytest.raises(ConnectionRefused):
        again.receive(*only(proof))
    assert not again.authenticated


def test_a_listeners_answers_are_worth_nothing_to_another_dialler() -> None:
    dialler, listener = ClientHandshake(N1, "peer", "n2", SECRET), ServerHandshake(N2, SECRET)
    _, challenge, _, welcome = shake(dialler, listener)
    again = ClientHandshake(N1, "peer", "n2", SECRET)
    again.receive(*only(challenge))
    with pytest.raises(ConnectionRefused, match="does not know the secret"):
        again.receive(*only(welcome))


def test_a_dialler_rejects_its_own_messages_reflected() -> None:
    """Reflection: the server knows no secret, and sends everything back."""
    dialler = ClientHandshake(N1, "peer", ANY, SECRET)
    with pytest.raises(FrameError) as caught:
        dialler.receive(*only(dialler.begin()))
    assert caught.value.reason is CloseReason.OUT_OF_TURN

    challenge = [1, ["c", "n2", 22], True, bytes(32)]
    proof = dialler.receive(FrameKind.CHALLENGE, msgspec.msgpack.encode(challenge))
    with pytest.raises(ConnectionRefused):
        dialler.receive(FrameKind.WELCOME, only(proof)[1])
    assert not dialler.done


def test_a_listener_that_wants_the_proof_made_for_another_is_not_helped() -> None:
    """The proof covers the challenge: it is void on another node."""
    dialler, real = ClientHandshake(N1, "peer", ANY, SECRET), ServerHandshake(N2, SECRET)
    real.receive(*only(dialler.begin()))
    fake = ServerHandshake(ConnectionIdentity("c", "n3", 3), SECRET + b"?")
    proof = dialler.receive(*only(fake.receive(*only(dialler.begin()))))
    with pytest.raises(ConnectionRefused):
        real.receive(*only(proof))


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("kind", [0, *FrameKind, FIRST_FREE - 1])
def test_every_frame_out_of_turn_is_refused(kind: int, secret: bytes | None) -> None:
    """Every state of both sides with every kind of frame: none gets past the handshake."""
    for steps in range(3):
        dialler, listener = ClientHandshake(N1, "peer", "n2", secret), ServerHandshake(N2, secret)
        said = [dialler.begin()]
        for step in range(steps):
            side: ClientHandshake | ServerHandshake = dialler if step % 2 else listener
            said.append(side.receive(*only(said[-1])))
        for one in (dialler, listener):
            if one is listener and steps == 0 and kind == FrameKind.HELLO:
                continue
            with pytest.raises((FrameError, ConnectionRefused)):
                one.receive(kind, b"\x93\x01\x02")
            if secret is not None:
                assert not dialler.done
                assert not listener.authenticated


@given(payload=st.binary(max_size=100))
def test_no_greeting_does_anything_but_fit_or_fail(payload: bytes) -> None:
    for side, kind in (
        (ClientHandshake(N1, "peer"), FrameKind.CHALLENGE),
        (ClientHandshake(N1, "peer"), FrameKind.REFUSAL),
        (ServerHandshake(N2), FrameKind.HELLO),
    ):
        with pytest.raises((FrameError, ConnectionRefused)):
            side.receive(kind, payload)


def test_names_in_a_greeting_are_bounded() -> None:
    with pytest.raises(FrameError, match="length"):
        ServerHandshake(N2).receive(
            *only(ClientHandshake(ConnectionIdentity("c", "n" * 300, 1), "client").begin())
        )


@pytest.mark.parametrize(
    ("host", "security", "fits"),
    [
        ("127.0.0.1", Security(), True),
        ("127.8.8.8", Security(), True),
        ("::1", Security(), True),
        ("localhost", Security(), True),
        ("0.0.0.0", Security(), False),
        ("", Security(), False),
        ("::", Security(), False),
        ("10.1.2.3", Security(), False),
        ("n1.example", Security(), False),
        ("10.1.2.3", Security(secret=SECRET), True),
        ("10.1.2.3", Security(tls=TLS(certificate="c", key="k", authority="a")), True),
        ("10.1.2.3", Security(tls=TLS(certificate="c", key="k", mutual=False)), False),
    ],
)
def test_beyond_loopback_unauthenticated_connections_are_refused(
    host: str, security: Security, fits: bool
) -> None:
    check_exposure(host, security, insecure=True)
    if fits:
        check_exposure(host, security)
    else:
        with pytest.raises(ConfigError, match="or pass --insecure"):
            check_exposure(host, security)


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="16 or more"):
        Security(secret=b"guess me")


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def test_errors_of_tls_name_the_file(certificates: Certificates, tmp_path: Path) -> None:
    certificate, key = certificates.certificate("server"), certificates.key("server")
    empty = tmp_path / "empty.pem"
    empty.touch()
    for tls, text in (
        (TLS(), "needs a certificate"),
        (TLS(certificate=certificate, key=key), "needs the authority"),
        (TLS(certificate=tmp_path / "none.pem", mutual=False), "none.pem: No such file"),
        (TLS(certificate=certificate, key=empty, mutual=False), "empty.pem do not go together"),
        (
            TLS(certificate=certificate, key=certificates.key("client"), mutual=False),
            "client.key do not go together",
        ),
        (TLS(certificate=certificate, key=key, authority=empty), "authority in .*empty.pem"),
    ):
        with pytest.raises(ConfigError, match=text):
            tls.for_listening()
    with pytest.raises(ConfigError, match=r"cannot read .*none\.pem"):
        TLS(authority=tmp_path / "none.pem").for_dialling()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h:1", ("h", 1)),
        ("127.0.0.1:7400", ("127.0.0.1", 7400)),
        ("[::1]:7400", ("::1", 7400)),
        (":7400", ("", 7400)),
    ],
)
def test_addresses(text: str, found: tuple[str, int]) -> None:
    assert parse_address(text) == found


@pytest.mark.parametrize(
    "text",
    [
        *("h", "h:", "h:x", "h:70000", "::1:7400", "", "h:-1", "h:²"),
        *("a..b:1", ".a:1", "x" * 64 + ":1", "a\0b:1"),
    ],
)
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not an address"):
        parse_address(text)


def test_both_sides_say_which_versions_of_the_state_they_support() -> None:
    """A node of the first release sends no versions, which means the first."""
    dialler, listener = ClientHandshake(N1, "peer"), ServerHandshake(N2)
    shake(dialler, listener)
    assert dialler.supports == listener.supports == handshake.SUPPORTED
    kind, hello = only(dialler.begin())
    old = ServerHandshake(N2)
    old.receive(kind, msgspec.msgpack.encode(msgspec.msgpack.decode(hello)[:7]))
    assert old.supports == (1, 1)
