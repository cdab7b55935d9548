"""Shell: leases from the nodes that lead the partitions of some topics. On the loop only.

One request goes to each leader, for all its partitions, and waits there until there are records. A
node answers at once if it does not lead one of them any more. Such a partition is left out for a
moment, and comes back when its new leader is known. New partitions and topics come with the routes,
which are requested from time to time.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from raftq.client.common.errors import RaftqError, UnknownTopic
from raftq.client.common.tasks import Tasks
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import read_batches
from raftq.client.net.leaders import error_of_code
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address
from raftq.client.queue.leased import LeasedRecord, Receipt, to_leased
from raftq.client.queue.options import QueueOptions
from raftq.client.queue.settling import Settlement, Settler
from raftq.client.wire.queue_messages import Lease, LeasedPartition, LeasePartition
from raftq.client.wire.schema import ITEMS_MAX

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # beyond the wait that the request asks for
NO_EPOCH = 0  # of no leader ever
TICK_S = 0.001  # timers may ring a little early

Partitions = tuple[LeasePartition, ...]


class Leasing:
    """Leases for one holder of a group."""

    def __init__(
        self,
        options: QueueOptions,
        holder: str,
        routes: Routes,
        pool: Pool,
        settler: Settler,
        tasks: Tasks,
    ) -> None:
        self.holder = holder
        self.problem: RaftqError | None = None  # why nothing can be leased at all
        self._options = options
        self._routes = routes
        self._pool = pool
        self._settler = settler
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._topics = dict.fromkeys(options.topics)
        self._resting: dict[PartitionKey, tuple[int | None, float]] = {}  # by node, and until when
        self._failures: dict[PartitionKey, int] = {}
        self._listeners: list[Callable[[], None]] = []
        self._alarm: asyncio.TimerHandle | None = None
        self._nodes: dict[Address, Partitions] | None = None
        routes.want(self._topics)
        routes.watch(self._tell)

    def watch(self, listener: Callable[[], None]) -> None:
        """Calls `listener` when `nodes` may have changed."""
        self._listeners.append(listener)

    def add_topics(self, topics: Iterable[str]) -> None:
        """Adds topics that match the pattern."""
        new = [topic for topic in topics if topic not in self._topics]
        if new:
            self._topics.update(dict.fromkeys(new))
            self._routes.want(new)
            self._routes.request_refresh()

    def stop(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    async def find(self) -> None:
        """Waits until the topics are known. Raises UnknownTopic if one does not exist."""
        for topic in self._options.topics:
            await self._routes.topic(topic)

    async def is_found(self, timeout_s: float) -> bool:
        """Whether the topics are known by then."""
        if any(topic not in self._routes.topics for topic in self._options.topics):
            try:
                async with asyncio.timeout(timeout_s):
                    await self.find()
            except TimeoutError:
                return False
        return True

    def nodes(self) -> dict[Address, Partitions]:
        """The partitions to ask each node for; the same object until that changes."""
        if self._nodes is None:
            self._nodes = self._find_nodes()
        return self._nodes

    def _find_nodes(self) -> dict[Address, Partitions]:
        now = self._loop.time()
        found: dict[Address, list[LeasePartition]] = {}
        for topic in self._topics:
            info = self._routes.topics.get(topic)
            if info is None:
                if topic in self._options.topics and self._routes.is_missing(topic, now):
                    self.problem = UnknownTopic(f"no topic is named {topic!r}")
                continue
            for part in info.partitions:
                leader = self._routes.leader(topic, part.partition)
                partition_key = topic, part.partition
                if leader is not None and not self._rests(partition_key, leader[0], now):
                    found.setdefault(leader[1], []).append(LeasePartition(*partition_key))
        return {address: tuple(parts[:ITEMS_MAX]) for address, parts in found.items()}

    def _rests(self, partition_key: PartitionKey, leader: int, now: float) -> bool:
        rest = self._resting.get(partition_key)
        if rest is None:
            return False
        if rest[0] == leader and now < rest[1]:
            return True
        del self._resting[partition_key]
        return False

    async def take(
        self, address: Address, partitions: Partitions, records_max: int, wait_ms: int,
        lease_ms: int,
    ) -> list[LeasedRecord]:  # fmt: skip
        """Leases from one node; [] if nothing comes in time, or there is no node to ask.

        Raises only errors that show a mistake of the caller."""
        options = self._options
        request = Lease(
            options.group, self.holder, partitions, records_max, options.lease_bytes, lease_ms,
            wait_ms, options.start,
        )  # fmt: skip
        partition_keys = [(partition.topic, partition.partition) for partition in partitions]
        try:
            connection = await self._pool.get(address)
            timeout_s = wait_ms / 1000 + ANSWER_S
            reply = await connection.request(request, timeout_s=timeout_s)
        except RaftqError as error:
            for partition_key in partition_keys:
                self._rest(partition_key, error)
            if not error.retriable:
                raise
            return []
        found: list[LeasedRecord] = []
        for partition in reply.message.partitions:
            partition_key = partition.topic, partition.partition
            if partition.error:
                self._rest(partition_key, error_of_code(partition.error, partition_key))
            else:
                self._failures.pop(partition_key, None)
                raw = reply.raw[partition.start : partition.start + partition.length]
                found += self._read(partition_key, partition, raw)
        return found

    def _read(
        self, partition_key: PartitionKey, one: LeasedPartition, raw: memoryview
    ) -> list[LeasedRecord]:
        try:
            return to_leased(partition_key, one.ranges, read_batches(raw))
        except RaftqError as error:
            # Damaged on the way: give it back, so that no attempt is spent.
            logger.error("leased records of %s/%d cannot be read: %s", *partition_key, error)
            self._rest(partition_key, error)
            receipts = [
                Receipt(*partition_key, offset, leased.nonce)
                for leased in one.ranges
                for offset in range(leased.start, leased.end)
            ]
            self._tasks.spawn(self._settler.settle(receipts, Settlement("release")))
            return []

    def call_off(self, address: Address, partitions: Partitions) -> None:
        """Ends a request that waits at a node.

        A newer request replaces it, and is answered at once because its epoch does not exist."""
        self._tasks.spawn(self._call_off(address, partitions[0]))

    async def _call_off(self, address: Address, one: LeasePartition) -> None:
        nothing = LeasePartition(one.topic, one.partition, NO_EPOCH)
        connection = self._pool.peek(address)
        if connection is None:
            return
        try:
            options = self._options
            await connection.request(Lease(options.group, self.holder, (nothing,), 1))
        except RaftqError as error:
            logger.debug("a lease at %s was not called off: %s", address, error)

    def _rest(self, partition_key: PartitionKey, error: RaftqError) -> None:
        """Leaves a partition out for a moment, or until another node leads it."""
        failures = self._failures.get(partition_key, 0)
        self._failures[partition_key] = failures + 1
        leader = self._routes.leader(*partition_key)
        until = self._loop.time() + self._options.backoff().after_s(failures)
        self._resting[partition_key] = (None if leader is None else leader[0], until)
        self._nodes = None
        if self._alarm is None:
            self._alarm = self._loop.call_at(until, self._ring)
        if error.refresh_route:
            self._routes.request_refresh()
        if failures == 10:
            logger.warning("%s/%d cannot be leased from: %s", *partition_key, error)

    def _ring(self) -> None:
        self._alarm = None
        now = self._loop.time() + TICK_S
        self._resting = {
            partition_key: rest for partition_key, rest in self._resting.items() if rest[1] > now
        }
        if self._resting:
            first = min(until for _, until in self._resting.values())
            self._alarm = self._loop.call_at(first, self._ring)
        self._tell()

    def _tell(self) -> None:
        self._nodes = None
        for listener in self._listeners:
            listener()
