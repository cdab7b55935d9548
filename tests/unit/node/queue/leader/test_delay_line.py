"""The delays log of a led partition: fires once, in time, cancels for good, across leaders."""

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import pytest
from fake_partition_logs import FakePartition
from fake_queue import run

from raftq.client.common.errors import DiskFull, NotEnoughReplicas, NotLeader
from raftq.client.common.tasks import sleep
from raftq.client.wire.batch import CODEC_LZ4, FLAG_DELAY_OFFSETS, encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.leader import delay_firing, delay_reclaim
from raftq.node.queue.leader.delay_line import DelayLine

WALL_MS = 1_700_000_000_000


def wall_ms() -> int:
    return WALL_MS + int(asyncio.get_running_loop().time() * 1000)


def begin(partition: FakePartition) -> DelayLine:
    line = DelayLine(partition.lead(), wall_ms)
    line.start()
    return line


def schedule(line: DelayLine, deliver_at: list[int], values: list[bytes], **more: Any) -> int:
    batch = encode(values, timestamps=wall_ms(), deliver_at=deliver_at, **more)
    base = line.leadership.delays.append(batch)
    line.scheduled(base, memoryview(batch))
    return base


def fired(
    partition: FakePartition, readable: bool = True, start: int = 0
) -> list[tuple[int, BatchRecord]]:
    """(delay id, record) of what is in the data log."""
    partition_log = partition.logs["data"]
    found = []
    for batch in partition_log.log.batches(
        start, partition_log.high_watermark if readable else None
    ):
        if batch.flags & FLAG_DELAY_OFFSETS:
            found += zip(batch.delay_offsets() or [], batch.records(), strict=True)
    return found


def test_records_fire_at_their_tick_with_all_they_have_and_never_early() -> None:
    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        now = wall_ms()
        times = [now + 25, now + 4_000, now - 5, now + 25]
        schedule(
            line,
            times,
            [b"a", b"b", b"c", b"d"],
            keys=[b"k", None, b"", b"x"],
            headers=[{"h": b"1"}, None, None, {"g": b"2"}],
            expiries=[0, 0, 9, now + 10**6],
            lane=4,
        )
        seen: dict[int, int] = {}
        for _ in range(4_100):
            for one, _ in fired(partition, readable=False):
                seen.setdefault(one, wall_ms())
            await sleep(0.001)
        assert sorted(seen) == [0, 1, 2, 3]
        for one, at in enumerate(times):
            assert at <= seen[one] <= max(at, now) + 13
        records = dict(fired(partition))
        a = records[0]
        assert (a.value, a.key, a.headers, a.priority) == (b"a", b"k", {"h": b"1"}, 4)
        assert (records[1].key, records[2].key, records[3].headers) == (None, b"", {"g": b"2"})
        assert [records[one].expires_at for one in range(4)] == [0, 0, 9, now + 10**6]
        assert line.counts.fired == 4
        assert line.counts.late_ms_max <= 13
        line.stop()

    run(main())


def test_only_replicated_records_fire() -> None:
    async def main() -> None:
        partition = FakePartition(lag_s=None)
        line = begin(partition)
        schedule(line, [wall_ms()], [b"a"])
        await sleep(5)
        assert fired(partition, readable=False) == []
        partition.logs["delays"].replicate()
        await sleep(0.05)
        assert [one for one, _ in fired(partition, readable=False)] == [0]
        line.stop()

    run(main())


def test_nothing_fires_while_too_few_replicas_are_in_sync_or_the_disk_is_full() -> None:
    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        partition.leadership.enough = False
        schedule(line, [wall_ms()] * 3, [b"a", b"b", b"c"])
        await sleep(2)
        assert fired(partition, readable=False) == []
        append, partition.leadership.data.append = partition.leadership.data.append, _full
        partition.leadership.enough = True
        await sleep(2)
        partition.leadership.data.append = append
        await sleep(2)
        assert sorted(one for one, _ in fired(partition)) == [0, 1, 2]
        line.stop()

    run(main())


def _full(batch: bytearray) -> int:
    raise DiskFull("full")


def test_cancelled_record_is_never_seen_and_the_answer_waits_for_replication() -> None:
    async def main() -> None:
        partition = FakePartition(lag_s=None)
        line = begin(partition)
        schedule(line, [wall_ms() + 1_000] * 3, [b"a", b"b", b"c"])
        partition.replicate()
        await sleep(0.01)
        cancel = asyncio.get_running_loop().create_task(line.cancel([1, 7, 1]))
        await sleep(5)
        assert not cancel.done()
        partition.replicate()
        assert await cancel == [1]
        partition.replicate()
        await sleep(1)
        assert sorted(one for one, _ in fired(partition, readable=False)) == [0, 2]
        again = asyncio.get_running_loop().create_task(line.cancel([0, 1, 2]))
        await sleep(0)
        partition.replicate()
        assert await again == [1]
        line.stop()

    run(main())


