"""Shell: the verbs that look at a queue and steer it."""

from raftq.client.common.errors import InvalidArgument, OffsetOutOfRange, UnknownCheckpoint
from raftq.client.common.names import LANE_NAMES
from raftq.client.wire.batch import validate
from raftq.node.queue.embedded.browse import PEEK_MAX, browse, peek
from raftq.node.queue.embedded.check import (
    check_count,
    check_limit,
    check_number,
    check_offset,
    check_seconds,
    check_text,
)
from raftq.node.queue.embedded.engine import DEFAULT_GROUP
from raftq.node.queue.embedded.ledger import CheckpointMade, GroupForgotten
from raftq.node.queue.embedded.message import (
    DELAYED_ID_PREFIX,
    DeadMessage,
    DelayedMessage,
    Message,
    QueueStats,
    delayed_id,
)
from raftq.node.queue.embedded.opened import OpenQueue
from raftq.node.queue.embedded.stats import take_stats
from raftq.node.storage.log import Log


class SteeredQueue(OpenQueue):
    """Peek, delays, dead letters, replay, pause, purge, compaction, counts."""

    def peek(self, max_messages: int = 10, *, group: str = DEFAULT_GROUP) -> list[Message]:
        """What would come next, highest priority first, without taking it."""
        with self._lock:
            self._check_open()
            return peek(self._engine, self._engine.known_group(group), max_messages)

    def browse(
        self, offset: int, max_messages: int = 100, *, timeout: float | None = 0.0
    ) -> tuple[list[Message], int]:
        """Messages from an offset on, settled or not, and the offset to go on from.

        Waits up to `timeout` seconds (None: for ever) while the queue ends at that offset.
        Nothing is taken: these messages cannot be acked.
        """
        check_offset(offset)
        check_count(max_messages, "max_messages", PEEK_MAX)
        if timeout is not None:
            check_seconds(timeout, "timeout")
        with self._changed:
            self._check_open()
            if timeout != 0.0:
                self._waiters += 1
                try:
                    self._changed.wait_for(
                        lambda: self._closed or self._files.data.end_offset > offset, timeout
                    )
                finally:
                    self._waiters -= 1
                self._check_open()
            return browse(self._engine, offset, max_messages)

    def delayed(self, limit: int = 1000) -> list[DelayedMessage]:
        """Messages that are not yet due, the next one first."""
        check_limit(limit)
        with self._lock:
            self._check_open()
            line = self._engine.delays
            due = dict(line.schedule.pending(limit))
            found = dict(line.records(list(due)))
        return [
            DelayedMessage(
                delayed_id(offset),
                due[offset] / 1000,
                record.value,
                record.key,
                record.headers,
                LANE_NAMES[record.priority],
            )
            for offset, record in found.items()
        ]

    def cancel(self, message_id: str) -> bool:
        """Cancel a delayed message; False when it is due, delivered or cancelled already."""
        digits = str(message_id).removeprefix(DELAYED_ID_PREFIX)
        if not digits.isdecimal() or len(digits) > 19:
            raise InvalidArgument(f"{message_id!r} is not a message id")
        if not str(message_id).startswith(DELAYED_ID_PREFIX):
            return False
        with self._lock:
            self._check_open()
            self._keeper.tick(self._clock())
            cancelled = bool(self._engine.delays.cancel([int(digits)]))
            target = (self._files.delays, self._files.delays.end_offset)
        self._wait_durable([target] if cancelled else [])
        return cancelled

    def dead_letters(
        self, *, reason: str | None = None, limit: int | None = None
    ) -> list[DeadMessage]:
        """Messages that were given up, oldest first."""
        check_limit(limit)
        with self._lock:
            self._check_open()
            return self._dead.browse(reason, limit)

    def redrive(self, reason: str | None = None, limit: int | None = None) -> int:
        """Put dead letters back into the queue, each once; returns how many."""
        check_limit(limit)
        with self._lock:
            self._check_open()
            count = self._dead.redrive(reason, limit, int(self._clock() * 1000))
            self._wake_all()
            targets = [(log, log.end_offset) for log in (self._files.data, self._files.ledger)]
        self._wait_durable(targets)
        return count

    def purge_dead_letters(self) -> int:
        """Forget all dead letters; returns how many there were."""
        with self._lock:
            self._check_open()
            count = self._dead.purge()
            target = (self._files.ledger, self._files.ledger.end_offset)
        self._wait_durable([target])
        return count

    def checkpoint(self, name: str, *, group: str = DEFAULT_GROUP) -> int:
        """Remember, by name, the first message the group has not settled; returns its offset."""
        check_text(name, "a checkpoint name")
        with self._lock:
            self._check_open()
            offset = self._engine.known_group(group).settled.prefix
            target = self._engine.write_shell(CheckpointMade(name, offset))
        self._wait_durable([target])
        return offset

    def checkpoints(self) -> dict[str, int]:
        with self._lock:
            self._check_open()
            return dict(self._engine.state.checkpoints)

    def replay_from(
        self,
        *,
        offset: int | None = None,
        timestamp: float | None = None,
        checkpoint: str | None = None,
        group: str = DEFAULT_GROUP,
    ) -> int:
        """Deliver everything from a place on again, settled or not; returns the offset.

        What was in flight is taken from its holders: their receipts no longer count.
        """
        if sum(place is not None for place in (offset, timestamp, checkpoint)) != 1:
            raise InvalidArgument("give exactly one of offset, timestamp and checkpoint")
        if offset is not None:
            check_offset(offset)
        if timestamp is not None:
            check_number(timestamp, "timestamp")
        if checkpoint is not None:
            check_text(checkpoint, "a checkpoint name")
        with self._lock:
            self._check_open()
            start = self._place(offset, timestamp, checkpoint)
            core = self._engine.group(group)
            target = self._engine.write([core.reset(start)])
            self._engine.note_damage()
            self._wake_all()
        self._wait_durable([target])
        return start

    def purge(self) -> int:
        """Drop every message, also those in flight and delayed, for every group; returns how many.

        Dead letters stay; see purge_dead_letters.
        """
        with self._lock:
            self._check_open()
            count = self._publisher.unsettled()
            line = self._engine.delays
            line.cancel(
                [offset for offset, _ in line.schedule.pending(line.schedule.pending_count)]
            )
            end = self._files.data.end_offset
            groups = self._engine.state.groups.values()
            target = self._engine.write([group.reset(end) for group in groups])
            delays = (self._files.delays, self._files.delays.end_offset)
        self._wait_durable([target, delays])
        return count

    def pause(self, *, group: str = DEFAULT_GROUP) -> None:
        """Deliver nothing more until resume; what is in flight can still be settled."""
        self._pause(group, True)

    def resume(self, *, group: str = DEFAULT_GROUP) -> None:
        self._pause(group, False)

    def groups(self) -> list[str]:
        with self._lock:
            self._check_open()
            return sorted(self._engine.state.groups)

    def delete_group(self, group: str) -> bool:
        """Forget a group and its progress; it no longer holds back the release of disk space."""
        check_text(group, "a group name")
        if group == DEFAULT_GROUP:
            raise InvalidArgument("the default group cannot be deleted")
        with self._lock:
            self._check_open()
            if group not in self._engine.state.groups:
                return False
            target = self._engine.write_shell(GroupForgotten(group))
            for key in [key for key in self._engine.readers if key[0] == group]:
                del self._engine.readers[key]
        self._wait_durable([target])
        return True

    def compact(self) -> int:
        """Drop at once what every group has settled; returns the bytes freed."""
        with self._lock:
            self._check_open()
            before = self._files.size_bytes
            self._engine.drop_settled()
            self._engine.delays.upkeep(force=True)
            self._dead.upkeep(0, None)
        self._keeper.snapshot()
        with self._lock:
            return before - self._files.size_bytes

    def sync(self) -> None:
        """Everything accepted so far is on disk when this returns."""
        with self._lock:
            self._check_open()
            targets = [(log, log.end_offset) for log in self._files.logs.values()]
        self._files.flusher.wait(targets)

    def stats(self) -> QueueStats:
        with self._lock:
            self._check_open()
            now = self._clock()
            found = take_stats(self._engine, self._dead)
            found.rates = self._keeper.rates(now)
            return found

    def verify(self) -> list[str]:
        """Read every byte again; returns one line for each damaged range."""
        problems = []
        if self._engine.ledger_damage:
            # Opening replaced the damaged part by a snapshot, so only this memory is left of it.
            problems.append(f"ledger: {self._engine.ledger_damage} damaged ranges found at open")
        for name, log in self._files.logs.items():
            with self._lock:
                self._check_open()
                _read_all(log)
                self._engine.note_damage()
                problems += [f"{name}: {damage}" for damage in log.damaged]
        return problems

    def _place(self, offset: int | None, timestamp: float | None, checkpoint: str | None) -> int:
        """The offset meant by one of the three. Lock held."""
        data = self._files.data
        if checkpoint is not None:
            known = self._engine.state.checkpoints.get(checkpoint)
            if known is None:
                raise UnknownCheckpoint(f"queue {self.path!r} has no checkpoint {checkpoint!r}")
            # Retention may have dropped what the checkpoint pointed at: replay what is left.
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

    def _pause(self, group: str, paused: bool) -> None:
        with self._lock:
            self._check_open()
            core = self._engine.known_group(group)
            target = self._engine.write([core.pause(paused)])
            self._wake_all()
        self._wait_durable([target])


def _read_all(log: Log) -> None:
    """Decode everything; what fails its checks is in `log.damaged` afterwards."""
    for batch in log.batches(log.start_offset, skip_damaged=True):
        validate(batch)
