"""Random commands for the cluster's metadata, and what must hold after each of them.

`random_command` is biased towards commands that make sense in the present state, so that runs get
deep into elections and moves; a part of them is off by one in every field that fences.
"""

from random import Random

from msgspec.structs import replace

from raftq.client.common.errors import Detail, RaftqError
from raftq.cluster.metadata.apply import Change, PartitionChanged, TopicChanged, apply, dump, load
from raftq.cluster.metadata.commands import (
    AddPartitions,
    AllocateProducerIds,
    AlterTopic,
    ChangeIsr,
    Command,
    CreateTopic,
    DeleteTopic,
    ElectPreferred,
    EnableQueues,
    FenceNode,
    InitNamedProducer,
    Lost,
    MoveReplicas,
    Recover,
    RegisterNode,
    RemoveNode,
    SetDraining,
    TellEnds,
    decode_command,
    encode_command,
)
from raftq.cluster.metadata.state import ClusterState, PartitionState

NODES = (1, 2, 3, 4, 5)
TOPICS = ("a", "b", "c")


LOSSES: tuple[Lost, ...] = ("nothing", "nothing", "tail", "everything")


def register(node_id: int, incarnation: int = 1, *, lost: Lost = "nothing") -> RegisterNode:
    """Of a process with the directory of the one before it, if it did not lose that."""
    host = f"host{node_id}"
    before = None if incarnation == 1 or lost == "everything" else incarnation - 1
    return RegisterNode(
        *(node_id, host, 7070, 8080, f"{host}:7000", "", incarnation),
        lost=lost,
        before=before,
        silent=before,
    )


def _node_command(state: ClusterState, rng: Random) -> Command:
    node_id = rng.choice(NODES)
    node = state.nodes.get(node_id)
    incarnation = node.incarnation if node is not None else 1
    what = rng.randrange(10)
    if what < 3:
        made = register(node_id, incarnation + rng.randrange(2), lost=rng.choice(LOSSES))
        if rng.randrange(8) == 0:
            made = replace(made, before=1, silent=1)
        return replace(made, synced=rng.random() < 0.3)
    if what < 7:
        return FenceNode(node_id, incarnation + (rng.randrange(6) == 0))
    if what < 9:
        return SetDraining(node_id, rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.5)
    return RemoveNode(node_id)


def _topic_command(state: ClusterState, rng: Random) -> Command:
    name = rng.choice(TOPICS)
    what = rng.randrange(10)
    if what < 4:
        replication = rng.randrange(5)
        config = {"min_insync": rng.randrange(1, 3)} if rng.random() < 0.5 else {}
        return CreateTopic(name, rng.randrange(6), replication, config)
    if what < 6:
        if rng.random() < 0.4:
            return AlterTopic(name, {"fsync": rng.choice(["always", "interval", None])})
        return AlterTopic(name, {"min_insync": rng.choice([None, 1, 2, 3])})
    if what < 9:
        return AddPartitions(name, rng.randrange(12))
    return DeleteTopic(name)


def _queue_command(state: ClusterState, rng: Random) -> Command:
    topic = state.topics.get(rng.choice(TOPICS))
    known = topic is not None and rng.random() < 0.7
    return EnableQueues(topic.topic_id if topic is not None and known else state.topic_id_next)


def _isr_command(state: ClusterState, rng: Random) -> Command:
    found = list(state.all_partitions())
    if not found:
        return _topic_command(state, rng)
    topic, number, one = rng.choice(found)
    members = list(one.isr)
    what = rng.randrange(4)
    outside = [node for node in one.replicas if node not in members]
    if what < 3 and outside:
        members.append(rng.choice(outside))
    elif len(members) > 1:
        members.remove(rng.choice(members))
    pairs = tuple((node, state.nodes[node].incarnation) for node in members)
    off = rng.randrange(12)
    return ChangeIsr(
        topic.topic_id,
        number + (off == 0),
        one.leader if one.leader is not None else 1,
        one.epoch + (off == 1),
        one.version + (off == 2),
        pairs,
    )


def _move_command(state: ClusterState, rng: Random) -> Command:
    found = list(state.all_partitions())
    if not found:
        return _topic_command(state, rng)
    if rng.random() < 0.3:
        chosen = rng.sample(found, min(3, len(found)))
        return ElectPreferred(tuple((topic.topic_id, number) for topic, number, _ in chosen))
    topic, number, one = rng.choice(found)
    nodes = rng.sample(NODES, rng.randrange(1, 4))
    if rng.random() < 0.3:
        nodes = list(one.replicas)
    return MoveReplicas(topic.name, number, tuple(nodes))


def _producer_command(state: ClusterState, rng: Random) -> Command:
    if rng.random() < 0.5:
        return AllocateProducerIds(1, rng.randrange(1, 2000))
    return InitNamedProducer(rng.choice("xyz"))


