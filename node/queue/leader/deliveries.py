"""Leases and settlements of every group of a partition: section D of the ledger. (Shell.)

Keeps one GroupDelivery core per group and the one way to change it: `write` applies entries and
writes them to the ledger in the same turn. A group sees only records below the high watermark of
`data`.

Times in the ledger are those of the leader's clock, and the clocks of nodes may differ. So a new
leader takes over how long each lease and each wait still had at the last time in the ledger
(`clock`), and counts that from its own beginning. None of them ends early, whatever the clocks
show, and the time left never grows. A change of leaders adds the time without a leader, and the
time since the last ClockEntry. `keep_time` writes such entries after a tenth of the time left, and
after half of the time that this leader has led. So at least half of the time of leaders that led
for a second or more counts, however often they change.

After a damaged ledger (`damaged`) the order of deliveries is unknown: only settlements, resets and
pauses count, and whatever is not settled is delivered again.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.names import DLQ_SUFFIX
from raftq.cluster.metadata.topic_config import TopicConfig
from raftq.node.queue.core.config import DeliveryConfig
from raftq.node.queue.core.entries import (
    ABSOLUTE,
    ATTEMPT_MAX,
    DEAD,
    RANGE_MAX,
    ClippedEntry,
    ClockEntry,
    CreatedEntry,
    DeletedEntry,
    Entry,
    ExtendedEntry,
    GrantedEntry,
    Row,
    SettledEntry,
    SnapshotEntry,
    pack,
    unpack,
)
from raftq.node.queue.core.group_delivery import DyingRecords, GroupDelivery
from raftq.node.queue.core.lanes import LANES
from raftq.node.queue.leader.ledger import TAG_DELIVERY, Ledger
from raftq.node.replication.leader_log import LeaderLog, Leadership

GROUPS_MAX = 1000
CLOCK_S_MIN, CLOCK_S_MAX = 0.5, 600.0
"""How often the time is written to the ledger while leases or waits are open."""
# Entries after which there is no more to lease than before.
_GIVE_NOTHING = (SettledEntry, ExtendedEntry, GrantedEntry)


class ReadableLanes:
    """The lane index of a data log, clipped to what is replicated."""

    __slots__ = ("_data", "_log")

    def __init__(self, data: LeaderLog) -> None:
        self._data = data
        self._log = data.log

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        run = self._log.next_run(lane, offset)
        if run is None:
            return None
        end = self._data.high_watermark
        if run[1] <= end:
            return run
        return (run[0], end) if run[0] < end else None

    def count_from(self, lane: int, offset: int) -> int:
        end = self._data.high_watermark
        if offset >= end:
            return 0
        return self._log.count_from(lane, offset) - self._log.count_from(lane, end)


class GroupState:
    """A group's core, and what its leader remembers of it beyond the ledger."""

    __slots__ = ("core", "extended", "given", "idle_at", "rejected", "waited_ms")

    def __init__(self, core: GroupDelivery) -> None:
        self.core = core
        self.idle_at = -1
        """The high watermark up to which there is nothing to lease; -1: look."""
        self.given = [0] * LANES
        self.waited_ms = [0] * LANES
        self.rejected = 0
        self.extended = 0


