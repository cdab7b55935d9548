"""What a leader remembers is about a version of the partition: directed runs of whole clusters.

Each of these lost acknowledged records, or never came to rest, when what was known of followers and
proposals belonged to the epoch alone.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from random import Random

import pytest
from clusterchecks import Invariants
from simcluster import WALL_MS, Plan, SimCluster, TopicPlan, make_plan
from simmetadata import SimMetadata
from simnet import NetworkShape

from raftq.client.common.errors import RaftqError
from raftq.client.producer.producer import Producer
from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import (
    AlterTopic,
    ChangeIsr,
    Command,
    Confirm,
    CreateTopic,
    DeleteTopic,
    MoveReplicas,
    decode_command,
)
from raftq.cluster.metadata.state import PartitionState

KEY = ("t0", 0)


def quiet_plan(seed: int, nodes: int = 5, partitions: int = 1, sync_s: float = 0.001) -> Plan:
    topics = (TopicPlan("t0", partitions, "interval", 1 << 26),)
    return replace(
        make_plan(seed),
        nodes=nodes,
        topics=topics,
        churn=0.0,
        decide_s=0.005,
        always=False,
        sync_s=sync_s,
        shape=NetworkShape(),
    )


def make_cluster(seed: int, nodes: int = 5, partitions: int = 1, sync_s: float = 0.001):  # type: ignore[no-untyped-def]
    return SimCluster(quiet_plan(seed, nodes, partitions, sync_s))


async def propose(cluster: SimCluster, node_id: int, command: Command) -> None:
    node = cluster.nodes[node_id]
    assert node.process is not None
    assert node.node is not None
    await node.process.spawn(node.node.metadata.propose(command))


async def begin(
    cluster: SimCluster, copies: int = 3, partitions: int = 1, **config: object
) -> None:
    for node in cluster.nodes.values():
        node.start()
    await cluster.until("all nodes serve", cluster.is_whole, 30)
    await propose(cluster, 1, CreateTopic("t0", partitions, copies, config))  # type: ignore[arg-type]
    await cluster.until("the topic is there", cluster.is_whole, 30)


def partition(cluster: SimCluster, number: int = 0) -> PartitionState:
    found = cluster.consensus.state.partition("t0", number)
    assert found is not None
    return found


class Sending:
    """A producer that sends to one partition until it is stopped, and what it was told."""

    def __init__(self, cluster: SimCluster, name: str, acks: str = "all", pace: float = 0.02):
        self.acknowledged: dict[bytes, int] = {}
        self.failed: list[RaftqError] = []
        self._cluster, self._name, self._acks, self._pace = cluster, name, acks, pace
        self._stop = asyncio.Event()
        self._task = cluster.client(name).spawn(self._run())

    async def _run(self) -> None:
        cluster = self._cluster
        producer = Producer(
            cluster.plan.bootstrap,
            name=self._name,
            rng=Random(self._name),
            acks=self._acks,  # type: ignore[arg-type]
            linger_ms=0,
            request_ms=3_000,
            connect_ms=1_000,
            delivery_timeout_ms=100_000,
            max_block_ms=100_000,
            bootstrap_ms=100_000,
            stall_ms=500,
            wall_ms=lambda: WALL_MS + int(cluster.loop.time() * 1000),
        )
        number = 0
        async with producer, asyncio.TaskGroup() as group:
            while not self._stop.is_set():
                value = f"{self._name} {number}".encode()
                number += 1
                with suppress(RaftqError):
                    delivery = await producer.send("t0", value, partition=0)
                    group.create_task(self._settle(delivery, value))
                await asyncio.sleep(self._pace)

    async def _settle(self, delivery, value: bytes) -> None:  # type: ignore[no-untyped-def]
        try:
            self.acknowledged[value] = (await delivery).offset
        except RaftqError as error:
            self.failed.append(error)

    async def stop(self) -> None:
        self._stop.set()
        await self._cluster.until("the producer has ended", self._task.done, 150)


def check_nothing_lost(cluster: SimCluster, acknowledged: dict[bytes, int]) -> None:
    leader = partition(cluster).leader
    assert leader is not None
    copy = cluster.nodes[leader].copy_of(KEY)
    assert copy is not None
    kept = {value for one in copy.log.batches(copy.log.start_offset) for value in one.values()}
    lost = [value for value in acknowledged if value not in kept]
    assert not lost, f"{len(lost)} of {len(acknowledged)} acknowledged records are lost"


async def expansion_under_a_long_split(cluster: SimCluster, copies: int) -> None:
    """
    1. X comes back and is level; its leader L proposes to let it in, and the metadata takes that.
    2. A split of 12 s begins: L and the rest of the set on one side, X and the majority on the
       other. X is in sync, and leads. L hears nothing; its proposal has no outcome, and its next
       tries find no leader.
    3. L acknowledges nothing that X does not have.
    """
    consensus, network, nodes = cluster.consensus, cluster.network, cluster.nodes
    await begin(cluster, copies)
    back = partition(cluster).replicas[0]
    nodes[back].kill()
    await cluster.until("it is put out", lambda: back not in partition(cluster).isr, 30)
    leader = partition(cluster).leader
    assert leader is not None
    apart = [one for one in partition(cluster).replicas if one != back]
    if consensus.leader in apart:
        consensus.leader = next(one for one in nodes if one not in apart and one != back)
    zone = [nodes[one].machine.name for one in apart] + ["near", "near too"]
    rest = [node.machine.name for one, node in nodes.items() if one not in apart]
    split, take = asyncio.Event(), consensus.take

    def take_and_split(node_id: int, data: bytes, command_id: bytes):  # type: ignore[no-untyped-def]
        command = decode_command(data)
        taken = take(node_id, data, command_id)
        if isinstance(command, ChangeIsr) and back in dict(command.isr) and not split.is_set():
            split.set()
            for one in zone:
                for other in rest:
                    network.cut(one, other)
                    network.cut(other, one)
        return taken

    consensus.take = take_and_split  # type: ignore[method-assign]
    sending = Sending(cluster, "near", pace=0.05)
    others = Sending(cluster, "near too", acks="leader")
    await asyncio.sleep(1.0)
    nodes[back].start()
    async with asyncio.timeout(30):
        await split.wait()
    await asyncio.sleep(12.0)
    assert partition(cluster).leader == back, "the schedule is not the one that is meant"
    copy, other = nodes[leader].copy_of(KEY), nodes[back].copy_of(KEY)
    assert copy is not None
    assert other is not None
    assert back not in copy.replica.decided.isr, "the leader has heard of it in spite of the split"
    # Whether it is lost in the end also depends on who leads after the split.
    assert copy.replica.high_watermark <= other.log.end_offset
    acknowledged = dict(sending.acknowledged)
    assert acknowledged
    network.heal_all()
    await sending.stop()
    await others.stop()
    await cluster.until("everything is whole", cluster.is_whole, 60)
    check_nothing_lost(cluster, acknowledged)


@pytest.mark.parametrize("copies", [2, 3])
@pytest.mark.parametrize("seed", range(2))
def test_an_expansion_of_unknown_outcome_counts_through_a_long_split(
    seed: int, copies: int
) -> None:
    cluster = make_cluster(seed, nodes=5 if copies == 3 else 3)
    cluster.run(expansion_under_a_long_split(cluster, copies), lambda: None)
    assert not cluster.bugs, cluster.bugs


def hear_late(cluster: SimCluster, node_id: int, lag_s: float) -> Callable[[], None]:
    """Every entry reaches this node `lag_s` after it was decided, one by one, until undone."""
    consensus = cluster.consensus
    member = consensus.seats[node_id].member
    assert member is not None
    append = consensus._append

    def hear() -> None:
        entry = consensus.entries[member.index]
        member.index += 1
        known = entry.error is None
        member._publish(apply(member.state, entry.command, member.index)[1] if known else [])

    def append_late(data: bytes, command_id: bytes) -> int:
        index = append(data, command_id)
        cluster.loop.call_later(lag_s, hear, context=member.process.context)
        return index

    member.catch_up_soon = lambda: None  # type: ignore[method-assign]
    consensus._append = append_late  # type: ignore[method-assign]

    def undo() -> None:
        del member.catch_up_soon
        consensus._append = append  # type: ignore[method-assign]

    return undo


async def moved_away_and_back(cluster: SimCluster, lag_s: float) -> None:
    """
    1. X is moved away, and hears of the metadata late. It is moved back before it has heard.
    2. It goes on to tell where its old log ends; nobody believes it.
    3. It hears of the first move, then of the second. Only then is it let in, with what it has.
    4. The leader is killed. Whoever leads then has everything.
    """
    nodes = cluster.nodes
    await begin(cluster, min_insync=2)
    leader, other, away = partition(cluster).replicas
    spare = next(one for one in nodes if one not in partition(cluster).replicas)
    sending = Sending(cluster, "producer")
    await asyncio.sleep(2.0)
    undo = hear_late(cluster, away, lag_s)
    await propose(cluster, other, MoveReplicas("t0", 0, (leader, other, spare)))
    await cluster.until("moved away", lambda: partition(cluster).target is None, 10)
    moved_at = cluster.loop.time()
    await propose(cluster, other, MoveReplicas("t0", 0, (away, leader, other)))
    await cluster.until("moved back", lambda: partition(cluster).target is None, 20)
    assert cluster.loop.time() > moved_at + lag_s * 0.9, "it was let in before it had heard"
    acknowledged = dict(sending.acknowledged)
    nodes[leader].kill()
    await asyncio.sleep(6.0)
    undo()
    nodes[leader].start()
    await sending.stop()
    await cluster.until("everything is whole", cluster.is_whole, 60)
    check_nothing_lost(cluster, acknowledged)


@pytest.mark.parametrize("lag_s", [0.12, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_a_replica_moved_away_and_back_is_not_let_in_for_what_it_is_about_to_delete(
    seed: int, lag_s: float
) -> None:
    cluster = make_cluster(seed)
    invariants = Invariants(cluster, every=3)
    cluster.run(moved_away_and_back(cluster, lag_s), invariants.after_turn)
    assert not cluster.bugs, cluster.bugs


async def moved_while_it_paused(cluster: SimCluster) -> None:
    """X sees both moves at once: nothing changed for it but its assignment."""
    await begin(cluster, min_insync=2)
    leader, other, away = partition(cluster).replicas
    spare = next(one for one in cluster.nodes if one not in partition(cluster).replicas)
    process = cluster.nodes[away].process
    assert process is not None
    process.pause()
    await propose(cluster, other, MoveReplicas("t0", 0, (leader, other, spare)))
    await cluster.until("moved away", lambda: partition(cluster).target is None, 10)
    await propose(cluster, other, MoveReplicas("t0", 0, (leader, other, away)))
    await asyncio.sleep(0.3)
    process.resume()
    await cluster.until("moved back", lambda: partition(cluster).target is None, 10)


def test_a_replica_that_paused_while_it_was_moved_away_and_back_is_heard_again() -> None:
    cluster = make_cluster(1)
    cluster.run(moved_while_it_paused(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def deleted_after_it_was_moved_back(cluster: SimCluster) -> None:
    """
    1. X is moved away, and nobody confirms that yet: its files stay.
    2. It is moved back, and the topic is deleted, with all files of it.
    3. Now the first move is confirmed. There is nothing left to remove, and X goes on.
    """
    consensus = cluster.consensus
    await begin(cluster, min_insync=2)
    leader, other, away = partition(cluster).replicas
    spare = next(one for one in cluster.nodes if one not in partition(cluster).replicas)
    take = consensus.take
    held: list[tuple[int, bytes, bytes]] = []

    def take_later(node_id: int, data: bytes, command_id: bytes) -> "asyncio.Future[int]":
        if not isinstance(decode_command(data), Confirm):
            return take(node_id, data, command_id)
        held.append((node_id, data, command_id))
        return cluster.loop.create_future()

    consensus.take = take_later  # type: ignore[method-assign]
    await propose(cluster, other, MoveReplicas("t0", 0, (leader, other, spare)))
    await cluster.until("it asks whether it may go", lambda: bool(held), 10)
    await propose(cluster, other, MoveReplicas("t0", 0, (leader, other, away)))
    await cluster.until("moved back", cluster.is_whole, 20)
    await propose(cluster, other, DeleteTopic("t0"))
    await cluster.until("it is deleted", lambda: not consensus.state.topics, 5)
    await asyncio.sleep(0.2)
    consensus.take = take  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    assert not cluster.exits, cluster.exits


def test_a_topic_is_deleted_while_a_copy_that_came_back_is_still_to_be_removed() -> None:
    cluster = make_cluster(1)
    cluster.run(deleted_after_it_was_moved_back(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def moved_away_from_its_leader(cluster: SimCluster, partitions: int) -> None:
    """After the moves nothing is to be done, and nothing is."""
    consensus = cluster.consensus
    await begin(cluster, partitions=partitions, min_insync=2)
    for number in range(partitions):
        old = partition(cluster, number)
        spare = next(one for one in cluster.nodes if one not in old.replicas)
        target = (*(one for one in old.replicas if one != old.leader), spare)
        await propose(cluster, 1, MoveReplicas("t0", number, target))
    await cluster.until("moved", cluster.is_whole, 60)
    await asyncio.sleep(5.0)
    before = consensus.commit_index
    await asyncio.sleep(10.0)
    assert consensus.commit_index == before, consensus.entries[before:]
    for node in cluster.nodes.values():
        assert node.node is not None
        assert not [one for one in node.node.partitions._active if one.closed]


@pytest.mark.parametrize("partitions", [1, 10])
def test_the_metadata_is_at_rest_after_moves_away_from_leaders(partitions: int) -> None:
    cluster = make_cluster(1, partitions=partitions)
    cluster.run(moved_away_from_its_leader(cluster, partitions), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def restarted_without_the_rest(cluster: SimCluster) -> None:
    """
    1. Both copies have what is acknowledged; both nodes are killed, and one never comes back.
    2. Nothing can be written, because the set cannot be made smaller. What was acknowledged can be
       read all the same.
    """
    nodes = cluster.nodes
    await begin(cluster, copies=2, min_insync=2)
    sending = Sending(cluster, "producer")
    await asyncio.sleep(3.0)
    await sending.stop()
    await asyncio.sleep(1.0)
    gone, stays = partition(cluster).replicas
    for one in (gone, stays):
        nodes[one].kill()
    nodes[stays].start()
    await cluster.until("it leads", lambda: partition(cluster).leader == stays, 30)
    await cluster.until("it serves", lambda: nodes[stays].copy_of(KEY) is not None, 5)
    copy = nodes[stays].copy_of(KEY)
    assert copy is not None
    await cluster.until("it has its role", lambda: copy.replica.role == "leader", 5)
    assert gone in copy.replica.decided.isr
    assert copy.replica.high_watermark == copy.log.end_offset == len(sending.acknowledged)
    assert copy.data.read(0, 1 << 20)


def test_a_restarted_leader_serves_what_was_readable_before_it_has_heard_of_the_others() -> None:
    cluster = make_cluster(1, nodes=3)
    cluster.run(restarted_without_the_rest(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def altered_during_a_sync(cluster: SimCluster, first: str, second: str) -> None:
    """A record is written under one setting, and its syncs end under the other."""
    nodes = cluster.nodes
    await begin(cluster, min_insync=3, fsync=first)
    sending = Sending(cluster, "producer", pace=100.0)

    def all_have_it() -> bool:
        copies = [node.copy_of(KEY) for node in nodes.values()]
        return all(one is not None and one.log.end_offset == 1 for one in copies)

    while not all_have_it():  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.0005)
    await propose(cluster, 1, AlterTopic("t0", {"fsync": second}))
    await cluster.until("it is acknowledged", lambda: bool(sending.acknowledged), 1)


@pytest.mark.parametrize(
    ("first", "second"), [("always", "interval"), ("interval", "always"), ("always", "none")]
)
def test_a_record_is_acknowledged_although_fsync_is_altered_during_its_sync(
    first: str, second: str
) -> None:
    cluster = make_cluster(3, nodes=3, sync_s=0.15)
    cluster.run(altered_during_a_sync(cluster, first, second), lambda: None)
    assert not cluster.bugs, cluster.bugs


async def elected_before_it_hears(cluster: SimCluster) -> None:
    """
    1. Another node is elected. It hears of that a second late, one follower at once.
    2. That follower comes too early, again and again, and is sent away.
    3. Records are written all the time, also when the new leader begins to lead. Nobody is late:
       the set stays as it is.
    """
    await begin(cluster, min_insync=2)
    sending = Sending(cluster, "producer", pace=0.1)
    early, elected, late = partition(cluster).replicas
    for one in (elected, late):
        metadata = cluster.nodes[one].node.metadata  # type: ignore[union-attr]
        assert isinstance(metadata, SimMetadata)
        metadata.lag_s = 1.0
    await propose(cluster, early, MoveReplicas("t0", 0, (elected, early, late)))
    await cluster.until("it is the first", lambda: partition(cluster).replicas[0] == elected, 5)
    # The next balance elects it; then it has to hear.
    copy = cluster.nodes[elected].copy_of(KEY)
    assert copy is not None
    await cluster.until("it leads", lambda: copy.replica.role == "leader", 30)
    end = cluster.loop.time() + 3.0
    while cluster.loop.time() < end:
        await asyncio.sleep(0.02)
        assert len(partition(cluster).isr) == 3, partition(cluster)
    await sending.stop()
    assert sending.acknowledged


@pytest.mark.parametrize("seed", range(3))
def test_a_follower_that_came_before_its_leader_had_heard_comes_again_in_time(seed: int) -> None:
    cluster = make_cluster(seed, nodes=3)
    cluster.run(elected_before_it_hears(cluster), lambda: None)
    assert not cluster.bugs, cluster.bugs
