"""What must hold in a simulated cluster at every moment, and on its disks in the end.

Invariants (cheap, draw no random numbers, between two turns of the loop)
- One leader per epoch: no two nodes ever lead a partition in the same epoch.
- The high watermark of a leader never goes back within its epoch, in any log.
- Whatever was below the high watermark of any leader at any time is in the log of every member of
  the in-sync set, and the same there: any of them may be elected next. That holds for each log.
- A record that was acknowledged by all is, when its producer hears of it, in the logs of at least
  `min_insync` replicas (those that lost their disk since excepted).

In the end (`check_replicas`) all replicas of a partition hold the same bytes in every log, but
for beginnings that were cut off and that some replica may still have.
"""

from collections.abc import Iterator

from history import Send
from simcluster import Id, Key, SimCluster, SimNode

from raftq.client.common.errors import StorageError
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import NAMES
from raftq.node.storage.log import Log

_CONTENT_EVERY = 40


class Broken(AssertionError):
    """An invariant does not hold."""


class Invariants:
    """Call `check` after turns of the loop; `acknowledged` when a producer gets an answer."""

    def __init__(self, cluster: SimCluster, every: int = 15) -> None:
        self._cluster = cluster
        self._every = every
        self._countdown = every
        self._checks = 0
        # By the topic's id: one that is created anew is another one.
        self._leaders: dict[tuple[int, int, int], tuple[int, int]] = {}
        self._watermarks: dict[tuple[int, int, int], list[int]] = {}
        self._readable: dict[Id, list[int]] = {}
        self._min_insync: dict[str, int] = {}
        self._broken: Broken | None = None
        cluster.consensus.on_decided = self._on_decided

    def _on_decided(self) -> None:
        """Nobody would hear what is raised here; the end of the turn raises it."""
        try:
            self.check()
        except Broken as error:
            self._broken = self._broken or error

    def after_turn(self) -> None:
        if self._broken is not None:
            raise self._broken
        self._countdown -= 1
        if not self._countdown:
            self._countdown = self._every
            self.check()

    def check(self) -> None:
        self._checks += 1
        for node in self._cluster.nodes.values():
            if node.node is None or not node.up:
                continue
            for partition in node.node.partitions:
                if partition.replica.role == "leader":
                    self._check_leader(node, partition)
        for topic, number, state in self._cluster.consensus.state.all_partitions():
            readable = self._readable.get((topic.topic_id, number))
            if readable is not None:
                for member in state.isr:
                    node = self._cluster.nodes[member]
                    self._check_member((topic.name, number), state.leader, node, readable)

    def _check_leader(self, node: SimNode, partition: Partition) -> None:
        place, replica = partition.ref, partition.replica
        key = (place.topic_id, place.number, replica.epoch)
        assert node.node is not None
        who = (node.node_id, node.node.incarnation)
        if self._leaders.setdefault(key, who) != who:
            raise Broken(f"{place} {key} is led by {self._leaders[key]} and by {who}")
        now = [progress.high_watermark for progress in replica.logs]
        before = self._watermarks.get(key, [])
        if any(new < old for old, new in zip(before, now, strict=False)):
            raise Broken(f"{place} {key}: the high watermarks went from {before} to {now}")
        self._watermarks[key] = now
        readable = self._readable.setdefault((place.topic_id, place.number), [0] * len(NAMES))
        for partition_log, end in enumerate(now):
            readable[partition_log] = max(readable[partition_log], end)

    def _check_member(self, key: Key, leader: int | None, node: SimNode, ends: list[int]) -> None:
        """That a member of the in-sync set has everything that was ever readable."""
        if node.tainted:
            return  # the metadata does not know yet that it lost data
        for partition_log, readable in enumerate(ends):
            end = node.end_of(key, partition_log)
            if end is not None and end < readable:
                raise Broken(
                    f"{key} {NAMES[partition_log]}: everything below {readable} was readable, but "
                    f"{node.machine.name} is in sync and ends at {end}\n{self._cluster.describe()}"
                )
        copy = node.copy_of(key)
        if copy is not None and leader is not None and self._checks % _CONTENT_EVERY == 0:
            other = self._cluster.nodes[leader].copy_of(key)
            blind = any(one.disk.fail_read for one in self._cluster.nodes.values())
            good = (
                not blind and not self._cluster.rotten and not self._cluster.nodes[leader].tainted
            )
            if other is not None and other is not copy and good:
                if other.ref.topic_id != copy.ref.topic_id:
                    return  # one of them has not heard yet that the topic is another one
                for one, two, end in zip(other.logs, copy.logs, ends, strict=False):
                    _compare(one.log, two.log, end, f"{one} on {node.machine.name}")

    def acknowledged(self, send: Send) -> None:
        """A producer has just been told that all have this record."""
        assert send.offset is not None
        nodes = self._cluster.nodes.values()
        state = self._cluster.consensus.state
        topic = state.topics.get(send.partition[0])
        if topic is None or topic.name in self._cluster.deleted:
            return
        # Its leader may not have heard yet that it was raised.
        needed = min(topic.config.min_insync, self._min_insync.get(topic.name, 2))
        self._min_insync[topic.name] = needed
        holders = lost = 0
        for node in nodes:
            if node.tainted and node.tainted_at >= send.at:
                lost += 1
            elif (copy := node.copy_of(send.partition)) is not None:
                holders += _holds(copy, send)
            else:
                holders += (node.end_of(send.partition) or 0) > send.offset
        rotten = (topic.topic_id, send.partition[1]) in self._cluster.rotten
        if holders + lost + rotten < needed:
            raise Broken(f"{send}: only {holders} replicas have it\n{self._cluster.describe()}")


