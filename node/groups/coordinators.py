"""The coordinators of this node, and the handlers of requests about groups. (Shell.)

A group belongs to the partition of `__groups` that its name hashes to, and the leader of that
partition coordinates it (coordinator.py). The first node that gets a request about a group creates
the topic. A node that gets a request about a group of another node names its leader, as with any
partition.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from random import Random
from typing import Any, TypeVar

import mmh3

from raftq.client.common.errors import (
    Detail,
    NotEnoughReplicas,
    NotLeader,
    RequestTimeout,
    TopicExists,
)
from raftq.client.wire.group_messages import (
    GROUPS_TOPIC,
    DeleteGroup,
    DeleteGroupReply,
    DescribeGroup,
    DescribeGroupReply,
    FindCoordinator,
    FindCoordinatorReply,
    GivenPartition,
    GroupHeartbeat,
    GroupHeartbeatReply,
    GroupSummary,
    LeaveGroup,
    LeaveGroupReply,
    ListGroups,
    ListGroupsReply,
    MemberInfo,
)
from raftq.client.wire.schema import ITEMS_MAX
from raftq.cluster.groups.group import Group, Member
from raftq.cluster.groups.groups import Groups, GroupsConfig
from raftq.cluster.metadata.changes import Change, TopicChanged, TopicDeleted
from raftq.cluster.metadata.commands import CreateTopic
from raftq.cluster.metadata.log import MetadataLog
from raftq.node.groups.coordinator import READY_S, Coordinator
from raftq.node.replication.leader_log import Leadership

logger = logging.getLogger(__name__)

PARTITIONS = 8
REPLICATION = 3
TOPICS_SHOWN_MAX = 1000
# The log is all there is: no record may be dropped by age, nor be lost by a power cut, which would
# give out a generation twice.
SETTINGS: dict[str, Detail] = {
    "retention_ms": -1,
    "fsync": "always",
    "segment_bytes": 16 * 1024 * 1024,
}

_PEER = re.compile(r"\('([^']+)'")

R = TypeVar("R")


def partition_of(group: str, partitions: int) -> int:
    """Return the partition of `__groups` that a group belongs to."""
    return int(mmh3.hash(group.encode(), signed=False)) % partitions


class Coordinators:
    """The coordinators of this node, by partition of `__groups`."""

    def __init__(
        self,
        node_id: int,
        metadata: MetadataLog,
        rng: Random,
        wall_ms: Callable[[], int],
        config: GroupsConfig | None = None,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._node_id = node_id
        self._metadata = metadata
        self._rng = rng
        self._wall_ms = wall_ms
        self._config = config or GroupsConfig()
        self._by_number: dict[int, Coordinator] = {}
        self._waiting: dict[asyncio.Future[None], None] = {}
        self._counts: dict[str, int] | None = None
        metadata.subscribe(self._changed)

    def serve(self, leadership: Leadership) -> Coordinator:
        """Begin to lead a partition of `__groups`."""
        number = leadership.ref.number
        coordinator = Coordinator(
            leadership,
            self._config,
            Random(self._rng.getrandbits(64)),
            self._wall_ms,
            self._topic_counts,
            lambda: self._not_leader(number),
            self._stopped,
        )
        self._by_number[number] = coordinator
        self._wake()
        return coordinator

    def __iter__(self) -> Iterator[Coordinator]:
        return iter(list(self._by_number.values()))

    def _stopped(self, coordinator: Coordinator) -> None:
        number = coordinator.leadership.ref.number
        if self._by_number.get(number) is coordinator:
            del self._by_number[number]

    def table(self) -> dict[type, Any]:
        """Request class -> handler."""
        return {
            FindCoordinator: self.find_coordinator,
            GroupHeartbeat: self.heartbeat,
            LeaveGroup: self.leave,
            ListGroups: self.list_groups,
            DescribeGroup: self.describe,
            DeleteGroup: self.delete,
        }

    # Metadata.

    def _changed(self, changes: Sequence[Change]) -> None:
        self._wake()
        if any(isinstance(change, TopicChanged | TopicDeleted) for change in changes):
            self._counts = None
            for coordinator in list(self._by_number.values()):
                coordinator.topics_changed()

    def _topic_counts(self) -> dict[str, int]:
        if self._counts is None:
            topics = self._metadata.state.topics.values()
            self._counts = {topic.name: len(topic.partitions) for topic in topics}
        return self._counts

    def _not_leader(self, number: int) -> NotLeader:
        state = self._metadata.state.partition(GROUPS_TOPIC, number)
        leader, epoch = (None, 0) if state is None else (state.leader, state.epoch)
        if leader == self._node_id:
            text = f"node {leader} begins to lead {GROUPS_TOPIC}/{number}"
        elif leader is None:
            text = f"no node leads {GROUPS_TOPIC}/{number} at the moment"
        else:
            text = f"node {leader} leads {GROUPS_TOPIC}/{number}"
        return NotLeader(f"{text}, in epoch {epoch}").with_details(leader=leader, epoch=epoch)

    async def _ensure_topic(self) -> None:
        """Make `__groups` unless it is there."""
        log = self._metadata
        if GROUPS_TOPIC in log.state.topics:
            return
        nodes = len(log.state.nodes)
        replication = min(REPLICATION, max(nodes, len(log.voters)))
        if nodes < replication:
            # If it were created now, it would have too few copies for ever.
            raise NotEnoughReplicas(
                f"{nodes} nodes of {replication} that are needed to keep groups"
            )
        try:
            await log.propose(CreateTopic(GROUPS_TOPIC, PARTITIONS, replication, SETTINGS))
        except TopicExists:
            logger.debug("topic=%s made by another node", GROUPS_TOPIC)

    async def _number(self, group: str) -> int:
        await self._ensure_topic()
        return partition_of(group, len(self._metadata.state.topics[GROUPS_TOPIC].partitions))

    # Finding the coordinator.

    def _at_hand(self, group: str) -> Coordinator | None:
        """Return the coordinator of a group, if it is here and can answer at once."""
        topic = self._metadata.state.topics.get(GROUPS_TOPIC)
        if topic is None:
            return None
        found = self._by_number.get(partition_of(group, len(topic.partitions)))
        ready = found is not None and found.ready.done() and found.ready.exception() is None
        return found if ready else None

    async def _find(self, group: str) -> Coordinator:
        """Return the coordinator of a group, once it can answer. NotLeader when it is elsewhere."""
        number = await self._number(group)
        try:
            async with asyncio.timeout(READY_S):
                while (found := self._by_number.get(number)) is None:
                    state = self._metadata.state.partition(GROUPS_TOPIC, number)
                    if state is None or state.leader != self._node_id:
                        raise self._not_leader(number)
                    await self._something_changes()
        except TimeoutError:
            raise RequestTimeout(str(self._not_leader(number))).with_outcome("failed") from None
        await found.until_ready()
        return found

    async def _something_changes(self) -> None:
        waiter: asyncio.Future[None] = self.loop.create_future()
        self._waiting[waiter] = None
        try:
            await waiter
        finally:
            self._waiting.pop(waiter, None)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    def _ask(self, group: str, ask: Callable[[Coordinator], Awaitable[R]]) -> Awaitable[R]:
        """Return the answer of the coordinator of a group, without a task when it can answer at
        once."""
        found = self._at_hand(group)
        return self._ask_later(group, ask) if found is None else ask(found)

    async def _ask_later(self, group: str, ask: Callable[[Coordinator], Awaitable[R]]) -> R:
        return await ask(await self._find(group))

    # Handlers.

    async def find_coordinator(
        self, message: FindCoordinator, raw: memoryview, session: Any
    ) -> FindCoordinatorReply:
        number = await self._number(message.group)
        state = self._metadata.state
        partition = state.partition(GROUPS_TOPIC, number)
        node = None
        if partition is not None and partition.leader is not None:
            node = state.nodes.get(partition.leader)
        if node is None:
            return FindCoordinatorReply(None)
        return FindCoordinatorReply(node.node_id, node.host, node.port)

    def heartbeat(
        self, message: GroupHeartbeat, raw: memoryview, session: Any
    ) -> Awaitable[GroupHeartbeatReply]:
        host = _host(session)
        return self._ask(message.group, lambda found: found.heartbeat(message, host))

    def leave(
        self, message: LeaveGroup, raw: memoryview, session: Any
    ) -> Awaitable[LeaveGroupReply]:
        return self._ask(message.group, lambda found: found.leave(message))

    def delete(
        self, message: DeleteGroup, raw: memoryview, session: Any
    ) -> Awaitable[DeleteGroupReply]:
        return self._ask(message.group, lambda found: found.delete(message.group))

    async def describe(
        self, message: DescribeGroup, raw: memoryview, session: Any
    ) -> DescribeGroupReply:
        core = (await self._find(message.group)).core
        group = core.find(message.group)
        now = self.loop.time()
        topics = {topic: None for found in group.wanted(core.topics).values() for topic in found}
        return DescribeGroupReply(
            group.name,
            group.phase,
            group.mode,
            group.generation,
            tuple(
                _member_info(core, group, member, now) for member in group.in_order()[:ITEMS_MAX]
            ),
            self._node_id,
            tuple(sorted(topics)[:ITEMS_MAX]),
        )

    async def list_groups(
        self, message: ListGroups, raw: memoryview, session: Any
    ) -> ListGroupsReply:
        found: list[GroupSummary] = []
        for number in sorted(self._by_number):
            coordinator = self._by_number.get(number)
            if coordinator is None:
                continue
            try:
                await coordinator.until_ready()
            except NotLeader:
                continue  # its new leader lists its groups
            found += [
                GroupSummary(
                    group.name, group.phase, group.mode, len(group.members), group.generation
                )
                for group in coordinator.core.groups.values()
            ]
        found.sort(key=lambda summary: summary.group)
        return ListGroupsReply(tuple(found[:ITEMS_MAX]))


def _member_info(core: Groups, group: Group, member: Member, now: float) -> MemberInfo:
    view = group.view(member, core.topics)
    wanted = core.topics.wanted(member.topics, member.pattern)
    return MemberInfo(
        member.member_id,
        member.client_id,
        member.instance_id,
        member.host,
        tuple(wanted[:TOPICS_SHOWN_MAX]),
        tuple(GivenPartition(*slot) for slot in view.assigned[:ITEMS_MAX]),
        max(int((now - member.heard_at) * 1000), 0),
        member.session_ms,
    )


def _host(session: Any) -> str:
    """Return the host of a caller, without the port, which changes with every connection."""
    peer = str(getattr(session, "peer", ""))
    found = _PEER.match(peer)
    return found[1] if found else peer[:255]
