"""The logs of a led partition with one follower: replicated, owned, cut, on real logs."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import (
    DiskFull,
    InvalidArgument,
    NotLeader,
    OutOfOrderSequence,
)
from raftq.client.wire.batch import BatchProducer, decode, encode
from raftq.client.wire.messages import Produce
from raftq.client.wire.node_messages import Progress, Replicate, Subscription
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.config import StorageConfig
from raftq.node.replication.leader import FollowerSession, Throttle
from raftq.node.replication.leadership import PartitionLeadership
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import DATA, DELAYS, LEDGER, PartitionLog
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.replication.replica_files import open_log, remove_replica
from raftq.node.storage.syncer import LoopSyncer

SMALL = topic_config({"min_insync": 2, "segment_bytes": 4096}, 2)
ALWAYS = topic_config({"min_insync": 2, "fsync": "always"}, 2)
DUE = [1_700_000_000_000]


class Service:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.stopped = 0
        self.told: list[tuple[int, list[bytes]]] = []

    def stop(self) -> None:
        self.stopped += 1

    def scheduled(self, base: int, batch: memoryview) -> None:
        found = decode(batch)
        assert found.base_offset == base
        self.told.append((base, list(found.values())))


class Home:
    """What one replica's node does for it: nothing but keep what it is told."""

    def __init__(self, node: int, config: object = SMALL, logs: int = 3) -> None:
        self.loop = asyncio.get_running_loop()
        self.syncer = LoopSyncer(self.loop)
        self.disk = SimDisk()
        self.config = config
        self.failures: list[BaseException] = []
        self.reports: list[PartitionLog] = []
        self.node = node
        self.ref = PartitionRef("t", 7, 0, "/p")
        log, producers = self.open(DATA)
        replica = Replica(node, 3.0, lambda one: True)
        self.partition = Partition(self.ref, log, producers, replica, self)
        self.partition.data.fetcher = self  # type: ignore[assignment]
        self.partition.configure(config)  # type: ignore[arg-type]
        self.syncer.add(log)
        if logs > 1:
            self.enable()

    def open(self, number: int):  # type: ignore[no-untyped-def]
        return open_log(self.disk, self.ref, number, self.config, StorageConfig(), 0)  # type: ignore[arg-type]

    def enable(self) -> None:
        for number in (LEDGER, DELAYS):
            log, producers = self.open(number)
            self.partition.open_log(log, producers).fetcher = self  # type: ignore[assignment]
            self.syncer.add(log)

    def decide(self, epoch: int, leader: int | None, **changes: object) -> None:
        self.partition.decide(
            Decided(epoch, 1, leader, (1, 2), (1, 2), (1, 1), 2, **changes), self.node
        )  # type: ignore[arg-type]

    def mark_active(self, partition: Partition) -> None: ...
    def report_end(self, partition_log: PartitionLog) -> None:
        self.reports.append(partition_log)

    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None: ...
    def disk_full(self) -> None: ...

    def failed(self, partition: Partition, error: BaseException) -> None:
        self.failures.append(error)


