"""Receipts as text: `topic:partition:offset:deliveryCount:nonce`. (Pure.)"""

from typing import Any, NamedTuple

from raftq.node.http.errors import invalid
from raftq.node.http.kinds import INTEGER_MAX, Kind, Schema, Text
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag

_PATTERN = r"[A-Za-z0-9._-]{1,249}:[0-9]{1,9}:[0-9]{1,18}:[0-9]{1,9}:[0-9]{1,19}"
_TEXT = Text(320, _PATTERN)


class ReceiptText(NamedTuple):
    """Proof of one delivery of one record."""

    topic: str
    partition: int
    offset: int
    attempt: int
    nonce: int

    def show(self) -> str:
        return ":".join(map(str, self))

    def is_of(self, group: str) -> bool:
        """Whether it can be of that group; a few groups share their mark."""
        return self.nonce >> TAG_SHIFT == group_tag(group)


class ReceiptHandle(Kind):
    def schema(self) -> Schema:
        return _TEXT.schema()

    def read(self, path: str, given: Any) -> ReceiptText:
        topic, partition, offset, attempt, nonce = _TEXT.read(path, given).split(":")
        if int(nonce) > INTEGER_MAX:
            raise invalid(path, "is no receipt")
        return ReceiptText(topic, int(partition), int(offset), int(attempt), int(nonce))
