"""Pure: what clients did to a cluster, when, and what the cluster answered.

A history does not depend on how the cluster runs: simulated nodes, real processes and containers
write the same one. It can be written to a file and read back unchanged. Every published record has
a unique value. Times are seconds on one clock, the clock of all deadlines. An operation ends as

    ok        the cluster answered
    failed    it certainly did not happen
    unknown   it may have happened, or may happen later
    open      it has not ended, which means no more than unknown

Deliveries and receives are noted before the client answers them. So the history also has the
records that a client held when it died.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import inf
from typing import Any, Literal, TypeVar

from raftq.client.common.types import PartitionKey

Status = Literal["open", "ok", "failed", "unknown"]
Verb = Literal["ack", "nack", "postpone", "reject", "extend", "release"]


@dataclass(slots=True, kw_only=True)
class Operation:
    """Something a client did to one partition."""

    client: str
    topic: str
    partition: int
    at: float

    @property
    def partition_key(self) -> PartitionKey:
        return self.topic, self.partition


@dataclass(slots=True, kw_only=True)
class HistoryCall(Operation):
    """An operation that takes time and has an outcome."""

    ended: float | None = None
    status: Status = "open"
    error: str = ""

    @property
    def over(self) -> float:
        """The time at which it had certainly happened, if it happened at all."""
        return inf if self.ended is None or self.status != "ok" else self.ended

    @property
    def may_have_happened(self) -> bool:
        return self.status != "failed"

    def end(self, status: Status, at: float, error: str = "") -> None:
        self.status, self.ended, self.error = status, at, error


@dataclass(slots=True, kw_only=True)
class Publish(HistoryCall):
    """A record was sent. 0.0 means: due at once, and never expires."""

    value: str
    deliver_at: float = 0.0
    expires_at: float = 0.0
    priority: int = 2
    offset: int | None = None
    number: int = -1
    """Its position among all records of its client, whatever their outcome; -1 if unknown."""


@dataclass(slots=True, kw_only=True)
class Cancel(HistoryCall):
    """A delayed record, identified by its value, was cancelled. ok means that it was still
    pending."""

    value: str


@dataclass(slots=True, kw_only=True)
class LeasedDelivery(Operation):
    """A record was leased.

    `granted` and `deadline` are the beginning and the end of the lease by the leader's clock.
    `asked` is the time of the request by the holder's clock."""

    group: str
    offset: int
    value: str
    attempt: int
    receipt: str
    granted: float
    deadline: float
    asked: float | None = None

    @property
    def safe_until(self) -> float:
        """The time until which no other holder may have the record, by the holder's clock.

        A lease begins when it is requested, or later."""
        began = self.granted if self.asked is None else self.asked
        return began + (self.deadline - self.granted)


@dataclass(slots=True, kw_only=True)
class SettleEvent(HistoryCall):
    """A holder settled a delivery. `delay` is in seconds; None means the topic's backoff."""

    group: str
    offset: int
    receipt: str
    verb: Verb
    delay: float | None = None


@dataclass(slots=True, kw_only=True)
class Redrive(HistoryCall):
    """A dead letter was sent back to its source, `topic` and `partition`."""

    value: str


@dataclass(slots=True, kw_only=True)
class Receive(Operation):
    """A member of a stream group was given a record."""

    group: str
    offset: int
    value: str


@dataclass(slots=True, kw_only=True)
class Store(HistoryCall):
    """A group's position was stored. `owner_epoch` -1 means a client that is not a member."""

    group: str
    offset: int
    owner_epoch: int = -1


@dataclass(slots=True, kw_only=True)
class Recall(HistoryCall):
    """A stored position was read; -1 means there was none. With an epoch the partition was
    claimed."""

    group: str
    offset: int = -1
    owner_epoch: int = -1


@dataclass(slots=True, kw_only=True)
class OwnedSpan(Operation):
    """A member owned a partition from `at` to `ended`.

    revoked   it was asked to give it up and did
    lost      it learned that it had lost it before
    died      its process was killed"""

    group: str
    owner_epoch: int
    ended: float | None = None
    how: Literal["open", "revoked", "lost", "died"] = "open"


@dataclass(slots=True, kw_only=True)
class Sighting(HistoryCall):
    """A node answered a fetch as the leader of the partition.

    `end_offset` is the end of the records in its answer."""

    node: int
    epoch: int = -1
    high_watermark: int = 0
    end_offset: int = 0