class World:
    """A leader, node 1, and a follower, node 2, whose conversation is carried on by hand."""

    def __init__(self, **options: object) -> None:
        self.leader = Home(1, **options)  # type: ignore[arg-type]
        self.follower = Home(2, **options)  # type: ignore[arg-type]
        self.service = Service()
        self.begin(1)

    def begin(self, epoch: int) -> None:
        self.leader.decide(epoch, 1)
        self.follower.decide(epoch, 1)
        self.leadership = PartitionLeadership(self.leader.partition, self.leader.loop)
        self.leader.partition.leadership = self.leadership
        self.leader.partition.service = self.service
        self.follower_session = FollowerSession(
            self.leader.loop, (2, 22), {(7, 0): self.leader.partition}.get, Throttle(1 << 30)
        )
        self.number = 0

    def ask(self, **fields: object) -> "asyncio.Future[object]":
        request = Replicate(2, 22, self.number, wait_ms=10_000, **fields)  # type: ignore[arg-type]
        self.number += 1
        return self.follower_session.handle(request)

    def subscribe(self, *numbers: int) -> "asyncio.Future[object]":
        wanted = []
        for number in numbers:
            log = self.follower.partition.logs[number].log
            pairs = tuple(one for pair in log.epoch_pairs(64) for one in pair)
            epoch = self.follower.partition.replica.epoch
            ends = (log.start_offset, log.end_offset)
            wanted.append(Subscription(7, 0, epoch, 1, *ends, pairs, number))
        return self.ask(subscribe=tuple(wanted))

    def take(self, future: "asyncio.Future[object]") -> list[tuple[int, str]]:
        """Have the follower do as it was told; (log, verb) of everything."""
        reply, buffers = future.result()  # type: ignore[misc]
        raw = memoryview(b"".join(map(bytes, buffers)))
        for one in reply.partitions:
            partition_log = self.follower.partition.logs[one.log_number]
            if one.verb == "append":
                batches = raw[one.start : one.start + one.length]
                partition_log.take(batches, one.high_watermark, one.start_offset)
            elif one.verb == "truncate":
                partition_log.cut(one.offset)
            elif one.verb == "reset":
                partition_log.restart_at(one.offset)
        return [(one.log_number, one.verb) for one in reply.partitions]

    def progress(self, *numbers: int) -> "asyncio.Future[object]":
        logs = self.follower.partition.logs
        epoch = self.follower.partition.replica.epoch
        return self.ask(
            progress=tuple(
                Progress(7, 0, epoch, 1, logs[number].own_end, number) for number in numbers
            )
        )

    async def sync(self) -> None:
        """Let the timers of the syncers run."""
        for _ in range(5):
            await asyncio.sleep(0.001)


def run(scenario: Callable[[World], Awaitable[None]], **options: object) -> None:
    async def main() -> None:
        world = World(**options)
        await scenario(world)
        assert not world.leader.failures
        assert not world.follower.failures

    asyncio.run(main())


def watermarks(home: Home) -> list[int]:
    return [partition_log.progress.high_watermark for partition_log in home.partition.logs]


def test_each_log_is_replicated_on_its_own() -> None:
    async def scenario(world: World) -> None:
        leadership = world.leadership
        assert leadership.ledger is not None
        assert leadership.delays is not None
        first = world.subscribe(DATA, LEDGER, DELAYS)
        assert leadership.ledger.append(encode([b"entry"])) == 0
        assert world.take(first) == [(LEDGER, "append")]
        waiting = leadership.ledger.replicated(1)
        assert not waiting.done()
        second = world.progress(LEDGER)
        assert waiting.done()
        assert watermarks(world.leader) == [0, 1, 0]
        leadership.data.append(encode([b"a", b"b"]))
        assert world.take(second) == [(DATA, "append"), (LEDGER, "append")], "with the news of it"
        assert watermarks(world.follower) == [0, 1, 0]
        third = world.progress(DATA)
        leadership.delays.append(encode([b"later"], deliver_at=DUE))
        assert (DELAYS, "append") in world.take(third)
        world.progress(DELAYS)
        assert watermarks(world.leader) == [2, 1, 1]

    run(scenario)


def test_a_log_that_is_not_open_yet_is_refused_and_left_ones_are_silent() -> None:
    async def scenario(world: World) -> None:
        reply, _ = await world.subscribe(DATA, LEDGER)  # type: ignore[misc]
        assert [(one.log_number, one.verb, one.error) for one in reply.partitions] == [
            (LEDGER, "refuse", "unknown_partition")
        ]
        world.leader.enable()
        parked = world.subscribe(LEDGER)
        partition_log = world.leader.partition.ledger
        assert partition_log is not None
        partition_log.append(encode([b"x"]))
        assert world.take(parked) == [(LEDGER, "append")]
        parked = world.ask(leave=(7, 0, LEDGER))
        partition_log.append(encode([b"x"]))
        assert not parked.done()
        assert not partition_log.listeners

    async def main() -> None:
        world = World(logs=1)
        world.follower.enable()
        await scenario(world)

    asyncio.run(main())


