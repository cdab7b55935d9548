"""Shell: the asyncio producer. accumulator.py makes batches, sender.py delivers them.

    async with Producer("127.0.0.1:7070") as producer:
        delivery = await producer.send("orders", b"v", key=b"k")   # taken: there was room for it
        appended = await delivery                                  # acknowledged: it has an offset

`send` waits only for room in the buffer (and, the first time, for the topic's routes). A Delivery
tells what becomes of its record. The next `flush` or `close` raises the errors of deliveries that
the application did not ask about, so no error is lost in silence.
"""

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import TypedDict, TypeVar, Unpack

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import (
    InvalidArgument,
    QueueClosed,
    RaftqError,
    RequestTimeout,
    Throttled,
    TooLarge,
)
from raftq.client.common.tasks import yield_to_loop
from raftq.client.common.times import record_times
from raftq.client.common.types import Times
from raftq.client.net.client import Client
from raftq.client.options import Bootstrap, ProducerOptions, ProducerSettings, lane_of
from raftq.client.producer.accumulator import Accumulator, SendRows, partition_of
from raftq.client.producer.outbox import MoreColumns, OutgoingBatch
from raftq.client.producer.sender import Sender
from raftq.client.results import Deliveries, Delivery
from raftq.client.wire.record import KEY_BYTES_MAX, Headers, check_record_limits

CLOSE_S_DEFAULT = 30.0
FEW_VALUES = 100  # in one `send_many`; with more, a short way saves nothing
_INT_64 = range(-(1 << 63), 1 << 63)

C = TypeVar("C")


class SendColumns(TypedDict, total=False):
    """Columns of `send_many`. Each has one item for every value."""

    headers: Sequence[Headers | None] | None
    priorities: Sequence[str | int] | None
    partitions: Sequence[int | None] | None
    timestamps: Sequence[int | None] | None
    times: Sequence[Times] | None
    """When a record is due and when it ends, in ms since 1970. 0 means at once, and never."""


