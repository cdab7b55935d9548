"""Shell: the blocking clients: the verbs of the asyncio ones, without `await`.

Each wraps its asyncio twin, which lives on the loop of a background thread (loop_thread.py). What
is called often does not go there: `send` fills batches and `poll` decodes them in the caller's own
thread, and only what needs the network is handed over.

A Producer and an Admin may be used by many threads at once, a Consumer by one at a time.
"""

import threading
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from datetime import datetime
from time import perf_counter
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from raftq.client.admin.admin import Admin as AsyncAdmin
from raftq.client.admin.recovery import Leaderless
from raftq.client.common.errors import Detail, InvalidArgument, QueueClosed, RaftqError
from raftq.client.consumer.consumer import POLL_BYTES
from raftq.client.consumer.consumer import Consumer as AsyncConsumer
from raftq.client.consumer.records import Fetched, to_table
from raftq.client.net.client import Client
from raftq.client.options import (
    AdminSettings,
    Bootstrap,
    ConsumerSettings,
    ProducerSettings,
    lane_of,
)
from raftq.client.producer.accumulator import RECORD_BYTES
from raftq.client.producer.producer import CLOSE_S_DEFAULT
from raftq.client.producer.producer import Producer as AsyncProducer
from raftq.client.results import Deliveries, Delivery, Record, TopicDescription
from raftq.client.sync import loop_thread
from raftq.client.sync.admin import QueueVerbs
from raftq.client.sync.group import GroupVerbs
from raftq.client.wire.admin_messages import ClusterStatusReply
from raftq.client.wire.messages import NodeInfo
from raftq.client.wire.record import Headers

C = TypeVar("C", bound=Client)
T = TypeVar("T")