def test_cancel_that_races_the_firing_is_told_who_won() -> None:
    async def main() -> None:
        for delay_ms in range(15):
            partition = FakePartition()
            line = begin(partition)
            schedule(line, [wall_ms() + 20] * 20, [b"%d" % one for one in range(20)])
            await sleep(0.01 + delay_ms / 1000)
            answers = await asyncio.gather(*(line.cancel([one]) for one in range(20)))
            gone = [one for answer in answers for one in answer]
            await sleep(1)
            came = sorted(one for one, _ in fired(partition))
            assert sorted(gone + came) == list(range(20))
            line.stop()

    run(main())


def test_listing_is_in_due_order_with_values() -> None:
    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        now = wall_ms()
        order = random.Random(1).sample(range(500), 500)
        schedule(line, [now + 10_000 + one for one in order], [b"%d" % one for one in order])
        await sleep(0.1)
        listed = await line.listed(100, 50)
        assert [at for _, at in listed] == list(range(now + 10_100, now + 10_150))
        records = line.read([one for one, _ in listed])
        assert [records[one].value for one, _ in listed] == [b"%d" % n for n in range(100, 150)]
        assert await line.find(listed[0][0]) == listed[:1]
        assert await line.find(10_000) == []
        line.stop()

    run(main())


def test_packed_and_big_batches_fire_in_any_order() -> None:
    async def main() -> None:
        rng = random.Random(2)
        partition = FakePartition(segment_bytes=1 << 22)
        line = begin(partition)
        now, expected = wall_ms(), {}
        for number in range(12):
            count = rng.choice((1, 40, 700))
            values = [rng.randbytes(rng.choice((0, 100, 1_000))) for _ in range(count)]
            times = [now + 100 + rng.randrange(3_000) for _ in range(count)]
            keys = [rng.choice((None, b"k%d" % one)) for one in range(count)]
            codec = CODEC_LZ4 if number % 3 == 0 else 0
            if codec:
                values = [b"same" * 200 for _ in values]
            base = schedule(line, times, values, keys=keys, codec=codec)
            expected.update({base + at: (values[at], keys[at]) for at in range(count)})
        await sleep(4)
        found = [(one, (record.value, record.key)) for one, record in fired(partition)]
        assert len(found) == len(expected)
        assert dict(found) == expected
        line.stop()

    run(main())


def test_new_leader_waits_until_everything_old_is_replicated() -> None:
    async def main() -> None:
        partition = FakePartition(lag_s=None)
        line = begin(partition)
        schedule(line, [wall_ms()], [b"a"])
        line.stop()
        partition.end_epoch()
        leadership = partition.lead(settle=False)
        line = DelayLine(leadership, wall_ms)
        line.start()
        with pytest.raises(NotEnoughReplicas):
            await line.cancel([0])
        await sleep(5)
        assert fired(partition, readable=False) == []
        leadership.settle()
        await sleep(0.1)
        assert len(fired(partition, readable=False)) == 1
        line.stop()
        with pytest.raises(NotLeader):
            await line.cancel([0])

    run(main())


def test_unreadable_record_waits_for_repair_and_holds_up_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        schedule(line, [wall_ms() + 50], [b"bad" * 10])
        schedule(line, [wall_ms() + 50], [b"good"])
        log = partition.logs["delays"].log
        path = log.segments.active.path
        whole = partition.disk.read_file(path, 1 << 20)
        bit = 8 * (whole.index(b"bad") + 1)
        partition.disk.flip_bit(path, bit)
        await sleep(3)
        assert [record.value for _, record in fired(partition)] == [b"good"]
        partition.disk.flip_bit(path, bit)
        for damage in list(log.damaged):
            start, end = damage.position, damage.end_position
            log.repair(damage.start, whole[start:end])
        await sleep(6)
        assert [record.value for _, record in fired(partition)] == [b"good", b"bad" * 10]
        line.stop()

    run(main())


