"""Objects with the API of S3: on moto, and on a model with lost responses and delayed requests.

The model is driven from seeds. While a leader's request is on its way, other leaders make theirs,
which is what a pause of the first one looks like to the store. The oracle reads the history of the
store: tokens only grow, and no call wrote twice. Broken variants of the guard must be seen.
"""

from __future__ import annotations

import hashlib
import io
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.exceptions import ClientError, ReadTimeoutError
from moto import mock_aws

from doyen.errors import ConfigError, Conflict, OutcomeUnknown, StaleToken
from doyen.fencing import GuardedObject, objects

SEEDS = 150


class Stored(NamedTuple):
    body: bytes
    metadata: dict[str, str]

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.body).hexdigest()}"'


def refused(status: int, code: str) -> ClientError:
    answer = {"HTTPStatusCode": status, "RetryAttempts": 0}
    return ClientError({"Error": {"Code": code}, "ResponseMetadata": answer}, "PutObject")


class Model:
    """One key of a store. Content decides the ETag, as in S3. `meanwhile` is called while a request
    is on its way, and decides whether its response is lost, or the request delayed."""

    def __init__(self) -> None:
        self.stored: Stored | None = None
        self.history: list[Stored] = []
        self.delayed: list[Callable[[], None]] = []
        self.meanwhile: Callable[[], str] = lambda: ""
        self.on_write: Callable[[], None] = lambda: None

    def let_go(self, number: int) -> None:
        """Carry out a delayed request, whose sender no longer waits for it."""
        try:
            self.delayed.pop(number)()
        except ClientError:
            pass

    def head_object(self, **_: Any) -> dict[str, Any]:
        if self.stored is None:
            raise refused(404, "404")
        return {"ETag": self.stored.etag, "Metadata": self.stored.metadata}

    def get_object(self, **_: Any) -> dict[str, Any]:
        found = self.head_object()
        assert self.stored is not None
        return {**found, "Body": io.BytesIO(self.stored.body)}

    def put_object(
        self,
        *,
        Body: bytes,  # noqa: N803
        Metadata: dict[str, str] | None = None,  # noqa: N803
        IfMatch: str | None = None,  # noqa: N803
        IfNoneMatch: str | None = None,  # noqa: N803
        **_: Any,
    ) -> None:
        def carry_out() -> None:
            if IfMatch and (self.stored is None or self.stored.etag != IfMatch):
                raise refused(412, "PreconditionFailed")
            if IfNoneMatch and self.stored is not None:
                raise refused(412, "PreconditionFailed")
            self.stored = Stored(Body, Metadata or {})
            self.history.append(self.stored)
            on_write()

        fate = self.meanwhile()
        on_write = self.on_write
        if fate == "delayed":
            self.delayed.append(carry_out)
        elif fate != "request lost":
            carry_out()
        if fate:
            raise ReadTimeoutError(endpoint_url="s3")


