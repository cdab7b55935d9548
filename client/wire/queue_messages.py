"""Requests of queue workers and stream groups about a partition, and of delays. (Pure.)

    kind  request           reply
    71    Lease             LeaseReply +raw
    73    Settle            SettleReply
    75    StoreOffsets      StoreOffsetsReply
    77    ReadOffsets       ReadOffsetsReply
    79    SteerGroup        SteerGroupReply
    81    DescribeQueue     DescribeQueueReply
    83    ListDelayed       ListDelayedReply +raw
    85    CancelDelayed     CancelDelayedReply
    87    DelayStats        DelayStatsReply
    89    DeadLetters       DeadLettersReply +raw

All of them go to the leader of the partitions they name. What concerns one partition of several is
answered with an error code beside it, so that one partition that moved does not spoil the others.
A receipt is a nonce and the offsets it covers; times are wall-clock ms.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from raftq.client.common.errors import Detail
from raftq.client.wire.messages import (
    EPOCH_ANY,
    I64,
    U8,
    U31,
    U32,
    Epoch,
    ErrorCode,
    Name,
    Offset,
    Request,
    WaitMs,
    WireMessage,
    register,
)
from raftq.client.wire.schema import ITEMS_MAX, TEXT_MAX, Bad, Most

Text = Annotated[str, Most(TEXT_MAX)]
NO_OFFSET = -1


@dataclass(frozen=True, slots=True)
class LeasePartition:
    topic: Name
    partition: U31
    epoch: Epoch = EPOCH_ANY


@dataclass(frozen=True, slots=True)
class LeasedRange:
    """Records [start, end) under one receipt, delivered for the `attempt`-th time."""

    nonce: Offset
    start: Offset
    end: Offset
    attempt: U31
    deadline: Offset
    first_delivery: Offset = 0


@dataclass(frozen=True, slots=True)
class LeasedPartition:
    """Leased ranges, and the whole batches that hold them: bytes [start, start + length) of the raw
    part. Those batches may hold other records too, which are not leased."""

    topic: Name
    partition: U31
    error: ErrorCode = ""
    ranges: Annotated[tuple[LeasedRange, ...], Most(ITEMS_MAX)] = ()
    start: U32 = 0
    length: U32 = 0
    epoch: Epoch = 0


@register
@dataclass(frozen=True, slots=True)
class LeaseReply(WireMessage):
    kind: ClassVar[int] = 72
    carries_raw: ClassVar[bool] = True

    partitions: tuple[LeasedPartition, ...]
    throttle_ms: WaitMs = 0

    def check(self, raw_bytes: int) -> None:
        """The ranges follow each other without gap or overlap and cover the raw part."""
        end = 0
        for at, one in enumerate(self.partitions):
            if one.length:
                if one.start != end:
                    raise Bad(f".partitions[{at}].start: {one.start} is not {end}")
                end += one.length
        if end != raw_bytes:
            raise Bad(f".partitions: they cover {end} of {raw_bytes} bytes")


@register
@dataclass(frozen=True, slots=True)
class Lease(Request[LeaseReply]):
    """Leases up to `records_max` records of these partitions, waiting until there are some.

    `holder` is who will settle them, for limits and descriptions. `lease_ms` 0: the topic's
    setting. `start` says where a group that is new begins.
    """

    kind: ClassVar[int] = 71

    group: Name
    holder: Name
    partitions: Annotated[tuple[LeasePartition, ...], Most(ITEMS_MAX)]
    records_max: U31 = 100
    bytes_max: U31 = 1024 * 1024
    lease_ms: Offset = 0
    wait_ms: WaitMs = 0
    start: Literal["earliest", "latest"] = "earliest"


@dataclass(frozen=True, slots=True)
class ReceiptRow:
    nonce: Offset
    start: Offset
    end: Offset


@register
@dataclass(frozen=True, slots=True)
class SettleReply(WireMessage):
    """`errors` has a code per row, "" where the row did what was asked. `dead` counts records that
    became dead letters by this."""

    kind: ClassVar[int] = 74

    errors: Annotated[tuple[ErrorCode, ...], Most(ITEMS_MAX)]
    dead: U31 = 0
    settled_offset: Offset = 0
    in_flight: Offset = 0
    next_visible: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class Settle(Request[SettleReply]):
    """What a holder says about records it has leased. Answered when it is replicated.

    ack       done
    nack      again after `delay_ms`, or (None) after the backoff; a dead letter when attempts end
    postpone  again after `delay_ms`, no attempt spent
    reject    a dead letter now, with `reason` and `error`
    extend    the lease ends `delay_ms` from now
    release   again at once, no attempt spent
    """

    kind: ClassVar[int] = 73

    group: Name
    topic: Name
    partition: U31
    verb: Literal["ack", "nack", "postpone", "reject", "extend", "release"]
    rows: Annotated[tuple[ReceiptRow, ...], Most(ITEMS_MAX)]
    delay_ms: Offset | None = None
    reason: Text = ""
    error: Text = ""
    epoch: Epoch = EPOCH_ANY


@dataclass(frozen=True, slots=True)
class StoreOffset:
    """`owner_epoch` is the one the coordinator gave; -1 from outside the group's membership, which
    is refused while the group has an owner for the partition. Each store of an owner has a higher
    `turn` than the one before, which tells one that comes late from a step back on purpose: it is
    answered with what is stored. 0: it is not told."""

    topic: Name
    partition: U31
    offset: Offset
    owner_epoch: I64 = -1
    turn: Offset = 0


@dataclass(frozen=True, slots=True)
class StoredOffset:
    """offset -1: nothing is stored."""

    topic: Name
    partition: U31
    error: ErrorCode = ""
    offset: I64 = NO_OFFSET
    owner_epoch: I64 = -1
    start_offset: Offset = 0
    high_watermark: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class StoreOffsetsReply(WireMessage):
    kind: ClassVar[int] = 76

    offsets: Annotated[tuple[StoredOffset, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class StoreOffsets(Request[StoreOffsetsReply]):
    """Stores the positions of a stream group; answered when that is replicated."""

    kind: ClassVar[int] = 75

    group: Name
    member: Name
    offsets: Annotated[tuple[StoreOffset, ...], Most(ITEMS_MAX)]


@dataclass(frozen=True, slots=True)
class ReadOffset:
    """With an `owner_epoch` of 0 or more the caller claims the partition: older ones are fenced
    from then on, before the stored position is read."""

    topic: Name
    partition: U31
    owner_epoch: I64 = -1


@register
@dataclass(frozen=True, slots=True)
class ReadOffsetsReply(WireMessage):
    kind: ClassVar[int] = 78

    offsets: Annotated[tuple[StoredOffset, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class ReadOffsets(Request[ReadOffsetsReply]):
    kind: ClassVar[int] = 77

    group: Name
    member: Name
    offsets: Annotated[tuple[ReadOffset, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class SteerGroupReply(WireMessage):
    kind: ClassVar[int] = 80

    offset: Offset = 0
    count: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class SteerGroup(Request[SteerGroupReply]):
    """Changes a group on one partition.

    reset   go on at `to` ("offset" or "time": `at`), for queue workers and stream readers alike
    purge   everything there now counts as settled
    delete  forget the group here
    """

    kind: ClassVar[int] = 79

    group: Name
    topic: Name
    partition: U31
    verb: Literal["reset", "pause", "resume", "purge", "delete"]
    to: Literal["earliest", "latest", "offset", "time"] = "earliest"
    at: I64 = 0


@dataclass(frozen=True, slots=True)
class QueueGroup:
    """A group on one partition. `counters` by name as in delivery/state.py's Counters."""

    group: Name
    settled_offset: Offset = 0
    stored_offset: I64 = NO_OFFSET
    owner_epoch: I64 = -1
    member: Name = ""
    in_flight: Offset = 0
    waiting: Offset = 0
    unsettled: Offset = 0
    paused: bool = False
    counters: Annotated[Mapping[str, Detail], Most(32)] = field(default_factory=dict)
    lanes: Annotated[tuple[Offset, ...], Most(8)] = ()
    """Records given out per lane since this leader took over."""
    lane_wait_ms: Annotated[tuple[Offset, ...], Most(8)] = ()
    """Sum over those of how long they had been readable, in ms."""