def test_log_is_cut_when_everything_has_fired() -> None:
    async def main() -> None:
        partition = FakePartition(segment_bytes=1 << 18)
        line = begin(partition)
        log = partition.logs["delays"].log
        for _ in range(40):
            schedule(line, [wall_ms() + 500] * 100, [bytes(1_000)] * 100)
            await sleep(0.2)
        assert log.start_offset > 0
        await sleep(10)
        assert log.segment_count == 1
        assert len(fired(partition)) == 4_000
        line.stop()

    run(main())


def test_long_pending_records_do_not_keep_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. One record in a hundred is due in a day. 2. Load goes on. 3. The log stays small.
    4. A new leader still knows them by their ids, cancels one, and the others fire in a day."""
    monkeypatch.setattr(delay_reclaim, "GROWN_BYTES_MIN", 1 << 19)

    async def main() -> None:
        partition = FakePartition(segment_bytes=1 << 17)
        line = begin(partition)
        log = partition.logs["delays"].log
        late: list[int] = []
        largest = 0
        for _ in range(150):
            times = [wall_ms() + 200] * 100
            times[7] = wall_ms() + 86_400_000
            late.append(schedule(line, times, [b"%04d" % one * 250 for one in range(100)]) + 7)
            await sleep(0.3)
            largest = max(largest, log.size_bytes)
        assert largest < 1 << 20
        assert log.start_offset > late[10]
        line.stop()
        partition.replicate()
        leadership = partition.fail_over(random.Random(1))
        leadership.settle()
        line = DelayLine(leadership, wall_ms)
        line.start()
        assert [one for one, _ in await line.listed(0, 200)] == late
        assert await line.cancel(late[:1]) == late[:1]
        await sleep(86_400)
        records = fired(partition)
        assert len(records) == 15_000 - 1
        assert sorted(one for one, record in records if one in late) == late[1:]
        assert {record.value for one, record in records if one in late} == {b"0007" * 250}
        line.stop()

    run(main())


def test_prefix_goes_only_when_what_was_stored_again_is_replicated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(delay_reclaim, "GROWN_BYTES_MIN", 1 << 15)

    async def main() -> None:
        partition = FakePartition(segment_bytes=1 << 14)
        line = begin(partition)
        log = partition.logs["delays"].log
        for _ in range(12):
            times = [wall_ms() + 50] * 60
            times[0] = wall_ms() + 10**7
            schedule(line, times, [bytes(300)] * 60)
            await sleep(0.01)
        partition.lag_s = None
        await sleep(0.02)
        partition.replicate()
        await sleep(0.2)
        for _ in range(5):
            await sleep(2)
            partition.logs["data"].replicate()
        assert len(line.pending_delays) == 12
        assert log.start_offset == 0
        assert line.pending_delays.offset_of(0) > 0  # it was stored again
        partition.lag_s = 0.001
        partition.replicate()
        await sleep(5)
        assert log.start_offset > 0
        assert len(await line.listed(0, 100)) == 12
        line.stop()

    run(main())


def test_data_that_was_lost_after_its_mark_fires_again_once() -> None:
    """1. Records fire and are marked. 2. A loss of power takes the data log's tail everywhere.
    3. They fire again. 4. Later leaders do not fire them a third time."""

    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        schedule(line, [wall_ms() + 10] * 5, [b"%d" % one for one in range(5)])
        await sleep(5)
        assert len(fired(partition)) == 5
        line.stop()
        partition.end_epoch()
        data = partition.logs["data"]
        data.log.truncate(0)
        data.high_watermark = 0
        for _ in range(3):
            leadership = partition.lead()
            partition.append("data", encode([b"others"] * 30))
            line = DelayLine(leadership, wall_ms)
            # What clients write in the new epoch comes after the service has begun.
            line._began = (line._began[0], line._began[1] - 30)
            line.start()
            await sleep(5)
            line.stop()
            partition.end_epoch()
        assert sorted(one for one, _ in fired(partition)) == list(range(5))

    run(main())


def test_ids_that_the_data_log_knows_are_never_given_to_others() -> None:
    async def main() -> None:
        partition = FakePartition()
        line = begin(partition)
        schedule(line, [wall_ms() + 10] * 5, [b"%d" % one for one in range(5)])
        schedule(line, [wall_ms() + 10**6], [b"x"])
        await sleep(5)
        line.stop()
        partition.end_epoch()
        delays = partition.logs["delays"]
        delays.log.truncate(3)
        delays.high_watermark = delays.log.end_offset
        line = begin(partition)
        await sleep(1)
        assert schedule(line, [wall_ms() + 10], [b"new"]) >= 0
        await sleep(1)
        assert [record.value for _, record in fired(partition)][-1] == b"new"
        line.stop()

    run(main())


class Story:
    """Random life of a partition; what was promised to clients, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.partition = FakePartition(lag_s=None, segment_bytes=1 << 14)
        self.due: dict[bytes, int] = {}
        self.acknowledged: dict[bytes, None] = {}
        self.cancelled: dict[bytes, None] = {}
        self.maybe_cancelled: dict[bytes, None] = {}
        self.id_of: dict[bytes, int] = {}
        self.first_seen: dict[bytes, int] = {}
        self.number = self.looked = 0
        self.line = begin(self.partition)
        self.tasks: list[asyncio.Task[None]] = []

    def publish(self) -> None:
        rng, line = self.rng, self.line
        count = rng.choice((1, 3, 30))
        values = [b"%06d" % (self.number + at) + bytes(rng.randrange(30)) for at in range(count)]
        self.number += count
        progress = rng.choice((20, 500, 5_000, 60_000))
        times = [wall_ms() + rng.randrange(-10, progress) for _ in values]
        base = schedule(line, times, values, lane=rng.randrange(5))
        for at, value in enumerate(values):
            self.due[value] = times[at]
            self.id_of[value] = base + at
        self._spawn(self._acknowledge(line, base + count, values))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    async def _acknowledge(self, line: DelayLine, end: int, values: list[bytes]) -> None:
        try:
            await line.leadership.delays.replicated(end)
        except NotLeader:
            return
        self.acknowledged.update(dict.fromkeys(values))

    def cancel(self) -> None:
        known = sorted(value for value in self.acknowledged if value not in self.cancelled)
        if known:
            values = self.rng.sample(known, min(len(known), self.rng.choice((1, 5))))
            self._spawn(self._cancel(self.line, values))

    async def _cancel(self, line: DelayLine, values: list[bytes]) -> None:
        ids = {self.id_of[value]: value for value in values}
        self.maybe_cancelled.update(dict.fromkeys(values))
        try:
            gone = await line.cancel(list(ids))
        except (NotLeader, NotEnoughReplicas):
            return
        for one in gone:
            self.cancelled[ids[one]] = None

    def replicate(self) -> None:
        for name in self.rng.sample(("data", "delays"), 2):
            partition_log = self.partition.logs[name]
            if self.rng.random() < 0.7:
                partition_log.replicate(self.rng.choice(partition_log.ends()))

    async def fail_over(self) -> None:
        self.line.stop()
        leadership = self.partition.fail_over(self.rng)
        self.line = DelayLine(leadership, wall_ms)
        self.line.start()
        await sleep(self.rng.choice((0, 0.003, 0.1)))
        if self.rng.random() < 0.8:
            leadership.settle()
            await sleep(self.rng.choice((0, 0.001, 0.2)))

    def look(self) -> None:
        for _, record in fired(self.partition, start=self.looked):
            self.first_seen.setdefault(record.value, wall_ms())
        self.looked = self.partition.logs["data"].high_watermark

    def judge(self) -> None:
        came = [record.value for _, record in fired(self.partition)]
        assert len(came) == len(set(came)), "fired twice"
        for value in came:
            assert self.first_seen[value] >= self.due[value], "early"
            assert value not in self.cancelled, "cancelled and seen"
        missing = [value for value in self.acknowledged if value not in came]
        assert all(value in self.maybe_cancelled for value in missing), "lost"


@pytest.mark.parametrize("seed", range(30))
def test_each_record_fires_exactly_once_whatever_leader_dies_when(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delay_reclaim, "GROWN_BYTES_MIN", 1 << 13)
    monkeypatch.setattr(delay_reclaim, "GROWN_TIMES", 2)
    monkeypatch.setattr(delay_firing, "UPKEEP_S", 0.2)

    async def main() -> None:
        story = Story(seed)
        rng = story.rng
        for _ in range(250):
            choice = rng.random()
            if choice < 0.3:
                story.publish()
            elif choice < 0.4:
                story.cancel()
            elif choice < 0.8:
                story.replicate()
            elif choice < 0.85:
                await story.fail_over()
            elif choice < 0.9:
                story.partition.append("data", encode([b"plain"] * rng.randrange(1, 40)))
            await sleep(rng.choice((0, 0.001, 0.01, 0.05, 0.7)))
            story.look()
        await story.fail_over()
        story.partition.leadership.settle()
        story.partition.lag_s = 0.001
        for _ in range(80):
            await sleep(1)
            story.partition.replicate()
            story.look()
        story.judge()
        assert len(story.line.pending_delays) == 0
        story.line.stop()
        await asyncio.gather(*story.tasks)

    run(main())
