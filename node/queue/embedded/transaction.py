"""Enqueues and acks that happen together or not at all. (Core of `Queue.transaction`.)"""

from collections.abc import Iterable
from datetime import datetime

from raftq.client.common.errors import InvalidArgument, TooLarge
from raftq.client.wire.record import Headers
from raftq.node.queue.embedded.consume import check_message, message_list
from raftq.node.queue.embedded.message import Message, record_bytes
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.publish import (
    Draft,
    check_list,
    check_values,
    lane_of,
    message_times,
)

TRANSACTION_BYTES_MAX = 32 * 1024 * 1024


class Transaction:
    """Collects what shall happen; the queue commits it when the `with` block ends well.

    Arguments are checked at once; whether the acked messages are still held is checked at commit.
    """

    def __init__(self, options: EmbeddedOptions, now: float) -> None:
        self._options = options
        self._now = now
        self._over = False
        self.size_bytes = 0
        self.drafts: list[Draft] = []
        self.acked: list[Message] = []
        self.ids: list[str] = []
        """The ids of the enqueued messages, in order, once committed."""

    def enqueue(  # noqa: PLR0913 - the same keywords as Queue.enqueue
        self,
        value: bytes,
        *,
        key: bytes | None = None,
        priority: str | int = "normal",
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
        headers: Headers | None = None,
    ) -> None:
        self._check_running()
        check_values([value], [key], [headers], self._options.value_bytes_max)
        draft = Draft(
            [value],
            None if key is None else [key],
            # A copy: the caller may change its headers for the next message before the commit.
            [dict(headers)] if headers else None,
            lane_of(priority),
            *message_times(delay, deliver_at, ttl, self._now),
        )
        size = self.size_bytes + record_bytes(value, key, headers)
        if size > TRANSACTION_BYTES_MAX:
            raise TooLarge(f"a transaction holds at most {TRANSACTION_BYTES_MAX} bytes")
        self.size_bytes = size
        self.drafts.append(draft)

    def enqueue_batch(self, values: Iterable[bytes], *, priority: str | int = "normal") -> None:
        for value in check_list(values):
            self.enqueue(value, priority=priority)

    def ack(self, message: Message) -> None:
        self._check_running()
        check_message(message)
        self.acked.append(message)

    def ack_batch(self, messages: Iterable[Message]) -> None:
        self._check_running()
        self.acked.extend(message_list(messages))

    def end(self) -> None:
        """Nothing more is taken: it would never be committed."""
        self._over = True

    def _check_running(self) -> None:
        if self._over:
            raise InvalidArgument("the transaction is over; open another one")