def test_a_false_claim_about_one_log_costs_the_subscription_of_that_one_only() -> None:
    async def scenario(world: World) -> None:
        world.subscribe(DATA, LEDGER)
        world.leadership.data.append(encode([b"a"]))
        world.ask(progress=(Progress(7, 0, 1, 1, 1, LEDGER),))
        partition = world.leader.partition
        assert partition.data.listeners
        assert partition.ledger is not None
        assert not partition.ledger.listeners

    run(scenario)


def test_the_owner_is_told_when_the_epoch_is_over() -> None:
    async def scenario(world: World) -> None:
        leadership, partition = world.leadership, world.leader.partition
        assert leadership.ledger is not None
        assert leadership.has_enough_replicas()
        leadership.ledger.append(encode([b"x"]))
        waiting = leadership.ledger.replicated(1)
        world.leader.decide(2, 2)
        with pytest.raises(NotLeader) as caught:
            waiting.result()
        assert caught.value.outcome == "unknown"
        assert not leadership.active
        assert world.service.stopped == 1
        assert partition.service is None
        assert partition.leadership is None
        with pytest.raises(NotLeader):
            leadership.ledger.append(encode([b"y"]))
        with pytest.raises(NotLeader):
            leadership.ledger.truncate_prefix(0)
        with pytest.raises(NotLeader):
            await leadership.ledger.replicated(1)
        assert leadership.ledger.log.end_offset == 1

    run(scenario)


def test_an_epoch_is_settled_when_every_log_is() -> None:
    async def scenario(world: World) -> None:
        assert world.leadership.old_epochs_replicated.done(), "nothing is there"
        assert world.leadership.ledger is not None
        world.leadership.data.append(encode([b"a"]))
        world.leadership.ledger.append(encode([b"b"]))
        world.begin(2)
        old_epochs_replicated = world.leadership.old_epochs_replicated
        assert not old_epochs_replicated.done()
        world.take(world.subscribe(DATA, LEDGER, DELAYS))
        world.progress(DATA)
        assert not old_epochs_replicated.done()
        world.progress(LEDGER)
        assert old_epochs_replicated.done()
        assert not world.leader.partition.ledger.readers  # type: ignore[union-attr]

    run(scenario)


def test_an_epoch_that_ends_unsettled_says_so() -> None:
    async def scenario(world: World) -> None:
        world.leadership.data.append(encode([b"a"]))
        world.begin(2)
        old_epochs_replicated = world.leadership.old_epochs_replicated
        world.leader.decide(3, None)
        with pytest.raises(NotLeader):
            await old_epochs_replicated
        assert not world.leader.partition.data.readers

    run(scenario)


def test_whoever_watches_hears_of_readable_data_until_the_epoch_ends() -> None:
    async def scenario(world: World) -> None:
        heard: list[int] = []
        world.leadership.watch_readable(lambda: heard.append(world.leadership.data.high_watermark))
        parked = world.subscribe(DATA, LEDGER)
        world.leadership.data.append(encode([b"a", b"b"]))
        world.take(parked)
        world.progress(DATA)
        assert heard == [2]
        world.leader.decide(2, 2)
        assert heard == [2]

    run(scenario)


def test_out_of_order_waits_end_in_the_order_of_their_offsets() -> None:
    async def scenario(world: World) -> None:
        ledger = world.leadership.ledger
        assert ledger is not None
        parked = world.subscribe(LEDGER)
        for _ in range(3):
            ledger.append(encode([b"x"]))
        late, early, middle = (ledger.replicated(end) for end in (3, 1, 2))
        world.take(parked)
        rest = world.progress(LEDGER)
        assert [one.done() for one in (early, middle, late)] == [True, False, False]
        world.take(rest)
        world.progress(LEDGER)
        assert late.done()
        assert middle.done()

    run(scenario)


def test_a_ledger_that_parts_is_cut_and_goes_the_leaders_way() -> None:
    """The follower led before, and wrote what nobody else has; its data is the same."""

    async def scenario(world: World) -> None:
        parked = world.subscribe(DATA, LEDGER)
        world.leadership.data.append(encode([b"common"]))
        world.take(parked)
        world.progress(DATA)
        world.leader.decide(2, 2)
        world.follower.decide(2, 2)
        own = world.follower.partition.ledger
        assert own is not None
        own.append(encode([b"alone", b"too"]))
        world.begin(3)
        assert world.leadership.ledger is not None
        world.leadership.ledger.append(encode([b"true"]))
        assert world.take(world.subscribe(DATA, LEDGER)) == [(LEDGER, "truncate")]
        assert own.log.end_offset == 0
        world.take(world.subscribe(LEDGER))
        world.progress(LEDGER)
        copies = [
            [bytes(batch.buffer[batch.position :][: batch.length]) for batch in one.log.batches(0)]
            for one in (own, world.leader.partition.ledger)
            if one is not None
        ]
        assert copies[0] == copies[1]
        assert watermarks(world.leader) == [1, 1, 0]

    run(scenario)