class Producer(Client):
    """Sends records. Settings are the fields of ProducerOptions."""

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ProducerSettings]) -> None:
        self.options = ProducerOptions(**settings)
        super().__init__(bootstrap, self.options, "producer")
        self._sender: Sender
        self._accumulator: Accumulator
        self._value_bytes_max = self.options.value_bytes_max
        self._threadsafe = False  # whether records come from other threads than the loop's
        self._closing: asyncio.Future[None] | None = None

    def _on_start(self) -> None:
        self._sender = Sender(self.options, self._routes, self._pool, self._tasks)
        self._accumulator = Accumulator(self.options, self._loop, self._wake)
        self._sender.attach(self._accumulator)

    def _wake(self) -> None:
        if self._threadsafe:
            self._loop.call_soon_threadsafe(self._sender.look)
        else:
            self._loop.call_soon(self._sender.look)

    async def send(  # noqa: PLR0913 - the fields of a record
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
        """Take a record for sending. Waits while the buffer is full, at most `max_block_ms`.

        `delay` (seconds) or `deliver_at` (a datetime, or seconds since 1970) hides it until then,
        `ttl` (seconds, from when it is due) ends it.
        """
        if not self._started:
            self._ensure_started()
        offer = self._accumulator.offer
        plain = (
            key is None and headers is None and partition is None and timestamp is None
            and delay is None and deliver_at is None and ttl is None
        )  # fmt: skip
        if plain and type(value) is bytes:
            delivery = self._accumulator.offer_value(topic, value, priority)
            if delivery is not None:
                if delivery.closed_batch():
                    await yield_to_loop()  # a caller that only sends must let the loop send
                return delivery
        times = self._checked(
            value, key, headers, priority, partition, timestamp, delay, deliver_at, ttl
        )
        delivery = offer(topic, value, key, headers, priority, partition, timestamp, times)
        while delivery is None:
            await self._make_room(topic, partition)
            delivery = offer(topic, value, key, headers, priority, partition, timestamp, times)
        if delivery.closed_batch():
            await yield_to_loop()
        return delivery

    async def send_many(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None = None,
        priority: str | int = "normal",
        partition: int | None = None,
        partial: bool = False,
        **columns: Unpack[SendColumns],
    ) -> Deliveries:
        """Take many records at once, column by column; much cheaper than many calls of `send`.

        `priority` and `partition` are for all records; the fields of SendColumns have one item for
        each. When no room comes for some records, `partial` makes them failed deliveries; without
        it the error is raised.
        """
        self._ensure_started()
        if keys is None and partition is None and not columns:
            taken = self._offer_values(topic, values, priority)
            if taken is not None:
                await yield_to_loop()
                return taken
        while topic not in self._accumulator.topics:
            await self._make_room(topic)
        deliveries, groups = self._split_many(topic, values, keys, (priority, partition), columns)
        try:
            for lane, number, rows in groups:
                while not self._accumulator.offer_many(topic, rows, lane, number, deliveries):
                    await self._make_room(topic, number)
        except RaftqError as error:
            if not partial:
                raise
            for _, _, rows in groups:
                deliveries._refuse(rows.positions[rows.at :], error)
        await yield_to_loop()
        return deliveries

    async def expect(self, topic: str, partitions: int) -> None:
        """Ask for the routes of the topic if fewer partitions are known, so that keys choose among
        all of them from now on."""
        self._ensure_started()
        if partitions and self._accumulator.lacks(topic, partitions - 1):
            if topic in self._accumulator.topics:
                await self._routes.refresh()
            else:
                await self._make_room(topic)

    async def flush(
        self,
        timeout: float | None = None,  # noqa: ASYNC109 - as in the blocking form
    ) -> None:
        """Send everything now and wait until all of it is settled, at most `timeout` seconds.

        Raises RequestTimeout when time runs out, otherwise the first error of a delivery that the
        application has not asked about.
        """
        self._ensure_started()
        await self._wait_for_batches(timeout)
        self._raise_unclaimed()

    async def close(
        self,
        timeout: float | None = CLOSE_S_DEFAULT,  # noqa: ASYNC109
    ) -> None:
        """Flush, then end. Records that are not settled in time fail with QueueClosed."""
        if not self._started or self._ended or self._loop.is_closed():
            await self._end()
            return
        if self._closing is not None:
            await asyncio.shield(self._closing)
            return
        self._closing = self._loop.create_future()
        self._accumulator.refuse(QueueClosed("the producer is closed"))
        try:
            await self._wait_for_batches(timeout)
        finally:
            self._sender.fail_all(QueueClosed("the producer was closed before the acknowledgement"))
            self._sender.stop()
            try:
                await self._end()
            finally:
                self._closing.set_result(None)
        self._raise_unclaimed()

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.close()
        except RaftqError:
            if error[0] is None:
                raise

    # Shared with the blocking form.

    def _checked(  # noqa: PLR0913 - the fields of a record
        self,
        value: bytes,
        key: bytes | None,
        headers: Headers | None,
        priority: str | int,
        partition: int | None,
        timestamp: int | None,
        delay: float | None,
        deliver_at: float | datetime | None,
        ttl: float | None,
    ) -> Times | None:
        """Refuse a record that cannot be sent. Returns when the record is due and when it ends, or
        None for a record without such times."""
        times = None
        if not (delay is deliver_at is ttl is None):
            times = record_times(delay, deliver_at, ttl, self.options.wall_ms())
            if not any(times):
                times = None
        if type(value) is not bytes:
            raise InvalidArgument(f"a value must be bytes, not {type(value).__name__}")
        if len(value) > self._value_bytes_max:
            check_record_limits(value, None, None, self._value_bytes_max)
        if key is not None or headers or partition is not None or timestamp is not None:
            self._check_more(key, headers, partition, timestamp)
        lane_of(priority)
        return times

    def _check_more(
        self,
        key: bytes | None,
        headers: Headers | None,
        partition: int | None,
        timestamp: int | None,
    ) -> None:
        if key is not None and type(key) is not bytes:
            raise InvalidArgument(f"a key must be bytes or None, not {type(key).__name__}")
        if headers and not isinstance(headers, dict):
            raise InvalidArgument(f"headers are a dict of str to bytes, not {headers!r}")
        check_record_limits(b"", key, headers, self._value_bytes_max)
        for name, number in (("partition", partition), ("timestamp", timestamp)):
            if number is not None and (type(number) is not int or number not in _INT_64):
                raise InvalidArgument(f"a {name} must be a whole number or None, not {number!r}")
        _check_partition(partition)

    def _offer_values(
        self, topic: str, values: Sequence[bytes], priority: str | int
    ) -> Deliveries | None:
        """Take a few values alone on a short way, or return None: then `_split_many` is needed."""
        if type(values) is not list or not 0 < len(values) <= FEW_VALUES:
            return None
        lane_of(priority)
        self._check_columns(values, None)
        return self._accumulator.offer_values(topic, values, priority)

    def _split_many(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        common: tuple[str | int, int | None],
        columns: SendColumns,
    ) -> tuple[Deliveries, list[tuple[str | int, int | None, SendRows]]]:
        """Return checked rows by priority and partition. `common` is for rows that name none."""
        priority, partition = common
        lane_of(priority)
        if not columns or all(column is None for column in columns.values()):
            deliveries, plain = self._split(topic, values, keys, partition)
            return deliveries, [(priority, number, rows) for number, rows in plain]
        lanes = columns.get("priorities")
        numbers = columns.get("partitions")
        headers = columns.get("headers")
        choices = (
            [priority] * len(values) if lanes is None else lanes,
            [partition] * len(values) if numbers is None else numbers,
        )
        given = None if headers is None else [mapping or None for mapping in headers]
        more = MoreColumns(given, columns.get("timestamps"), columns.get("times"))
        return self._split_rows(topic, values, keys, choices, more)

    def _split(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        partition: int | None,
    ) -> tuple[Deliveries, list[tuple[int | None, SendRows]]]:
        """Return checked rows by partition. Rows under None may go to any partition."""
        if not isinstance(values, list):
            values = list(values)
        self._check_columns(values, keys)
        _check_partition(partition)
        deliveries = Deliveries(len(values))
        if partition is not None or keys is None:
            return deliveries, [(partition, SendRows(values, keys))] if values else []
        count = len(self._accumulator.topics[topic].outboxes)
        groups: dict[int | None, list[int]] = {}
        for at, key in enumerate(keys):
            number = None if key is None else partition_of(key, count)
            if number in groups:
                groups[number].append(at)
            else:
                groups[number] = [at]
        found: list[tuple[int | None, SendRows]] = []
        for number, positions in groups.items():
            picked = [values[at] for at in positions]
            their_keys = None if number is None else [keys[at] for at in positions]
            by_key = number is not None
            found.append((number, SendRows(picked, their_keys, positions, by_key)))
        return deliveries, found

    def _split_rows(
        self,
        topic: str,
        values: Sequence[bytes],
        keys: Sequence[bytes | None] | None,
        choices: tuple[Sequence[str | int], Sequence[int | None]],
        more: MoreColumns,
    ) -> tuple[Deliveries, list[tuple[str | int, int | None, SendRows]]]:
        """Return checked rows by priority and partition. Rows of one lane and partition keep their
        order, also when keys chose the partition of some of them."""
        self._check_columns(values, keys)
        self._check_rows(len(values), choices, more)
        lanes, numbers = choices
        count = len(self._accumulator.topics[topic].outboxes)
        groups: dict[tuple[str | int, int | None, bool], list[int]] = {}
        by_key: dict[int, None] = {}
        for at in range(len(values)):
            number = numbers[at]
            if number is None and keys is not None and (key := keys[at]) is not None:
                number = partition_of(key, count)
                by_key[at] = None
            later = more.times is not None and more.times[at][0] > 0
            groups.setdefault((lanes[at], number, later), []).append(at)
        found: list[tuple[str | int, int | None, SendRows]] = []
        for (lane, number, later), positions in groups.items():
            columns = MoreColumns(
                _pick(more.headers, positions),
                _pick(more.timestamps, positions),
                _pick(more.times, positions),
            )
            picked = [values[at] for at in positions]
            rows = SendRows(picked, _pick(keys, positions), positions, more=columns)
            rows.by_key = any(at in by_key for at in positions)
            rows.by_number = any(at not in by_key for at in positions)
            rows.later = later
            found.append((lane, number, rows))
        return Deliveries(len(values)), found

    def _check_rows(
        self,
        count: int,
        choices: tuple[Sequence[str | int], Sequence[int | None]],
        more: MoreColumns,
    ) -> None:
        columns = dict(zip(("priorities", "partitions"), choices, strict=True)) | more._asdict()
        for name, column in columns.items():
            if column is not None and len(column) != count:
                raise InvalidArgument(f"{count} values but {len(column)} {name}")
        for lane in set(choices[0]):
            lane_of(lane)
        for number in set(choices[1]):
            _check_partition(number)
        for headers in more.headers or ():
            if headers:
                self._check_more(None, headers, None, None)
        for timestamp in set(more.timestamps or ()):
            self._check_more(None, None, None, timestamp)

    def _check_columns(self, values: Sequence[bytes], keys: Sequence[bytes | None] | None) -> None:
        if set(map(type, values)) - {bytes}:
            raise InvalidArgument("values must be bytes")
        longest = max(map(len, values), default=0)
        if longest > self._value_bytes_max:
            raise TooLarge(
                f"a value of {longest} bytes is over the limit of {self._value_bytes_max}"
            )
        if keys is None:
            return
        if len(keys) != len(values):
            raise InvalidArgument(f"{len(values)} values but {len(keys)} keys")
        if set(map(type, keys)) - {bytes, type(None)}:
            raise InvalidArgument("keys must be bytes or None")
        longest = max([len(key) for key in keys if key is not None], default=0)
        if longest > KEY_BYTES_MAX:
            raise TooLarge(f"a key of {longest} bytes is over the limit of {KEY_BYTES_MAX}")

    async def _make_room(self, topic: str, partition: int | None = None) -> None:
        """Wait until a refused offer can be repeated."""
        block_s = self.options.max_block_ms / 1000
        accumulator = self._accumulator
        if topic not in accumulator.topics:
            if not isinstance(topic, str) or not topic:
                raise InvalidArgument(f"a topic is a name, not {topic!r}")
            await self._learn_topic(topic, block_s)
            return
        if accumulator.lacks(topic, partition):
            await self._learn_partition(topic, partition, block_s)
            return
        self._push_all()
        room: asyncio.Future[None] = self._loop.create_future()
        accumulator.starving.append(room)
        try:
            async with asyncio.timeout(block_s):
                await room
        except TimeoutError:
            raise self._no_room() from None

    def _push_all(self) -> None:
        """Send everything now; on the loop."""
        if not self._ended:
            self._sender.push(self._accumulator.push_out())

    async def _learn_topic(self, topic: str, block_s: float) -> None:
        try:
            async with asyncio.timeout(block_s):
                info = await self._routes.topic(topic)
        except TimeoutError:
            raise Throttled(f"nothing was learned about topic {topic!r} in {block_s} s") from None
        self._accumulator.set_partitions(topic, len(info.partitions), info.topic_id)

    async def _learn_partition(self, topic: str, partition: int | None, block_s: float) -> None:
        """The topic may have got more partitions since its routes were asked for."""
        try:
            async with asyncio.timeout(block_s):
                await self._routes.refresh()
        except TimeoutError:
            raise Throttled(f"nothing was learned about topic {topic!r} in {block_s} s") from None
        known = self._accumulator.topics.get(topic)
        if known is not None and self._accumulator.lacks(topic, partition):
            raise InvalidArgument(
                f"topic {topic!r} has {len(known.outboxes)} partitions, so no partition {partition}"
            )

    def _no_room(self) -> RaftqError:
        options = self.options
        return Throttled(
            f"the buffer of {options.buffer_bytes} bytes stayed full for {options.max_block_ms} ms"
        )

    async def _wait_for_batches(self, timeout_s: float | None) -> None:
        batches = self._accumulator.push_out()
        self._sender.push(batches)
        try:
            async with asyncio.timeout(timeout_s):
                for batch in batches:
                    if not batch.done:
                        await batch.waiter()
        except TimeoutError:
            left = [batch for batch in batches if not batch.done]
            count = sum([batch.count or len(batch.values) for batch in left])
            raise RequestTimeout(
                f"{count} records are not acknowledged after {timeout_s} s"
            ) from None

    def _raise_unclaimed(self) -> None:
        failed, self._sender.failed = self._sender.failed, []
        for batch in failed:
            if not batch.claimed and batch.error is not None:
                raise _for_many(batch, failed)


def _pick(column: Sequence[C] | None, positions: Sequence[int]) -> list[C] | None:
    """These rows of a column; None when nothing is given in any of them."""
    if column is None:
        return None
    picked = [column[at] for at in positions]
    return picked if any(item is not None for item in picked) else None


def _check_partition(partition: int | None) -> None:
    if partition is not None and (type(partition) is not int or partition < 0):
        raise InvalidArgument(f"a partition is a number from 0 on or None, not {partition!r}")


def _for_many(first: OutgoingBatch, failed: list[OutgoingBatch]) -> RaftqError:
    assert first.error is not None
    error = copy_error(first.error)
    count = sum([batch.count for batch in failed if not batch.claimed])
    error.args = (f"{count} records were not delivered, the first because: {first.error}",)
    return error