class GroupDeliveries:
    """All groups of a led partition."""

    def __init__(
        self, leadership: Leadership, ledger: Ledger, rng: random.Random, now: float
    ) -> None:
        self.groups: dict[str, GroupState] = {}
        self.clock: float | None = None
        """The last time in the ledger, by the clock of its leader."""
        self._began = now
        self.damaged = False
        self.on_change: Callable[[GroupState], None] = lambda group: None
        """Called when a group may have a new deadline, more room or more to give."""
        self._leadership = leadership
        self._ledger = ledger
        self._rng = rng
        self._now_at_start = now
        self._lanes = ReadableLanes(leadership.data)
        self._settings = leadership.config
        self._config = delivery_config(leadership.ref.topic, leadership.config)

    def refresh_config(self) -> None:
        """Use the topic's settings if they have changed."""
        settings = self._leadership.config
        if settings is not self._settings:
            self._settings = settings
            self._config = delivery_config(self._leadership.ref.topic, settings)
            for group in self.groups.values():
                group.core.config = self._config
                group.idle_at = -1

    # Changes

    def create(self, name: str, start_offset: int) -> GroupState:
        """A new group that begins there."""
        if len(self.groups) >= GROUPS_MAX:
            raise InvalidArgument(f"a partition has at most {GROUPS_MAX} groups")
        self.write([CreatedEntry(name, start_offset)])
        return self.groups[name]

    def write(
        self, entries: Sequence[Entry], also: Sequence[bytes] = (), patient: bool = False
    ) -> "asyncio.Future[None]":
        """Apply entries and write them, and other ledger records with them."""
        for entry in entries:
            self._apply(entry)
            if entry.group in self.groups:
                self.on_change(self.groups[entry.group])
        return self.record(entries, also, patient)

    def record(
        self, entries: Sequence[Entry], also: Sequence[bytes] = (), patient: bool = False
    ) -> "asyncio.Future[None]":
        """Write entries whose effect is in memory already."""
        for entry in entries:
            if isinstance(entry, GrantedEntry):
                self.clock = entry.now
        return self._ledger.write([TAG_DELIVERY + pack(entries), *also], patient)

    def take_over(self, now: float) -> None:
        """Go on by this clock: move all deadlines and due times to it."""
        self._began = now
        if self.clock is not None and self._is_timed():
            self.write([ClockEntry(None, now, now - self.clock)])

    def clock_due(self, soonest: float) -> float:
        """When to write the time next, if the first lease or wait ends at `soonest`."""
        since = self._began if self.clock is None else self.clock
        every = min((soonest - since) / 10, since - self._began, CLOCK_S_MAX)
        return since + max(every, CLOCK_S_MIN)

    def keep_time(self, now: float, soonest: float) -> float:
        """Write the time to the ledger if that is due; returns when it will be due next."""
        if now >= self.clock_due(soonest) and self._leadership.has_enough_replicas():
            self.write([ClockEntry(None, now, 0.0)])
        return max(self.clock_due(soonest), now + CLOCK_S_MIN)

    def _is_timed(self) -> bool:
        states = [group.core.state for group in self.groups.values()]
        return any(len(state.leases) or len(state.waiting) for state in states)

    def settle_dead(
        self, group: str, rows: Iterable[Row], also: Sequence[bytes] = (), how: int = DEAD
    ) -> "asyncio.Future[None]":
        """Settle dying records: their copies are safe, or (SKIPPED) nothing was left to copy.

        Rows of leases that are gone do nothing.
        """
        if group not in self.groups:
            return self._ledger.write(also)
        return self.write([SettledEntry(group, how, tuple(rows))], also)

    def pass_over(
        self, group: str, ranges: Iterable[tuple[int, int]], also: Sequence[bytes] = ()
    ) -> "asyncio.Future[None]":
        """Settle these ranges in a group, whatever their state; creates the group if needed."""
        if group not in self.groups:
            self.create(group, self._leadership.data.log.start_offset)
        rows = [
            (0, at, min(at + RANGE_MAX, end))
            for start, end in ranges
            for at in range(start, end, RANGE_MAX)
        ]
        return self.write([self.groups[group].core.skip(rows)], also)

    def mark_dying(self, group: str, rows: Iterable[Row]) -> None:
        """Mark the records that are still leased as dying: their dead letter is decided."""
        found = self.groups.get(group)
        if found is None:
            return
        leases = found.core.leases
        for nonce, start, end in rows:
            lease = leases.get(nonce)
            for run in [] if lease is None else lease.runs(start, end):
                assert lease is not None
                leases.mark_dying(lease, *run)

    def unmark_dying(self, group: str, letters: Iterable[DyingRecords], retry_at: float) -> None:
        """The dead letters could not be decided: leases hold the records until `retry_at`."""
        found = self.groups.get(group)
        if found is not None:
            found.core.unmark_dying(letters, retry_at)
            self.on_change(found)

    def _apply(self, entry: Entry) -> None:
        name = entry.group
        if isinstance(entry, GrantedEntry | ClockEntry):
            self.clock = entry.now
        if name is None:
            for group in self.groups.values():
                group.core.apply(entry)
                group.idle_at = -1
        elif isinstance(entry, DeletedEntry):
            self.groups.pop(name, None)
        else:
            found = self.groups.get(name)
            if found is None or isinstance(entry, SnapshotEntry):
                found = self.groups[name] = self._new(name)
            found.core.apply(entry)
            if not isinstance(entry, _GIVE_NOTHING):
                found.idle_at = -1

    def _new(self, name: str) -> GroupState:
        start = self._leadership.data.log.start_offset
        now = self._now_at_start
        return GroupState(GroupDelivery(name, self._config, self._lanes, self._rng, start, now))

    # The section of the ledger

    def replay(self, content: bytes) -> None:
        for entry in unpack(content):
            believed = self._believable(entry) if self.damaged else entry
            if believed is not None:
                self._apply(believed)

    def snapshot(self) -> list[bytes]:
        clock = [] if self.clock is None else [pack([ClockEntry(None, self.clock, 0.0)])]
        return clock + [pack([group.core.state.snapshot()]) for group in self.groups.values()]

    def _believable(self, entry: Entry) -> Entry | None:
        """What an entry still means when some entries before it are unknown."""
        if isinstance(entry, SettledEntry):
            rows = tuple((0, start, end) for _, start, end in entry.rows)
            return SettledEntry(entry.group, entry.how, rows)
        if isinstance(entry, (*ABSOLUTE, ClippedEntry, SnapshotEntry, DeletedEntry)):
            return entry
        return None

    def restart_unsettled(self) -> None:
        """After a damaged replay: whatever is not settled is fresh again."""
        for group in list(self.groups.values()):
            self._apply(group.core.state.settled_snapshot())

    def refers_beyond(self, end: int) -> bool:
        """Whether a group knows of offsets that the data log does not have."""
        return any(
            max(group.core.state.cursors) > end or group.core.settled.prefix > end
            for group in self.groups.values()
        )


def delivery_config(topic: str, config: TopicConfig) -> DeliveryConfig:
    """The settings of a topic for its groups. A dead letter never dies again."""
    is_last = topic.endswith(DLQ_SUFFIX)
    return DeliveryConfig(
        lease_s=config.visibility_timeout_ms / 1000,
        max_deliveries=ATTEMPT_MAX - 1 if is_last else config.max_deliveries,
        backoff_s=config.backoff_ms / 1000,
        backoff_cap_s=config.backoff_max_ms / 1000,
        jitter=config.backoff_jitter / 100,
        in_flight_max=config.in_flight_max,
    )
