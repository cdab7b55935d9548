"""What the admin client says about groups, dead letters and delayed records. (Pure.)"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from raftq.client.common.names import DLQ_HEADER
from raftq.client.results import Record
from raftq.client.wire.group_messages import MemberInfo, Mode
from raftq.client.wire.layout import LANE_COUNT

LetterVerb = Literal["browse", "redrive", "purge"]


@dataclass(frozen=True, slots=True)
class GroupPartition:
    """A group on one partition.

    `position` is where its readers go on, or up to where its workers have settled everything; None
    when it has none. `lag` counts what its readers have not read, or its workers not settled.
    """

    topic: str
    partition: int
    position: int | None
    high_watermark: int
    lag: int
    member: str = ""
    in_flight: int = 0
    waiting: int = 0
    paused: bool = False
    counters: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group as its coordinator and the leaders of its partitions have it."""

    group: str
    state: str
    mode: Mode
    generation: int
    coordinator: int | None
    members: tuple[MemberInfo, ...]
    partitions: tuple[GroupPartition, ...]

    @property
    def lag(self) -> int:
        return sum([partition.lag for partition in self.partitions])


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A record that was given up, with the facts of its failure."""

    topic: str
    """Where it came from, like `partition` and `offset`."""
    partition: int
    offset: int
    dead_topic: str
    """Where it is now, like `dead_partition` and `dead_offset`."""
    dead_partition: int
    dead_offset: int
    key: bytes | None
    value: bytes
    headers: Mapping[str, bytes]
    """Its own, without the facts."""
    priority: int
    timestamp: int
    reason: str
    error: str
    group: str
    attempts: int
    first_delivery: int
    last_delivery: int
    """In ms since 1970, like `timestamp`, which is when it became a dead letter."""


@dataclass(frozen=True, slots=True)
class DelayedRecord:
    """A record that is not yet due. `offset` is its place among the delayed of its partition."""

    topic: str
    partition: int
    offset: int
    deliver_at: int
    priority: int
    key: bytes | None = None
    value: bytes | None = None
    headers: Mapping[str, bytes] | None = None


@dataclass(frozen=True, slots=True)
class DelayTotals:
    """Counts over the partitions of a topic; all but `pending` since their leaders took over."""

    pending: int = 0
    scheduled: int = 0
    fired: int = 0
    cancelled: int = 0
    late_ms_max: int = 0


class LetterPlace(NamedTuple):
    """Where a page of dead letters begins."""

    partition: int = 0
    offset: int = 0


@dataclass(slots=True)
class LetterPage:
    """Dead letters as they are stored. `next` is None when there are no more."""

    records: list[Record]
    next: LetterPlace | None = None


@dataclass(slots=True)
class Swept:
    """How many letters were sent back or forgotten; `complete` when no match is left."""

    count: int
    complete: bool


@dataclass(slots=True)
class DelayedPage:
    """Delayed records in the order they are due, and how many the topic has in all."""

    records: list[DelayedRecord]
    pending: int


@dataclass(slots=True)
class DelaySums:
    """Delayed records of some topics; all but `pending` since the leaders took over."""

    pending: int = 0
    fired: int = 0
    cancelled: int = 0
    delay_ms_sum: int = 0
    missing: int = 0
    """Partitions whose leader did not answer."""


@dataclass(slots=True)
class QueueSums:
    """Deliveries of some topics to all groups. `counters` has the nodes' own names."""

    counters: dict[str, int] = field(default_factory=dict)
    lanes: list[int] = field(default_factory=lambda: [0] * LANE_COUNT)
    lane_wait_ms: list[int] = field(default_factory=lambda: [0] * LANE_COUNT)
    in_flight: int = 0
    letters: int = 0
    """Dead letters that are neither sent back nor forgotten."""
    missing: int = 0


def dead_letter(record: Record) -> DeadLetter:
    """A record of a dead-letter topic, its facts read from its headers."""

    def fact(name: str) -> str:
        return record.headers.get(DLQ_HEADER + name, b"").decode(errors="replace")

    def number(name: str) -> int:
        text = fact(name)
        return int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1

    return DeadLetter(
        fact("topic"),
        number("partition"),
        number("offset"),
        record.topic,
        record.partition,
        record.offset,
        record.key,
        record.value,
        {name: item for name, item in record.headers.items() if not name.startswith(DLQ_HEADER)},
        record.priority,
        record.timestamp,
        fact("reason"),
        fact("error"),
        fact("group"),
        number("attempts"),
        number("first-delivery"),
        number("last-delivery"),
    )
