"""An object in a store with the API of S3, which only the holder of the highest token can replace.

The token is in the object's metadata, and every write is conditional on the ETag that was read
with it (`If-Match`, or `If-None-Match: *` for the first), so the comparison and the write are one
step of the store.

An ETag is a hash of the content in most stores. If a later leader wrote the very content that a
paused one had read, the paused one's condition would hold again. So the content stored begins with
a line that is different for each write, and `read` removes it.

A write whose response was lost is resolved by reading: the metadata names the write. The object
store's client library is that of the caller. May import errors only.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

from doyen.errors import ConfigError, Conflict, OutcomeUnknown
from doyen.fencing.tokens import HasToken, stale, token_of

__all__ = ["GuardedObject"]

TOKEN, WRITE = "doyen-token", "doyen-write"
ATTEMPTS = 20
PROBE = ".doyen-probe"


class _Found(NamedTuple):
    """An object as it was read. An object that does not exist has no ETag."""

    etag: str | None = None
    token: int = -1
    write: str = ""
    body: bytes = b""


class GuardedObject:
    """An object that only the holder of the highest token seen can write.

        state = GuardedObject(boto3.client("s3"), "bucket", "state.json")
        state.write(term, b"…")

    Guarantees, on a store that is consistent and keeps the conditions of S3:

    - A write replaces the whole object in one step.
    - Once a call with a token has returned, calls with lower tokens raise `StaleToken` and do not
      change the object. This holds for a process that was paused at any point, and for a request
      that is delayed in the network.
    - A call writes at most once, however often its request was sent.
    - `OutcomeUnknown` is raised if no response came and reading does not decide whether the write
      was carried out; `Conflict` if other holders of the same token keep writing.

    A new leader that reads before it writes must first call `append(term, b"")`: after that call,
    no write of an earlier term can follow the read.

    `client` is a client of boto3. The content is stored with a line before it, so read it with
    `read`. Do not delete the object: its token would be forgotten. The first call verifies that the
    store refuses a conditional write to a key that does not exist, the object's own with
    `.doyen-probe` after it; `probe=False` skips that.
    """

    def __init__(self, client: Any, bucket: str, key: str, *, probe: bool = True) -> None:
        self.bucket, self.key = bucket, key
        self._client = client
        self._probe = probe

    def read(self) -> bytes:
        """The content. Raises `FileNotFoundError` if nothing has been written."""
        found = self._get()
        if found.etag is None:
            raise FileNotFoundError(f"there is no object {self._name}")
        return found.body

    @property
    def token(self) -> int | None:
        """The highest token seen, or None."""
        token = self._head().token
        return token if token >= 0 else None

    def write(self, token: int | HasToken, data: bytes) -> None:
        """Replace the content."""
        self._replace(token_of(token), self._head, lambda found: data)

    def append(self, token: int | HasToken, data: bytes) -> None:
        """Append to the content."""
        self._replace(token_of(token), self._get, lambda found: found.body + data)

    @property
    def _name(self) -> str:
        return f"{self.bucket}/{self.key}"

    def _replace(
        self, token: int, look: Callable[[], _Found], content: Callable[[_Found], bytes]
    ) -> None:
        from botocore.exceptions import BotoCoreError, ClientError

        self._require_conditions()
        write = uuid.uuid4().hex
        doubt: Exception | None = None
        before: _Found | None = None
        for _ in range(ATTEMPTS):
            try:
                found = look()
            except (BotoCoreError, ClientError) as error:
                if doubt is None:
                    raise
                raise self._unknown(doubt) from error
            if found.write == write:
                return
            if found.token > token:
                refusal = stale(self._name, token, found.token)
                if doubt is not None:
                    refusal.add_note("a request of this call may have been carried out before that")
                raise refusal from doubt
            if doubt is not None and before is not None and found.etag != before.etag:
                # Another wrote meanwhile. If ours came first, it must not be repeated after theirs.
                raise self._unknown(doubt)
            before = found
            try:
                self._put(token, write, found, content(found))
                return
            except ClientError as error:
                answer = error.response["ResponseMetadata"]
                if answer["HTTPStatusCode"] >= 500 or answer.get("RetryAttempts"):
                    doubt = error  # the client library may have sent it more than once
                elif not _condition_failed(error):
                    if doubt is None:
                        raise
                    raise self._unknown(doubt) from error
            except BotoCoreError as error:
                doubt = error
        if doubt is not None:
            raise self._unknown(doubt)
        raise Conflict(
            f"{self._name} was written by other holders of token {token} at each of {ATTEMPTS}"
            " attempts; nothing was written"
        )

    def _unknown(self, cause: Exception) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"the write to {self._name} may have been carried out, or may be later: {cause}"
        )

    def _put(self, token: int, write: str, over: _Found, data: bytes) -> None:
        condition = {"IfNoneMatch": "*"} if over.etag is None else {"IfMatch": over.etag}
        self._client.put_object(
            Bucket=self.bucket,
            Key=self.key,
            Body=_first_line(write) + data,
            Metadata={TOKEN: str(token), WRITE: write},
            **condition,
        )

    def _head(self) -> _Found:
        return self._look(self._client.head_object)

    def _get(self) -> _Found:
        return self._look(self._client.get_object)

    def _look(self, request: Callable[..., Any]) -> _Found:
        from botocore.exceptions import ClientError

        try:
            response = request(Bucket=self.bucket, Key=self.key)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                return _Found()
            raise
        metadata = response["Metadata"]
        body = response["Body"].read() if "Body" in response else b""
        if WRITE not in metadata:
            return _Found(response["ETag"], body=body)
        line = _first_line(metadata[WRITE])
        return _Found(
            response["ETag"], int(metadata[TOKEN]), metadata[WRITE], body.removeprefix(line)
        )

    def _require_conditions(self) -> None:
        """Raise `ConfigError` if the store ignores conditions, so that it would refuse nothing."""
        if not self._probe:
            return
        from botocore.exceptions import ClientError

        probe = {"Bucket": self.bucket, "Key": self.key + PROBE}
        try:
            self._client.put_object(**probe, Body=b"", IfMatch='"' + "0" * 32 + '"')
        except ClientError as error:
            if not _condition_failed(error):
                raise
            self._probe = False
            return
        self._client.delete_object(**probe)
        raise ConfigError(
            f"the object store of {self._name} ignores If-Match, so it would not refuse a stale"
            " write: use a store that supports conditional writes"
        )


def _condition_failed(error: Any) -> bool:
    """Whether a conditional write was refused because the object is another one, or is gone."""
    status = error.response["ResponseMetadata"]["HTTPStatusCode"]
    return status in (404, 409, 412) and error.response["Error"]["Code"] != "NoSuchBucket"


def _first_line(write: str) -> bytes:
    return f"{WRITE}: {write}\n".encode()
