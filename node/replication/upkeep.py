"""What a node does for its logs in the background: retention, scrubbing, repair. (Shell.)

Every second it does a little: it applies retention to some partitions and verifies some bytes of
sealed segments. Damage, found so or by a reader, is repaired with the bytes of another replica.
Until that succeeds, the damaged range stays unreadable here and everything around it is served.

Another replica may have other records at the same offsets, which were never acknowledged and are
not cut there yet. So a follower takes missing bytes from the leader of its epoch, because all logs
are made equal to that one. A leader takes them from the members of its in-sync set, who have
everything readable. Either way it takes only what is below the high watermark of the node that it
asks: that is in every possible history. The epochs that the damaged log still knows must agree as
well.

Retention is for the data of clients. The services cut the other logs and the internal topics. In a
queue, retention drops only what was readable for MARKED_S. Before its mark is replicated, which
takes a moment, only its place in the data shows that a delayed record has fired. Without both, the
next leader would fire it again.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from raftq.client.common.errors import (
    CorruptBatch,
    DiskFull,
    FencedEpoch,
    RaftqError,
    StorageFailed,
    UnknownPartition,
)
from raftq.client.common.names import is_internal
from raftq.client.common.tasks import sleep
from raftq.client.common.types import Buffer
from raftq.client.net.connection import Connection
from raftq.client.wire.headers import clip_below, end_offset_of
from raftq.client.wire.node_messages import ReadReplica, ReadReplicaReply
from raftq.node.config import StorageConfig
from raftq.node.replication.follower import Net, Spawn
from raftq.node.replication.partition import Partition
from raftq.node.replication.partition_log import PartitionLog
from raftq.node.replication.partitions import Partitions
from raftq.node.storage.damage import DamagedRange

logger = logging.getLogger(__name__)

TICK_S = 1.0
RETENTION_S = 30.0
"""Retention is applied to each partition this often."""
MARKED_S = 30.0
EXPIRE_S = 3600.0
REPAIR_READ_BYTES = 1024 * 1024
REPAIR_BYTES_MAX = 128 * 1024 * 1024
FILL_BYTES = 8 * 1024 * 1024
"""A gap without a file is fetched in parts of about this size, each written at once."""
REPAIR_AGAIN_S_MIN, REPAIR_AGAIN_S_MAX = 1.0, 30.0
"""The other node may not lead yet, or not know yet what is readable: retry soon, then seldom."""


class Upkeep:
    """Retention, scrubbing and repair of all logs of a node."""

    def __init__(
        self,
        partitions: Partitions,
        net: Net,
        wall_ms: Callable[[], int],
        spawn: Spawn,
        storage: StorageConfig,
    ) -> None:
        self._partitions = partitions
        self._net = net
        self._wall_ms = wall_ms
        self._spawn = spawn
        self._scrub_bytes_s = storage.scrub_bytes_s
        self._producer_idle_ms = storage.producer_idle_ms
        self._expire_s = min(EXPIRE_S, storage.producer_idle_ms / 1000)
        self._turn = 0
        self._scrubs = 0
        self._expired_at = net.loop.time()
        self._readable: dict[tuple[int, int], tuple[float, int, int]] = {}
        """By partition: (time, end of what was readable then, and at least MARKED_S before)."""
        self._repairing: dict[PartitionLog, None] = {}
        self._stopped = False
        self.repaired = 0
        partitions.on_damage = self._damaged

    def start(self) -> None:
        self._net.loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        self._stopped = True

    def _tick(self) -> None:
        if self._stopped:
            return
        partitions = list(self._partitions)
        if partitions:
            share = max(1, round(len(partitions) * TICK_S / RETENTION_S))
            for _ in range(min(share, len(partitions))):
                self._turn = (self._turn + 1) % len(partitions)
                self._maintain(partitions[self._turn])
            if self._scrub_bytes_s:
                self._scrub(partitions[self._turn])
            if self._net.loop.time() - self._expired_at > self._expire_s:
                self._expired_at = self._net.loop.time()
                held = {(partition.ref.topic_id, partition.ref.number) for partition in partitions}
                self._readable = {key: at for key, at in self._readable.items() if key in held}
                for partition in partitions:
                    for partition_log in partition.logs:
                        partition_log.producers.expire(self._wall_ms(), self._producer_idle_ms)
        self._net.loop.call_later(TICK_S, self._tick)

    def _maintain(self, partition: Partition) -> None:
        if partition.closed:
            return
        if not is_internal(partition.ref.topic) and partition.log.failure is None:
            self._retain(partition)
        for partition_log in partition.logs:
            if partition_log.log.damaged and partition_log.log.failure is None:
                self._damaged(partition_log, None)

    def _retain(self, partition: Partition) -> None:
        """Apply retention to what every reader may have seen already."""
        config, log = partition.config, partition.log
        below = partition.replica.high_watermark
        if partition.is_queue:
            below = min(below, self._readable_before(partition, below))
        try:
            freed = log.retain(self._wall_ms(), config.retention_ms, config.retention_bytes, below)
        except StorageFailed as error:
            self._partitions.failed(partition, error)
            return
        except DiskFull as error:
            logger.warning("partition=%s retention failed: %s", partition.ref, error)
            return
        if freed:
            logger.info(
                "partition=%s retention freed=%d start_offset=%d",
                partition.ref, freed, log.start_offset,
            )  # fmt: skip

    def _readable_before(self, partition: Partition, readable: int) -> int:
        """Return the offset up to which a partition was readable MARKED_S ago, as far as known."""
        now = self._net.loop.time()
        key = partition.ref.topic_id, partition.ref.number
        at, newer, older = self._readable.get(key, (now, readable, 0))
        if now - at >= MARKED_S:
            at, newer, older = now, readable, newer
        self._readable[key] = (at, newer, older)
        return older

    def _scrub(self, partition: Partition) -> None:
        """Verify some bytes of one log. The next log has its turn with the next turn of the
        partition."""
        partition_log = partition.logs[self._scrubs % len(partition.logs)]
        self._scrubs += 1
        if partition.closed or partition_log.log.failure is not None:
            return
        try:
            step = partition_log.log.scrub(int(self._scrub_bytes_s * TICK_S))
        except StorageFailed as error:
            logger.error("partition=%s scrub failed: %s", partition_log, error)
            return
        if step.damaged:
            logger.error("partition=%s damaged=%s", partition_log, step.damaged)
            self._damaged(partition_log, None)

    # Repair

    def _damaged(self, partition_log: PartitionLog, error: BaseException | None) -> None:
        """Look for good bytes for known damage, unless that is under way."""
        if partition_log not in self._repairing and not self._stopped:
            self._repairing[partition_log] = None
            self._spawn(self._repair(partition_log))

    async def _repair(self, partition_log: PartitionLog) -> None:
        """Retry until no damage is left, or nothing more can be done here."""
        delay = REPAIR_AGAIN_S_MIN
        try:
            while not await self._try_repair(partition_log):
                await sleep(delay)
                delay = min(delay * 2, REPAIR_AGAIN_S_MAX)
        finally:
            del self._repairing[partition_log]

    async def _try_repair(self, partition_log: PartitionLog) -> bool:
        """Ask every helpful node once, and report whether nothing is left to try."""
        for damage in list(partition_log.log.damaged):
            for node in self._helpers(partition_log):
                if await self._copy(partition_log, damage, node):
                    break
        self._resign_if_blocked(partition_log)
        given_up = (
            self._stopped or partition_log.partition.closed or partition_log.log.failure is not None
        )
        return given_up or not partition_log.log.damaged

    def _resign_if_blocked(self, partition_log: PartitionLog) -> None:
        """Resign when damage blocks replication.

        What is damaged before it was replicated is nowhere else, and no follower gets past it. It
        was not acknowledged: under another leader the replicas go on without it.
        """
        readable = partition_log.progress.high_watermark
        if partition_log.replica.role == "leader" and any(
            damage.start >= readable for damage in partition_log.log.damaged
        ):
            self._partitions.resign(
                partition_log.partition, "followers wait for records that are damaged here"
            )

    def _helpers(self, partition_log: PartitionLog) -> list[int]:
        """Return the nodes whose readable records are also those of this replica; none without a
        leader."""
        replica = partition_log.replica
        decided = replica.decided
        if replica.role == "leader":
            return [node for node in decided.isr if node != self._net.node_id]
        return [decided.leader] if replica.role == "follower" and decided.leader else []

    async def _copy(self, partition_log: PartitionLog, damage: DamagedRange, node: int) -> bool:
        """Repair the damage with bytes of this node, and report success."""
        try:
            epoch = partition_log.replica.epoch
            connection = await self._net.connect(node)
            try:
                start = damage.start
                while start < damage.end:
                    good = await self._read(connection, partition_log, replace(damage, start=start))
                    if partition_log.partition.closed:
                        return True
                    if partition_log.replica.epoch != epoch:
                        raise FencedEpoch(f"{partition_log} is no longer in epoch {epoch}")
                    partition_log.log.repair(start, good)
                    start = end_offset_of(good)
            finally:
                await connection.close()
        except RaftqError as error:
            logger.warning(
                "partition=%s damage=[%d,%d) node=%d cannot help: %s",
                partition_log, damage.start, damage.end, node, error,
            )  # fmt: skip
            if partition_log.log.failure is not None and not partition_log.partition.closed:
                # The log refuses writes from now on, and perhaps no write comes for a while.
                self._partitions.failed(partition_log.partition, error)
            return False
        self.repaired += 1
        logger.warning(
            "partition=%s repaired=[%d,%d) from node=%d",
            partition_log,
            damage.start,
            damage.end,
            node,
        )
        return True

    async def _read(
        self, connection: Connection, partition_log: PartitionLog, damage: DamagedRange
    ) -> Buffer:
        """Return the batches that belong there: all for damaged bytes, the first ones for a gap."""
        is_gap = damage.position == damage.end_position
        topic_id, partition, number = partition_log.key
        parts: list[bytes] = []
        size = 0
        offset = damage.start
        while offset < damage.end:
            if max(size, damage.end_position - damage.position) > REPAIR_BYTES_MAX:
                raise CorruptBatch(f"[{offset},{damage.end}) is too large to be repaired at once")
            reply = await connection.request(
                ReadReplica(
                    *(topic_id, partition, offset, REPAIR_READ_BYTES, number),
                    partition_log.replica.epoch,
                )
            )
            data = clip_below(reply.raw, damage.end)
            if not len(data):
                break
            parts.append(bytes(data))
            size += len(data)
            offset = end_offset_of(data)
            if is_gap and size >= FILL_BYTES:
                break
        return b"".join(parts)

    def read_replica(
        self, message: ReadReplica, raw: memoryview, session: Any
    ) -> tuple[ReadReplicaReply, list[Buffer]]:
        """Handle the request of a node that repairs its log."""
        partition = self._partitions.find((message.topic_id, message.partition))
        partition_log = None if partition is None else partition.log_of(message.log_number)
        if partition_log is None:
            raise UnknownPartition(f"no copy of {message.topic_id:x}/{message.partition} here")
        limit = partition_log.log.end_offset
        if message.epoch is not None:
            limit = self._agreed_end(partition_log, message.epoch)
            if message.offset >= limit:
                return ReadReplicaReply(), []
        data: Buffer = partition_log.log.read(
            message.offset, min(message.bytes_max, REPAIR_READ_BYTES)
        )
        data = clip_below(data, limit)
        return ReadReplicaReply(), [data] if len(data) else []

    def _agreed_end(self, partition_log: PartitionLog, epoch: int) -> int:
        """Return the offset up to which this copy equals those of the whole in-sync set."""
        replica = partition_log.replica
        if replica.epoch != epoch or self._net.node_id not in replica.decided.isr:
            raise FencedEpoch(
                f"{partition_log} is in epoch {replica.epoch} with isr {replica.decided.isr} here, "
                f"not in epoch {epoch} with this node"
            )
        return partition_log.progress.high_watermark