def test_followers_forget_what_the_owner_cuts_off() -> None:
    async def scenario(world: World) -> None:
        ledger = world.leadership.ledger
        assert ledger is not None
        parked = world.subscribe(LEDGER)
        for _ in range(20):
            ledger.append(encode([b"x" * 1000]))
            world.take(parked)
            parked = world.progress(LEDGER)
        ledger.truncate_prefix(15)
        await world.sync()
        assert ledger.log.start_offset == 15
        assert ledger.log.segment_count < 4
        world.ask()  # what was parked is answered, with the news
        world.take(parked)
        await world.sync()
        copy = world.follower.partition.ledger
        assert copy is not None
        assert copy.log.start_offset == 15
        assert copy.log.flushed_offset == 20, "what takes the place of the past is on disk"
        assert copy.log.segment_count < 4
        assert world.follower.partition.log.start_offset == 0

    run(scenario)


def test_a_follower_that_lags_keeps_its_beginning_until_it_has_what_takes_its_place() -> None:
    async def scenario(world: World) -> None:
        copy = world.follower.partition.ledger
        assert copy is not None
        leader = world.leader.partition.ledger
        assert leader is not None
        for _ in range(4):
            leader.append(encode([b"x"]))
        data = [leader.log.read(at, 1) for at in range(4)]
        copy.take(data[0], 4, 2)
        copy.take(data[1], 4, 2)
        copy.take(data[2], 4, 2)
        await world.sync()
        assert copy.log.start_offset == 0
        copy.take(data[3], 4, 2)
        await world.sync()
        assert copy.log.start_offset == 2

    run(scenario)


def test_a_follower_that_ends_below_the_leaders_beginning_begins_anew() -> None:
    async def scenario(world: World) -> None:
        copy, leader = world.follower.partition.ledger, world.leader.partition.ledger
        assert copy is not None
        assert leader is not None
        for _ in range(4):
            leader.append(encode([b"x"]))
        copy.take(leader.log.read(0, 1), 0, 0)
        leader.log.truncate_prefix(3)
        assert world.take(world.subscribe(LEDGER)) == [(LEDGER, "reset")]
        assert (copy.log.start_offset, copy.log.end_offset) == (3, 3)
        world.take(world.subscribe(LEDGER))
        assert copy.log.end_offset == 4

    run(scenario)


def test_a_follower_that_parted_before_the_leaders_beginning_begins_anew() -> None:
    """Where their histories part is cut off at the leader: it cannot say what they share."""

    async def scenario(world: World) -> None:
        copy, leader = world.follower.partition.ledger, world.leader.partition.ledger
        assert copy is not None
        assert leader is not None
        for _ in range(4):
            leader.append(encode([b"x"]))
        for at in range(3):
            copy.take(leader.log.read(at, 1), 3, 0)
        world.leader.decide(2, 2)
        world.follower.decide(2, 2)
        for _ in range(4):
            copy.append(encode([b"alone"]))
        world.begin(3)
        leader.append(encode([b"newer"]))
        leader.log.truncate_prefix(4)
        assert world.take(world.subscribe(LEDGER)) == [(LEDGER, "reset")]
        assert (copy.log.start_offset, copy.log.end_offset) == (4, 4)

    run(scenario)


def test_nothing_that_is_not_readable_may_be_cut_off() -> None:
    async def scenario(world: World) -> None:
        assert world.leadership.ledger is not None
        world.leadership.ledger.append(encode([b"x"]))
        with pytest.raises(AssertionError, match="not readable"):
            world.leadership.ledger.truncate_prefix(1)

    run(scenario)