def _holds(copy: Partition, send: Send) -> bool:
    assert send.offset is not None
    log = copy.log
    if send.offset < log.start_offset and copy.config.retention_bytes is not None:
        return True  # it has done its time
    if not log.start_offset <= send.offset < log.end_offset:
        return False
    try:
        batch = log.batch_at(send.offset)
    except StorageError:
        return True  # it rotted, or cannot be read at the moment: nobody can tell
    return batch.values()[list(batch.offsets()).index(send.offset)] == send.value


def _bytes_below(log: Log, end: int) -> Iterator[tuple[int, bytes]]:
    for batch in log.batches(log.start_offset, end):
        if batch.base_offset < end:
            yield batch.base_offset, bytes(batch.buffer[batch.position :][: batch.length])


def _compare(one: Log, other: Log, end: int, what: str) -> None:
    first, second = dict(_bytes_below(one, end)), dict(_bytes_below(other, end))
    start = max(one.start_offset, other.start_offset)
    for offset in sorted({*first, *second}):
        if offset >= start and first.get(offset) != second.get(offset):
            raise Broken(
                f"{what}: the batch at {offset} is another than its leader's, and everything below "
                f"{end} is readable"
            )


def is_readable(cluster: SimCluster) -> bool:
    """Whether every copy can be read from its beginning to its end; what cannot be is reported, as
    a reader would, so that it is repaired."""
    readable = True
    for node in cluster.nodes.values() if cluster.rotten else ():
        for partition in () if node.node is None else node.node.partitions:
            for partition_log in partition.logs:
                try:
                    for _ in _bytes_below(partition_log.log, partition_log.log.end_offset):
                        pass
                except StorageError as error:
                    assert node.node is not None
                    assert node.process is not None
                    readable = False
                    node.process.call(node.node.partitions.damaged, partition_log, error)
    return readable


def check_replicas(cluster: SimCluster) -> None:
    """After everything has healed: all copies of a partition are the same, to the last byte."""
    for topic, number, state in cluster.consensus.state.all_partitions():
        for partition_log in range(len(NAMES) if topic.queued else 1):
            logs: dict[int, Log] = {}
            for replica in state.replicas:
                node = cluster.nodes[replica].node
                assert node is not None, f"node {replica} is down"
                found = node.partitions.of(topic.name, number).log_of(partition_log)
                assert found is not None, f"node {replica} has no {NAMES[partition_log]}"
                logs[replica] = found.log
            _check_same(f"{topic.name}/{number} {NAMES[partition_log]}", logs)


def _check_same(what: str, logs: dict[int, Log]) -> None:
    start = max(log.start_offset for log in logs.values())
    copies = {
        f"node-{replica} up to {log.end_offset}": [
            one for one in _bytes_below(log, log.end_offset) if one[0] >= start
        ]
        for replica, log in logs.items()
    }
    first = next(iter(copies.values()))
    if any(copy != first for copy in copies.values()):
        ends = {name: len(copy) for name, copy in copies.items()}
        raise Broken(f"{what}: replicas differ from {start} on: {ends}")
