"""What the HTTP handlers ask of groups, queues, delays and dead letters, and the shapes. (Pure.)

`Queues` has two implementations: over the client library (queue_calls.py and its neighbours) and
the tests' fake. No state of a member is kept by the node alone: what it needs it can ask for again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal, NamedTuple, Protocol

from raftq.client.admin.results import GroupDescription
from raftq.client.common.errors import RaftqError
from raftq.client.wire.group_messages import Mode
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.gateway import Readable
from raftq.node.http.receipts import ReceiptText

Offsets = dict[str, dict[int, int]]
"""By topic and partition."""
Verb = Literal["ack", "nack", "reject", "extend", "release"]
Reset = Literal["earliest", "latest"] | int | datetime
"""Where a group goes on: an end, an offset or a time."""
PartitionName = tuple[str, int]
TIME_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a member that joins wants."""

    client_id: str
    topics: tuple[str, ...]
    session_ms: int
    mode: Mode


@dataclass(slots=True)
class MemberAnswer:
    """What a member is told. `pending`: more will be assigned once others have let go."""

    member_id: str
    generation: int
    assigned: list[PartitionName]
    revoked: list[PartitionName] = field(default_factory=list)
    pending: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """How much a poll may bring, and how long it may wait. `lease_ms` 0: the topic's setting."""

    records_max: int
    bytes_max: int
    wait_ms: int
    lease_ms: int = 0


@dataclass(slots=True)
class Delivered:
    """A record that was given to a member; a stream's have no receipt."""

    topic: str
    partition: int
    record: Readable
    receipt: ReceiptText | None = None


@dataclass(slots=True)
class Settled:
    """What became of a receipt. `next_visible` is 0 where nothing will be delivered again."""

    settled_offset: int
    in_flight: int
    dead: bool = False
    next_visible: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SettleCall:
    """What a caller says about its receipts. Without a group it is found by the receipts."""

    verb: Verb
    receipts: Sequence[ReceiptText]
    group: str | None = None
    delay_ms: int | None = None
    reason: str = ""


class Waiting(NamedTuple):
    """A delayed record that is not yet due."""

    deliver_at: int
    partition: int
    offset: int
    priority: int


@dataclass(slots=True)
class DelaySums:
    pending: int = 0
    fired: int = 0
    cancelled: int = 0
    delay_ms_sum: int = 0
    missing: int = 0
    """Partitions whose leader did not answer."""


@dataclass(slots=True)
class QueueTotals:
    """Sums over groups and partitions. `counters` by name as delivery has them."""

    counters: dict[str, int] = field(default_factory=dict)
    lanes: list[int] = field(default_factory=lambda: [0] * 5)
    lane_wait_ms: list[int] = field(default_factory=lambda: [0] * 5)
    in_flight: int = 0
    letters: int = 0
    missing: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which dead letters are meant; what is not given matches everything."""

    group: str = ""
    reason: str = ""
    key: bytes | None = None
    since: int = 0
    until: int = TIME_MAX
    partition: int | None = None


class Cursor(NamedTuple):
    """Where browsing goes on."""

    partition: int
    offset: int


@dataclass(slots=True)
class Letters:
    """Dead letters with the partition they are in. `next` is None when all was looked at."""

    letters: list[tuple[int, Readable]]
    next: Cursor | None = None


@dataclass(slots=True)
class Swept:
    """How many letters were sent back or forgotten; `complete` when no match is left."""

    count: int
    complete: bool


class Queues(Protocol):
    """Everything raises RaftqErrors. Calls may overlap."""

    # Groups and their members.

    async def list_groups(self) -> list[str]: ...

    async def describe_group(self, group: str) -> GroupDescription: ...

    async def delete_group(self, group: str) -> None: ...

    async def join(self, group: str, wish: Wish) -> MemberAnswer: ...

    async def heartbeat(self, group: str, member_id: str, generation: int | None) -> MemberAnswer:
        """The member has let go of everything that was revoked in a generation it knows.
        FencedGeneration when the group no longer has the member."""

    async def leave(self, group: str, member_id: str) -> bool: ...

    async def poll(self, group: str, member_id: str, ask: Ask) -> list[Delivered]:
        """Waits for the first records; [] when none came. Counts as a heartbeat."""

    async def give_back(self, group: str, delivered: Sequence[Delivered]) -> None:
        """The caller hung up before it got them: they are delivered again at once, and no attempt
        is spent."""

    async def stored_offsets(self, group: str, topics: Sequence[str] | None) -> Offsets:
        """Where the group will go on; of all its topics unless some are named."""

    async def store_offsets(self, group: str, member_id: str, offsets: Offsets) -> None:
        """An empty member id: from outside, which is refused where a member owns a partition."""

    async def reset(
        self, group: str, topic: TopicState, partition: int | None, to: Reset
    ) -> Mapping[int, int]:
        """Where the group goes on now, by partition. GroupNotEmpty while members read: they would
        store their own positions over it."""

    async def settle(self, settlement: SettleCall) -> list[Settled | RaftqError]:
        """One result per receipt, in order."""

    # Delayed records.

    async def delayed(self, topic: TopicState, skip: int, limit: int) -> tuple[list[Waiting], int]:
        """Those that are due next, and how many wait in all."""

    async def find_delayed(
        self, topic: TopicState, partition: int | None, offset: int
    ) -> Waiting | None: ...

    async def cancel_delayed(self, topic: TopicState, partition: int, offset: int) -> bool:
        """Whether it was waiting, and will never be seen now."""

    async def delay_totals(self, topics: Sequence[TopicState]) -> DelaySums: ...

    # Dead letters; the topic is that of the letters.

    async def letters(
        self, topic: TopicState, which: Filter, cursor: Cursor, limit: int
    ) -> Letters: ...

    async def redrive(
        self, topic: TopicState, which: Filter, limit: int, rate: float | None
    ) -> Swept:
        """Send letters back to where they came from, at most `rate` a second, for as long as one
        request may take."""

    async def purge(self, topic: TopicState, which: Filter, limit: int) -> Swept: ...

    async def queue_totals(self, topics: Sequence[TopicState]) -> QueueTotals: ...

    async def close(self) -> None: ...