def test_with_fsync_always_a_log_counts_when_it_is_on_disk() -> None:
    async def scenario(world: World) -> None:
        ledger = world.leadership.ledger
        assert ledger is not None
        parked = world.subscribe(LEDGER)
        ledger.append(encode([b"x"]))
        world.take(parked)
        assert not world.follower.reports
        waiting = ledger.replicated(1)
        await world.sync()
        assert world.follower.reports == [world.follower.partition.ledger]
        world.progress(LEDGER)
        assert waiting.done()

    run(scenario, config=ALWAYS)


def copying(world: World, records: int) -> tuple[PartitionLog, list[memoryview]]:
    """The follower's data, and batches that the leader has and it has not."""
    leader = world.leader.partition.data
    for _ in range(records):
        leader.append(encode([b"x"]))
    return world.follower.partition.data, [leader.log.read(at, 1) for at in range(records)]


def test_what_a_follower_lacked_counts_when_it_is_on_disk() -> None:
    """It is let in for what it told. Then it loses power, and the others their disks: the last
    moment may be gone, but not what was readable long before it was copied."""

    async def scenario(world: World) -> None:
        copy, data = copying(world, 5)
        for at in range(2):
            copy.take(data[at], 4, 0)
        await world.sync()
        assert (copy.own_end, copy.log.flushed_offset) == (0, 0), "no sync while more is to come"
        copy.take(data[2], 4, 0)
        copy.take(data[3], 4, 0)
        assert copy.own_end == 0
        world.follower.reports.clear()
        await world.sync()
        assert (copy.own_end, copy.log.flushed_offset) == (4, 4)
        assert world.follower.reports == [copy]
        copy.take(data[4], 5, 0)
        assert (copy.own_end, copy.log.flushed_offset) == (5, 4), "it keeps up now"

    run(scenario)


def test_what_is_readable_while_a_follower_syncs_does_not_make_it_sync_again() -> None:
    async def scenario(world: World) -> None:
        copy, data = copying(world, 3)
        copy.take(data[0], 1, 0)
        copy.take(data[1], 2, 0)
        assert copy.own_end == 0
        await world.sync()
        rounds = world.follower.syncer.rounds
        copy.take(data[2], 3, 0)
        await world.sync()
        assert (copy.own_end, world.follower.syncer.rounds) == (3, rounds)

    run(scenario)


def test_a_follower_that_lacked_nothing_syncs_nothing_before_it_counts() -> None:
    async def scenario(world: World) -> None:
        copy, data = copying(world, 2)
        copy.take(data[0], 0, 0)
        assert copy.own_end == 1
        copy.take(data[1], 1, 0)
        assert (copy.own_end, copy.log.flushed_offset) == (2, 0)

    run(scenario)


def test_a_follower_that_subscribes_again_may_lack_something_again() -> None:
    async def scenario(world: World) -> None:
        copy, data = copying(world, 2)
        copy.take(data[0], 0, 0)
        copy.subscribes()
        copy.take(data[1], 2, 0)
        assert copy.own_end == 0
        copy.cut(1)
        assert copy.own_end == 1, "what is cut need not be synced"

    run(scenario)


def test_a_copy_that_is_made_leader_syncs_what_it_lacked_before_it_counts() -> None:
    """When the last one in sync is gone the longest leads, and may just have been copying."""

    async def scenario(world: World) -> None:
        copy, data = copying(world, 2)
        copy.flush()  # a sync of less is under way when it becomes the leader
        copy.take(data[0], 2, 0)
        world.follower.partition.decide(Decided(2, 2, 2, (1, 2), (2,), (1, 1), 1), 2)
        assert copy.progress.own_end == 0
        await world.sync()
        assert watermarks(world.follower)[DATA] == 1

    run(scenario)


# Delayed records


def produce(world: World, *batches: bytearray, **fields: object) -> object:
    raw = memoryview(bytearray().join(batches))
    return world.leader.partition.produce(Produce("t", 0, delayed=True, **fields), raw)  # type: ignore[arg-type]


