"""What retention may take, and when."""

import asyncio
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from fake_partition_logs import FakePartition
from fake_queue import pause, run

from raftq.client.wire.batch import encode
from raftq.cluster.metadata.topic_config import topic_config
from raftq.node.config import StorageConfig
from raftq.node.queue.leader.delay_line import DelayLine
from raftq.node.replication.upkeep import RETENTION_S, Upkeep


class Home:
    """As much of a node's partitions as the upkeep looks at: one."""

    def __init__(self, partition: FakePartition, is_queue: bool = True) -> None:
        self.on_damage: Any = None
        self.held = Held(partition, is_queue)

    def __iter__(self) -> Any:
        return iter([self.held])


@dataclass
class Held:
    """As much of a partition, whose followers have what is readable."""

    partition: FakePartition
    is_queue: bool
    closed: bool = False
    logs: tuple[()] = ()

    def __post_init__(self) -> None:
        self.ref = self.partition.ref
        self.config = self.partition.config
        self.log = self.partition.logs["data"].log

    @property
    def replica(self) -> Any:
        return SimpleNamespace(high_watermark=self.partition.logs["data"].high_watermark)


def wall_ms() -> int:
    return 1_700_000_000_000 + int(asyncio.get_running_loop().time() * 1000)


def upkeep(home: Home) -> Upkeep:
    net: Any = SimpleNamespace(loop=asyncio.get_running_loop())
    return Upkeep(home, net, wall_ms, lambda work: None, StorageConfig(scrub_bytes_s=0))  # type: ignore[arg-type]


def test_delayed_record_does_not_fire_twice_when_retention_takes_what_fired() -> None:
    """
    1. A record fires; its segment is sealed and over the limit before the mark is written.
    2. Retention looks, and the leader dies: the next one finds in its data log that it has fired.
    3. Retention takes the segment when the mark is surely there.
    """

    async def main() -> None:
        config = topic_config({"fsync": "none", "retention_bytes": 1}, 3)
        partition = FakePartition(config=config)
        keeper = upkeep(Home(partition))
        keeper.start()
        await pause(5)
        line = DelayLine(partition.lead(), wall_ms)
        line.start()
        batch = encode([b"later"], timestamps=wall_ms(), deliver_at=[wall_ms() + 2_010])
        line.scheduled(line.leadership.delays.append(batch), memoryview(batch))
        await pause(2.03)
        assert line.counts.fired == 1
        partition.logs["data"].log.roll()
        keeper._maintain(keeper._partitions.held)  # type: ignore[attr-defined]
        line.stop()
        leadership = partition.fail_over(Random(1))
        line = DelayLine(leadership, wall_ms)
        line.start()
        leadership.settle()
        await pause(5)
        assert line.counts.fired == 0, "it fired again"
        await pause(3 * RETENTION_S)
        assert partition.logs["data"].log.start_offset == 1
        line.stop()
        keeper.stop()

    run(main())


@pytest.mark.parametrize("is_queue", [False, True])
def test_retention_goes_on_under_load(is_queue: bool) -> None:
    """What goes was readable for a while where records may be delayed; nothing waits elsewhere."""

    async def main() -> None:
        config = topic_config({"fsync": "none", "retention_bytes": 1}, 3)
        partition = FakePartition(config=config)
        partition.lead()
        keeper = upkeep(Home(partition, is_queue))
        keeper.start()
        log = partition.logs["data"].log
        for _ in range(200):
            partition.append("data", encode([b"x"]))
            log.roll()
            await pause(1)
        kept = log.end_offset - log.start_offset
        assert kept <= (2 * RETENTION_S + 3 if is_queue else 3)
        keeper.stop()

    run(main())
