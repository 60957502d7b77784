"""The two buckets of a store: created if they are missing, and again if they were lost.

A bucket is lost if an operator deletes it, or if its server comes back without its data. A client
that stayed connected knows the highest sequence that was given out and the leases that were alive,
and creates the bucket again so that both still hold: above every token, and not before every term
that was won in the lost bucket has ended.

Imports the model and the requests to JetStream.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Any

from doyen.errors import StoreUnavailable, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.stores.nats.jetstream import JetStream, StreamExists, StreamMissing
from doyen.stores.port import Context

log = logging.getLogger("doyen.nats")

LEAP = 2**32
"""How far a bucket that is created again begins above the highest sequence that this client has
seen. Other clients may have seen higher ones, if this one was disconnected for a while."""


class Buckets:
    """The bucket of entries and leases, `name`, and that of the renewals."""

    def __init__(self, jetstream: JetStream, name: str, context: Context) -> None:
        self._jetstream = jetstream
        self.name = name
        self.renewals = f"{name}_beats"
        self._create = context.create
        self._now = context.clock.now
        self.replicas = 1
        self._lost_at: float | None = None
        """Since when the bucket of entries is known to be lost."""

    async def open(self, replicas: int, floor: int) -> None:
        """Create what is missing. The sequences of a new bucket begin above `floor`; one that is
        below it is refused."""
        self.replicas = max(1, replicas)
        await self._ensure(self.name, floor)
        await self._ensure(self.renewals, 0)
        last = int((await self.state())["last_seq"])
        if last < floor:
            raise StoreUnusable(
                f"the bucket {self.name} is at sequence {last}, below token_floor={floor}: it seems"
                " to have been restored or created anew, and would give out tokens a second time."
                " Delete it; doyen creates it again above token_floor"
            )

    async def state(self) -> dict[str, Any]:
        """The state of the bucket of entries, as the leader of its stream reports it."""
        try:
            info = await self._jetstream.call(f"STREAM.INFO.KV_{self.name}")
        except StreamMissing as error:
            raise StreamMissing(
                f"the bucket {self.name} does not exist any more: it was deleted, or its server has"
                " lost its data; it is created again when the leases in it are over"
            ) from error
        state: dict[str, Any] = info["state"]
        return state

    async def ensure_renewals(self) -> None:
        """Create the bucket of renewals if it was lost. The leases that had their renewals in it
        cannot be renewed any more."""
        if self._create:
            await self._ensure(self.renewals, 0)

    def found(self) -> None:
        """The bucket of entries exists, or whether it does is unknown again."""
        self._lost_at = None

    async def missing(self, highest: int, ttl_s: float) -> None:
        """The bucket of entries does not exist. Create it again when it has been missing for
        `ttl_s`, the longest ttl of the leases in it. `highest` is its highest known sequence.

        The leases end first: without their renewals no holder can renew, so all terms have ended
        after that time.
        """
        if not self._create:
            return
        if self._lost_at is None:
            with suppress(StreamMissing):
                await self._jetstream.call(f"STREAM.DELETE.KV_{self.renewals}")
            self._lost_at = self._now()
            log.warning("%s", log_line(event="bucket_lost", bucket=self.name, last=highest))
        if self._now() - self._lost_at < ttl_s:
            return
        await self._ensure(self.name, highest + LEAP)
        await self._ensure(self.renewals, 0)
        line = log_line(event="bucket_created_again", bucket=self.name, above=highest + LEAP)
        log.warning("%s", line)

    async def _ensure(self, bucket: str, floor: int) -> None:
        """Create a bucket if it does not exist. Its sequences begin above `floor`."""
        try:
            config = await self._configuration(bucket)
        except StreamMissing as error:
            if not self._create:
                raise StoreUnusable(
                    f"there is no bucket {bucket}, and a query creates none: no candidate has used"
                    " this store yet; check the URL"
                ) from error
            try:
                config = await self._new(bucket, floor)
            except StreamExists:  # another client has just created it, above another floor
                config = await self._configuration(bucket)
        except StoreUnavailable as error:
            raise StoreUnavailable(f"{error} (bucket {bucket})") from error
        required = {
            "storage": (config["storage"], "file"),
            "max_age": (config.get("max_age", 0), 0),
            "allow_msg_ttl": (config.get("allow_msg_ttl", False), True),
        }
        for name, (found, needed) in required.items():
            if found != needed:
                raise StoreUnusable(
                    f"the bucket {bucket} has {name} {found!r}, and doyen needs {needed!r}:"
                    " name another bucket; doyen creates it with the settings that it needs"
                )
        self.replicas = int(config["num_replicas"])

    async def _configuration(self, bucket: str) -> dict[str, Any]:
        config: dict[str, Any] = (await self._jetstream.call(f"STREAM.INFO.KV_{bucket}"))["config"]
        return config

    async def _new(self, bucket: str, floor: int) -> dict[str, Any]:
        stream = f"KV_{bucket}"
        created = await self._jetstream.call(
            f"STREAM.CREATE.{stream}",
            name=stream,
            subjects=[f"$KV.{bucket}.>"],
            max_msgs_per_subject=1,
            discard="new",
            deny_delete=True,
            allow_rollup_hdrs=True,
            allow_msg_ttl=True,
            storage="file",
            num_replicas=self.replicas,
            first_seq=floor + 1,
        )
        config: dict[str, Any] = created["config"]
        return config
