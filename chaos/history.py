"""What clients did to a cluster, when, and what they were told. (Pure.)

A history knows nothing of how the cluster runs: simulated nodes, real processes and containers
write the same one, and it goes to a file and comes back unchanged. Every record that is published
has a value of its own. Times are seconds on one clock, the one that deadlines are told in. An
operation ends

    ok        it was answered
    failed    it certainly did not happen
    unknown   it may have happened, or may happen later
    open      it has not ended, which says no more than unknown

Deliveries and receives are noted before anything is said about them, so that what a client died
with is in the history, too.
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
        """When it had certainly happened, if it happened at all."""
        return inf if self.ended is None or self.status != "ok" else self.ended

    @property
    def may_have_happened(self) -> bool:
        return self.status != "failed"

    def end(self, status: Status, at: float, error: str = "") -> None:
        self.status, self.ended, self.error = status, at, error


@dataclass(slots=True, kw_only=True)
class Publish(HistoryCall):
    """0.0: due at once, ends never."""

    value: str
    deliver_at: float = 0.0
    expires_at: float = 0.0
    priority: int = 2
    offset: int | None = None
    number: int = -1
    """Its place among all that its client sent, whatever became of them; -1: nobody knows."""


@dataclass(slots=True, kw_only=True)
class Cancel(HistoryCall):
    """Of a delayed record, known by its value. ok means that it was pending and is not any more."""

    value: str


@dataclass(slots=True, kw_only=True)
class LeasedDelivery(Operation):
    """A record was leased. `granted` is when the leader decided so, `deadline` when it ends, by
    the leader's clock; `asked` is when the holder asked for it, by its own."""

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
        """Until when nobody else may have it, by the holder's clock: a lease begins when it is
        asked for, or later."""
        began = self.granted if self.asked is None else self.asked
        return began + (self.deadline - self.granted)


@dataclass(slots=True, kw_only=True)
class SettleEvent(HistoryCall):
    """What a holder said about a delivery. `delay` in seconds; None: the backoff."""

    group: str
    offset: int
    receipt: str
    verb: Verb
    delay: float | None = None


@dataclass(slots=True, kw_only=True)
class Redrive(HistoryCall):
    """A dead letter was sent back; `topic` and `partition` are where it came from."""

    value: str


@dataclass(slots=True, kw_only=True)
class Receive(Operation):
    """A member of a stream group was given a record."""

    group: str
    offset: int
    value: str


@dataclass(slots=True, kw_only=True)
class Store(HistoryCall):
    """A group's position was stored. `owner_epoch` -1: from outside the group's membership."""

    group: str
    offset: int
    owner_epoch: int = -1


@dataclass(slots=True, kw_only=True)
class Recall(HistoryCall):
    """A stored position was read; -1: there was none. With an epoch the partition was claimed."""

    group: str
    offset: int = -1
    owner_epoch: int = -1


@dataclass(slots=True, kw_only=True)
class OwnedSpan(Operation):
    """A member owned a partition from `at` to `ended`.

    revoked   it was asked to give it up and did
    lost      it was told that it had lost it before
    died      its process was killed
    """

    group: str
    owner_epoch: int
    ended: float | None = None
    how: Literal["open", "revoked", "lost", "died"] = "open"


@dataclass(slots=True, kw_only=True)
class Sighting(HistoryCall):
    """A node was asked for records and answered as the leader of the partition.

    `end_offset` is where the records end that it gave.
    """

    node: int
    epoch: int = -1
    high_watermark: int = 0
    end_offset: int = 0


@dataclass(slots=True, kw_only=True)
class Change(HistoryCall):
    """Somebody changed a topic: asked for `total` partitions, or for so many `copies` of each."""

    verb: Literal["create", "delete", "grow", "move", "alter"]
    total: int = 0
    copies: int = 0


@dataclass(slots=True, kw_only=True)
class DeadLetterSeen:
    """A dead letter in the end; topic, partition and offset are those of its source."""

    topic: str
    partition: int
    offset: int
    group: str
    value: str
    attempts: int
    reason: str


@dataclass(slots=True, kw_only=True)
class Final:
    """What is there after everything has healed and all groups have drained their partitions."""

    logs: dict[PartitionKey, list[tuple[int, str]]] = field(default_factory=dict)
    letters: list[DeadLetterSeen] = field(default_factory=list)
    drained: dict[str, list[str]] = field(default_factory=dict)
    """Groups of workers that leased until nothing was left, and their topics."""
    read: dict[str, list[str]] = field(default_factory=dict)
    """Groups of stream readers that read from the start up to the end, and their topics."""
    copies: dict[tuple[str, int, str], dict[int, list[tuple[int, str]]]] = field(
        default_factory=dict
    )
    """Of every log of a partition and every node that has a copy: the base offset and a digest of
    every batch."""
    topics: dict[str, list[list[int]]] = field(default_factory=dict)
    """Every topic that there is, with the nodes that are in sync for each partition."""

    def to_json(self) -> dict[str, Any]:
        logs = [[topic, number, rows] for (topic, number), rows in self.logs.items()]
        copies = [
            [*partition_key, node, rows]
            for partition_key, nodes in self.copies.items()
            for node, rows in nodes.items()
        ]
        return {
            "logs": logs,
            "letters": [asdict(one) for one in self.letters],
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
        """An operation of this history has ended; for those that write it down at once."""

    def of(self, kind: type[Op]) -> Iterator[Op]:
        return (one for one in self.operations if isinstance(one, kind))

    def counts(self) -> dict[str, int]:
        """How many of each kind, calls by how they ended, for reports."""
        found: dict[str, int] = {}
        for one in self.operations:
            name = _NAMES[type(one)]
            if isinstance(one, SettleEvent):
                name = one.verb
            if isinstance(one, HistoryCall):
                name += f" {one.status}"
            found[name] = found.get(name, 0) + 1
        return dict(sorted(found.items()))

    def to_json(self) -> list[dict[str, Any]]:
        return [to_row(one) for one in self.operations]

    @classmethod
    def from_json(cls, rows: Iterable[Mapping[str, Any]]) -> "History":
        return cls([from_row(row) for row in rows])


def to_row(operation: Operation) -> dict[str, Any]:
    return {"kind": _NAMES[type(operation)], **asdict(operation)}


def from_row(row: Mapping[str, Any]) -> Operation:
    fields = dict(row)
    return KINDS[fields.pop("kind")](**fields)
