"""Shell: the blocking producer. `send` fills batches in the caller's own thread."""

from collections.abc import Sequence
from datetime import datetime
from typing import Unpack

from raftq.client.common.errors import RaftqError
from raftq.client.options import Bootstrap, ProducerSettings
from raftq.client.producer.accumulator import RECORD_BYTES
from raftq.client.producer.producer import CLOSE_S_DEFAULT, SendColumns
from raftq.client.producer.producer import Producer as AsyncProducer
from raftq.client.results import Deliveries, Delivery
from raftq.client.sync.blocking import Blocking
from raftq.client.wire.record import Headers


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
        """Take a record for sending. Blocks while the buffer is full, at most `max_block_ms`.

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
        times = self._client._checked(
            value, key, headers, priority, partition, timestamp, delay, deliver_at, ttl
        )
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
        partial: bool = False,
        **columns: Unpack[SendColumns],
    ) -> Deliveries:
        """Take many records at once, column by column; much cheaper than many calls of `send`.

        `priority` and `partition` are for all records; the fields of SendColumns have one item for
        each. When no room comes for some records, `partial` makes them failed deliveries; without
        it the error is raised.
        """
        if self._refusal is not None:
            self._refuse()
        if keys is None and partition is None and not columns:
            taken = self._client._offer_values(topic, values, priority)
            if taken is not None:
                return taken
        accumulator = self._client._accumulator
        while topic not in accumulator.topics:
            self._make_room(topic, None, 0)
        common = priority, partition
        deliveries, groups = self._client._split_many(topic, values, keys, common, columns)
        try:
            for lane, number, rows in groups:
                while not accumulator.offer_many(topic, rows, lane, number, deliveries):
                    self._make_room(topic, number, self._client.options.batch_bytes)
        except RaftqError as error:
            if not partial:
                raise
            for _, _, rows in groups:
                deliveries._refuse(rows.positions[rows.at :], error)
        return deliveries

    def _make_room(self, topic: str, partition: int | None, size: int) -> None:
        client = self._client
        accumulator = client._accumulator
        if accumulator.lacks(topic, partition):
            self._call(client._make_room(topic, partition))
            return
        self._thread.loop.call_soon_threadsafe(client._push_all)
        if not accumulator.wait_for_room(size, client.options.max_block_ms / 1000):
            raise client._no_room()

    def expect(self, topic: str, partitions: int) -> None:
        """Use all of these partitions from now on, also if fewer are known."""
        self._call(self._client.expect(topic, partitions))

    def flush(self, timeout: float | None = None) -> None:
        """Send everything now and wait until all of it is settled."""
        self._call(self._client.flush(timeout))

    def close(self, timeout: float | None = CLOSE_S_DEFAULT) -> None:
        """Flush, then end. Records that are not settled in time fail with QueueClosed."""
        self._close(self._client.close(timeout))
