"""A naive shell over lists drives the delay schedule through random crashes."""

import random

import pytest

from raftq.node.queue.core.delay_schedule import DelaySchedule

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


class Partition:
    """A naive shell over lists: what is durable, what a crash can take, and what must hold."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now_ms = NOW_MS
        self.schedule = DelaySchedule(self.now_ms)
        self.delays: list[tuple[int, str, tuple[int, ...], int]] = []
        self.data: list[tuple[int, tuple[int, ...]]] = []
        self.data_flushed = 0
        self.snapshot: bytes | None = None
        self.snapshot_end = 0
        self.deliver_at: dict[int, int] = {}
        self.cancelled: dict[int, None] = {}

    def data_end(self) -> int:
        return self.data[-1][0] if self.data else 0

    def publish_delayed(self) -> None:
        count = self.rng.randrange(1, 6)
        reach_ms = self.rng.choice((15, 300, 5000, 200_000, 20 * DAY_MS))
        times = [self.now_ms + self.rng.randrange(-20, reach_ms) for _ in range(count)]
        base = self.schedule.end_offset
        self.delays.append((base, "scheduled", tuple(times), 0))
        self.schedule.scheduled(base, times)
        self.deliver_at.update(zip(range(base, base + count), times, strict=True))

    def publish_plain(self) -> None:
        self.data.append((self.data_end() + self.rng.randrange(1, 4), ()))

    def append_control(self, kind: str, offsets: tuple[int, ...], data_end: int) -> None:
        offset = self.schedule.end_offset
        self.delays.append((offset, kind, offsets, data_end))
        self.schedule.control(offset)

    def cancel(self) -> None:
        offset = self.rng.randrange(self.schedule.end_offset + 1)
        fired = any(offset in offsets for _, offsets in self.data)
        expected = offset in self.deliver_at and offset not in self.cancelled and not fired
        assert self.schedule.cancel(offset) == expected
        if expected:
            self.append_control("cancelled", (offset,), 0)
            self.schedule.apply_cancelled(offset)
            self.cancelled[offset] = None

    def fire(self, records_max: int) -> int:
        due = self.schedule.due(self.now_ms, records_max)
        assert due == sorted(due)
        assert all(at <= self.now_ms and self.schedule.is_pending(offset) for at, offset in due)
        if not due or self.rng.random() < 0.2:  # the append failed
            return 0
        offsets = tuple(offset for _, offset in due)
        self.data.append((self.data_end() + len(due), offsets))
        self.check_data(self.now_ms)
        if self.rng.random() < 0.15:
            self.crash()
            return len(due)
        self.schedule.apply_fired(offsets, self.data_end())
        self.append_control("fired", offsets, self.data_end())
        return len(due)

    def flush(self) -> None:
        reached = self.rng.choice([end for end, _ in self.data] or [0])
        self.data_flushed = max(self.data_flushed, reached)
        self.schedule.fired_flushed(self.data_flushed)

    def write_snapshot(self) -> None:
        self.snapshot, self.snapshot_end = self.schedule.snapshot(), self.schedule.end_offset
        # The delays log loses what nobody needs.
        keep_from = min(self.schedule.done_below, self.snapshot_end)
        needed = [entry for entry in self.delays if entry[0] >= keep_from]
        self.delays = needed if self.rng.random() < 0.5 else self.delays

    def crash(self) -> None:
        """Unflushed data and the last FIRED marks may be gone; then open again."""
        ends = [end for end, _ in self.data if end >= self.data_flushed]
        data_end = self.rng.choice(ends) if ends else 0
        self.data = [batch for batch in self.data if batch[0] <= data_end]
        while self.delays and self.delays[-1][1] == "fired" and self.rng.random() < 0.5:
            if self.delays[-1][0] < self.snapshot_end:
                break
            self.delays.pop()
        self.now_ms += self.rng.choice((-1000, 0, 0, 7, DAY_MS))
        if self.snapshot is None:
            self.schedule = DelaySchedule(self.now_ms)
        else:
            self.schedule = DelaySchedule.restore(self.snapshot, self.now_ms)
        self.replay()
        for end, offsets in self.data:
            unmarked = end > self.schedule.fired_end
            if unmarked or self.rng.random() < 0.3:
                self.schedule.apply_fired(offsets, end)
            if unmarked and offsets:
                self.append_control("fired", offsets, end)
        if self.schedule.recovered(self.data_end()):
            if self.rng.random() < 0.5:
                self.write_snapshot()
            else:
                self.append_control("recovered", (), self.data_end())
        self.check_state()

    def replay(self) -> None:
        for offset, kind, numbers, data_end in self.delays:
            if offset < self.schedule.end_offset:
                continue
            if kind == "scheduled":
                self.schedule.scheduled(offset, numbers)
                continue
            self.schedule.control(offset)
            if kind == "cancelled":
                self.schedule.apply_cancelled(numbers[0])
            elif kind == "fired":
                self.schedule.apply_fired(numbers, data_end)
            else:
                self.schedule.recovered(data_end)

    def check_data(self, now_ms: int) -> None:
        fired = [offset for _, offsets in self.data for offset in offsets]
        assert len(fired) == len(set(fired)), "twice"
        assert not [offset for offset in fired if offset in self.cancelled], "cancelled, yet seen"
        last = self.data[-1][1] if self.data else ()
        assert all(self.deliver_at[offset] <= now_ms for offset in last), "early"

    def check_state(self) -> None:
        fired = {offset for _, offsets in self.data for offset in offsets}
        expected = sorted(
            (max(at, 0), offset)
            for offset, at in self.deliver_at.items()
            if offset not in fired and offset not in self.cancelled
        )
        pending = [(at, offset) for offset, at in self.schedule.pending(10**6)]
        assert pending == expected, "lost, or back from the dead"
        first = min((offset for _, offset in expected), default=self.schedule.end_offset)
        assert self.schedule.done_below <= first
        if expected:
            next_due_ms = self.schedule.next_due_ms()
            assert next_due_ms is not None
            assert next_due_ms <= expected[0][0] + 10

    def finish(self) -> None:
        """Time passes without crashes: everything that was not cancelled is seen exactly once."""
        self.now_ms = NOW_MS + 10_000 * DAY_MS
        for _ in range(10_000):
            due = self.schedule.due(self.now_ms, 7)
            if not due:
                break
            offsets = tuple(offset for _, offset in due)
            self.data.append((self.data_end() + len(due), offsets))
            self.schedule.apply_fired(offsets, self.data_end())
            self.check_data(self.now_ms)
        fired = sorted(offset for _, offsets in self.data for offset in offsets)
        assert fired == sorted(offset for offset in self.deliver_at if offset not in self.cancelled)


@pytest.mark.parametrize("seed_base", range(0, 400, 100))
def test_no_record_is_early_lost_twice_or_seen_after_cancel_across_crashes(seed_base: int) -> None:
    for seed in range(seed_base, seed_base + 100):
        rng = random.Random(seed)
        partition = Partition(rng)
        for _ in range(120):
            action = rng.choices(
                ("delayed", "plain", "cancel", "fire", "time", "flush", "snapshot", "crash"),
                (20, 5, 10, 25, 25, 5, 3, 4),
            )[0]
            if action == "delayed":
                partition.publish_delayed()
            elif action == "plain":
                partition.publish_plain()
            elif action == "cancel":
                partition.cancel()
            elif action == "fire":
                partition.fire(rng.choice((1, 3, 1000)))
            elif action == "time":
                partition.now_ms += rng.choice((-50, 1, 9, 10, 11, 300, 3000, 170_000, DAY_MS))
            elif action == "flush":
                partition.flush()
            elif action == "snapshot":
                partition.write_snapshot()
            else:
                partition.crash()
            partition.check_state()
        partition.finish()
