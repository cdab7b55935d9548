"""The clients through which the HTTP handlers reach the cluster. (Shell.)

They have the own node as their bootstrap, so REST is one more client of the single publish and read
path. Each is made when it is first used: a node that nobody asks over HTTP has no connections to
itself. One producer serves all requests, so records that come at the same time share batches, and a
record that comes alone is sent at once.
"""

import logging
from functools import cached_property

from raftq.client.admin.admin import Admin
from raftq.client.common.errors import RaftqError
from raftq.client.options import show
from raftq.client.producer.producer import Producer
from raftq.client.queue.stateless import StatelessMembers, StatelessOptions
from raftq.client.wire.record import VALUE_BYTES_MAX
from raftq.node.http.options import HttpOptions
from raftq.node.metrics.node_status import NodeFacts

logger = logging.getLogger(__name__)

CLIENT_NAME = "http"
PUBLISH_MS = 25_000
"""Less than a request may take, so that the caller learns what kept its records."""
BLOCK_MS = 5_000
CALL_MS = 12_000
CLOSE_S = 2.0


class HttpClients:
    """The clients of one HTTP server. Belongs to one event loop."""

    def __init__(self, facts: NodeFacts, options: HttpOptions | None = None) -> None:
        self._facts = facts
        self._options = options or HttpOptions()

    @cached_property
    def producer(self) -> Producer:
        return Producer(
            show(self._facts.native_address),
            name=CLIENT_NAME,
            linger_ms=0,
            value_bytes_max=VALUE_BYTES_MAX,
            delivery_timeout_ms=PUBLISH_MS,
            max_block_ms=BLOCK_MS,
        )

    @cached_property
    def admin(self) -> Admin:
        return Admin(show(self._facts.native_address), name=CLIENT_NAME, timeout_ms=CALL_MS)

    @cached_property
    def members(self) -> StatelessMembers:
        options = StatelessOptions(
            name=CLIENT_NAME, timeout_ms=CALL_MS, poll_bytes=self._options.read_bytes_max
        )
        return StatelessMembers(show(self._facts.native_address), options)

    async def close(self) -> None:
        made = vars(self)
        if "producer" in made:
            try:
                await self.producer.close(CLOSE_S)
            except RaftqError as error:
                logger.warning("records were not delivered", extra={"problem": str(error)})
        if "members" in made:
            await self.members.close()
        if "admin" in made:
            await self.admin.close()
