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

A partition has up to three logs: 0 data, 1 ledger, 2 delays. Each is subscribed to, replicated and
left on its own. On the wire the number of a log is called `strand`.

What is said of a copy is said for an epoch and an assignment, the version of the partition at which
the follower was made a replica; said for another one, it means nothing.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta, field

from raftq.client.wire.messages import (
    U8,
    U31,
    U32,
    Epoch,
    ErrorCode,
    NodeId,
    Nodes,
    Offset,
    Request,
    WaitMs,
    WireMessage,
    check_ranges,
    register,
)
from raftq.client.wire.schema import Bad, Items, WireStruct

EPOCHS_MAX = 64
COMMAND_BYTES_MAX = 4 * 1024 * 1024


@register
class IdentifyReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 60

    node_id: NodeId
    incarnation: Offset


@register
class Identify(Request[IdentifyReply], frozen=True):
    """Asked by a process that is about to take the place of another one."""

    kind: ClassVar[int] = 59


@register
class HeartbeatReply(WireMessage, frozen=True):
    """Whether the asked node is the controller; if not, who is, as far as it knows."""

    kind: ClassVar[int] = 62

    controls: bool
    controller: NodeId | None = None


@register
class Heartbeat(Request[HeartbeatReply], frozen=True):
    kind: ClassVar[int] = 61

    node_id: NodeId
    incarnation: Offset


@register
class ProposeReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 64

    index: Offset  # the metadata index at which the command is known to be applied
    result: Annotated[bytes, Meta(max_length=COMMAND_BYTES_MAX)] = b""  # msgpack


@register
class Propose(Request[ProposeReply], frozen=True):
    kind: ClassVar[int] = 63

    command: Annotated[bytes, Meta(max_length=COMMAND_BYTES_MAX)]
    command_id: Annotated[bytes, Meta(max_length=64)] = b""  # b"" before the first try
    timeout_ms: WaitMs = 5_000


@register
class WatchMetadataReply(WireMessage, frozen=True):
    """The raw part has the commands applied after the asked index, `lengths` apart; or, on the
    first request and when the asker is too far behind (`dump`), the whole state. `voters` are
    those of the node that answers."""

    kind: ClassVar[int] = 66
    carries_raw: ClassVar[bool] = True

    index: Offset
    lengths: Items[U32] = ()
    dump: bool = False
    controller: NodeId | None = None
    term: Offset = 0
    voters: Nodes = ()

    def check(self, raw_bytes: int) -> None:
        if not self.dump and sum(self.lengths) != raw_bytes:
            raise Bad(f".lengths: they cover {sum(self.lengths)} of {raw_bytes} bytes")


@register
class WatchMetadata(Request[WatchMetadataReply], frozen=True):
    """Waits until something is applied above `index`, there is another controller than the asker
    knows, or `wait_ms` pass. None asks for a dump."""

    kind: ClassVar[int] = 65

    index: Offset | None = None
    wait_ms: WaitMs = 10_000
    controller: NodeId | None = None
    term: Offset = 0


class Subscription(WireStruct, frozen=True):
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
    epochs: Annotated[tuple[Offset, ...], Meta(max_length=2 * EPOCHS_MAX)] = ()
    log_number: U8 = field(name="strand", default=0)
    refused: bool = False

    def pairs(self) -> list[tuple[int, int]]:
        return list(zip(self.epochs[::2], self.epochs[1::2], strict=True))


class Progress(WireStruct, frozen=True):
    """The follower's log ends here now, as durable as the topic's fsync policy asks."""

    topic_id: Offset
    partition: U31
    epoch: Epoch
    assignment: Offset
    end_offset: Offset
    log_number: U8 = field(name="strand", default=0)


class Replicated(WireStruct, frozen=True):
    """About one log of a partition, one of

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
    log_number: U8 = field(name="strand", default=0)
    assignment: Offset = 0


@register
class ReplicateReply(WireMessage, frozen=True):
    kind: ClassVar[int] = 68
    carries_raw: ClassVar[bool] = True

    partitions: Items[Replicated] = ()

    def check(self, raw_bytes: int) -> None:
        check_ranges(self.partitions, raw_bytes)
        for at, one in enumerate(self.partitions):
            if one.length and one.verb != "append":
                raise Bad(f".partitions[{at}].length: {one.verb} takes no bytes")


@register
class Replicate(Request[ReplicateReply], frozen=True):
    """`number` counts the requests of a conversation; 0 begins a new one and forgets the old."""

    kind: ClassVar[int] = 67

    node_id: NodeId
    incarnation: Offset
    number: Offset
    subscribe: Items[Subscription] = ()
    progress: Items[Progress] = ()
    leave: Items[Offset] = ()  # topic id, partition, log number, ...
    bytes_max: U31 = 1024 * 1024
    wait_ms: WaitMs = 500

    def check(self, raw_bytes: int) -> None:
        if len(self.leave) % 3:
            raise Bad(".leave: not triples of topic id, partition and log number")
        for at, one in enumerate(self.subscribe):
            if len(one.epochs) % 2:
                raise Bad(f".subscribe[{at}].epochs: not pairs of epoch and offset")


@register
class ReadReplicaReply(WireMessage, frozen=True):
    """Whole batches of the replica, the first of which holds the asked offset."""

    kind: ClassVar[int] = 70
    carries_raw: ClassVar[bool] = True


@register
class ReadReplica(Request[ReadReplicaReply], frozen=True):
    """With an `epoch`, the partition's as the caller knows it, only a member of the in-sync set
    answers, and only with what is readable. Without it, any replica answers with all that is in its
    log, readable or not: for tools that compare copies."""

    kind: ClassVar[int] = 69

    topic_id: Offset
    partition: U31
    offset: Offset
    bytes_max: U31 = 1024 * 1024
    log_number: U8 = field(name="strand", default=0)
    epoch: Epoch | None = None
