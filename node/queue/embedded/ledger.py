"""What the ledger of an embedded queue contains, and how it is replayed. (Core.)

A ledger record is a tag byte and a msgpack list. `D` records hold delivery entries (the hot path).
`S` records hold entries about the whole queue, each a list of a number for its kind (the `tag` of
its class) and its fields.

The first delivery entry that names a group creates it. After a damaged ledger batch the order of
deliveries is unknown: from there on only settlements, resets and pauses count, and whatever is not
settled is delivered again. So damage can repeat a delivery, but never loses a message. A ledger
that begins with anything but a snapshot has lost its beginning, and is treated the same way.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta
from msgspec.msgpack import Decoder

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core import entries as delivery_entries
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.entries import (
    ABSOLUTE,
    ClippedEntry,
    Entry,
    LedgerStruct,
    SettledEntry,
    SnapshotEntry,
)
from raftq.node.queue.core.group_delivery import GroupDelivery
from raftq.node.queue.core.settled_offsets import SettledDump, SettledOffsets

TAG_DELIVERY = b"D"
TAG_SHELL = b"S"

MessageId = Annotated[str, Meta(pattern="^d?[0-9]{1,19}$")]
"""An offset in the data log; with a `d`, in the delays log."""


class CheckpointMade(LedgerStruct, tag=1, frozen=True):
    """A named offset to replay from."""

    name: str
    offset: int


class GroupForgotten(LedgerStruct, tag=2, frozen=True):
    """A group was deleted."""

    group: str


class DeadLettersDone(LedgerStruct, tag=3, frozen=True):
    """Dead letters that were redriven or purged."""

    ranges: list[tuple[int, int]]


class IntentDecided(LedgerStruct, tag=4, frozen=True):
    """A decision that spans logs.

    The CRC of its record makes it all or nothing. The appends are applied to the other logs right
    after it, and again at open if a crash came between.
    """

    appends: list[tuple[str, int, int, bytes]]
    """Log name, base offset, span, batch."""
    deliveries: bytes
    """Delivery entries, packed, or nothing."""
    dedups: list[tuple[str, MessageId, int]]
    """Dedup id, message id, time in ms until which it is remembered."""
    dead_done: list[tuple[int, int]]


class QueueOpened(LedgerStruct, tag=5, frozen=True):
    """The ends of the logs that recovery found.

    Anything that refers to offsets beyond these ends did not survive. Intents that are still to be
    applied move down to them.
    """

    ends: dict[str, int]


class QueueSnapshot(LedgerStruct, tag=6, frozen=True):
    """All of this. Together with the snapshots of the groups it lets the ledger drop its prefix."""

    checkpoints: list[tuple[str, int]]
    dedups: list[tuple[str, MessageId, int]]
    dead_done: SettledDump


QueueEntry = (
    CheckpointMade | GroupForgotten | DeadLettersDone | IntentDecided | QueueOpened | QueueSnapshot
)
_decode = stored_decoder(Decoder(list[QueueEntry]), "ledger entries of the queue")


@dataclass(slots=True)
class PlannedAppend:
    """A batch that an intent appends to a log, and where."""

    log: str
    base: int
    span: int
    batch: bytes


Intent = list[PlannedAppend]


@dataclass(slots=True)
class QueueState:
    """Everything the ledger knows."""

    new_group: Callable[[str], GroupDelivery]
    groups: dict[str, GroupDelivery] = field(default_factory=dict)
    checkpoints: dict[str, int] = field(default_factory=dict)
    dedup: dict[str, tuple[str, int]] = field(default_factory=dict)
    """dedup id -> (message id, ms at which it is forgotten), oldest first."""
    dead_done: SettledOffsets = field(default_factory=SettledOffsets)
    intents: list[Intent] = field(default_factory=list)
    damaged: bool = False

    def group(self, name: str) -> GroupDelivery:
        found = self.groups.get(name)
        if found is None:
            found = self.groups[name] = self.new_group(name)
        return found

    def replay(self, record: bytes) -> None:
        """Apply one ledger record."""
        if record[:1] == TAG_DELIVERY:
            for entry in delivery_entries.unpack(record[1:]):
                self.deliver(entry)
        elif record[:1] == TAG_SHELL:
            for queue_entry in _decode(record[1:]):
                self.apply(queue_entry)
        else:
            raise CorruptFile(f"a ledger record has the unknown tag {record[:1]!r}")

    def deliver(self, entry: Entry) -> None:
        name = entry.group
        if name is None:
            for group in self.groups.values():
                group.apply(entry)
        elif isinstance(entry, SnapshotEntry):
            self.groups[name] = self.new_group(name)
            self.groups[name].apply(entry)
        elif not self.damaged or isinstance(entry, ABSOLUTE):
            self.group(name).apply(entry)
        elif isinstance(entry, SettledEntry):
            for _, start, end in entry.rows:
                self.group(name).settled.add(start, end)

    def apply(self, entry: QueueEntry) -> None:
        """Apply one entry about the whole queue, live or at replay."""
        if isinstance(entry, CheckpointMade):
            self.checkpoints[entry.name] = entry.offset
        elif isinstance(entry, GroupForgotten):
            self.groups.pop(entry.group, None)
        elif isinstance(entry, DeadLettersDone):
            self._dead_done(entry.ranges)
        elif isinstance(entry, IntentDecided):
            self._apply_intent(entry)
        elif isinstance(entry, QueueOpened):
            self._apply_opened(entry.ends)
        else:
            self._apply_snapshot(entry)

    def lost_entries(self) -> None:
        """A ledger batch could not be read: believe only settlements from here on."""
        self.damaged = True
        self.groups = {name: self._settled_only(group) for name, group in self.groups.items()}

    def restart_unsettled(self) -> None:
        """After a damaged replay: what is not settled is fresh again, in every group."""
        if self.damaged:
            self.groups = {name: self._settled_only(group) for name, group in self.groups.items()}

    def _settled_only(self, group: GroupDelivery) -> GroupDelivery:
        fresh = self.new_group(group.group)
        fresh.apply(group.state.settled_snapshot())
        return fresh

    def forget_old_dedups(self, now_ms: int) -> None:
        for dedup_id, (_, forget_at) in list(self.dedup.items()):
            if forget_at > now_ms:
                return
            del self.dedup[dedup_id]

    def snapshot(self) -> list[bytes]:
        """Ledger records that stand for everything before them."""
        state = QueueSnapshot(
            list(self.checkpoints.items()),
            [(name, *rest) for name, rest in self.dedup.items()],
            self.dead_done.dump(),
        )
        groups = [pack_delivery([group.state.snapshot()]) for group in self.groups.values()]
        return [pack_shell([state]), *groups]

    def _dead_done(self, ranges: list[tuple[int, int]]) -> None:
        if any(start < 0 for start, _ in ranges):
            raise CorruptFile(f"dead letters below offset 0: {ranges!r:.60}")
        for start, end in ranges:
            self.dead_done.add(start, end)

    def _apply_intent(self, entry: IntentDecided) -> None:
        if entry.deliveries:
            for delivery in delivery_entries.unpack(entry.deliveries):
                self.deliver(delivery)
        for dedup_id, message_id, forget_at in entry.dedups:
            # A renewed id goes to the end, so that the oldest stay in front.
            self.dedup.pop(dedup_id, None)
            self.dedup[dedup_id] = (message_id, forget_at)
        self._dead_done(entry.dead_done)
        self.intents.append([PlannedAppend(*append) for append in entry.appends])

    def _apply_opened(self, ends: dict[str, int]) -> None:
        if not {"data", "delays", "dead"} <= ends.keys() or min(ends.values()) < 0:
            raise CorruptFile(f"bad ends of logs in a ledger entry: {ends!r:.60}")
        cursors = dict(ends)
        for intent in self.intents:
            for append in intent:
                end = cursors.get(append.log)
                if end is None:
                    raise CorruptFile(f"a ledger entry names the unknown log {append.log!r:.60}")
                if append.base >= end:
                    append.base = end
                    cursors[append.log] += append.span
        self.dead_done.truncate(ends["dead"])
        self.checkpoints = {n: min(at, ends["data"]) for n, at in self.checkpoints.items()}
        for group in self.groups.values():
            group.apply(ClippedEntry(None, ends["data"]))
        lost = [
            dedup_id
            for dedup_id, (message_id, _) in self.dedup.items()
            if not self._survives(message_id, cursors)
        ]
        for dedup_id in lost:
            del self.dedup[dedup_id]

    def _survives(self, message_id: str, ends: dict[str, int]) -> bool:
        if message_id.startswith("d"):
            return int(message_id[1:]) < ends["delays"]
        return int(message_id) < ends["data"]

    def _apply_snapshot(self, entry: QueueSnapshot) -> None:
        self.dead_done = SettledOffsets.load(entry.dead_done)
        self.checkpoints = dict(entry.checkpoints)
        self.dedup = {name: (message_id, at) for name, message_id, at in entry.dedups}
        self.groups = {}
        self.intents = []
        self.damaged = False


def is_snapshot(record: bytes) -> bool:
    """Whether a ledger can start with this record."""
    return record[:1] == TAG_SHELL and any(
        isinstance(entry, QueueSnapshot) for entry in _decode(record[1:])
    )


def pack_delivery(entries: Sequence[Entry]) -> bytes:
    return TAG_DELIVERY + delivery_entries.pack(entries)


def pack_shell(entries: Sequence[QueueEntry]) -> bytes:
    return TAG_SHELL + encode_stored(list(entries))
