"""Real nodes whose topics become queues: while led, followed or down, across restarts."""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from raftq import aio
from raftq.client.common.disk import RealDisk
from raftq.client.common.errors import InvalidArgument, NotLeader, UnknownTopic
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.batch import encode
from raftq.client.wire.messages import Produce
from raftq.cluster.metadata.commands import CreateTopic, MoveReplicas
from raftq.cluster.raft.config import RaftTimes
from raftq.node.app import Node, wall_ms
from raftq.node.config import Address, NodeConfig, StorageConfig
from raftq.node.replication.leader_log import Leadership
from raftq.node.replication.partition_log import PartitionLog

SECRET = b"0123456789abcdef"
FAST = RaftTimes(election_ms_min=150, election_ms_max=300, append_ms=40, fallback_ms=450)
DUE = [4_000_000_000_000]


class Owner:
    """A service that remembers its epochs."""

    def __init__(self, leadership: Leadership) -> None:
        self.leadership = leadership
        self.stopped = False
        self.scheduled_at: list[int] = []

    def stop(self) -> None:
        assert not self.leadership.active
        self.stopped = True

    def scheduled(self, base: int, batch: memoryview) -> None:
        self.scheduled_at.append(base)


class Cluster:
    """Nodes of one cluster in this process, started and stopped at will."""

    def __init__(self, directory: Path, count: int) -> None:
        self.directory = directory
        self.raft = {node: free_port() for node in range(1, count + 1)}
        self.native = {node: free_port() for node in self.raft}
        self.nodes: dict[int, Node] = {}
        self.owners: dict[int, list[Owner]] = {node: [] for node in self.raft}

    async def start(self, *wanted: int) -> None:
        async with asyncio.TaskGroup() as group:
            for node_id in wanted or self.raft:
                group.create_task(self._start(node_id))

    async def _start(self, node_id: int) -> None:
        config = NodeConfig(
            node_id=node_id,
            secret=SECRET,
            data_dir=str(self.directory / str(node_id)),
            native=Address("127.0.0.1", self.native[node_id]),
            http=None,
            raft=Address("127.0.0.1", self.raft[node_id]),
            voters={one: f"127.0.0.1:{port}" for one, port in self.raft.items()},
            raft_times=FAST,
            storage=StorageConfig(fsync_interval_ms=50),
        )
        node = Node(config, disk=RealDisk(), rng=random.Random(), wall_ms=wall_ms)
        owners = self.owners[node_id]

        def serve(leadership: Leadership) -> Owner:
            owners.append(Owner(leadership))
            return owners[-1]

        node.partitions.serve = serve
        self.nodes[node_id] = node
        await node.start()

    async def stop(self, *wanted: int) -> None:
        for node_id in wanted or list(self.nodes):
            await self.nodes.pop(node_id).stop()

    async def until(self, holds: Callable[[], Any], seconds: float = 20.0) -> None:
        async with asyncio.timeout(seconds):
            while not holds():  # noqa: ASYNC110 - of whatever state, in several nodes
                await asyncio.sleep(0.02)

    @property
    def any(self) -> Node:
        return next(iter(self.nodes.values()))

    async def create(self, name: str = "t", replication: int = 1, partitions: int = 1) -> None:
        command = CreateTopic(name, partitions, replication, {"segment_bytes": 4096})
        await self.any.metadata.propose(command)
        await self.until(lambda: self.leader(name) is not None)

    def leader(self, topic: str = "t") -> int | None:
        for node_id, node in self.nodes.items():
            partition = node.partitions.by_name.get((topic, 0))
            if partition is not None and partition.replica.role == "leader":
                state = self.any.metadata.state.partition(topic, 0)
                if state is not None and state.leader == node_id:
                    return node_id
        return None

    def owner(self, node_id: int, topic: str = "t") -> Owner:
        service = self.nodes[node_id].partitions.of(topic, 0).service
        assert isinstance(service, Owner)
        return service

    def partition_log(self, node_id: int, number: int) -> PartitionLog | None:
        partition = self.nodes[node_id].partitions.by_name.get(("t", 0))
        return None if partition is None else partition.log_of(number)

    def is_whole(self, count: int = 3) -> bool:
        state = self.any.metadata.state.partition("t", 0)
        return state is not None and len(state.isr) == count and self.leader() is not None

    def same(self) -> bool:
        """Whether all nodes have the same bytes in every log."""
        for number in range(3):
            copies = []
            for node_id in self.nodes:
                partition_log = self.partition_log(node_id, number)
                if partition_log is None:
                    return False
                log = partition_log.log
                copies.append(
                    [bytes(one.buffer[one.position :][: one.length]) for one in log.batches(0)]
                    if log.end_offset
                    else []
                )
            if any(copy != copies[0] for copy in copies):
                return False
        return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def run(directory: Path, count: int, scenario: Callable[[Cluster], Awaitable[None]]) -> None:
    async def main() -> None:
        cluster = Cluster(directory, count)
        try:
            await cluster.start()
            await scenario(cluster)
            assert not any(node.fatal.done() for node in cluster.nodes.values())
        finally:
            await cluster.stop()

    asyncio.run(main())


