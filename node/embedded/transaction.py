"""Enqueues and acks that happen together or not at all. (Core of `Queue.transaction`.)"""

from collections.abc import Iterable
from dataclasses import replace

from raftq.client.wire.errors import InvalidArgument
from raftq.client.wire.record import Headers
from raftq.node.embedded.message import Message
from raftq.node.embedded.options import QueueOptions
from raftq.node.embedded.publish import Draft, check_values, due_ms, expiry_ms, lane_of

TRANSACTION_BYTES_MAX = 32 * 1024 * 1024


class Transaction:
    """Collects what shall happen; the queue commits it when the `with` block ends well.

    Arguments are checked at once; whether the acked messages are still held is checked at commit.
    """

    def __init__(self, options: QueueOptions, now: float) -> None:
        self._options = options
        self._now = now
        self._bytes = 0
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
        deliver_at: float | None = None,
        ttl: float | None = None,
        headers: Headers | None = None,
    ) -> None:
        check_values([value], [key], [headers], self._options.value_bytes_max)
        self._bytes += len(value)
        if self._bytes > TRANSACTION_BYTES_MAX:
            raise InvalidArgument(f"a transaction holds at most {TRANSACTION_BYTES_MAX} bytes")
        due = due_ms(delay, deliver_at, self._now)
        self.drafts.append(
            Draft(
                [value],
                None if key is None else [key],
                [headers] if headers else None,
                lane_of(priority),
                due,
                expiry_ms(ttl, due, self._now),
            )
        )

    def enqueue_batch(self, values: Iterable[bytes], *, priority: str | int = "normal") -> None:
        for value in values:
            self.enqueue(value, priority=priority)

    def ack(self, message: Message) -> None:
        self.acked.append(message)

    def ack_batch(self, messages: Iterable[Message]) -> None:
        self.acked.extend(messages)


def merge_drafts(drafts: list[Draft]) -> list[Draft]:
    """Neighbours that can share a batch, joined; the order stays."""
    merged: list[Draft] = []
    for draft in drafts:
        last = merged[-1] if merged else None
        if last is not None and _alike(last, draft):
            keys = [*(last.keys or [None] * len(last.values)), *(draft.keys or [None])]
            headers = [*(last.headers or [None] * len(last.values)), *(draft.headers or [None])]
            last.values = [*last.values, *draft.values]
            last.keys = keys if any(key is not None for key in keys) else None
            last.headers = headers if any(headers) else None
        else:
            merged.append(replace(draft))
    return merged


def _alike(a: Draft, b: Draft) -> bool:
    return (a.lane, a.deliver_at_ms, a.expires_at_ms) == (b.lane, b.deliver_at_ms, b.expires_at_ms)
