"""The copy of the bucket that each client keeps, fed by one consumer at a time.

- The copy changes in the order of the stream. When the consumer fails, the copy is replaced by one
  from a new consumer, and all watches are notified.
- `catch_up` makes the copy at least as new as the stream was when it was called.
- The server may place the consumer on a replica that lacks the latest messages. A new copy is
  therefore used only once it has the message that the leader of the stream reported as its last.
- A message that doyen cannot have written is logged once and ignored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import nats.errors

from doyen.errors import OutcomeUnknown, StoreError, StoreUnavailable, StoreUnusable
from doyen.events.log_lines import log_line
from doyen.stores.nats.buckets import Buckets
from doyen.stores.nats.consumer import SILENCE_S, BucketConsumer
from doyen.stores.nats.jetstream import (
    RESPONSE_S,
    ConnectionEnded,
    JetStream,
    StoredMessage,
    StreamMissing,
    WrongSequence,
)
from doyen.stores.nats.view import BucketView, DamagedMessage, key_of

log = logging.getLogger("doyen.nats")

PAUSE_S = 0.2
_WARNINGS = 1_000
_APPLIED_AT_ONCE = 200


class Mirror:
    """A copy of one bucket."""

    def __init__(self, jetstream: JetStream, buckets: Buckets) -> None:
        self._jetstream = jetstream
        self._buckets = buckets
        self._bucket = buckets.name
        self.view = BucketView()
        self._position = 0
        """The sequence up to which the copy has everything."""
        self.highest = 0
        """The highest position of this and all earlier copies."""
        self._advanced = asyncio.Event()
        self._consumer: BucketConsumer | None = None
        self._task: asyncio.Task[None] | None = None
        self._warned: dict[str, int] = {}
        """The sequence of the damaged message that was last logged, by subject."""

    def start(self, changed: Callable[[str], None], all_changed: Callable[[], None]) -> None:
        """Begin to copy. `changed` is called with the key of each change, and `all_changed` when
        there is a new copy."""
        self._task = asyncio.get_running_loop().create_task(self._run(changed, all_changed))

    async def catch_up(self) -> None:
        """Wait until the copy has everything that was written before this call."""
        known, last = self._position, int((await self._buckets.state())["last_seq"])
        if last < known:
            error = f"the bucket {self._bucket} has gone back from sequence {known} to {last}"
            if self._consumer is not None:
                self._consumer.fail(StoreUnavailable(error))
            raise OutcomeUnknown(error)
        await self.reach(last)

    async def reach(self, sequence: int) -> None:
        """Wait until the copy has everything up to this sequence."""
        try:
            async with asyncio.timeout(RESPONSE_S):
                while self._position < sequence:
                    await self._advanced.wait()
        except TimeoutError:
            raise OutcomeUnknown(
                f"the changes of the bucket {self._bucket} up to {sequence} did not arrive within"
                f" {RESPONSE_S:g} s; the last that did is {self._position}"
            ) from None

    async def write(
        self, subject: str, value: bytes, last: int = 0, headers: dict[str, str] | None = None
    ) -> int:
        """Write to the bucket if `last` is the sequence of the subject's last message. The new
        sequence may become a token, so it must be above all that were ever seen."""
        before = self.highest
        sequence = await self._jetstream.write(subject, value, last, headers)
        if sequence > before:
            return sequence
        try:
            await self._jetstream.delete(subject, sequence)
        except WrongSequence:
            pass
        raise StoreUnusable(
            f"the bucket {self._bucket} is at sequence {sequence} and was at {before} before: it"
            " was deleted or restored, or its server has lost writes, and its tokens would be lower"
            " than those already given out. Stop all candidates, delete the bucket, and connect"
            f" with token_floor={before} or higher"
        )

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, changed: Callable[[str], None], all_changed: Callable[[], None]) -> None:
        while True:
            try:
                base = int((await self._buckets.state())["last_seq"])
                self._buckets.found()
                last = await self._jetstream.last(f"KV_{self._bucket}", f"$KV.{self._bucket}.>")
                async with BucketConsumer.open(self._jetstream, self._bucket) as consumer:
                    self._consumer = consumer
                    await self._copy(consumer, base, last.sequence if last else 0)
                    all_changed()
                    await self._follow(consumer, changed)
            except StreamMissing:
                await self._create_again()
            except (StoreError, OSError, nats.errors.Error, ConnectionEnded) as error:
                self._buckets.found()
                log.debug("%s", log_line(event="bucket_copied_again", reason=error))
            except Exception:
                log.exception("%s", log_line(event="bucket_copied_again", bucket=self._bucket))
            self._consumer = None
            await asyncio.sleep(PAUSE_S)

    async def _create_again(self) -> None:
        longest_s = max((ttl_s or 0.0 for ttl_s in self.view.leases.values()), default=0.0)
        try:
            await self._buckets.missing(self.highest, longest_s)
        except StoreError as error:
            log.debug("%s", log_line(event="bucket_not_created", reason=error))

    async def _copy(self, consumer: BucketConsumer, base: int, last: int) -> None:
        """Replace the copy. `base` is the position of the stream before the consumer was created,
        `last` the sequence of its last message."""
        position = 0
        messages: list[tuple[str, StoredMessage]] = []
        async with asyncio.timeout(None) as limit:
            while consumer.pending > 0 or position < last:
                if consumer.pending == 0 and limit.when() is None:
                    # The replica is behind, or the last message has expired in the meantime.
                    limit.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                subject, message = await consumer.next()
                position = message.sequence
                messages.append((subject, message))
        view = BucketView()
        leases = f"$KV.{self._bucket}.leases."
        messages.sort(key=lambda each: not each[0].startswith(leases))
        for number, (subject, message) in enumerate(messages):
            self._apply(view, subject, message)
            if number % _APPLIED_AT_ONCE == 0:
                await asyncio.sleep(0)  # let renewals and others on this loop proceed
        self.view = view
        self._advance(max(position, base))

    async def _follow(self, consumer: BucketConsumer, changed: Callable[[str], None]) -> None:
        while True:
            subject, message = await consumer.next()
            keys = self._apply(self.view, subject, message)
            self._advance(message.sequence)
            for key in keys:
                changed(key)

    def _advance(self, position: int) -> None:
        self._position = position
        self.highest = max(self.highest, position)
        self._advanced.set()
        self._advanced = asyncio.Event()

    def _apply(self, view: BucketView, subject: str, message: StoredMessage) -> set[str]:
        try:
            return view.apply(*key_of(self._bucket, subject), message)
        except DamagedMessage as damage:
            self._warn(subject, message.sequence, damage)
            return set()

    def _warn(self, subject: str, sequence: int, damage: DamagedMessage) -> None:
        if self._warned.get(subject) == sequence:
            return
        if len(self._warned) >= _WARNINGS:
            self._warned.clear()
        self._warned[subject] = sequence
        line = log_line(
            event="message_ignored",
            bucket=self._bucket,
            subject=subject,
            sequence=sequence,
            reason=damage,
            remedy="delete it, and keep other programs out of the bucket",
        )
        log.warning("%s", line)
