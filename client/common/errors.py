"""Every error RaftQ raises, with the decision it carries.

    RaftqError
    ├── RequestError            the request was understood and refused
    │   ├── LeaseLost           the receipt no longer holds its record
    │   │   ├── LeaseExpired    its time ran out
    │   │   ├── LeaseReplaced   the record was delivered again under another receipt
    │   │   ├── LeaseForeign    the receipt belongs to another group
    │   │   └── AlreadySettled  the record was settled before
    │   ├── OffsetOutOfRange    no such offset is kept
    │   ├── TooLarge            a record or batch is over a limit
    │   ├── QueueFull           a limit on messages or bytes is reached
    │   ├── QueueClosed         the queue was closed
    │   ├── UnknownCheckpoint   no checkpoint has that name
    │   ├── UnknownTopic        no topic has that name, as far as the node knows
    │   ├── UnknownPartition    the topic has no such partition, or the node holds no copy of it
    │   ├── NotLeader           another node leads the partition (details: leader, epoch)
    │   │   └── LeaderLost      it was replaced with this half done: unknown
    │   ├── FencedEpoch         the partition has a newer leader epoch (details: epoch)
    │   ├── FencedGeneration    the group has moved on to a newer generation
    │   ├── FencedProducer      a newer instance of the producer has taken over
    │   ├── OutOfOrderSequence  a batch before this one is missing
    │   ├── NotEnoughReplicas   too few replicas are in sync to accept the write
    │   ├── Throttled           too much at once; try again later (details: wait_ms)
    │   ├── NodeStopping        the node drains and takes no new requests
    │   ├── TopicExists         a topic has that name already
    │   ├── NodeIdTaken         a node of that id is alive (details: incarnation, host, port)
    │   ├── UnknownGroup        no group has that name
    │   ├── GroupNotEmpty       the group still has members
    │   ├── AccessDenied        the caller has not proved that it may
    │   └── InvalidArgument     a value that no caller should pass
    ├── TransportError          the way to the node
    │   ├── ConnectFailed       no connection was made; nothing was sent
    │   ├── ConnectionLost      the connection ended before the answer
    │   └── RequestTimeout      no answer in time
    ├── ProtocolError           what was said does not follow the wire protocol
    │   ├── LocalProtocolError  this side was about to send it
    │   ├── RemoteProtocolError  the other side sent it
    │   └── UnsupportedVersion  the two sides have no protocol version in common
    ├── InternalError           the node failed to handle the request; its log says why
    ├── UnknownCode             the node sent an error that this version has no class for
    ├── StorageError            the disk or what is on it
    │   ├── CorruptBatch        a batch fails its checks
    │   ├── CorruptFile         another file fails its checks
    │   ├── UnknownFormat       written by a newer version
    │   ├── DiskFull            no space left; nothing was written
    │   ├── DirectoryLocked     another process has the directory open
    │   ├── DirectoryReadOnly   the directory cannot be written to
    │   └── StorageFailed       a write or fsync failed; the log refuses writes until it is reopened
    ├── ConsensusError          the replicated state machine could not take or decide a command
    │   ├── NoLeader            no leader took the command in time; it was not applied
    │   ├── OutcomeUnknown      the command was handed on; whether it was applied is not known
    │   ├── ConsensusStopped    this node's part of the cluster is stopped
    │   └── ConsensusBroken     what this node knows contradicts itself; it must not go on
    └── ConfigError             settings that contradict each other or make no sense

`outcome` says whether the refused operation can have taken effect: "failed" means it did not,
"unknown" means it may have. `retriable` says whether the same call can succeed later, and
`refresh_route` whether the caller should first ask again which node leads the partition. A class
says what usually holds; an error may say otherwise for itself (a timeout before sending has failed,
after sending it is unknown). `details` are facts for programs, such as the epoch that fenced.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, Self

Outcome = Literal["failed", "unknown"]
Detail = int | str | bool | None

_NO_DETAILS: Mapping[str, Detail] = MappingProxyType({})


class RaftqError(Exception):
    """Base of every error of this package."""

    code: ClassVar[str] = "error"
    retriable: bool = False
    refresh_route: bool = False
    outcome: Outcome = "failed"
    details: Mapping[str, Detail] = _NO_DETAILS
    registry: ClassVar[dict[str, type["RaftqError"]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        code = cls.__dict__.get("code")
        if code is None:
            raise TypeError(f"{cls.__name__} needs a code of its own")
        if code in RaftqError.registry:
            raise TypeError(f"{cls.__name__} repeats the code {code!r}")
        RaftqError.registry[code] = cls

    def with_details(self, **details: Detail) -> Self:
        """The same error, with facts for programs."""
        self.details = details
        return self

    def with_outcome(self, outcome: Outcome) -> Self:
        """The same error, knowing better than its class whether the operation took effect."""
        self.outcome = outcome
        return self


RaftqError.registry[RaftqError.code] = RaftqError


class RequestError(RaftqError):
    code = "request_refused"


class LeaseLost(RequestError):
    code = "lease_lost"


class LeaseExpired(LeaseLost):
    code = "lease_expired"


class LeaseReplaced(LeaseLost):
    code = "lease_replaced"


class LeaseForeign(LeaseLost):
    code = "lease_foreign"


class AlreadySettled(LeaseLost):
    code = "already_settled"


class OffsetOutOfRange(RequestError):
    code = "offset_out_of_range"


class TooLarge(RequestError):
    code = "too_large"


class QueueFull(RequestError):
    code = "queue_full"
    retriable = True


class QueueClosed(RequestError):
    code = "queue_closed"


class UnknownCheckpoint(RequestError):
    code = "unknown_checkpoint"


class UnknownTopic(RequestError):
    code = "unknown_topic"
    retriable = True
    refresh_route = True


class UnknownPartition(RequestError):
    code = "unknown_partition"
    retriable = True
    refresh_route = True


class NotLeader(RequestError):
    code = "not_leader"
    retriable = True
    refresh_route = True


class LeaderLost(NotLeader):
    """The leader wrote it, and was replaced before enough replicas had it."""

    code = "leader_lost"
    outcome = "unknown"


class FencedEpoch(RequestError):
    code = "fenced_epoch"
    retriable = True
    refresh_route = True


class FencedGeneration(RequestError):
    code = "fenced_generation"


class FencedProducer(RequestError):
    code = "fenced_producer"


class OutOfOrderSequence(RequestError):
    code = "out_of_order_sequence"


class NotEnoughReplicas(RequestError):
    code = "not_enough_replicas"
    retriable = True


class Throttled(RequestError):
    code = "throttled"
    retriable = True


class NodeStopping(RequestError):
    code = "node_stopping"
    retriable = True
    refresh_route = True


class TopicExists(RequestError):
    code = "topic_exists"


class NodeIdTaken(RequestError):
    code = "node_id_taken"


class UnknownGroup(RequestError):
    code = "unknown_group"


class GroupNotEmpty(RequestError):
    code = "group_not_empty"


class AccessDenied(RequestError):
    code = "access_denied"


class InvalidArgument(RequestError, ValueError):
    code = "invalid_argument"


class TransportError(RaftqError):
    code = "transport"
    retriable = True
    refresh_route = True


class ConnectFailed(TransportError):
    code = "connect_failed"


class ConnectionLost(TransportError):
    code = "connection_lost"
    outcome = "unknown"


class RequestTimeout(TransportError):
    code = "request_timeout"
    outcome = "unknown"


class ProtocolError(RaftqError):
    code = "protocol"


class LocalProtocolError(ProtocolError):
    code = "local_protocol"


class RemoteProtocolError(ProtocolError):
    code = "remote_protocol"
    outcome = "unknown"


class UnsupportedVersion(ProtocolError):
    code = "unsupported_version"


class InternalError(RaftqError):
    code = "internal"
    outcome = "unknown"


class UnknownCode(RaftqError):
    code = "unknown_code"
    outcome = "unknown"


class StorageError(RaftqError):
    code = "storage"


class CorruptBatch(StorageError):
    code = "corrupt_batch"


class CorruptFile(StorageError):
    code = "corrupt_file"


class UnknownFormat(StorageError):
    code = "unknown_format"


class DiskFull(StorageError):
    code = "disk_full"
    retriable = True


class DirectoryLocked(StorageError):
    code = "directory_locked"
    retriable = True


class DirectoryReadOnly(StorageError):
    code = "directory_read_only"


class StorageFailed(StorageError):
    code = "storage_failed"
    outcome = "unknown"


class ConsensusError(RaftqError):
    code = "consensus"


class NoLeader(ConsensusError):
    code = "no_leader"
    retriable = True


class OutcomeUnknown(ConsensusError):
    code = "outcome_unknown"
    retriable = True
    outcome = "unknown"


class ConsensusStopped(ConsensusError):
    code = "consensus_stopped"


class ConsensusBroken(ConsensusError):
    code = "consensus_broken"
    outcome = "unknown"


class ConfigError(RaftqError):
    code = "config"