def _recovery_command(state: ClusterState, rng: Random) -> Command:
    """Mostly about what waits for it."""
    found = list(state.all_partitions())
    if not found:
        return _topic_command(state, rng)
    waiting = [row for row in found if row[2].recovery is not None]
    leaderless = [row for row in found if row[2].leader is None]
    off = rng.randrange(12)
    if rng.random() < 0.3:
        topic, number, one = rng.choice(leaderless or found)
        return Recover(topic.topic_id, number + (off == 0), one.version + (off == 1))
    node_id = rng.choice(NODES)
    rows = []
    for topic, number, one in waiting or found:
        recovery = one.recovery
        if recovery is not None and rng.random() < 0.8:
            node_id = rng.choice(recovery.asked)
        since = 1 if recovery is None else recovery.since
        ends = [rng.randrange(4) for _ in range(2 if rng.random() < 0.7 else 6)]
        rows.append((topic.topic_id, number, since + (off == 2), *ends))
    node = state.nodes.get(node_id)
    incarnation = 1 if node is None else node.incarnation
    return TellEnds(node_id, incarnation + (off == 3), tuple(rows))


def random_command(state: ClusterState, rng: Random) -> Command:
    makers = [_node_command] * 4 + [_topic_command] * 2 + [_isr_command] * 6
    makers += [_move_command] * 3 + [_producer_command, _queue_command]
    makers += [_recovery_command] * 2
    return rng.choice(makers)(state, rng)


class Model:
    """A state with a memory: applies commands and checks each against what was before."""

    def __init__(self) -> None:
        self.state = ClusterState("model")
        self.index = 0
        self.refused = 0
        self.topic_ids: set[int] = set()
        self.producer_ids: list[tuple[int, int]] = []

    def apply(self, command: Command) -> object:
        """The result; raises the RaftqError of a refusal after checking that nothing changed."""
        before = _copied(self.state)
        packed = dump(self.state)
        self.index += 1
        try:
            result, changes = apply(self.state, decode_command(encode_command(command)), self.index)
        except RaftqError:
            self.refused += 1
            assert dump(self.state) == packed, f"refused, yet changed by {command}"
            raise
        self._check_state()
        self._check_steps(before, command, changes)
        self._check_ids(command, result, before)
        return result

    def _check_state(self) -> None:
        state = self.state
        for topic, _, one in state.all_partitions():
            assert one.isr or one.recovery, one
            assert len(set(one.replicas)) == len(one.replicas), one
            assert all(node in one.replicas for node in one.isr), one
            assert all(node in state.nodes for node in one.replicas), one
            if one.leader is None:
                assert not any(state.nodes[node].alive for node in one.isr), one
            else:
                assert one.leader in one.isr, one
                assert state.nodes[one.leader].alive, one
            if (recovery := one.recovery) is not None:
                assert one.leader is None, one
                assert recovery.waits_for, "all have told, and it is not decided"
                assert all(node in one.replicas for node in recovery.asked), one
                told = [known.node_id for known in recovery.told]
                assert len(set(told)) == len(told), one
                assert all(node in recovery.asked for node in told), one
                assert all(state.nodes[node].alive for node in told), one
            if one.target is not None:
                assert all(node in one.replicas for node in one.target), one
                assert len(one.target) >= topic.config.min_insync, one
        assert state.partition_count == sum(len(one.partitions) for one in state.topics.values())
        assert {one.topic_id: one.name for one in state.topics.values()} == state.topic_names
        assert load(dump(state)) == state

    def _check_steps(self, before: ClusterState, command: Command, changes: list[Change]) -> None:
        said = {(c.topic_id, c.partition) for c in changes if isinstance(c, PartitionChanged)}
        whole = {c.topic_id for c in changes if isinstance(c, TopicChanged)}
        for topic in self.state.topics.values():
            earlier = before.topic_by_id(topic.topic_id)
            was_queued = earlier is not None and earlier.queued
            if topic.queued != was_queued:
                assert isinstance(command, EnableQueues), command
                assert topic.queued, "a queue stays one"
                assert topic.topic_id in whole
        for topic, number, new in self.state.all_partitions():
            old_topic = before.topic_by_id(topic.topic_id)
            if old_topic is None or number >= len(old_topic.partitions):
                assert topic.topic_id in whole
                assert (new.epoch, new.version) == (1, 1)
                continue
            old = old_topic.partitions[number]
            if old == new:
                assert (topic.topic_id, number) not in said
                continue
            assert (topic.topic_id, number) in said
            assert new.version == old.version + 1
            assert new.epoch == old.epoch + (old.leader != new.leader or old.epoch != new.epoch)
            least = topic.isr_size_min(new)
            self._check_isr(command, old, new, least)
            self._check_move(command, old, new)
            self._check_restart(before, command, old, new)
            self._check_recovery(command, topic.topic_id, number, old, new)

    def _check_isr(
        self, command: Command, old: PartitionState, new: PartitionState, least: int
    ) -> None:
        lost = [node for node in old.isr if node not in new.isr]
        if isinstance(command, ChangeIsr) and lost:
            assert len(new.isr) >= min(least, len(new.replicas)), (old, new)
        by_all = ChangeIsr | MoveReplicas | TellEnds | Recover
        if not isinstance(command, by_all) and lost and old.target is None:
            assert isinstance(command, RegisterNode), (command, old, new)
            assert command.lost != "nothing" or command.before is not None
            if old.recovery is None:
                assert lost == [command.node_id]
            assert new.isr or new.recovery

    def _check_recovery(
        self, command: Command, topic_id: int, number: int, old: PartitionState, new: PartitionState
    ) -> None:
        """Whoever leads after a recovery was in sync, or has the longest of all logs told of."""
        recovery = old.recovery or new.recovery
        if isinstance(command, Recover) or recovery is None or new.leader is None:
            return
        assert new.recovery is None
        if new.leader in old.isr:
            return
        ends = {known.node_id: known.ends for known in recovery.told}
        if isinstance(command, TellEnds):
            for row in command.rows:
                if row[:2] == (topic_id, number):
                    ends[command.node_id] = tuple(zip(row[3::2], row[4::2], strict=True))
        if isinstance(command, RegisterNode):
            ends.pop(command.node_id, None)
        assert ends[new.leader] == max(ends.values()), (command, old, new)
        assert new.isr in ((new.leader,), new.target, old.target), (command, old, new)

    def _check_move(self, command: Command, old: PartitionState, new: PartitionState) -> None:
        if old.target is not None and new.target is None:
            wanted = command.replicas if isinstance(command, MoveReplicas) else old.target
            assert new.replicas == new.isr == wanted, (command, old, new)

    def _check_restart(
        self, before: ClusterState, command: Command, old: PartitionState, new: PartitionState
    ) -> None:
        if not isinstance(command, RegisterNode):
            return
        known = before.nodes.get(command.node_id)
        if known is None or known.incarnation == command.incarnation:
            return
        if old.leader == command.node_id:
            assert new.epoch == old.epoch + 1
        if command.lost == "everything" and len(old.replicas) > 1:
            assert command.node_id not in new.isr

    def _check_ids(self, command: Command, result: object, before: ClusterState) -> None:
        if isinstance(command, CreateTopic):
            assert isinstance(result, dict)
            assert result["topic_id"] not in self.topic_ids
            self.topic_ids.add(result["topic_id"])
        if isinstance(command, AllocateProducerIds):
            assert isinstance(result, int)
            self._take(result, command.count)
        if isinstance(command, InitNamedProducer):
            assert isinstance(result, list)
            known = before.producers.get(command.name)
            if known is None:
                self._take(result[0], 1)
            else:
                assert result == [known[0], known[1] + 1]

    def _take(self, first: int, count: int) -> None:
        for other, length in self.producer_ids:
            assert first + count <= other or other + length <= first, "producer ids overlap"
        self.producer_ids.append((first, count))


