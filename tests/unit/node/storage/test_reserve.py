"""Space set aside: a full disk refuses records and takes settlements, here and on followers."""

import asyncio

import pytest
from simdisk import SimDisk

from raftq.client.common.errors import DiskFull
from raftq.client.wire.batch import encode
from raftq.client.wire.encoder import encode_control
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.config import StorageConfig
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import DATA, DELAYS, LEDGER, PartitionLog
from raftq.node.replication.partition_ref import PartitionRef
from raftq.node.replication.replica import Decided, Replica
from raftq.node.replication.replica_files import open_log
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.reserve import Reserve

SIZE = 200_000


class Home:
    """A node with one partition on a simulated disk."""

    def __init__(self, leader: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.found_full = 0
        self.syncer = Flusher(None)
        self.disk = SimDisk()
        self.disk.make_directory("/p")
        config = topic_config({"fsync": "none"}, 1)
        place = PartitionRef("t", 7, 0, "/p")
        logs = [
            open_log(self.disk, place, number, config, StorageConfig(), 0)
            for number in (DATA, LEDGER, DELAYS)
        ]
        self.partition = Partition(place, *logs[0], Replica(1, 3.0, lambda one: True), self)
        self.partition.configure(config)
        for log, producers in logs[1:]:
            self.partition.open_log(log, producers)
        self.reserve = Reserve(self.disk, "/p", SIZE)
        self.reserve.hold()
        for partition_log in self.partition.logs:
            partition_log.reserve = self.reserve
        self.partition.decide(Decided(1, 1, leader, (1, 2), (leader,), (1, 1), 1, False), 1)

    def fill(self) -> None:
        self.disk.capacity = self.disk.used_bytes()

    def mark_active(self, partition: Partition) -> None: ...
    def damaged(self, partition_log: PartitionLog, error: BaseException) -> None: ...
    def disk_full(self) -> None:
        self.found_full += 1

    def failed(self, partition: Partition, error: BaseException) -> None: ...


def test_a_full_disk_refuses_records_and_takes_settlements() -> None:
    async def main() -> None:
        home = Home(leader=1)
        data, ledger, delays = home.partition.logs
        data.append_incoming(memoryview(encode([b"a"])), [])
        home.fill()
        with pytest.raises(DiskFull):
            data.append_incoming(memoryview(encode([b"b"])), [])
        assert home.reserve.is_held
        assert home.found_full == 1
        for _ in range(100):
            ledger.append(encode_control(b"settled"))
        assert home.reserve.is_used
        # There is room now, but not for this.
        with pytest.raises(DiskFull, match="read and acked"):
            data.append_incoming(memoryview(encode([b"b"])), [])
        with pytest.raises(DiskFull):
            delays.append(encode([b"b"], deliver_at=[1]))
        assert ledger.log.end_offset == 100
        # Space is back, and so is the reserve.
        home.disk.capacity = None
        home.reserve.check(home.loop.time() + 10)
        assert home.reserve.is_held
        data.append_incoming(memoryview(encode([b"b"])), [])

    asyncio.run(main())


def test_the_ledger_ends_where_the_reserve_does() -> None:
    async def main() -> None:
        home = Home(leader=1)
        ledger = home.partition.logs[LEDGER]
        home.fill()
        ledger.append(encode_control(bytes(100_000)))
        with pytest.raises(DiskFull):
            ledger.append(encode_control(bytes(150_000)))
        ledger.append(encode_control(bytes(50_000)))

    asyncio.run(main())


def test_a_follower_takes_settlements_on_a_full_disk() -> None:
    async def main() -> None:
        leader, follower = Home(leader=1), Home(leader=2)
        source = leader.partition.logs[LEDGER]
        source.append(encode_control(b"settled"))
        follower.fill()
        follower.partition.logs[LEDGER].take(source.log.read(0, 1000), 0, 0)
        assert follower.partition.logs[LEDGER].log.end_offset == 1
        leader.partition.logs[DATA].append_incoming(memoryview(encode([bytes(300_000)])), [])
        with pytest.raises(DiskFull):
            follower.partition.logs[DATA].take(
                leader.partition.logs[DATA].log.read(0, 1 << 20), 0, 0
            )

    asyncio.run(main())


def test_no_reserve_is_made_where_there_is_little_room() -> None:
    disk = SimDisk()
    disk.make_directory("/p")
    disk.capacity = disk.used_bytes() + 3 * SIZE
    reserve = Reserve(disk, "/p", SIZE)
    reserve.hold()
    assert not reserve.is_held
    assert not reserve.give_up()
    reserve.check(100.0)  # nothing was given up, so nobody is refused
    Reserve(disk, "/p", 0).hold()
    assert disk.list("/p") == []
