"""Shell: the positions of a stream group, which the leaders of the partitions keep.

`claim` fences all previous owners of a partition and reads its position. `store` writes positions;
it is refused for partitions that another member has claimed since. Both may be repeated.
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

OUTSIDE = -1  # the owner epoch of a client that is no member

Stored = dict[PartitionKey, StoredOffset | RaftqError]


class Offsets:
    """The stored offsets of one group."""

    def __init__(self, group: str, leaders: Leaders) -> None:
        self._group = group
        self._leaders = leaders

    async def read(self, keys: Iterable[PartitionKey], timeout_s: float) -> Stored:
        """The stored offsets, without a claim."""

        def build(asked: list[PartitionKey]) -> ReadOffsets:
            return ReadOffsets(self._group, "", tuple(ReadOffset(*key) for key in asked))

        return await self._leaders.ask_each(list(keys), build, read_stored, timeout_s)

    async def claim(
        self, epochs: Mapping[PartitionKey, int], member: str, timeout_s: float
    ) -> Stored:
        """Owns these from now on. One attempt, which may be repeated."""

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
        """Stores these offsets. Answered when they are replicated.

        After that, requests of an earlier `turn` that are still on their way change nothing."""

        def build(asked: list[PartitionKey]) -> StoreOffsets:
            rows = tuple(
                StoreOffset(*key, offsets[key], epochs.get(key, OUTSIDE), turn) for key in asked
            )
            return StoreOffsets(self._group, member, rows)

        return await self._leaders.ask_each(list(offsets), build, read_stored, timeout_s)


def read_stored(reply: ReadOffsetsReply | StoreOffsetsReply) -> Answers[StoredOffset]:
    """The stored offset or the error of each partition in an answer."""
    return [((offset.topic, offset.partition), _error(offset), offset) for offset in reply.offsets]


def _error(one: StoredOffset) -> RaftqError | str:
    """The error for a row, with the epoch that fenced it, if there is one."""
    if not one.error or one.owner_epoch < 0:
        return one.error
    error = error_of_code(one.error, (one.topic, one.partition))
    return error.with_details(owner_epoch=one.owner_epoch)


def first_error(stored: Stored) -> RaftqError | None:
    """The error of the first partition that has one; fencing errors come first."""
    errors = [answer for answer in stored.values() if isinstance(answer, RaftqError)]
    return min(errors, key=lambda error: error.retriable, default=None)
