"""Shell: the state of an open queue and the few ways to change it. Not thread-safe: see queue.py.

Every change is first a ledger record, then memory: so memory never knows more than the disk. What
spans several logs is an intent (ledger.py): `commit` writes it and then applies its appends; an
intent that could not be applied (disk full) blocks further publishes until it is, and is applied at
the latest when the queue is opened again.
"""

import logging
import random
from collections.abc import Sequence

from raftq.client.common.errors import (
    CorruptBatch,
    CorruptFile,
    DiskFull,
    InvalidArgument,
    OffsetOutOfRange,
    RaftqError,
    UnknownCheckpoint,
)
from raftq.client.wire.batch import Batch, encode, validate
from raftq.client.wire.encoder import encode_control
from raftq.node.queue.core.entries import RANGE_MAX, CreatedEntry, Entry, pack
from raftq.node.queue.core.group_delivery import DeliveryConfig, GroupDelivery
from raftq.node.queue.embedded.check import check_text
from raftq.node.queue.embedded.delays import EmbeddedDelays
from raftq.node.queue.embedded.files import QueueFiles
from raftq.node.queue.embedded.ledger import (
    GroupForgotten,
    Intent,
    IntentDecided,
    QueueEntry,
    QueueOpened,
    QueueState,
    is_snapshot,
    pack_delivery,
    pack_shell,
)
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.reader import LaneReader
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.log import Log

logger = logging.getLogger("raftq.queue")

DEFAULT_GROUP = "default"
GROUPS_MAX = 1000

Target = tuple[Log, int]