class Call:
    """One call of a leader: the writes that the store carried out for it."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.carried_out = 0
        self.refused = False


def run(seed: int) -> list[str]:
    """Leaders write to one object at the same time; return what went wrong."""
    draw = random.Random(seed)
    store = Model()
    calls: list[Call] = []
    under_way: list[Call] = []
    wrong: list[str] = []
    token = 0

    def lead() -> None:
        nonlocal token
        token += draw.choice((0, 1, 1))
        call = Call(token)
        calls.append(call)
        under_way.append(call)
        guard = GuardedObject(store, "bucket", "key", probe=False)
        try:
            draw.choice((guard.write, guard.append))(token, draw.choice((b"on", b"off", b"")))
        except (OutcomeUnknown, Conflict):
            pass
        except StaleToken as refusal:
            call.refused = not hasattr(refusal, "__notes__")
        else:
            if not call.carried_out:
                wrong.append(f"token {call.token} was told that it wrote, and did not")
        under_way.remove(call)

    def meanwhile() -> str:
        sender = under_way[-1]
        for _ in range(draw.choice((0, 0, 1, 2))):
            if store.delayed and draw.random() < 0.5:
                store.let_go(draw.randrange(len(store.delayed)))
            elif len(under_way) < 4:
                lead()
        store.on_write = partial(count, sender)
        return draw.choice(("", "", "", "request lost", "response lost", "delayed"))

    def count(call: Call) -> None:
        call.carried_out += 1

    store.meanwhile = meanwhile
    for _ in range(4):
        lead()
    while store.delayed:
        store.let_go(0)
    order = [int(each.metadata["doyen-token"]) for each in store.history]
    if order != sorted(order):
        wrong.append(f"a later token was overwritten: {order}")
    for call in calls:
        if call.carried_out > 1:
            wrong.append(f"a call with token {call.token} wrote twice")
        if call.refused and call.carried_out:
            wrong.append(f"token {call.token} was refused, and wrote")
    return wrong


def test_tokens_only_grow_and_no_call_writes_twice() -> None:
    for seed in range(SEEDS):
        assert run(seed) == [], f"seed {seed}"


def without_line(patch: pytest.MonkeyPatch) -> None:
    """The same content has the same ETag."""
    patch.setattr(objects, "_first_line", lambda write: b"")


def without_condition(patch: pytest.MonkeyPatch) -> None:
    put = Model.put_object

    def unconditional(self: Model, **options: Any) -> None:
        options.pop("IfMatch", None)
        options.pop("IfNoneMatch", None)
        put(self, **options)

    patch.setattr(Model, "put_object", unconditional)


def without_comparing(patch: pytest.MonkeyPatch) -> None:
    look = GuardedObject._look
    patch.setattr(
        GuardedObject, "_look", lambda self, request: look(self, request)._replace(token=-1)
    )


def without_recognising(patch: pytest.MonkeyPatch) -> None:
    """A write whose response was lost is taken for one that was refused, and is made again."""
    look, put = GuardedObject._look, Model.put_object

    def impatient(self: Model, **options: Any) -> None:
        try:
            put(self, **options)
        except ReadTimeoutError:
            raise refused(412, "PreconditionFailed") from None

    patch.setattr(Model, "put_object", impatient)
    patch.setattr(
        GuardedObject, "_look", lambda self, request: look(self, request)._replace(write="")
    )


@pytest.mark.parametrize(
    "mutant",
    [without_line, without_condition, without_comparing, without_recognising],
    ids=lambda each: each.__name__,
)
def test_broken_variants_are_seen(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert any(run(seed) for seed in range(SEEDS))


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        client = boto3.client("s3", region_name="us-east-1")
        client.create_bucket(Bucket="bucket")
        yield client
        client.close()


def test_an_object_is_written_read_and_appended_to(s3: Any) -> None:
    state = GuardedObject(s3, "bucket", "state")
    assert [state.token] == [None]
    with pytest.raises(FileNotFoundError, match="bucket/state"):
        state.read()
    state.write(7, b"one")
    state.append(8, b", two")
    assert (state.read(), state.token) == (b"one, two", 8)
    with pytest.raises(StaleToken, match="refuses token 7, because it has seen the later token 8"):
        state.write(7, b"stale")
    assert s3.list_objects_v2(Bucket="bucket")["KeyCount"] == 1


def test_an_object_that_was_there_before_is_taken_over(s3: Any) -> None:
    s3.put_object(Bucket="bucket", Key="state", Body=b"plain")
    state = GuardedObject(s3, "bucket", "state")
    assert [state.read(), state.token] == [b"plain", None]
    state.append(3, b"")
    assert [state.read(), state.token] == [b"plain", 3]


@pytest.mark.parametrize("how", ["guarded", "bare"])
@pytest.mark.parametrize("content", [b"new", b"first"])
def test_an_object_and_a_leader_that_wakes_too_late(s3: Any, how: str, content: bytes) -> None:
    """The former leader is paused between its last look and its write. Its successor writes, maybe
    the very content that the former leader found."""
    successor = GuardedObject(s3, "bucket", "state")
    successor.write(1, b"first")
    paused: list[str] = []

    def pause(**_: Any) -> None:
        if not paused:
            paused.append("now")
            successor.write(2, content)

    former = GuardedObject(s3, "bucket", "state", probe=False)
    s3.meta.events.register("before-send.s3.PutObject", pause)
    if how == "guarded":
        with pytest.raises(StaleToken, match="token 1, because it has seen the later token 2"):
            former.write(1, b"stale")
        assert successor.read() == content
    else:
        s3.put_object(Bucket="bucket", Key="state", Body=b"stale")
        assert successor.read() == b"stale"
    s3.meta.events.unregister("before-send.s3.PutObject", pause)


def test_a_lost_response_is_resolved_by_reading(s3: Any) -> None:
    state = GuardedObject(s3, "bucket", "state")
    state.write(1, b"first")
    lost: list[str] = []

    def lose(**_: Any) -> None:
        if not lost:
            lost.append("now")
            raise ReadTimeoutError(endpoint_url="s3")

    s3.meta.events.register("after-call.s3.PutObject", lose)
    state.append(1, b", second")
    s3.meta.events.unregister("after-call.s3.PutObject", lose)
    assert (lost, state.read()) == (["now"], b"first, second")


def test_a_store_without_conditions_is_refused() -> None:
    class Careless(Model):
        def put_object(self, **options: Any) -> None:
            super().put_object(Body=options["Body"])

        def delete_object(self, **_: Any) -> None:
            self.stored = None

    store = Careless()
    with pytest.raises(ConfigError, match="ignores If-Match"):
        GuardedObject(store, "bucket", "key").write(1, b"data")
    assert store.stored is None


def test_other_errors_are_those_of_the_client(s3: Any) -> None:
    with pytest.raises(ClientError, match="NoSuchBucket"):
        GuardedObject(s3, "nowhere", "state").write(1, b"data")
    with pytest.raises(ClientError, match="NoSuchBucket"):
        GuardedObject(s3, "nowhere", "state", probe=False).write(1, b"data")


def test_other_holders_of_the_token_are_not_overwritten_for_ever() -> None:
    store = Model()
    other = GuardedObject(store, "bucket", "key", probe=False)

    def busy() -> str:
        store.meanwhile = lambda: ""
        other.write(1, b"theirs")
        store.meanwhile = busy
        return ""

    store.meanwhile = busy
    with pytest.raises(Conflict, match="other holders of token 1"):
        GuardedObject(store, "bucket", "key", probe=False).write(1, b"ours")


def test_without_any_answer_the_outcome_is_unknown() -> None:
    store = Model()
    store.meanwhile = lambda: "request lost"
    with pytest.raises(OutcomeUnknown, match="may have been carried out"):
        GuardedObject(store, "bucket", "key", probe=False).write(1, b"data")