def values(partition_log: PartitionLog | None) -> list[bytes]:
    assert partition_log is not None
    return [value for batch in partition_log.log.batches(0) for value in batch.values()]


def test_a_topic_becomes_a_queue_on_first_use_and_stays_one(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create()
        partitions = cluster.any.partitions
        assert partitions.of("t", 0).service is None
        files = tmp_path / "1" / "logs" / "t-1" / "0"
        assert not (files / "ledger").exists()
        await asyncio.gather(*(partitions.enable_queues("t") for _ in range(5)))
        first = cluster.owner(1)
        assert cluster.owners[1] == [first]
        assert (files / "ledger").exists()
        assert (files / "delays").exists()
        await partitions.enable_queues("t")
        await first.leadership.old_epochs_replicated
        assert first.leadership.ledger is not None
        await first.leadership.ledger.replicated(
            first.leadership.ledger.append(encode([b"entry"])) + 1
        )
        await cluster.stop()
        assert first.stopped
        await cluster.start()
        await cluster.until(lambda: cluster.leader())
        again = cluster.owner(1)
        assert again.leadership.epoch > first.leadership.epoch
        assert again.leadership.ledger is not None
        assert values(cluster.partition_log(1, 1)) == [b"entry"]
        await again.leadership.old_epochs_replicated
        with pytest.raises(UnknownTopic):
            await cluster.any.partitions.enable_queues("nowhere")

    run(tmp_path, 1, scenario)


def test_the_first_delayed_record_makes_a_topic_a_queue(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create()
        batch = encode([b"later"], deliver_at=DUE)
        async with await Connection.open(
            "127.0.0.1", cluster.any.native_port, ConnectionOptions()
        ) as connection:
            replies = await asyncio.gather(
                *(connection.request(Produce("t", 0, delayed=True), [batch]) for _ in range(3))
            )
            assert sorted(one.message.base_offsets[0] for one in replies) == [0, 1, 2]
            with pytest.raises(InvalidArgument):
                await connection.request(Produce("t", 0, delayed=True), [encode([b"now"])])
        assert cluster.owner(1).scheduled_at == [0, 1, 2]
        assert values(cluster.partition_log(1, 2)) == [b"later"] * 3
        assert values(cluster.partition_log(1, 0)) == []

    run(tmp_path, 1, scenario)


def test_the_clusters_own_topics_are_not_for_clients(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create("__own")
        assert cluster.owner(1, "__own").leadership.ledger is None
        address = f"127.0.0.1:{cluster.any.native_port}"
        async with aio.Admin(address) as admin:
            for refused in (
                admin.create_topic("__mine"),
                admin.delete_topic("__own"),
                admin.alter_topic("__own", {"retention_ms": 1}),
                admin.add_partitions("__own", 9),
            ):
                with pytest.raises(InvalidArgument, match="cluster's own"):
                    await refused
        async with await Connection.open(
            "127.0.0.1", cluster.any.native_port, ConnectionOptions()
        ) as connection:
            for delayed in (False, True):
                request = Produce("__own", 0, delayed=delayed)
                with pytest.raises(InvalidArgument, match="cluster itself"):
                    await connection.request(request, [encode([b"x"])])
        with pytest.raises(InvalidArgument, match="cannot be a queue"):
            await cluster.any.partitions.enable_queues("__own")
        leadership = cluster.owner(1, "__own").leadership
        await leadership.data.replicated(leadership.data.append(encode([b"ours"])) + 1)

    run(tmp_path, 1, scenario)


def test_a_deleted_queue_leaves_nothing_behind(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create()
        await cluster.any.partitions.enable_queues("t")
        owner = cluster.owner(1)
        assert owner.leadership.ledger is not None
        waiting = owner.leadership.ledger.replicated(5)
        async with aio.Admin(f"127.0.0.1:{cluster.any.native_port}") as admin:
            await admin.delete_topic("t")
        await cluster.until(lambda: owner.stopped)
        with pytest.raises(NotLeader):
            await waiting
        left = tmp_path / "1" / "logs" / "t-1"
        await cluster.until(lambda: not list(left.glob("*")))

    run(tmp_path, 1, scenario)


def test_what_a_ledger_had_replicated_survives_its_leader(tmp_path: Path) -> None:
    """
    1. Three replicas; the topic becomes a queue through a node that follows.
    2. Entries are written and replicated; the leader goes, another one has all of them when it is
       settled, and goes on writing.
    3. The first comes back, whose ledger has something that nobody else has: it is cut.
    """

    async def scenario(cluster: Cluster) -> None:
        await cluster.create(replication=3)
        await cluster.until(cluster.is_whole)
        first = cluster.leader()
        assert first is not None
        follower = next(one for one in cluster.nodes if one != first)
        await cluster.nodes[follower].partitions.enable_queues("t")
        assert cluster.partition_log(follower, 1) is not None
        await cluster.until(lambda: cluster.owners[first])
        leadership = cluster.owner(first).leadership
        assert leadership.ledger is not None
        assert leadership.delays is not None
        for number in range(30):
            base = leadership.ledger.append(encode([b"%d" % number * 50]))
            leadership.delays.append(encode([b"later"], deliver_at=DUE))
        await leadership.ledger.replicated(base + 1)
        await leadership.delays.replicated(base + 1)
        expected = values(cluster.partition_log(first, 1))
        gone = cluster.nodes[first]
        gone.follower_sessions.fence = lambda: None  # type: ignore[method-assign]
        for session in list(gone.follower_sessions._by_session):
            gone.follower_sessions.session_ended(session)
        leadership.ledger.append(encode([b"nobody else has this"]))
        await cluster.stop(first)
        assert cluster.owners[first][-1].stopped

        await cluster.until(lambda: cluster.leader() not in (None, first))
        second = cluster.leader()
        assert second is not None
        after = cluster.owner(second).leadership
        await asyncio.wait_for(after.old_epochs_replicated, 20)
        assert values(cluster.partition_log(second, 1)) == expected
        assert after.ledger is not None
        assert after.ledger.high_watermark == 30
        await after.ledger.replicated(after.ledger.append(encode([b"afterwards"])) + 1)

        await cluster.start(first)
        await cluster.until(lambda: cluster.is_whole() and cluster.same())
        for node in cluster.nodes:
            assert values(cluster.partition_log(node, 1)) == [*expected, b"afterwards"]

    run(tmp_path, 3, scenario)


def test_a_node_that_was_down_and_one_that_is_new_get_all_logs(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await cluster.create(replication=2)
        await cluster.until(lambda: cluster.is_whole(2))
        state = cluster.any.metadata.state.partition("t", 0)
        assert state is not None
        leader, follower = state.leader, next(one for one in state.replicas if one != state.leader)
        assert leader is not None
        await cluster.stop(follower)
        await cluster.until(lambda: cluster.is_whole(1))
        await cluster.nodes[leader].partitions.enable_queues("t")
        leadership = cluster.owner(leader).leadership
        assert leadership.ledger is not None
        for number in range(30):
            end = leadership.ledger.append(encode([b"%d" % number * 300])) + 1
        await leadership.ledger.replicated(end)
        leadership.ledger.truncate_prefix(20)
        await cluster.until(
            lambda: leadership.ledger is not None and leadership.ledger.log.start_offset == 20
        )
        await cluster.start(follower)
        await cluster.until(lambda: cluster.is_whole(2))
        partition_log = cluster.partition_log(follower, 1)
        assert partition_log is not None
        assert (partition_log.log.start_offset, partition_log.log.end_offset) == (20, 30)

        third = next(one for one in cluster.raft if one not in (leader, follower))
        await cluster.any.metadata.propose(MoveReplicas("t", 0, (third,)))
        await cluster.until(lambda: cluster.leader() == third and cluster.is_whole(1))
        assert cluster.partition_log(third, 1).log.end_offset == 30  # type: ignore[union-attr]
        await cluster.until(lambda: cluster.partition_log(leader, 0) is None)
        assert cluster.owners[leader][-1].stopped
        # Files go after a confirmed read of the metadata, a moment later.
        left = tmp_path / str(leader) / "logs" / "t-1"
        await cluster.until(lambda: not list(left.glob("*")))
        moved = cluster.owner(third).leadership.ledger
        assert moved is not None
        await moved.replicated(moved.append(encode([b"x"])) + 1)

    run(tmp_path, 3, scenario)


async def fill_ledger(cluster: Cluster) -> int:
    """Several segments of it, the same on all nodes; who leads."""
    await cluster.create(replication=3)
    await cluster.until(cluster.is_whole)
    leader = cluster.leader()
    assert leader is not None
    await cluster.nodes[leader].partitions.enable_queues("t")
    leadership = cluster.owner(leader).leadership
    assert leadership.ledger is not None
    for _ in range(20):
        end = leadership.ledger.append(encode([b"x" * 900])) + 1
    await leadership.ledger.replicated(end)
    await cluster.until(cluster.same)
    return leader


def flip(path: Path, position: int) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 1]))


def test_rotten_bits_of_a_ledger_are_repaired_from_another_copy(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        await fill_ledger(cluster)
        for node_id, node in cluster.nodes.items():
            files = sorted((tmp_path / str(node_id) / "logs/t-1/0/ledger").glob("*.log"))
            assert len(files) > 2
            flip(files[1], 500)
            partition = node.partitions.of("t", 0)
            for _ in partition.logs:
                node.upkeep._scrub(partition)
            assert partition.ledger is not None
            assert partition.ledger.log.damaged
            await cluster.until(lambda node=node: node.upkeep.repaired)
            assert not partition.ledger.log.damaged
        assert cluster.same()

    run(tmp_path, 3, scenario)


def test_a_segment_that_vanished_is_fetched_again_from_another_copy(tmp_path: Path) -> None:
    async def scenario(cluster: Cluster) -> None:
        leader = await fill_ledger(cluster)
        victim = next(one for one in cluster.raft if one != leader)
        await cluster.stop(victim)
        files = sorted((tmp_path / str(victim) / "logs/t-1/0/ledger").glob("*.log"))
        assert len(files) > 3
        files[1].unlink()
        files[-1].unlink()
        await cluster.start(victim)
        node = cluster.nodes[victim]
        await cluster.until(lambda: node.upkeep.repaired == 2)
        ledger = node.partitions.of("t", 0).ledger
        assert ledger is not None
        assert not ledger.log.damaged
        await cluster.until(cluster.same)

    run(tmp_path, 3, scenario)


def test_rotten_bits_in_the_active_segment_of_a_leader_do_not_keep_a_follower_out(
    tmp_path: Path,
) -> None:
    """
    1. A follower is away while records are written; one of them rots in the leader's active file.
    2. The follower comes back: it refuses what it is handed, the leader repairs its file with the
       bytes of the other follower, and all are in sync.
    """

    async def scenario(cluster: Cluster) -> None:
        await cluster.create(replication=3)
        await cluster.until(cluster.is_whole)
        leader = cluster.leader()
        assert leader is not None
        data = cluster.partition_log(leader, 0)
        assert data is not None
        away = next(one for one in cluster.raft if one != leader)
        await cluster.stop(away)
        for number in range(5):
            data.append(encode([b"%d" % number * 100]))
        await cluster.until(lambda: cluster.is_whole(2) and data.progress.high_watermark == 5)
        other = next(node for node in cluster.nodes if node != leader)
        copy = cluster.partition_log(other, 0)
        assert copy is not None
        await cluster.until(lambda: copy.progress.high_watermark == 5)
        segment, position = data.log.stored_at(3)
        flip(Path(segment.path), position + 90)
        await cluster.start(away)
        await cluster.until(cluster.is_whole)
        assert cluster.nodes[leader].upkeep.repaired == 1
        assert not data.log.damaged
        assert [values(cluster.partition_log(node, 0)) for node in cluster.nodes] == [
            values(copy)
        ] * 3

    run(tmp_path, 3, scenario)
