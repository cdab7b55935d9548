"""Shell: which node leads which partition, learned from any node of the cluster.

The first answer comes from a bootstrap address. After that every known node may be asked, and the
bootstrap addresses again if none of them answers. Callers that need newer routes join the request
that is in flight. Requests are never sent more often than every `refresh_ms_min`.

A node may know less than another node, so an answer with an older epoch never replaces a newer one.
No route is dropped because a node does not answer.
"""

import asyncio
from collections.abc import Callable, Iterable

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import (
    ConnectFailed,
    NotLeader,
    QueueClosed,
    RaftqError,
    UnknownTopic,
)
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.net.connection import Connection
from raftq.client.net.pool import Pool
from raftq.client.options import Address, ClientOptions, show
from raftq.client.wire.messages import (
    Metadata,
    MetadataReply,
    NodeInfo,
    PartitionInfo,
    TopicInfo,
)

HEDGE_S = 0.3  # after this long without an answer, the next node is asked, too
ATTEMPT_S = 2.0
SILENT_S = 3.0
"""A node that did not answer, or may know too little, is asked after the others for this long."""


class Routes:
    """The known nodes, topics and leaders."""

    def __init__(
        self, bootstrap: list[Address], pool: Pool, options: ClientOptions, tasks: Tasks
    ) -> None:
        self.nodes: dict[int, NodeInfo] = {}
        self.topics: dict[str, TopicInfo] = {}
        self.missing: dict[str, float] = {}  # topics that no node knows, and since when
        self.controller: int | None = None
        self.cluster_id: str | None = None
        self._bootstrap = bootstrap
        self._pool = pool
        self._options = options
        self._tasks = tasks
        self._wanted: dict[str, None] = {}
        self._listeners: list[Callable[[], None]] = []
        self._running: asyncio.Task[None] | None = None
        self._asked_at = float("-inf")
        self._asked = 0
        self._avoided: dict[Address, float] = {}  # until then others are asked first
        self._timer: asyncio.TimerHandle | None = None
        self._problem: RaftqError | None = None
        self._stopped = False

    # What is known.

    def leader(self, topic: str, partition: int) -> tuple[int, Address] | None:
        """(node id, address) of a partition's leader; None if none is known."""
        info = self.partition(topic, partition)
        if info is None or info.leader is None:
            return None
        node = self.nodes.get(info.leader)
        return None if node is None else (node.node_id, (node.host, node.port))

    def partition(self, topic: str, partition: int) -> PartitionInfo | None:
        info = self.topics.get(topic)
        if info is None or not 0 <= partition < len(info.partitions):
            return None
        return info.partitions[partition]

    def addresses(self) -> list[Address]:
        """The addresses to ask, the most promising first."""
        known = [(node.host, node.port) for node in self.nodes.values() if node.alive]
        dead = [(node.host, node.port) for node in self.nodes.values() if not node.alive]
        # In turn: a node that is cut off from the others would give the same old answer again.
        first = self._asked % len(known) if known else 0
        known = known[first:] + known[:first]
        every = list(dict.fromkeys((*known, *self._bootstrap, *dead)))
        now = asyncio.get_running_loop().time()
        # Only for a while. Otherwise a node that answers, but knows too little, is always asked.
        self._avoided = {one: until for one, until in self._avoided.items() if until > now}
        return sorted(every, key=self._avoided.__contains__)

    def avoid(self, *addresses: Address) -> None:
        """Asks other nodes first for a while."""
        until = asyncio.get_running_loop().time() + SILENT_S
        self._avoided.update(dict.fromkeys(addresses, until))

    def describe_leader(self, topic: str, partition: int) -> str:
        found = self.leader(topic, partition)
        return "nobody" if found is None else f"node {found[0]} at {show(found[1])}"

    # Learning more.

    def watch(self, listener: Callable[[], None]) -> None:
        """Calls `listener` after every change of routes."""
        self._listeners.append(listener)

    def want(self, topics: Iterable[str]) -> None:
        """Asks about these topics from now on."""
        self._wanted.update(dict.fromkeys(topics))

    def unwant(self, topic: str) -> None:
        self._wanted.pop(topic, None)
        self.topics.pop(topic, None)
        self.missing.pop(topic, None)

    def request_refresh(self) -> "asyncio.Task[None]":
        """Asks again soon; joins a request in flight. The task never fails."""
        if self._running is None or self._running.done():
            self._running = self._tasks.spawn(self._refresh_quietly())
        return self._running

    async def refresh(self) -> None:
        """Asks again and waits for the answer. Raises if no node answers."""
        if not self._stopped:
            await asyncio.wait((self.request_refresh(),))
        if self._stopped:
            raise QueueClosed("the client was closed meanwhile")
        if self._problem is not None:
            raise copy_error(self._problem)

    async def refresh_patiently(self, began: float) -> None:
        """Ask again until a node answers. Raises when none does for `bootstrap_ms` from `began`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                return await self.refresh()
            except RaftqError:
                if self._stopped or loop.time() - began >= self._options.bootstrap_ms / 1000:
                    raise
            await sleep(self._options.retry_backoff_ms_max / 1000)

    async def topic(self, name: str) -> TopicInfo:
        """The routes of a topic. Asks until they are known.

        Raises UnknownTopic if the nodes do not know it for `topic_grace_ms`, ConnectFailed if no
        node answers for `bootstrap_ms`. Callers that cannot wait so long use their own timeout."""
        loop = asyncio.get_running_loop()
        self.want((name,))
        began = loop.time()
        while (info := self.topics.get(name)) is None:
            await self.refresh_patiently(began)
            if self.is_missing(name, loop.time()):
                self.unwant(name)
                raise UnknownTopic(f"no topic is named {name!r}")
            if name not in self.topics:
                await sleep(self._options.retry_backoff_ms / 1000)
        return info

    def is_missing(self, topic: str, now: float) -> bool:
        """Whether the nodes did not know the topic for the whole grace time."""
        since = self.missing.get(topic)
        return since is not None and now - since >= self._options.topic_grace_ms / 1000

    def hint(self, topic: str, partition: int, error: RaftqError) -> None:
        """Uses what a NotLeader says about the new leader."""
        leader, epoch = error.details.get("leader"), error.details.get("epoch")
        info = self.partition(topic, partition)
        if (
            isinstance(error, NotLeader)
            and info is not None
            and isinstance(leader, int)
            and isinstance(epoch, int)
            and epoch > info.epoch
            and leader in self.nodes
        ):
            known = self.topics[topic]
            partitions = list(known.partitions)
            partitions[partition] = PartitionInfo(partition, leader, epoch, info.replicas, info.isr)
            self.topics[topic] = _with_partitions(known, tuple(partitions))
            self._tell()

    def start(self) -> None:
        """Asks from time to time, even if nothing fails."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._options.refresh_ms / 1000, self._ring)

    def stop(self) -> None:
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        if self._wanted:
            self.request_refresh()
        self.start()

    async def _refresh_quietly(self) -> None:
        loop = asyncio.get_running_loop()
        wait = self._asked_at + self._options.refresh_ms_min / 1000 - loop.time()
        if wait > 0:
            await sleep(wait)
        self._asked_at = loop.time()
        self._asked += 1
        try:
            reply = await self._ask_anyone(Metadata(tuple(self._wanted)))
        except RaftqError as error:
            self._problem = error
            return
        self._problem = None
        self._learn(reply, loop.time())
        self._tell()

    async def _ask_anyone(self, request: Metadata) -> MetadataReply:
        """Returns the first answer. Asks the next node if one fails or takes long."""
        failures: dict[Address, str] = {}
        asked: dict[asyncio.Task[MetadataReply | RaftqError], Address] = {}
        left = self.addresses()
        tried = list(left)
        try:
            while left or asked:
                if left:
                    address = left.pop(0)
                    asked[self._tasks.spawn(self._ask(address, request))] = address
                done, late = await asyncio.wait(
                    asked,
                    timeout=HEDGE_S if left else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if not done:
                    self.avoid(*(asked[task] for task in late))
                for task in [task for task in asked if task in done]:
                    address = asked.pop(task)
                    answer = task.result()
                    if isinstance(answer, MetadataReply):
                        return answer
                    failures[address] = str(answer)
                    self.avoid(address)
        finally:
            for task in asked:
                task.cancel()
        reasons = "; ".join(f"{show(address)}: {failures[address]}" for address in tried)
        raise ConnectFailed(f"no node of the cluster answers (tried {reasons})")

    async def _ask(self, address: Address, request: Metadata) -> MetadataReply | RaftqError:
        """The answer or the error, as a value."""
        try:
            connection: Connection = await self._pool.get(address)
            return (await connection.request(request, timeout_s=ATTEMPT_S)).message
        except RaftqError as error:
            return error

    def _learn(self, reply: MetadataReply, now: float) -> None:
        self.cluster_id = reply.cluster_id
        self.controller = reply.controller
        # Addresses from a node that is behind may be old; the next request goes to another node.
        self.nodes.update({node.node_id: node for node in reply.nodes})
        for topic in reply.topics:
            if topic.error:
                self.missing.setdefault(topic.topic, now)
                if self.is_missing(topic.topic, now):
                    self.topics.pop(topic.topic, None)
            else:
                self.missing.pop(topic.topic, None)
                self.topics[topic.topic] = self._newer(self.topics.get(topic.topic), topic)

    def _newer(self, known: TopicInfo | None, offered: TopicInfo) -> TopicInfo:
        if known is None or offered.topic_id > known.topic_id:
            return offered
        if offered.topic_id < known.topic_id:
            return known
        partitions = list(offered.partitions)
        partitions += known.partitions[len(partitions) :]
        for at, old in enumerate(known.partitions):
            if old.epoch > partitions[at].epoch:
                partitions[at] = old
        return _with_partitions(offered, tuple(partitions))

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()


def _with_partitions(topic: TopicInfo, partitions: tuple[PartitionInfo, ...]) -> TopicInfo:
    return TopicInfo(topic.topic, partitions, topic.error, topic.topic_id, topic.config)
