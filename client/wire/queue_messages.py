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

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

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
    check_ranges,
    register,
)
from raftq.client.wire.schema import TEXT_MAX, Details, Items, WireStruct, no_details

Text = Annotated[str, Meta(max_length=TEXT_MAX)]
NO_OFFSET = -1


class LeasePartition(WireStruct, frozen=True):
    topic: Name
    partition: U31
    epoch: Epoch = EPOCH_ANY


class LeasedRange(WireStruct, frozen=True):
    """Records [start, end) under one receipt, delivered for the `attempt`-th time."""

    nonce: Offset
    start: Offset
    end: Offset
    attempt: U31
    deadline: Offset
    first_delivery: Offset = 0


class LeasedPartition(WireStruct, frozen=True):
    """Leased ranges, and the whole batches that hold them: bytes [start, start + length) of the raw
    part. Those batches may hold other records too, which are not leased."""

    topic: Name
    partition: U31
    error: ErrorCode = ""
    ranges: Items[LeasedRange] = ()
    start: U32 = 0
    length: U32 = 0
    epoch: Epoch = 0


@register
class LeaseReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 72
    carries_raw: ClassVar[bool] = True

    partitions: Items[LeasedPartition]
    throttle_ms: WaitMs = 0

    def check(self, raw_bytes: int) -> None:
        check_ranges(self.partitions, raw_bytes)


@register
class Lease(Request[LeaseReply], frozen=True):
    """Leases up to `records_max` records of these partitions, waiting until there are some.

    `holder` is who will settle them, for limits and descriptions. `lease_ms` 0: the topic's
    setting. `start` says where a group that is new begins.
    """

    kind: ClassVar[int] = 71

    group: Name
    holder: Name
    partitions: Items[LeasePartition]
    records_max: U31 = 100
    bytes_max: U31 = 1024 * 1024
    lease_ms: Offset = 0
    wait_ms: WaitMs = 0
    start: Literal["earliest", "latest"] = "earliest"


class ReceiptRow(WireStruct, frozen=True):
    nonce: Offset
    start: Offset
    end: Offset


@register
class SettleReply(WireMessage, frozen=True):
    """`errors` has a code per row, "" where the row did what was asked. `dead` counts records that
    became dead letters by this."""

    kind: ClassVar[int] = 74

    errors: Items[ErrorCode]
    dead: U31 = 0
    settled_offset: Offset = 0
    in_flight: Offset = 0
    next_visible: Offset = 0


@register
class Settle(Request[SettleReply], frozen=True):
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
    rows: Items[ReceiptRow]
    delay_ms: Offset | None = None
    reason: Text = ""
    error: Text = ""
    epoch: Epoch = EPOCH_ANY


class StoreOffset(WireStruct, frozen=True):
    """`owner_epoch` comes from the coordinator. -1 comes from a caller that is not a member; it is
    refused while the group has an owner for the partition. Each store of an owner has a higher
    `turn` than the one before. A lower one comes late, and is answered with what is stored; a step
    back on purpose has a higher one. 0: the caller does not count turns."""

    topic: Name
    partition: U31
    offset: Offset
    owner_epoch: I64 = -1
    turn: Offset = 0


class StoredOffset(WireStruct, frozen=True):
    """offset -1: nothing is stored."""

    topic: Name
    partition: U31
    error: ErrorCode = ""
    offset: I64 = NO_OFFSET
    owner_epoch: I64 = -1
    start_offset: Offset = 0
    high_watermark: Offset = 0


@register
class StoreOffsetsReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 76

    offsets: Items[StoredOffset]


@register
class StoreOffsets(Request[StoreOffsetsReply], frozen=True):
    """Stores the positions of a stream group; answered when that is replicated."""

    kind: ClassVar[int] = 75

    group: Name
    member: Name
    offsets: Items[StoreOffset]


class ReadOffset(WireStruct, frozen=True):
    """With an `owner_epoch` of 0 or more the caller claims the partition: older ones are fenced
    from then on, before the stored position is read."""

    topic: Name
    partition: U31
    owner_epoch: I64 = -1


@register
class ReadOffsetsReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 78

    offsets: Items[StoredOffset]


@register
class ReadOffsets(Request[ReadOffsetsReply], frozen=True):
    kind: ClassVar[int] = 77

    group: Name
    member: Name
    offsets: Items[ReadOffset]


@register
class SteerGroupReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 80

    offset: Offset = 0
    count: Offset = 0


@register
class SteerGroup(Request[SteerGroupReply], frozen=True):
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


class QueueGroup(WireStruct, frozen=True):
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
    counters: Annotated[Details, Meta(max_length=32)] = field(default_factory=no_details)
    lanes: Annotated[tuple[Offset, ...], Meta(max_length=8)] = ()
    """Records given out per lane since this leader took over."""
    lane_wait_ms: Annotated[tuple[Offset, ...], Meta(max_length=8)] = ()
    """Sum over those of how long they had been readable, in ms."""


@register
class DescribeQueueReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 82

    groups: Items[QueueGroup]
    start_offset: Offset = 0
    high_watermark: Offset = 0


@register
class DescribeQueue(Request[DescribeQueueReply], frozen=True):
    """The groups on one partition; "": all of them."""

    kind: ClassVar[int] = 81

    topic: Name
    partition: U31
    group: Name = ""


class DelayedRow(WireStruct, frozen=True):
    offset: Offset
    deliver_at: Offset
    priority: U8


@register
class ListDelayedReply(WireMessage, frozen=True):
    """In the order they are due. With `values` the raw part has the batches that hold them."""

    kind: ClassVar[int] = 84
    carries_raw: ClassVar[bool] = True

    records: Items[DelayedRow]
    pending: Offset = 0


@register
class ListDelayed(Request[ListDelayedReply], frozen=True):
    """`offset` asks for one record only."""

    kind: ClassVar[int] = 83

    topic: Name
    partition: U31
    skip: Offset = 0
    limit: U31 = 100
    offset: I64 = NO_OFFSET
    values: bool = False


@register
class CancelDelayedReply(WireMessage, frozen=True):
    """Those that were pending and will never be seen now."""

    kind: ClassVar[int] = 86

    cancelled: Items[Offset]


@register
class CancelDelayed(Request[CancelDelayedReply], frozen=True):
    kind: ClassVar[int] = 85

    topic: Name
    partition: U31
    offsets: Items[Offset]


@register
class DelayStatsReply(WireMessage, frozen=True):
    """Counts since this leader took over, except `pending`."""

    kind: ClassVar[int] = 88

    pending: Offset = 0
    scheduled: Offset = 0
    fired: Offset = 0
    cancelled: Offset = 0
    delay_ms_sum: Offset = 0
    late_ms_max: Offset = 0


@register
class DelayStats(Request[DelayStatsReply], frozen=True):
    kind: ClassVar[int] = 87

    topic: Name
    partition: U31


@register
class DeadLettersReply(WireMessage, frozen=True):
    """browse: the letters are the records at `offsets` in the batches of the raw part."""

    kind: ClassVar[int] = 90
    carries_raw: ClassVar[bool] = True

    count: Offset = 0
    offsets: Items[Offset] = ()
    next_offset: Offset = 0
    """Where to go on; the high watermark when all was looked at."""


@register
class DeadLetters(Request[DeadLettersReply], frozen=True):
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
    key: Annotated[bytes, Meta(max_length=65_536)] | None = None
    since: I64 = 0
    until: I64 = (1 << 63) - 1
