"""Shell: the positions of a stream group, kept by the leaders of the partitions.

`claim` fences all who owned a partition before and reads its position; `store` writes positions,
and is refused for partitions that somebody else has claimed since. Both may be repeated.
"""

from collections.abc import Iterable, Mapping

from raftq.client.common.errors import RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.net.leaders import Answers, Leaders, error_of_code
from raftq.client.wire.queue_messages import (
    ReadOffset,
    ReadOffsets,
    ReadOffsetsReply,
    StoredOffset,
    StoreOffset,
    StoreOffsets,
    StoreOffsetsReply,
)

OUTSIDE = -1  # the owner epoch of one who is no member

Stored = dict[PartitionKey, StoredOffset | RaftqError]


class Offsets:
    """The stored offsets of one group."""

    def __init__(self, group: str, leaders: Leaders) -> None:
        self._group = group
        self._leaders = leaders

    async def read(self, keys: Iterable[PartitionKey], timeout_s: float) -> Stored:
        """What is stored, for whoever wants to know."""

        def build(asked: list[PartitionKey]) -> ReadOffsets:
            return ReadOffsets(self._group, "", tuple(ReadOffset(*key) for key in asked))

        return await self._leaders.ask_each(list(keys), build, read_stored, timeout_s)

    async def claim(
        self, epochs: Mapping[PartitionKey, int], member: str, timeout_s: float
    ) -> Stored:
        """Own these from now on: one attempt, which may be repeated."""

        def build(asked: list[PartitionKey]) -> ReadOffsets:
            rows = tuple(ReadOffset(*key, epochs[key]) for key in asked)
            return ReadOffsets(self._group, member, rows)

        return await self._leaders.ask_once(list(epochs), build, read_stored, timeout_s)

    async def store(
        self,
        offsets: Mapping[PartitionKey, int],
        epochs: Mapping[PartitionKey, int],
        member: str,
        timeout_s: float,
        turn: int = 0,
    ) -> Stored:
        """Store these; answered when they are replicated. What is left on its way of an earlier
        `turn` changes nothing then."""

        def build(asked: list[PartitionKey]) -> StoreOffsets:
            rows = tuple(
                StoreOffset(*key, offsets[key], epochs.get(key, OUTSIDE), turn) for key in asked
            )
            return StoreOffsets(self._group, member, rows)

        return await self._leaders.ask_each(list(offsets), build, read_stored, timeout_s)


def read_stored(reply: ReadOffsetsReply | StoreOffsetsReply) -> Answers[StoredOffset]:
    """What an answer says of each partition."""
    return [((offset.topic, offset.partition), _error(offset), offset) for offset in reply.offsets]


def _error(one: StoredOffset) -> RaftqError | str:
    """With the epoch that fenced, where there is one."""
    if not one.error or one.owner_epoch < 0:
        return one.error
    error = error_of_code(one.error, (one.topic, one.partition))
    return error.with_details(owner_epoch=one.owner_epoch)


def first_error(stored: Stored) -> RaftqError | None:
    """The error of the first partition that has one; those of fencing before others."""
    errors = [one for one in stored.values() if isinstance(one, RaftqError)]
    return min(errors, key=lambda error: error.retriable, default=None)
