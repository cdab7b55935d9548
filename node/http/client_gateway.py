"""The gateway over the client library, with the own node as its bootstrap. (Shell.)

One producer serves all requests: records that come at the same time share batches, and one that
comes alone is sent at once. Everything is made on first use, so a node that nobody asks over HTTP
has no connections to itself.
"""

import logging
from collections.abc import Mapping

from raftq.client.admin.admin import Admin
from raftq.client.common.errors import Detail, RaftqError
from raftq.client.options import ClientOptions, show
from raftq.client.producer.producer import Producer
from raftq.client.results import Delivery
from raftq.client.wire.layout import LANE_NORMAL
from raftq.client.wire.record import VALUE_BYTES_MAX
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.gateway import Outcome, Outgoing, Page, Placed, Position
from raftq.node.http.queue_calls import QueueCalls
from raftq.node.http.reader import PageReader
from raftq.node.metrics.node_status import NodeFacts

logger = logging.getLogger(__name__)

CLIENT_NAME = "http"
PUBLISH_MS = 25_000
"""Less than a request may take, so that the caller learns what kept its records."""
BLOCK_MS = 5_000
ADMIN_MS = 12_000
READ_S = 10.0
CLOSE_S = 2.0


class ClientGateway:
    """A Gateway. Belongs to one event loop."""

    def __init__(self, facts: NodeFacts) -> None:
        self._facts = facts
        self._producer: Producer | None = None
        self._reader: PageReader | None = None
        self._admin: Admin | None = None
        self._queues: QueueCalls | None = None

    def _bootstrap(self) -> str:
        return show(self._facts.native_address)

    async def publish(self, topic: TopicState, records: Outgoing) -> list[Outcome]:
        producer = self._producer
        if producer is None:
            producer = self._producer = Producer(
                self._bootstrap(),
                name=CLIENT_NAME,
                linger_ms=0,
                value_bytes_max=VALUE_BYTES_MAX,
                delivery_timeout_ms=PUBLISH_MS,
                max_block_ms=BLOCK_MS,
            )
        try:
            await producer.expect(topic.name, len(topic.partitions))
        except RaftqError as error:
            return [error] * len(records.values)
        return await _settled(await _sent(producer, topic.name, records))

    async def read(
        self, topic: str, partition: int, position: Position, limit: int, bytes_max: int
    ) -> Page:
        return await self._page_reader().read(topic, partition, position, limit, bytes_max)

    def _page_reader(self) -> PageReader:
        if self._reader is None:
            options = ClientOptions(name=CLIENT_NAME)
            self._reader = PageReader(self._bootstrap(), options, READ_S)
        return self._reader

    @property
    def queues(self) -> QueueCalls:
        if self._queues is None:
            options = ClientOptions(name=CLIENT_NAME)
            reader = self._page_reader()
            self._queues = QueueCalls(
                self._facts, self._bootstrap(), options, reader, self._administration
            )
        return self._queues

    async def offsets(self, topic: str) -> Mapping[int, tuple[int, int]]:
        described = await self._administration().describe_topic(topic)
        return {
            one.partition: (one.start_offset, one.high_watermark)
            for one in described.partitions
            if one.start_offset is not None and one.high_watermark is not None
        }

    async def create_topic(
        self, name: str, partitions: int, replication: int, config: Mapping[str, Detail]
    ) -> int:
        admin = self._administration()
        made = await admin.create_topic(name, partitions, replication, config)
        return len(made.partitions)

    async def delete_topic(self, name: str) -> None:
        await self._administration().delete_topic(name)

    async def add_partitions(self, name: str, total: int) -> int:
        return len((await self._administration().add_partitions(name, total)).partitions)

    def _administration(self) -> Admin:
        if self._admin is None:
            self._admin = Admin(self._bootstrap(), name=CLIENT_NAME, timeout_ms=ADMIN_MS)
        return self._admin

    async def close(self) -> None:
        producer, self._producer = self._producer, None
        reader, self._reader = self._reader, None
        admin, self._admin = self._admin, None
        queues, self._queues = self._queues, None
        if queues is not None:
            await queues.close()
        if producer is not None:
            try:
                await producer.close(CLOSE_S)
            except RaftqError as error:
                logger.warning("records were not delivered", extra={"problem": str(error)})
        if reader is not None:
            await reader.close()
        if admin is not None:
            await admin.close()


async def _sent(producer: Producer, topic: str, records: Outgoing) -> list[Delivery | RaftqError]:
    """Hand the records over, in order."""
    values = records.values
    count = len(values)
    keys = records.keys or [None] * count
    headers = records.headers or [None] * count
    partitions = records.partitions or [None] * count
    lanes = records.priorities or [LANE_NORMAL] * count
    due = records.deliver_at or [None] * count
    ttls = records.ttls_ms or [None] * count
    rows = zip(values, keys, headers, lanes, partitions, due, ttls, strict=True)
    sent: list[Delivery | RaftqError] = []
    try:
        for value, key, header, lane, partition, at, ttl_ms in rows:
            ttl = None if ttl_ms is None else ttl_ms / 1000
            delivery = await producer.send(
                topic, value, key, header, lane, partition, deliver_at=at, ttl=ttl
            )
            sent.append(delivery)
    except RaftqError as error:
        # Records are checked before: what keeps one from being taken keeps the rest as well.
        sent += [error] * (count - len(sent))
    return sent


async def _settled(sent: list[Delivery | RaftqError]) -> list[Outcome]:
    settled: list[Outcome] = []
    for one in sent:
        if isinstance(one, RaftqError):
            settled.append(one)
            continue
        try:
            appended = await one
        except RaftqError as error:
            settled.append(error)
        else:
            settled.append(Placed(appended.partition, appended.offset))
    return settled
