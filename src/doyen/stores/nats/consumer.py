"""A push consumer of a bucket: its messages in order, or an error if one may have been missed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.msg import Msg

from doyen.errors import StoreUnavailable
from doyen.stores.nats.jetstream import CLOSE_S, JetStream, StoredMessage, run_in_task

__all__ = ["HEARTBEAT_S", "SILENCE_S", "BucketConsumer"]

HEARTBEAT_S = 1.0
SILENCE_S = 3.0
_NANO = 1_000_000_000


class BucketConsumer:
    """The last message of each subject of a bucket, then every new message, in order. It ends with
    an error as soon as a message may have been missed: after a gap in the numbers of the
    deliveries, after silence, and when the connection ends."""

    def __init__(self, pending: int = 0) -> None:
        self.pending = pending
        """How many messages the bucket had after the last one that was delivered."""
        self._delivered = 0
        self._queue: asyncio.Queue[Msg | StoreUnavailable] = asyncio.Queue()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, jetstream: JetStream, bucket: str, *, since: int | None = None
    ) -> AsyncIterator[BucketConsumer]:
        """With `since`, begin at this sequence, and leave out the values."""
        consumer = cls()
        what: dict[str, object] = {"deliver_policy": "last_per_subject"}
        if since is not None:
            what = {"deliver_policy": "by_start_sequence", "opt_start_seq": since}
            what["headers_only"] = True
        connection = jetstream.connected()
        inbox, name = connection.new_inbox(), ""
        subscription = await run_in_task(
            connection.subscribe(inbox, cb=consumer._receive), CLOSE_S, connection.ended
        )
        connection.ended.add_done_callback(consumer._connection_ended)
        try:
            created = await jetstream.call(
                f"CONSUMER.CREATE.KV_{bucket}",
                stream_name=f"KV_{bucket}",
                config={
                    "deliver_subject": inbox,
                    **what,
                    "filter_subject": f"$KV.{bucket}.>",
                    "ack_policy": "none",
                    "max_deliver": 1,
                    "idle_heartbeat": int(HEARTBEAT_S * _NANO),
                    "inactive_threshold": int(10 * SILENCE_S * _NANO),
                    "mem_storage": True,
                    "num_replicas": 1,
                },
            )
            name, consumer.pending = created["name"], int(created["num_pending"])
            yield consumer
        finally:
            connection.ended.remove_done_callback(consumer._connection_ended)
            if connection.is_connected:
                await run_in_task(subscription.unsubscribe(), CLOSE_S)
                if name:
                    subject = f"$JS.API.CONSUMER.DELETE.KV_{bucket}.{name}"
                    await run_in_task(connection.publish(subject, b""), CLOSE_S)

    async def next(self) -> tuple[str, StoredMessage]:
        """The next message and its subject."""
        while True:
            message = await self._next_delivery()
            headers = message.headers or {}
            if message.reply.startswith("$JS.ACK."):
                sequence, number, self.pending = _numbers(message.reply)
                if number != self._delivered + 1:
                    raise StoreUnavailable("messages were missed")
                self._delivered = number
                return message.subject, StoredMessage(sequence, headers, message.data)
            if headers.get("Status") == "100":  # a heartbeat
                if int(headers.get("Nats-Last-Consumer", self._delivered)) != self._delivered:
                    raise StoreUnavailable("messages were missed")
            elif "Status" in headers:
                raise StoreUnavailable(f"the consumer has ended: {headers.get('Description')}")

    def fail(self, error: StoreUnavailable) -> None:
        """Have `next` raise this error after the messages that have already arrived."""
        self._queue.put_nowait(error)

    async def _next_delivery(self) -> Msg:
        if self._queue.empty():
            try:
                async with asyncio.timeout(SILENCE_S):
                    delivery = await self._queue.get()
            except TimeoutError:
                raise StoreUnavailable(f"the consumer was silent for {SILENCE_S:g} s") from None
        else:
            delivery = self._queue.get_nowait()
        if isinstance(delivery, StoreUnavailable):
            raise delivery
        return delivery

    async def _receive(self, message: Msg) -> None:
        self._queue.put_nowait(message)

    def _connection_ended(self, _: asyncio.Future[None]) -> None:
        self.fail(StoreUnavailable("the connection ended"))


def _numbers(reply: str) -> tuple[int, int, int]:
    """Of a delivery: its sequence in the stream, its number in the consumer, how many follow."""
    tokens = reply.split(".")
    first = 4 if len(tokens) == 9 else 6  # longer with a domain and an account
    return int(tokens[first + 1]), int(tokens[first + 2]), int(tokens[first + 4])
