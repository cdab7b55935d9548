"""What the handlers share, and the topics they look up. (Shell.)"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from raftq.client.common.errors import UnknownPartition, UnknownTopic
from raftq.client.common.names import is_internal
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.clients import HttpClients
from raftq.node.http.options import HttpOptions
from raftq.node.http.routes import Call
from raftq.node.metrics.node_status import NodeFacts


@dataclass(slots=True)
class Context:
    """What every handler has."""

    facts: NodeFacts
    clients: HttpClients
    options: HttpOptions
    topics: "Topics" = field(init=False)

    def __post_init__(self) -> None:
        self.topics = Topics(self.facts, self.options)


class Topics:
    """Finds topics in this node's copy of the metadata.

    The copy may be behind: a topic that another node has just created is waited for a moment, so
    that a caller who changes nodes between two requests does not see the gap.
    """

    def __init__(self, facts: NodeFacts, options: HttpOptions) -> None:
        self._facts = facts
        self._wait_s = options.topic_wait_ms / 1000
        self._waiting: dict[asyncio.Future[None], None] = {}
        facts.metadata.subscribe(self._changed)

    def _changed(self, changes: Sequence[Any]) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
        self._waiting.clear()

    async def by_name(self, name: str) -> TopicState:
        found = self._facts.metadata.state.topics.get(name)
        if found is not None:
            return found
        return await self._find(name, lambda found: True, UnknownTopic(f"no topic {name!r}"))

    def peek(self, name: str) -> TopicState | None:
        """A topic, if it is there right now."""
        return self._facts.metadata.state.topics.get(name)

    def queued(self) -> list[str]:
        """The names of the topics that have leases or delays."""
        topics = self._facts.metadata.state.topics.values()
        return [one.name for one in topics if one.queued and not is_internal(one.name)]

    async def get_partition(self, call: Call) -> tuple[TopicState, int]:
        """The topic and the partition of the path."""
        number = call.path["partition"]
        topic = await self.by_name(call.path["topic"])
        return await self.with_partition(topic, number, "partition"), number

    async def with_partition(self, topic: TopicState, number: int, path: str) -> TopicState:
        """The same topic, waited for until it has the partition."""
        if number < len(topic.partitions):
            return topic
        count = len(topic.partitions)
        error = UnknownPartition(f"{path}: topic {topic.name!r} has {count} partitions")
        return await self._find(topic.name, lambda found: number < len(found.partitions), error)

    async def _find(
        self, name: str, good: Callable[[TopicState], bool], error: Exception
    ) -> TopicState:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        while True:
            found = self._facts.metadata.state.topics.get(name)
            if found is not None and good(found):
                return found
            waiter = loop.create_future()
            self._waiting[waiter] = None
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                raise error from None
            finally:
                self._waiting.pop(waiter, None)