@register
@dataclass(frozen=True, slots=True)
class DescribeQueueReply(WireMessage):
    kind: ClassVar[int] = 82

    groups: Annotated[tuple[QueueGroup, ...], Most(ITEMS_MAX)]
    start_offset: Offset = 0
    high_watermark: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class DescribeQueue(Request[DescribeQueueReply]):
    """The groups on one partition; "": all of them."""

    kind: ClassVar[int] = 81

    topic: Name
    partition: U31
    group: Name = ""


@dataclass(frozen=True, slots=True)
class DelayedRow:
    offset: Offset
    deliver_at: Offset
    priority: U8


@register
@dataclass(frozen=True, slots=True)
class ListDelayedReply(WireMessage):
    """In the order they are due. With `values` the raw part has the batches that hold them."""

    kind: ClassVar[int] = 84
    carries_raw: ClassVar[bool] = True

    records: Annotated[tuple[DelayedRow, ...], Most(ITEMS_MAX)]
    pending: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class ListDelayed(Request[ListDelayedReply]):
    """`offset` asks for one record only."""

    kind: ClassVar[int] = 83

    topic: Name
    partition: U31
    skip: Offset = 0
    limit: U31 = 100
    offset: I64 = NO_OFFSET
    values: bool = False


@register
@dataclass(frozen=True, slots=True)
class CancelDelayedReply(WireMessage):
    """Those that were pending and will never be seen now."""

    kind: ClassVar[int] = 86

    cancelled: Annotated[tuple[Offset, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class CancelDelayed(Request[CancelDelayedReply]):
    kind: ClassVar[int] = 85

    topic: Name
    partition: U31
    offsets: Annotated[tuple[Offset, ...], Most(ITEMS_MAX)]


@register
@dataclass(frozen=True, slots=True)
class DelayStatsReply(WireMessage):
    """Counts since this leader took over, except `pending`."""

    kind: ClassVar[int] = 88

    pending: Offset = 0
    scheduled: Offset = 0
    fired: Offset = 0
    cancelled: Offset = 0
    delay_ms_sum: Offset = 0
    late_ms_max: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class DelayStats(Request[DelayStatsReply]):
    kind: ClassVar[int] = 87

    topic: Name
    partition: U31


@register
@dataclass(frozen=True, slots=True)
class DeadLettersReply(WireMessage):
    """browse: the letters are the records at `offsets` in the batches of the raw part."""

    kind: ClassVar[int] = 90
    carries_raw: ClassVar[bool] = True

    count: Offset = 0
    offsets: Annotated[tuple[Offset, ...], Most(ITEMS_MAX)] = ()
    next_offset: Offset = 0
    """Where to go on; the high watermark when all was looked at."""


@register
@dataclass(frozen=True, slots=True)
class DeadLetters(Request[DeadLettersReply]):
    """Looks at the letters of one partition of a dead-letter topic that are not gone, from `offset`
    on, at most `limit` that match; redrive sends them back to where they came from, purge forgets
    them. Filters that are empty match everything; `key` None matches every key."""

    kind: ClassVar[int] = 89

    topic: Name
    partition: U31
    verb: Literal["browse", "redrive", "purge"]
    offset: Offset = 0
    limit: U31 = 100
    group: Name = ""
    reason: Text = ""
    key: Annotated[bytes, Most(65_536)] | None = None
    since: I64 = 0
    until: I64 = (1 << 63) - 1
