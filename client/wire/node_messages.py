"""What nodes say to each other, on connections opened with the role "node". (Pure.)

    kind  request           reply
    59    Identify          IdentifyReply            who is at this address
    61    Heartbeat         HeartbeatReply           to the controller, keeps the node's lease
    63    Propose           ProposeReply             from a node that is no voter, to one that is
    65    WatchMetadata     WatchMetadataReply +raw  the same: what was decided since an index
    67    Replicate         ReplicateReply +raw      from a follower to a leader, see below
    69    ReadReplica       ReadReplicaReply +raw    a copy of batches that are damaged here

One Replicate conversation runs per pair of nodes and carries all partitions that one leads and the
other follows. The leader remembers what the follower subscribed to, so a request names only what
changed: new subscriptions, and the ends of logs that grew. The leader parks it until there is
something to say about any subscribed partition, and then says it about all of those at once.

A partition has up to three logs, its strands: 0 data, 1 ledger, 2 delays. Each is subscribed to,
replicated and left on its own.

What is said of a copy is said for an epoch and an assignment, the version of the partition at which
the follower was made a replica; said for another one, it means nothing.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from raftq.client.wire.messages import (
    U8,
    U31,
    U32,
    Epoch,
    ErrorCode,
    NodeId,
    Offset,
    Request,
    WaitMs,
    WireMessage,
    register,
)
from raftq.client.wire.schema import ITEMS_MAX, Bad, Most

EPOCHS_MAX = 64
COMMAND_BYTES_MAX = 4 * 1024 * 1024


@register
@dataclass(frozen=True, slots=True)
class IdentifyReply(WireMessage):
    kind: ClassVar[int] = 60

    node_id: NodeId
    incarnation: Offset


@register
@dataclass(frozen=True, slots=True)
class Identify(Request[IdentifyReply]):
    """Asked by a process that is about to take the place of another one."""

    kind: ClassVar[int] = 59


@register
@dataclass(frozen=True, slots=True)
class HeartbeatReply(WireMessage):
    """Whether the asked node is the controller; if not, who is, as far as it knows."""

    kind: ClassVar[int] = 62

    controls: bool
    controller: NodeId | None = None


@register
@dataclass(frozen=True, slots=True)
class Heartbeat(Request[HeartbeatReply]):
    kind: ClassVar[int] = 61

    node_id: NodeId
    incarnation: Offset


@register
@dataclass(frozen=True, slots=True)
class ProposeReply(WireMessage):
    kind: ClassVar[int] = 64

    index: Offset  # the metadata index at which the command is known to be applied
    result: Annotated[bytes, Most(COMMAND_BYTES_MAX)] = b""  # msgpack


@register
@dataclass(frozen=True, slots=True)
class Propose(Request[ProposeReply]):
    kind: ClassVar[int] = 63

    command: Annotated[bytes, Most(COMMAND_BYTES_MAX)]
    command_id: Annotated[bytes, Most(64)] = b""  # b"" before the first try
    timeout_ms: WaitMs = 5_000


@register
@dataclass(frozen=True, slots=True)
class WatchMetadataReply(WireMessage):
    """The raw part has the commands applied after the asked index, `lengths` apart; or, on the
    first request and when the asker is too far behind (`dump`), the whole state. `voters` are
    those of the node that answers."""

    kind: ClassVar[int] = 66
    carries_raw: ClassVar[bool] = True

    index: Offset
    lengths: Annotated[tuple[U32, ...], Most(ITEMS_MAX)] = ()
    dump: bool = False
    controller: NodeId | None = None
    term: Offset = 0
    voters: Annotated[tuple[NodeId, ...], Most(64)] = ()

    def check(self, raw_bytes: int) -> None:
        if not self.dump and sum(self.lengths) != raw_bytes:
            raise Bad(f".lengths: they cover {sum(self.lengths)} of {raw_bytes} bytes")


@register
@dataclass(frozen=True, slots=True)
class WatchMetadata(Request[WatchMetadataReply]):
    """Waits until something is applied above `index`, there is another controller than the asker
    knows, or `wait_ms` pass. None asks for a dump."""

    kind: ClassVar[int] = 65

    index: Offset | None = None
    wait_ms: WaitMs = 10_000
    controller: NodeId | None = None
    term: Offset = 0


@dataclass(frozen=True, slots=True)
class Subscription:
    """A follower's log as it is: where it ends and which epochs wrote its latest part.

    `epochs` are (epoch, start offset) alternating, oldest first, at most EPOCHS_MAX pairs.
    `refused`: what was handed over from its end on failed its checks there.
    """

    topic_id: Offset
    partition: U31
    epoch: Epoch
    assignment: Offset
    start_offset: Offset
    end_offset: Offset
    epochs: Annotated[tuple[Offset, ...], Most(2 * EPOCHS_MAX)] = ()
    strand: U8 = 0
    refused: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.epochs[::2], self.epochs[1::2], strict=True))


@dataclass(frozen=True, slots=True)
class Progress:
    """The follower's log ends here now, as durable as the topic's fsync policy asks."""

    topic_id: Offset
    partition: U31
    epoch: Epoch
    assignment: Offset
    end_offset: Offset
    strand: U8 = 0


@dataclass(frozen=True, slots=True)
class Replicated:
    """About one strand of a partition, one of

    append    bytes [start, start + length) of the raw part go to the end of the log
    truncate  the logs agree below `offset` only: cut there, then subscribe anew
    reset     the leader keeps nothing the follower has: begin anew at `offset`, then subscribe
    refuse    `error` says why; the subscription is gone

    The leader's `start_offset` is also the follower's, once that has everything readable.
    """

    topic_id: Offset
    partition: U31
    epoch: Epoch
    verb: Literal["append", "truncate", "reset", "refuse"]
    high_watermark: Offset = 0
    start_offset: Offset = 0
    offset: Offset = 0
    start: U32 = 0
    length: U32 = 0
    error: ErrorCode = ""
    strand: U8 = 0
    assignment: Offset = 0


@register
@dataclass(frozen=True, slots=True)
class ReplicateReply(WireMessage):
    kind: ClassVar[int] = 68
    carries_raw: ClassVar[bool] = True

    partitions: Annotated[tuple[Replicated, ...], Most(ITEMS_MAX)] = ()

    def check(self, raw_bytes: int) -> None:
        """The ranges follow each other without gap or overlap and cover the raw part."""
        end = 0
        for at, one in enumerate(self.partitions):
            if one.length:
                if one.start != end or one.verb != "append":
                    raise Bad(f".partitions[{at}].start: {one.start} is not {end}")
                end += one.length
        if end != raw_bytes:
            raise Bad(f".partitions: they cover {end} of {raw_bytes} bytes")


@register
@dataclass(frozen=True, slots=True)
class Replicate(Request[ReplicateReply]):
    """`number` counts the requests of a conversation; 0 begins a new one and forgets the old."""

    kind: ClassVar[int] = 67

    node_id: NodeId
    incarnation: Offset
    number: Offset
    subscribe: Annotated[tuple[Subscription, ...], Most(ITEMS_MAX)] = ()
    progress: Annotated[tuple[Progress, ...], Most(ITEMS_MAX)] = ()
    leave: Annotated[tuple[Offset, ...], Most(ITEMS_MAX)] = ()  # topic id, partition, strand, ...
    bytes_max: U31 = 1024 * 1024
    wait_ms: WaitMs = 500

    def check(self, raw_bytes: int) -> None:
        if len(self.leave) % 3:
            raise Bad(".leave: not triples of topic id, partition and strand")
        for at, one in enumerate(self.subscribe):
            if len(one.epochs) % 2:
                raise Bad(f".subscribe[{at}].epochs: not pairs of epoch and offset")


@register
@dataclass(frozen=True, slots=True)
class ReadReplicaReply(WireMessage):
    """Whole batches of the replica, the first of which holds the asked offset."""

    kind: ClassVar[int] = 70
    carries_raw: ClassVar[bool] = True


@register
@dataclass(frozen=True, slots=True)
class ReadReplica(Request[ReadReplicaReply]):
    """With an `epoch`, that of the partition as the asker knows it: only what is readable, and only
    from a member of its in-sync set. Without: all that is in the log of any replica, be it readable
    or not, for who compares copies."""

    kind: ClassVar[int] = 69

    topic_id: Offset
    partition: U31
    offset: Offset
    bytes_max: U31 = 1024 * 1024
    strand: U8 = 0
    epoch: Epoch | None = None