class Cluster(Model):
    """A model with shorter words for one partition of the topic t."""

    def __init__(self, nodes: int = 3) -> None:
        super().__init__()
        for node_id in range(1, nodes + 1):
            self.apply(register(node_id))

    def create(self, partitions: int = 1, replication: int = 3, **config: Detail) -> None:
        self.apply(CreateTopic("t", partitions, replication, config))

    def at(self, number: int = 0) -> PartitionState:
        found = self.state.partition("t", number)
        assert found is not None
        return found

    def isr(self, *members: int, **other: int) -> object:
        """The leader of t/0 says who is in sync."""
        one, topic = self.at(), self.state.topics["t"]
        pairs = tuple((node, self.state.nodes[node].incarnation) for node in members)
        command = ChangeIsr(topic.topic_id, 0, one.leader or 0, one.epoch, one.version, pairs)
        return self.apply(replace(command, **other))

    def tell(self, node_id: int, *ends: tuple[int, int]) -> object:
        """A node says where its copy of t/0 ends."""
        topic, recovery = self.state.topics["t"], self.at().recovery
        since = 0 if recovery is None else recovery.since
        row = (topic.topic_id, 0, since, *(number for end in ends for number in end))
        return self.apply(TellEnds(node_id, self.state.nodes[node_id].incarnation, (row,)))

    def recover(self, **other: int) -> object:
        """An operator gives up the isr of t/0."""
        topic = self.state.topics["t"]
        return self.apply(replace(Recover(topic.topic_id, 0, self.at().version), **other))

    def fence(self, node_id: int) -> object:
        return self.apply(FenceNode(node_id, self.state.nodes[node_id].incarnation))


def _copied(state: ClusterState) -> ClusterState:
    """Entries are never mutated, so the dicts are all there is to copy."""
    return ClusterState(
        state.cluster_id,
        dict(state.nodes),
        dict(state.topics),
        dict(state.topic_names),
        producers=dict(state.producers),
    )


def run(seed: int, steps: int) -> Model:
    """A whole random life of a cluster."""
    rng = Random(seed)
    model = Model()
    for node_id in NODES[: rng.randrange(1, 6)]:
        model.apply(register(node_id))
    for _ in range(steps):
        command = random_command(model.state, rng)
        try:
            model.apply(command)
        except RaftqError:
            continue
    return model
