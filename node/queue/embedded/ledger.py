"""What the ledger of an embedded queue says, and how it is replayed. (Core.)

A ledger record is a tag byte and a msgpack list. `D` records hold delivery entries (the hot path);
`S` records hold what belongs to the whole queue:

    CHECKPOINT  name, offset            a named place to replay from
    FORGET      group                   a group was deleted
    DEAD_DONE   ranges                  dead letters that were redriven or purged
    INTENT      appends, deliveries, dedups, dead_done
                a decision that spans logs. Its CRC makes it all or nothing: the appends are applied
                to the other logs right after it, and again at open when a crash came between
    OPENED      ends of the logs        what recovery found: whatever refers to offsets beyond these
                ends did not survive, and intents still to be applied move down to them
    STATE       snapshot of all of this; with the SNAPSHOT entries of the groups it lets the ledger
                drop its prefix

Groups are created by the first delivery entry that names them. After a damaged ledger batch the
order of deliveries is no longer known: from there on only settlements, resets and pauses are
believed, and what is not settled is delivered again. So damage can repeat a delivery, and never
loses a message. A ledger that starts with anything but a snapshot has lost its beginning: the same.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack

from raftq.client.common.errors import CorruptFile
from raftq.node.queue.core import entries as kinds
from raftq.node.queue.core.group_delivery import GroupDelivery
from raftq.node.queue.core.lanes import LANES
from raftq.node.queue.core.settled_offsets import SettledOffsets

TAG_DELIVERY = b"D"
TAG_SHELL = b"S"
CHECKPOINT, FORGET, DEAD_DONE, INTENT, OPENED, STATE = range(1, 7)
# No container or text that a ledger holds is larger than the batch that carries it.
ITEMS_MAX = 1 << 24

Entry = tuple[Any, ...]
ShellEntry = Sequence[Any]


@dataclass(slots=True)
class Intent:
    """Appends that a transaction decided: (log name, base offset, span) and their batches."""

    places: list[tuple[str, int, int]]
    batches: list[bytes]


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
            for entry in kinds.unpack(record[1:]):
                self.deliver(entry)
        elif record[:1] == TAG_SHELL:
            for shell_entry in _unpack(record[1:]):
                self.apply(shell_entry)
        else:
            raise CorruptFile(f"a ledger record has the unknown tag {record[:1]!r}")

    def deliver(self, entry: Entry) -> None:
        kind, name = entry[0], entry[1]
        if name is None:
            for group in self.groups.values():
                group.apply(entry)
        elif kind == kinds.SNAPSHOT:
            self.groups[name] = self.new_group(name)
            self.groups[name].apply(entry)
        elif not self.damaged:
            self.group(name).apply(entry)
        elif kind == kinds.SETTLED:
            for row in entry[3]:
                self.group(name).settled.add(row[1], row[2])
        elif kind in _ABSOLUTE:
            self.group(name).apply(entry)

    def apply(self, entry: ShellEntry) -> None:
        """Apply one entry of the whole queue, live or at replay."""
        try:
            _APPLY[entry[0]](self, *entry[1:])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise CorruptFile(f"a ledger entry does not make sense: {error!r}") from error

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
        cursors = [group.settled.prefix] * LANES
        state = (group.settled.dump(), cursors, group.paused, group.counters.to_row(), (), ())
        fresh.apply((kinds.SNAPSHOT, group.group, state))
        return fresh

    def forget_old_dedups(self, now_ms: int) -> None:
        for dedup_id, (_, forget_at) in list(self.dedup.items()):
            if forget_at > now_ms:
                return
            del self.dedup[dedup_id]

    def snapshot(self) -> list[bytes]:
        """Ledger records that stand for everything before them."""
        state = [
            STATE,
            list(self.checkpoints.items()),
            [[name, *rest] for name, rest in self.dedup.items()],
            self.dead_done.dump(),
        ]
        groups = [pack_delivery([group.snapshot()]) for group in self.groups.values()]
        return [pack_shell([state]), *groups]

    def _checkpoint(self, name: str, offset: int) -> None:
        self.checkpoints[str(name)] = int(offset)

    def _forget(self, group: str) -> None:
        self.groups.pop(group, None)

    def _dead_done(self, ranges: list[list[int]]) -> None:
        for start, end in ranges:
            self.dead_done.add(start, end)

    def _intent(
        self,
        appends: list[list[Any]],
        deliveries: bytes,
        dedups: list[list[Any]],
        dead_done: list[list[int]],
    ) -> None:
        if deliveries:
            for entry in kinds.unpack(deliveries):
                self.deliver(entry)
        for dedup_id, message_id, forget_at in dedups:
            # A renewed id goes to the end, so that the oldest stay in front.
            self.dedup.pop(dedup_id, None)
            self.dedup[dedup_id] = (message_id, forget_at)
        self._dead_done(dead_done)
        places = [(str(name), int(base), int(span)) for name, base, span, _ in appends]
        self.intents.append(Intent(places, [bytes(item[3]) for item in appends]))

    def _opened(self, ends: dict[str, int]) -> None:
        cursors = dict(ends)
        for intent in self.intents:
            for index, (name, base, span) in enumerate(intent.places):
                if base >= cursors[name]:
                    intent.places[index] = (name, cursors[name], span)
                    cursors[name] += span
        self.dead_done.truncate(ends["dead"])
        self.checkpoints = {n: min(at, ends["data"]) for n, at in self.checkpoints.items()}
        for group in self.groups.values():
            group.apply((kinds.CLIPPED, None, ends["data"]))
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

    def _state(self, checkpoints: list[Any], dedups: list[Any], dead_done: list[Any]) -> None:
        self.checkpoints = {str(name): int(offset) for name, offset in checkpoints}
        self.dedup = {str(name): (str(rid), int(forget_at)) for name, rid, forget_at in dedups}
        self.dead_done = SettledOffsets.load(dead_done)
        self.groups = {}
        self.intents = []
        self.damaged = False


_APPLY: dict[int, Callable[..., None]] = {
    CHECKPOINT: QueueState._checkpoint,
    FORGET: QueueState._forget,
    DEAD_DONE: QueueState._dead_done,
    INTENT: QueueState._intent,
    OPENED: QueueState._opened,
    STATE: QueueState._state,
}


# Entries that mean the same whatever came before them.
_ABSOLUTE = (kinds.RESET, kinds.PAUSED, kinds.CREATED)


def is_snapshot(record: bytes) -> bool:
    """Whether a ledger can start with this record."""
    return record[:1] == TAG_SHELL and any(entry[0] == STATE for entry in _unpack(record[1:]))


def pack_delivery(entries: Sequence[Entry]) -> bytes:
    return TAG_DELIVERY + kinds.pack(entries)


def pack_shell(entries: Sequence[ShellEntry]) -> bytes:
    return TAG_SHELL + bytes(msgpack.packb(list(entries)))


def _unpack(packed: bytes) -> list[Any]:
    try:
        found = msgpack.unpackb(packed, max_array_len=ITEMS_MAX, max_map_len=ITEMS_MAX)
    except Exception as error:
        # msgpack raises several unrelated types on bad input; all of them mean the same here.
        raise CorruptFile(f"a ledger record is not msgpack: {error}") from error
    if not isinstance(found, list):
        raise CorruptFile("a ledger record is not a list of entries")
    return found