def test_delayed_records_go_to_their_log_and_the_service_hears_of_them() -> None:
    async def scenario(world: World) -> None:
        parked = world.subscribe(DATA, LEDGER, DELAYS)
        one, two = (encode([value], deliver_at=DUE) for value in (b"one", b"two"))
        answer = produce(world, one, two)
        assert isinstance(answer, asyncio.Future)
        assert world.service.told == [(0, [b"one"]), (1, [b"two"])]
        assert world.take(parked) == [(DELAYS, "append")]
        world.progress(DELAYS)
        assert answer.result().base_offsets == (0, 1)
        assert world.leader.partition.log.end_offset == 0

    run(scenario)


def test_repeated_delayed_records_are_neither_written_nor_told_again() -> None:
    async def scenario(world: World) -> None:
        def batch(sequence: int) -> bytearray:
            return encode(
                [b"%d" % sequence], deliver_at=DUE, producer=BatchProducer(5, 0, sequence)
            )

        produce(world, batch(0), acks="leader")
        reply = produce(world, batch(0), batch(1), acks="leader")
        assert reply.base_offsets == (0, 1)  # type: ignore[attr-defined]
        assert [base for base, _ in world.service.told] == [0, 1]
        with pytest.raises(OutOfOrderSequence):
            produce(world, batch(2), batch(4), acks="leader")
        assert [base for base, _ in world.service.told] == [0, 1, 2], "2 is in the log"
        data = world.leader.partition.data
        data.append_incoming(memoryview(encode([b"x"], producer=BatchProducer(5, 0, 0))), [])
        assert data.log.end_offset == 1, "each log has sequences of its own"

    run(scenario)


def test_batches_in_the_wrong_log_are_refused() -> None:
    async def scenario(world: World) -> None:
        with pytest.raises(InvalidArgument, match="without the times"):
            produce(world, encode([b"now"]))
        raw = memoryview(encode([b"later"], deliver_at=DUE))
        with pytest.raises(InvalidArgument, match="not sent as a delayed one"):
            world.leader.partition.produce(Produce("t", 0), raw)
        assert not world.service.told

    run(scenario)


def test_a_full_disk_leaves_what_was_written_scheduled() -> None:
    async def scenario(world: World) -> None:
        batch = encode([b"x" * 3000], deliver_at=DUE)
        world.leader.disk.capacity = world.leader.disk.used_bytes() + 3500
        with pytest.raises(DiskFull) as caught:
            produce(world, bytearray(batch), bytearray(batch), acks="leader")
        assert caught.value.outcome == "unknown"
        assert [base for base, _ in world.service.told] == [0]

    run(scenario)


def test_a_broken_service_ends_the_node() -> None:
    class Broken(Service):
        def stop(self) -> None:
            raise RuntimeError("broken")

        def scheduled(self, base: int, batch: memoryview) -> None:
            raise RuntimeError("broken")

    async def main() -> None:
        world = World()
        world.leader.partition.service = Broken()
        produce(world, encode([b"x"], deliver_at=DUE), acks="leader")
        world.leader.partition.close()
        assert [str(one) for one in world.leader.failures] == ["broken", "broken"]
        assert all(one.log.failure is not None for one in world.leader.partition.logs)

    asyncio.run(main())


def test_the_files_of_all_logs_come_back_and_go_together() -> None:
    async def main() -> None:
        home = Home(1)
        home.partition.decide(Decided(1, 1, 1, (1,), (1,), (1,), 1), 1)
        for number, partition_log in enumerate(home.partition.logs):
            due = DUE if number == DELAYS else None
            batch = encode(
                [b"%d" % number], deliver_at=due, producer=BatchProducer(5 + number, 0, 0)
            )
            partition_log.append(batch)
        home.partition.close()
        assert sorted(home.disk.list("/p")) == sorted(
            ["data", "delays", "ledger", f"producers-{1:020d}.snapshot"]
        )
        for number in (DATA, LEDGER, DELAYS):
            log, producers = home.open(number)
            assert [bytes(v) for one in log.batches(0) for v in one.values()] == [b"%d" % number]
            assert producers.check(5 + number, 0, 0, 1) == 0
            log.close()
        home.disk.capacity = home.disk.used_bytes()
        remove_replica(home.disk, "/p")
        assert not home.disk.exists("/p")

    asyncio.run(main())