@dataclass(slots=True, kw_only=True)
class Change(HistoryCall):
    """An operator changed a topic. `total` is the wanted number of partitions, `copies` of
    replicas."""

    verb: Literal["create", "delete", "grow", "move", "alter"]
    total: int = 0
    copies: int = 0


@dataclass(slots=True, kw_only=True)
class DeadLetterSeen:
    """A dead letter in the final state; topic, partition and offset are those of its source."""

    topic: str
    partition: int
    offset: int
    group: str
    value: str
    attempts: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Final:
    """The state after everything has healed and all groups have drained their partitions."""

    logs: dict[PartitionKey, list[tuple[int, str]]] = field(default_factory=dict)
    letters: list[DeadLetterSeen] = field(default_factory=list)
    drained: dict[str, list[str]] = field(default_factory=dict)
    """Groups of workers that leased until nothing was left, with their topics."""
    read: dict[str, list[str]] = field(default_factory=dict)
    """Groups of stream readers that read from the start to the end, with their topics."""
    copies: dict[tuple[str, int, str], dict[int, list[tuple[int, str]]]] = field(
        default_factory=dict
    )
    """For every log of a partition and every node with a copy: the base offset and a digest of each
    batch."""
    topics: dict[str, list[list[int]]] = field(default_factory=dict)
    """Every existing topic, with the in-sync nodes of each partition."""

    def to_json(self) -> dict[str, Any]:
        logs = [[topic, number, rows] for (topic, number), rows in self.logs.items()]
        copies = [
            [*partition_key, node, rows]
            for partition_key, nodes in self.copies.items()
            for node, rows in nodes.items()
        ]
        return {
            "logs": logs,
            "letters": [asdict(letter) for letter in self.letters],
            "drained": self.drained,
            "read": self.read,
            "copies": copies,
            "topics": self.topics,
        }

    @classmethod
    def from_json(cls, given: Mapping[str, Any]) -> "Final":
        logs = {
            (topic, number): [(offset, value) for offset, value in rows]
            for topic, number, rows in given["logs"]
        }
        made = cls(logs=logs, drained=given["drained"], read=given["read"])
        made.letters = [DeadLetterSeen(**one) for one in given["letters"]]
        made.topics = given.get("topics", {})
        for topic, number, partition_log, node, rows in given.get("copies", []):
            found = made.copies.setdefault((topic, number, partition_log), {})
            found[node] = [(offset, digest) for offset, digest in rows]
        return made


KINDS: dict[str, type[Operation]] = {
    "publish": Publish, "cancel": Cancel, "delivery": LeasedDelivery, "settlement": SettleEvent,
    "redrive": Redrive, "receive": Receive, "store": Store, "recall": Recall, "ownership":
    OwnedSpan, "sighting": Sighting, "change": Change,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}

Op = TypeVar("Op", bound=Operation)


@dataclass(slots=True)
class History:
    """Operations in the order in which they began."""

    operations: list[Operation] = field(default_factory=list)

    def add(self, operation: Op) -> Op:
        self.operations.append(operation)
        return operation

    def note(self, operation: Operation) -> None:
        """Called when an operation of this history has ended. A journal writes it down then."""

    def of(self, kind: type[Op]) -> Iterator[Op]:
        return (operation for operation in self.operations if isinstance(operation, kind))

    def counts(self) -> dict[str, int]:
        """How many operations of each kind there are, calls by outcome, for reports."""
        found: dict[str, int] = {}
        for operation in self.operations:
            name = _NAMES[type(operation)]
            if isinstance(operation, SettleEvent):
                name = operation.verb
            if isinstance(operation, HistoryCall):
                name += f" {operation.status}"
            found[name] = found.get(name, 0) + 1
        return dict(sorted(found.items()))

    def to_json(self) -> list[dict[str, Any]]:
        return [to_row(operation) for operation in self.operations]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]]) -> "History":
        return cls([from_row(row) for row in rows])


def to_row(operation: Operation) -> dict[str, Any]:
    return {"kind": _NAMES[type(operation)], **asdict(operation)}


def from_row(row: Mapping[str, Any]) -> Operation:
    fields = dict(row)
    return KINDS[fields.pop("kind")](**fields)