class Blocking:
    """What the blocking clients have in common: the thread, opening and closing."""

    def __init__(self, client: Client) -> None:
        self._refusal: str | None = None
        self._base = client
        self._thread = loop_thread.join(self)
        self._call(client.start())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._refusal is not None:
            work.close()
            self._refuse()
        return self._thread.call(work)

    def _refuse(self) -> None:
        raise QueueClosed(f"this client cannot be used: {self._refusal}")

    def forbid(self, reason: str) -> None:
        self._refusal = reason

    def _close(self, work: Coroutine[Any, Any, None]) -> None:
        if self._refusal is not None:
            work.close()
            return
        try:
            self._call(work)
        finally:
            if self._refusal is None:
                self._refusal = "it is closed"
                loop_thread.leave(self, self._thread)

    def close(self) -> None:
        self._close(self._base.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RaftqError:
            if kind is None:
                raise


class Producer(Blocking):
    """Sends records: `with Producer("127.0.0.1:7070") as producer: ...`.

    Settings are the fields of ProducerOptions. Any number of threads may use it.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ProducerSettings]) -> None:
        self._client = AsyncProducer(bootstrap, **settings)
        self._client._threadsafe = True
        super().__init__(self._client)
        self._offer_value = self._client._accumulator.offer_value

    def send(  # noqa: PLR0913 - the fields of a record
        self,
        topic: str,
        value: bytes,
        key: bytes | None = None,
        headers: Headers | None = None,
        priority: str | int = "normal",
        partition: int | None = None,
        timestamp: int | None = None,
        delay: float | None = None,
        deliver_at: float | datetime | None = None,
        ttl: float | None = None,
    ) -> Delivery:
        """Take a record for sending; blocks while the buffer is full, at most `max_block_ms`.

        `delay` (seconds) or `deliver_at` (a datetime, or seconds since 1970) hides it until then,
        `ttl` (seconds, from when it is due) ends it.
        """
        if self._refusal is not None:
            self._refuse()
        plain = (
            key is None and headers is None and partition is None and timestamp is None
            and delay is None and deliver_at is None and ttl is None
        )  # fmt: skip
        if plain and type(value) is bytes:
            delivery = self._offer_value(topic, value, priority)
            if delivery is not None:
                return delivery
        times = None if plain else self._client.times(delay, deliver_at, ttl)
        self._client.check(value, key, headers, priority, partition, timestamp)
        offer = self._client._accumulator.offer
        delivery = offer(topic, value, key, headers, priority, partition, timestamp, times)
        while delivery is None:
            self._make_room(topic, partition, len(value) + RECORD_BYTES)
            delivery = offer(topic, value, key, headers, priority, partition, timestamp, times)
        return delivery

    def send_many(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None = None,
        priority: str | int = "normal",
        partition: int | None = None,
    ) -> Deliveries:
        """Take many records at once, column by column; much cheaper than one `send` for each."""
        if self._refusal is not None:
            self._refuse()
        accumulator = self._client._accumulator
        while topic not in accumulator.topics:
            self._make_room(topic, None, 0)
        lane_of(priority)
        deliveries, groups = self._client.split(topic, values, keys, partition)
        for number, rows in groups:
            while not accumulator.offer_many(topic, rows, priority, number, deliveries):
                self._make_room(topic, number, self._client.options.batch_bytes)
        return deliveries

    def _make_room(self, topic: str, partition: int | None, size: int) -> None:
        client = self._client
        accumulator = client._accumulator
        if accumulator.lacks(topic, partition):
            self._call(client.make_room(topic, partition))
            return
        self._thread.loop.call_soon_threadsafe(client.push_all)
        if not accumulator.wait_for_room(size, client.options.max_block_ms / 1000):
            raise client.no_room()

    def expect(self, topic: str, partitions: int) -> None:
        """Somebody knows that the topic has so many partitions: use all of them from now on."""
        self._call(self._client.expect(topic, partitions))

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until all of it is settled."""
        self._call(self._client.flush(timeout))

    def close(self, timeout: float | None = CLOSE_S_DEFAULT) -> None:
        """Flush, then end. What is not settled in time fails with QueueClosed."""
        self._close(self._client.close(timeout))


class Consumer(GroupVerbs, Blocking):
    """Reads records of partitions that it is assigned, or that its group gives it:
    `with Consumer("127.0.0.1:7070", group="billing", topics=["orders"]) as consumer: ...`.

    Settings are the fields of ConsumerOptions. One thread at a time.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ConsumerSettings]) -> None:
        self._client = AsyncConsumer(bootstrap, **settings)
        self._client._threadsafe = True
        super().__init__(self._client)
        self._positions = self._client._positions
        self._polling = threading.Lock()

    def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these (topic, partition) from now on, and no others."""
        self._call(self._client.assign(list(partitions)))

    def assignment(self) -> list[tuple[str, int]]:
        return self._client.assignment()

    def seek(
        self,
        topic: str,
        partition: int,
        offset: int | None = None,
        time: int | None = None,
        to: str | None = None,
        timeout: float = 10.0,
    ) -> None:
        """Go on at an offset, at a time (ms), or `to` "earliest" or "latest"."""
        self._call(self._client.seek(topic, partition, offset, time, to, timeout))

    def stop_at(self, topic: str, partition: int, offset: int) -> None:
        """Fetch no more of a partition once everything before this offset has come."""
        self._call(self._client.stop_at(topic, partition, offset))

    def position(self, topic: str, partition: int, timeout: float = 10.0) -> int:
        """The offset of the next record that `poll` gives, at the earliest."""
        return self._call(self._client.position(topic, partition, timeout))

    def high_watermark(self, topic: str, partition: int) -> int | None:
        return self._client.high_watermark(topic, partition)

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        """Records as they are there, at most `max_records`; [] when none comes in time."""
        if type(max_records) is not int or max_records < 1:
            raise InvalidArgument(f"max_records must be at least 1, not {max_records!r}")
        return self._poll(lambda: self._positions.take_records(max_records), timeout)

    def poll_batches(self, max_bytes: int = POLL_BYTES, timeout: float = 1.0) -> list[Fetched]:
        """Whole batches as they are stored, checksums not yet compared."""
        return self._poll(lambda: self._positions.take_batches(max_bytes), timeout)

    def poll_arrow(self, max_bytes: int = POLL_BYTES, timeout: float = 1.0) -> Any:
        """The next records as one `pyarrow.Table`, empty when none comes in time."""
        return to_table(self.poll_batches(max_bytes, timeout))

    def _poll(self, take: Callable[[], list[T]], timeout: float) -> list[T]:
        if not self._polling.acquire(blocking=False):
            raise InvalidArgument("another thread polls this consumer")
        group = self._client._group
        found: list[T] = []
        try:
            if group is not None:
                group.begin_poll()
            deadline = perf_counter() + timeout
            while True:
                if self._refusal is not None:
                    self._refuse()
                if group is not None and group.is_wanted:
                    self._come_back(group)
                found = take()
                left = deadline - perf_counter()
                if found or left <= 0:
                    return found
                self._positions.wait(left)
        finally:
            if group is not None:
                group.end_poll(found)
            self._polling.release()


class Admin(QueueVerbs, Blocking):
    """Administrates the cluster: `with Admin("127.0.0.1:7070") as admin: ...`.

    Settings are the fields of AdminOptions.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[AdminSettings]) -> None:
        self._client = AsyncAdmin(bootstrap, **settings)
        super().__init__(self._client)

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        replication: int | None = None,
        config: Mapping[str, Detail] | None = None,
    ) -> TopicDescription:
        """Create a topic and wait until all its partitions have leaders that answer."""
        return self._call(self._client.create_topic(name, partitions, replication, config))

    def delete_topic(self, name: str) -> None:
        self._call(self._client.delete_topic(name))

    def alter_topic(self, name: str, config: Mapping[str, Detail]) -> None:
        """Change these settings; None takes one back to its default."""
        self._call(self._client.alter_topic(name, config))

    def add_partitions(self, name: str, total: int) -> TopicDescription:
        return self._call(self._client.add_partitions(name, total))

    def list_topics(self) -> list[str]:
        return self._call(self._client.list_topics())

    def describe_topic(self, name: str) -> TopicDescription:
        return self._call(self._client.describe_topic(name))

    def describe_topics(self) -> list[TopicDescription]:
        return self._call(self._client.describe_topics())

    def move_replica(self, topic: str, partition: int, replicas: Sequence[int]) -> None:
        self._call(self._client.move_replica(topic, partition, replicas))

    def drain(
        self, node_id: int, drain: bool = True, decommission: bool = False, force: bool = False
    ) -> int:
        return self._call(self._client.drain(node_id, drain, decommission, force))

    def remove_node(self, node_id: int) -> None:
        self._call(self._client.remove_node(node_id))

    def nodes(self) -> list[NodeInfo]:
        return self._call(self._client.nodes())

    def cluster_status(self) -> ClusterStatusReply:
        return self._call(self._client.cluster_status())

    def leaderless(
        self, topic: str | None = None, partition: int | None = None
    ) -> list[Leaderless]:
        """The partitions that nobody leads, with what is known of their copies."""
        return self._call(self._client.leaderless(topic, partition))

    def recover(self, topic: str, partition: int, version: int | None = None) -> int:
        """Give up the isr of a partition that nobody leads: the longest of the copies that are
        alive leads it; which node that is."""
        return self._call(self._client.recover(topic, partition, version))