class QueueEngine:
    """An open queue directory. One caller at a time."""

    def __init__(
        self, files: QueueFiles, options: EmbeddedOptions, name: str, rng: random.Random, now: float
    ) -> None:
        self.files = files
        self.options = options
        self.name = name
        self.path = files.directory
        self.now_at_open = now
        self._rng = rng
        self._delivery_config = DeliveryConfig(
            lease_s=options.visibility_timeout,
            max_deliveries=options.max_deliveries,
            backoff_s=options.backoff,
            backoff_cap_s=options.backoff_max,
            jitter=options.backoff_jitter,
            in_flight_max=options.in_flight_max,
        )
        self.state = QueueState(new_group=self._new_group)
        self.unapplied: Intent | None = None
        self.intent_ends: dict[str, int] = {}
        self.readers: dict[tuple[str, int], LaneReader] = {}
        self.ledger_damage = 0
        self._damage_reported: dict[tuple[str, DamagedRange], bool] = {}
        self.published = 0
        self._replay()
        self.delays = EmbeddedDelays(files, int(now * 1000))
        self._recover(now)

    def group(self, name: str) -> GroupDelivery:
        """The group of that name; a new one starts at the oldest message kept."""
        if type(name) is str and (found := self.state.groups.get(name)) is not None:
            return found
        check_text(name, "a group name")
        if len(self.state.groups) >= GROUPS_MAX:
            raise InvalidArgument(f"a queue has at most {GROUPS_MAX} groups")
        start = self.files.data.start_offset
        self.write([CreatedEntry(name, start)])
        self.note_damage()
        return self.state.group(name)

    def known_group(self, name: str) -> GroupDelivery:
        """The group of that name, which must exist."""
        check_text(name, "a group name")
        found = self.state.groups.get(name)
        if found is None:
            raise InvalidArgument(f"queue {self.name!r} has no group {name!r}")
        return found

    def write(self, entries: Sequence[Entry]) -> Target:
        """Put delivery entries in the ledger, then apply them."""
        target = self.record(entries)
        for entry in entries:
            self.state.deliver(entry)
        return target

    def record(self, entries: Sequence[Entry]) -> Target:
        """Put delivery entries in the ledger; their effect is already in memory."""
        return self._append_ledger([pack_delivery(entries)])

    def write_shell(self, entry: QueueEntry) -> Target:
        """Put one entry of the whole queue in the ledger, then apply it."""
        target = self._append_ledger([pack_shell([entry])])
        self.state.apply(entry)
        return target

    def write_snapshot(self) -> tuple[int, Target]:
        """Write the whole state to the ledger; once synced, the ledger may drop what came before.

        Returns the offset the ledger may begin with, and what must be synced for that.
        """
        ledger = self.files.ledger
        ledger.roll()
        offset = ledger.end_offset
        return offset, self._append_ledger(self.state.snapshot())

    def commit(
        self,
        appends: list[tuple[str, bytearray]],
        deliveries: Sequence[Entry] = (),
        dedups: Sequence[tuple[str, str, int]] = (),
        dead_done: Sequence[tuple[int, int]] = (),
        sync: bool = True,
    ) -> list[Target]:
        """Append batches to several logs, with ledger entries, all or nothing.

        `sync` makes that true for power cuts as well: the ledger must be on disk before the other
        logs may be, or an append could survive without the settlement that belongs to it.
        """
        self.check_publish()
        logs = self.files.logs
        ends = {name: logs[name].end_offset for name, _ in appends}
        rows: list[tuple[str, int, int, bytes]] = []
        for name, batch in appends:
            span = Batch(batch).span
            rows.append((name, ends[name], span, bytes(batch)))
            ends[name] += span
        packed = pack(deliveries) if deliveries else b""
        entry = IntentDecided(rows, packed, list(dedups), list(dead_done))
        target = self._append_ledger([pack_shell([entry])], reserve=not appends)
        if sync:
            self.files.ledger.sync()
        self.state.apply(entry)
        self.intent_ends.update(ends)
        self.unapplied = self.state.intents.pop()
        self.finish_intent()
        return [target, *((logs[name], end) for name, end in ends.items())]

    def finish_intent(self) -> None:
        """Apply what is left of the last intent; a full disk leaves it for later."""
        if self.unapplied is None:
            return
        try:
            self._apply_intent(self.unapplied)
        except DiskFull:
            # The ledger holds it, so it is committed; it is applied when space returns.
            logger.warning("queue=%s event=intent_waits reason=disk_full", self.name)
            return
        self.unapplied = None

    def check_publish(self) -> None:
        """Refuse to publish while the disk is full or an intent waits for space."""
        self.finish_intent()
        if self.unapplied is not None or (self.files.reserve_missing and self.files.reserve_bytes):
            if self.unapplied is None and self.files.restore_reserve():
                return
            raise DiskFull(f"no space left on the disk of queue {self.name!r}; acks still work")

    def delete_group(self, name: str) -> Target:
        for key in [key for key in self.readers if key[0] == name]:
            del self.readers[key]
        return self.write_shell(GroupForgotten(name))

    def find_offset(
        self, offset: int | None, timestamp: float | None, checkpoint: str | None
    ) -> int:
        """The offset that one of the three names."""
        data = self.files.data
        if checkpoint is not None:
            known = self.state.checkpoints.get(checkpoint)
            if known is None:
                raise UnknownCheckpoint(f"queue {self.path!r} has no checkpoint {checkpoint!r}")
            # Retention may have dropped messages behind the checkpoint: replay what is left.
            return max(known, data.start_offset)
        if timestamp is not None:
            # Rounded, so that a message's own timestamp finds it.
            return data.offset_for_time(round(timestamp * 1000))
        if offset is None or not data.start_offset <= offset <= data.end_offset:
            raise OffsetOutOfRange(
                f"offset {offset} is not kept: the queue has "
                f"{data.start_offset} to {data.end_offset}"
            )
        return offset

    def verify(self, name: str) -> list[str]:
        """Read a whole log again; returns one line for each damaged range."""
        log = self.files.logs[name]
        for batch in log.batches(log.start_offset, skip_damaged=True):
            validate(batch)
        self.note_damage()
        return [f"{name}: {damage}" for damage in log.damaged]

    def reader(self, group: str, lane: int) -> LaneReader:
        found = self.readers.get((group, lane))
        if found is None:
            found = self.readers[group, lane] = LaneReader(self.files.data)
        return found

    def settled_floor(self) -> int:
        """Below this offset every group has settled everything."""
        prefixes = [group.settled.prefix for group in self.state.groups.values()]
        return min(prefixes, default=self.files.data.start_offset)

    def note_damage(self) -> None:
        """Report each damaged range once, and settle what cannot be read in every group.

        Otherwise it would hold up their progress, and with it the release of disk space, for ever.
        """
        for name, log in self.files.logs.items():
            for damage in log.damaged:
                if (name, damage) not in self._damage_reported:
                    self._damage_reported[name, damage] = True
                    logger.error(
                        "queue=%s event=damage_found log=%s range=%s", self.name, name, damage
                    )
        data = self.files.data
        for damage in data.damaged:
            end = min(damage.end, data.end_offset)
            if end - damage.start <= RANGE_MAX:
                for group in self.state.groups.values():
                    self._pass_range(group, damage.start, end)

    def _pass_range(self, group: GroupDelivery, start: int, end: int) -> None:
        """Settle what the group has not settled of a range, except leased records."""
        held = [lease for lease in group.leases if lease.start < end and start < lease.end]
        rows = [
            (0, hole_start, hole_end)
            for hole_start, hole_end in group.settled.holes(start, end)
            if not any(lease.start < hole_end and hole_start < lease.end for lease in held)
        ]
        if rows:
            self.write([group.skip(rows)])

    def drop_settled(self) -> int:
        """Drop every file whose messages all groups have settled; returns the bytes freed."""
        data = self.files.data
        floor = self.settled_floor()
        if floor >= data.end_offset > data.start_offset:
            data.roll()
        return data.retain(0, bytes_max=0, below=floor)

    def drop_fired(self) -> None:
        """Drop every file of delayed messages that are all fired or cancelled."""
        if self.delays.has_changes:
            self.files.data.sync()  # what fired may only go once it is here for good
            self.delays.upkeep(force=True)

    def _new_group(self, name: str) -> GroupDelivery:
        start = self.files.data.start_offset
        config, rng = self._delivery_config, self._rng
        return GroupDelivery(name, config, self.files.data, rng, start, self.now_at_open)

    def _append_ledger(self, records: list[bytes], reserve: bool = True) -> Target:
        """`reserve`: may use the space that is set aside for acks when the disk is full."""
        ledger = self.files.ledger
        batch = encode_control(records[0]) if len(records) == 1 else encode(records, control=True)
        try:
            base = ledger.append(batch)
        except DiskFull:
            if not reserve or not self.files.give_up_reserve():
                raise
            logger.warning("queue=%s event=reserve_used reason=disk_full", self.name)
            base = ledger.append(batch)
        return ledger, base + len(records)

    def _apply_intent(self, intent: Intent) -> None:
        for append in intent:
            name, base = append.log, append.base
            log = self.files.logs[name]
            if log.end_offset >= base + append.span:
                continue
            if log.end_offset != base:
                # Only damage brings this about. Twice is better than not at all.
                logger.error(
                    "queue=%s event=intent_moved log=%s from=%d to=%d",
                    *(self.name, name, base, log.end_offset),
                )
            copy = bytearray(append.batch)
            log.append(copy)
            if name == "delays":
                self.delays.note_appended(Batch(bytes(copy)))

    def _replay(self) -> None:
        ledger = self.files.ledger
        offset = start = ledger.start_offset
        while offset < ledger.end_offset:
            try:
                for batch in ledger.batches(offset):
                    offset = batch.base_offset
                    records = batch.values()
                    if offset <= start and start and not any(map(is_snapshot, records)):
                        self._ledger_damaged(f"its beginning, up to offset {start}, is missing")
                    for record in records:
                        self.state.replay(record)
                    offset = batch.end_offset
            except (CorruptBatch, CorruptFile) as error:
                self._ledger_damaged(error)
                readable = ledger.next_readable(offset)
                offset = readable if readable > offset else self._batch_end(offset)

    def _ledger_damaged(self, what: RaftqError | str) -> None:
        self.ledger_damage += 1
        logger.error("queue=%s event=ledger_damaged error=%s", self.name, what)
        self.state.lost_entries()

    def _batch_end(self, offset: int) -> int:
        """Where the ledger goes on after a batch that can be read but makes no sense."""
        try:
            return self.files.ledger.batch_at(offset).end_offset
        except CorruptBatch:
            return max(self.files.ledger.next_readable(offset), offset + 1)

    def _recover(self, now: float) -> None:
        """Bring the logs and the state in step, and give back what a dead process had leased."""
        state = self.state
        state.restart_unsettled()
        self.group(DEFAULT_GROUP)
        ends = {name: self.files.logs[name].end_offset for name in ("data", "delays", "dead")}
        self.write_shell(QueueOpened(ends))
        # What is read from here on must not be taken back by a later power cut.
        for log in self.files.logs.values():
            log.sync()
        for group in list(state.groups.values()):
            if group.settled.prefix < self.files.data.start_offset:
                # Retention dropped what was settled, and a power cut the ledger entries saying so.
                self.write([group.advance(self.files.data.start_offset)])
        self.note_damage()
        for intent in state.intents:
            self._apply_intent(intent)
        self.intent_ends = {name: log.end_offset for name, log in self.files.logs.items()}
        state.intents = []
        state.forget_old_dedups(int(now * 1000))
        if state.damaged:
            state.damaged = False
            offset, _ = self.write_snapshot()
            self.files.ledger.sync()
            self.files.ledger.truncate_prefix(offset)
