"""A fake cluster that knows groups and queues: what their clients talk to in tests.

The decisions are those of the real cores (cluster/groups/groups.py, node/delivery); what is left
out is everything that makes them survive: here nothing is ever lost, whoever leads or coordinates.
`asking` and `answering` say what goes wrong, before and after a request is done. Every lease and
settlement is written to `history`.
"""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from fake_cluster import FakeCluster, FakePartition, started

from raftq.client.common.errors import (
    FencedEpoch,
    FencedGeneration,
    InvalidArgument,
    NotLeader,
    RaftqError,
)
from raftq.client.wire import group_messages as groups
from raftq.client.wire import queue_messages as queues
from raftq.client.wire.batch import decode, encode
from raftq.client.wire.messages import EPOCH_ANY
from raftq.cluster.groups.groups import Groups, GroupsConfig
from raftq.node.queue.core.config import DeliveryConfig
from raftq.node.queue.core.group_delivery import GroupDelivery

Fault = Callable[[Any, int], Any]


class Lanes:
    """The lane index of a fake partition."""

    def __init__(self, log: FakePartition) -> None:
        self._log = log
        self._known: list[tuple[int, int, int]] = []

    def _runs(self, lane: int) -> list[tuple[int, int]]:
        for raw in self._log.batches[len(self._known) :]:
            one = decode(raw)
            self._known.append((one.lane, one.base_offset, one.end_offset))
        return [(start, end) for number, start, end in self._known if number == lane]

    def next_run(self, lane: int, offset: int) -> tuple[int, int] | None:
        for start, end in self._runs(lane):
            if end > offset:
                return max(start, offset), end
        return None

    def count_from(self, lane: int, offset: int) -> int:
        return sum(max(end - max(start, offset), 0) for start, end in self._runs(lane))


class FakeQueue:
    """What one partition knows of its groups."""

    def __init__(self, log: FakePartition) -> None:
        self.log = log
        self.stored: dict[str, int] = {}
        self.owners: dict[str, tuple[int, str]] = {}
        self.groups: dict[str, GroupDelivery] = {}
        self.dead: list[tuple[int, str, str]] = []


class FakeGroups(FakeCluster):
    """A fake cluster with groups and queues. At first node 1 coordinates all groups."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.coordinator: int | None = 1
        self.core = Groups(GroupsConfig(target_ms=20), random.Random(1))
        self.delivery = DeliveryConfig()
        self.queues: dict[FakePartition, FakeQueue] = {}
        self.asking: Fault | None = None
        self.answering: Fault | None = None
        self.history: list[tuple[Any, ...]] = []
        self.heartbeats = 0
        self.parked: dict[tuple[str, str, int], asyncio.Event] = {}
        self._news = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._told: dict[tuple[str, str], Any] = {}
        self.dead_letters: dict[str, list[tuple[bytes, dict[str, bytes]]]] = {}

    def more_handlers(self) -> dict[Any, Any]:
        table = {
            groups.FindCoordinator: self._find_coordinator,
            groups.GroupHeartbeat: self._heartbeat,
            groups.LeaveGroup: self._leave,
            groups.ListGroups: self._list_groups,
            groups.DescribeGroup: self._describe_group,
            groups.DeleteGroup: self._delete_group,
            queues.ReadOffsets: self._read_offsets,
            queues.StoreOffsets: self._store_offsets,
            queues.Lease: self._lease,
            queues.Settle: self._settle,
            queues.SteerGroup: self._steer,
            queues.DescribeQueue: self._describe_queue,
            queues.ListDelayed: self._list_delayed,
            queues.CancelDelayed: self._cancel_delayed,
            queues.DelayStats: self._delay_stats,
            queues.DeadLetters: self._dead_letters,
        }
        return {kind: self._faulty(handle) for kind, handle in table.items()}

    def _faulty(self, handle: Any) -> Any:
        async def call(request: Any, raw: memoryview, node_id: int) -> Any:
            if self.asking is not None and (wait := self.asking(request, node_id)) is not None:
                await wait
            answer = handle(request, node_id)
            if asyncio.iscoroutine(answer):
                answer = await answer
            if self.answering is not None:
                wait = self.answering(request, node_id)
                if wait is not None:
                    await wait
            return answer

        return call

    # Groups.

    def move_coordinator(self, node_id: int | None) -> None:
        self.coordinator = node_id
        self._changed()

    def lead(self, topic: str, partition: int, node_id: int | None) -> None:
        super().lead(topic, partition, node_id)
        self.topics[topic][partition].grown = asyncio.Event()

    def add_topic(self, name: str, partitions: int = 1) -> list[FakePartition]:
        parts = super().add_topic(name, partitions)
        self.topics_changed()
        return parts

    def _add_partitions(self, request: Any, raw: memoryview, node_id: int) -> Any:
        answer = super()._add_partitions(request, raw, node_id)
        self.topics_changed()
        return answer

    def topics_changed(self) -> None:
        counts = {name: len(parts) for name, parts in self.topics.items()}
        self.core.set_topics(counts, self._now())
        self._react()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _changed(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def _react(self) -> None:
        _, changed = self.core.take()
        if changed:
            self._changed()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline = self.core.next_deadline()
        if deadline is not None and self.servers:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.core.tick(self._now())
        self._react()

    async def stop_node(self, node_id: int) -> None:
        await super().stop_node(node_id)
        if not self.servers and self._timer is not None:
            self._timer.cancel()

    def _find_coordinator(self, request: Any, node_id: int) -> Any:
        if self.coordinator is None:
            return groups.FindCoordinatorReply(None)
        return groups.FindCoordinatorReply(
            self.coordinator, "127.0.0.1", self.ports[self.coordinator]
        )

    def _coordinates(self, node_id: int) -> None:
        if node_id != self.coordinator:
            raise NotLeader(f"{self.coordinator} coordinates").with_details(
                leader=self.coordinator, epoch=1
            )

    async def _heartbeat(self, request: groups.GroupHeartbeat, node_id: int) -> Any:
        self._coordinates(node_id)
        self.heartbeats += 1
        member_id = self.core.heartbeat(request, "here", self._now())
        self._react()
        key = request.group, member_id
        view = self.core.view(*key)
        assert view is not None
        epoch = view.member_epoch
        deadline = self._now() + request.wait_ms / 1000
        while self._told.get(key) == view.assigned and self._now() < deadline - 1e-6:
            news = self._news
            try:
                async with asyncio.timeout_at(deadline):
                    await news.wait()
            except TimeoutError:
                break
            self._coordinates(node_id)
            view = self.core.view(*key)
            if view is None or view.member_epoch != epoch:
                raise FencedGeneration("the member is gone")
        self._told[key] = view.assigned
        given = tuple(groups.GivenPartition(*one) for one in view.assigned)
        return groups.GroupHeartbeatReply(
            member_id, view.member_epoch, view.generation, given, view.pending
        )

    def _leave(self, request: groups.LeaveGroup, node_id: int) -> Any:
        self._coordinates(node_id)
        left = self.core.leave(request.group, request.member_id, request.member_epoch, self._now())
        self._told.pop((request.group, request.member_id), None)
        self._react()
        return groups.LeaveGroupReply(left)

    def _list_groups(self, request: Any, node_id: int) -> Any:
        if node_id != self.coordinator:
            return groups.ListGroupsReply(())
        return groups.ListGroupsReply(
            tuple(
                groups.GroupSummary(name, one.phase, one.mode, len(one.members), one.generation)
                for name, one in self.core.groups.items()
            )
        )

    def _describe_group(self, request: Any, node_id: int) -> Any:
        self._coordinates(node_id)
        group = self.core.find(request.group)
        members = []
        for one in group.in_order():
            view = group.view(one, self.core.topics)
            given = tuple(groups.GivenPartition(*slot) for slot in view.assigned)
            members.append(
                groups.MemberInfo(
                    one.member_id,
                    one.client_id,
                    one.instance_id,
                    one.host,
                    one.topics,
                    given,
                    session_ms=one.session_ms,
                )
            )
        wanted = sorted({topic for found in group.wanted(self.core.topics).values()
                         for topic in found})  # fmt: skip
        return groups.DescribeGroupReply(
            group.name, group.phase, group.mode, group.generation, tuple(members), node_id,
            tuple(wanted),
        )  # fmt: skip

    def _delete_group(self, request: Any, node_id: int) -> Any:
        self._coordinates(node_id)
        self.core.delete(request.group, self._now())
        self._react()
        return groups.DeleteGroupReply()

    # Stored offsets.

    def queue_of(self, topic: str, partition: int, node_id: int) -> FakeQueue:
        log = self._leadership(topic, partition, node_id)
        return self.queues.setdefault(log, FakeQueue(log))

    def queue(self, topic: str, partition: int) -> FakeQueue:
        log = self.topics[topic][partition]
        return self.queues.setdefault(log, FakeQueue(log))

    def _offset(self, one: Any, group: str, node_id: int, work: Any) -> queues.StoredOffset:
        try:
            queue = self.queue_of(one.topic, one.partition, node_id)
            epoch, _ = queue.owners.get(group, (-1, ""))
            if 0 <= one.owner_epoch < epoch or (one.owner_epoch < 0 <= epoch and work is not None):
                raise FencedGeneration(f"generation {epoch} owns it")
            if work is not None:
                work(queue)
        except RaftqError as error:
            return queues.StoredOffset(one.topic, one.partition, error.code)
        epoch, _ = queue.owners.get(group, (-1, ""))
        return queues.StoredOffset(
            one.topic, one.partition, "", queue.stored.get(group, -1), epoch, queue.log.start,
            queue.log.end,
        )  # fmt: skip

    def _read_offsets(self, request: queues.ReadOffsets, node_id: int) -> Any:
        found = []
        for one in request.offsets:

            def claim(queue: FakeQueue, one: Any = one) -> None:
                queue.owners[request.group] = (one.owner_epoch, request.member)
                self.history.append(("claim", request.member, one.topic, one.partition))

            work = claim if one.owner_epoch >= 0 else None
            found.append(self._offset(one, request.group, node_id, work))
        return queues.ReadOffsetsReply(tuple(found))

    def _store_offsets(self, request: queues.StoreOffsets, node_id: int) -> Any:
        found = []
        for one in request.offsets:

            def store(queue: FakeQueue, one: Any = one) -> None:
                queue.stored[request.group] = one.offset
                place = one.topic, one.partition
                self.history.append(("store", request.member, *place, one.offset))

            found.append(self._offset(one, request.group, node_id, store))
        return queues.StoreOffsetsReply(tuple(found))

    # Queues.

    def _group(self, queue: FakeQueue, name: str, start: str = "earliest") -> GroupDelivery:
        group = queue.groups.get(name)
        if group is None:
            begin = queue.log.start if start == "earliest" else queue.log.end
            group = queue.groups[name] = GroupDelivery(
                name, self.delivery, Lanes(queue.log), random.Random(7), begin, self._now()
            )
        return group

    async def _lease(self, request: queues.Lease, node_id: int) -> Any:
        if not request.partitions or not request.records_max:
            raise InvalidArgument("a lease of nothing")
        key = request.group, request.holder, node_id
        older = self.parked.pop(key, None)
        if older is not None:
            older.set()
        deadline = self._now() + request.wait_ms / 1000
        superseded = asyncio.Event()
        while True:
            reply, raw, waits_for = self._take(request, node_id)
            left = deadline - self._now()
            if reply.partitions or left <= 1e-6 or superseded.is_set():
                return reply, raw
            self.parked[key] = superseded
            # Retries and ended leases have no event here: they are looked for.
            waits = [asyncio.ensure_future(one.grown.wait()) for one in waits_for]
            waits.append(asyncio.ensure_future(superseded.wait()))
            try:
                await asyncio.wait(
                    waits, timeout=min(left, 0.05), return_when=asyncio.FIRST_COMPLETED
                )
            finally:
                for wait in waits:
                    wait.cancel()
                if self.parked.get(key) is superseded:
                    del self.parked[key]

    def _take(self, request: queues.Lease, node_id: int) -> tuple[Any, Any, list[FakePartition]]:
        answers: list[queues.LeasedPartition] = []
        buffers: list[bytearray] = []
        logs: list[FakePartition] = []
        at, left = 0, request.records_max
        for one in request.partitions:
            place = one.topic, one.partition
            try:
                queue = self.queue_of(*place, node_id)
                if one.epoch not in (EPOCH_ANY, queue.log.epoch):
                    raise FencedEpoch("another epoch")
            except RaftqError as error:
                answers.append(queues.LeasedPartition(*place, error.code))
                continue
            logs.append(queue.log)
            group = self._group(queue, request.group, request.start)
            self._expire(queue, group)
            lease_s = request.lease_ms / 1000 if request.lease_ms else None
            grants = group.lease(left, self._now(), request.holder, lease_s) if left else []
            if not grants:
                continue
            left -= sum(one.end - one.start for one in grants)
            ranges = tuple(
                queues.LeasedRange(
                    g.nonce, g.start, g.end, g.attempt, int(g.deadline * 1000), int(g.first * 1000)
                )
                for g in grants
            )
            for g in grants:
                for offset in range(g.start, g.end):
                    self.history.append(("lease", *place, offset, request.holder, g.attempt))
            found = [
                raw
                for raw in queue.log.batches
                if any(
                    decode(raw).base_offset < g.end and g.start < decode(raw).end_offset
                    for g in grants
                )
            ]
            size = sum(map(len, found))
            answers.append(queues.LeasedPartition(*place, "", ranges, at, size, queue.log.epoch))
            at += size
            buffers += found
        return queues.LeaseReply(tuple(answers)), buffers, logs

    def _expire(self, queue: FakeQueue, group: GroupDelivery) -> None:
        entries, letters = group.expire(self._now())
        for entry in entries:
            group.apply(entry)
        self._bury(queue, group, letters, "expired")

    def _bury(self, queue: FakeQueue, group: GroupDelivery, letters: Any, error: str) -> None:
        for letter in letters:
            for offset in range(letter.start, letter.end):
                queue.dead.append((offset, letter.reason, error))
        if letters:
            group.apply(group.settle_dead(letters))

    def _settle(self, request: queues.Settle, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        group = self._group(queue, request.group)
        now = self._now()
        errors = []
        dead = len(queue.dead)
        for row in request.rows:
            place = row.nonce, row.start, row.end
            try:
                self._settle_row(queue, group, request, place, now)
            except RaftqError as error:
                errors.append(error.code)
                continue
            errors.append("")
            for offset in range(row.start, row.end):
                self.history.append((request.verb, request.topic, request.partition, offset))
        next_visible = int(now * 1000) + (request.delay_ms or 0)
        return queues.SettleReply(
            tuple(errors), len(queue.dead) - dead, group.settled.prefix, group.in_flight,
            next_visible,
        )  # fmt: skip

    def _settle_row(
        self, queue: FakeQueue, group: GroupDelivery, request: queues.Settle, row: Any, now: float
    ) -> None:
        delay = None if request.delay_ms is None else request.delay_ms / 1000
        letters: Any = []
        entry: Any = None
        if request.verb == "ack":
            entry = group.ack([row], now)
        elif request.verb == "nack":
            entry, letters = group.nack(*row, now, delay)
        elif request.verb == "postpone":
            entry = group.postpone(*row, now, delay or 0)
        elif request.verb == "reject":
            letters = group.reject(*row, now, request.reason)
        elif request.verb == "extend":
            entry = group.extend(*row, now, delay or 0)
        else:
            entry = group.release([row], now)
        if entry is not None:
            group.apply(entry)
        self._bury(queue, group, letters, request.error)

    # Operators.

    def _steer(self, request: queues.SteerGroup, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        self.history.append((request.verb, request.group, request.topic, request.partition))
        if request.verb == "delete":
            queue.stored.pop(request.group, None)
            queue.groups.pop(request.group, None)
            return queues.SteerGroupReply()
        group = self._group(queue, request.group)
        if request.verb in ("pause", "resume"):
            group.apply(group.pause(request.verb == "pause"))
            return queues.SteerGroupReply()
        to = "latest" if request.verb == "purge" else request.to
        at = {"earliest": queue.log.start, "latest": queue.log.end, "offset": request.at}[to]
        count = queue.log.end - group.settled.prefix
        group.apply(group.reset(at))
        queue.stored[request.group] = at
        queue.owners.pop(request.group, None)
        return queues.SteerGroupReply(at, count)

    def _describe_queue(self, request: queues.DescribeQueue, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        names = sorted({*queue.groups, *queue.stored})
        found = []
        for name in names:
            if request.group not in ("", name):
                continue
            epoch, member = queue.owners.get(name, (-1, ""))
            core = queue.groups.get(name)
            prefix = queue.stored.get(name, 0) if core is None else core.settled.prefix
            found.append(
                queues.QueueGroup(
                    name, prefix, queue.stored.get(name, -1), epoch, member,
                    0 if core is None else core.in_flight,
                    paused=core is not None and core.state.paused,
                    counters={} if core is None else {"acked": core.state.counters.acked},
                    unsettled=queue.log.end - prefix,
                )
            )  # fmt: skip
        return queues.DescribeQueueReply(tuple(found), queue.log.start, queue.log.end)

    def _delayed(self, queue: FakeQueue) -> list[tuple[int, int, int]]:
        """(due, offset, lane) of what is pending."""
        gone = {offset for verb, *rest, offset in self.history if verb == "cancel"
                and rest == [queue]}  # fmt: skip
        found = []
        for raw in queue.log.delays.batches:
            batch = decode(raw)
            for offset, due in zip(batch.offsets(), batch.deliver_at() or (), strict=True):
                if offset not in gone:
                    found.append((due, offset, batch.lane))
        return sorted(found)

    def _list_delayed(self, request: queues.ListDelayed, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        found = self._delayed(queue)
        if request.offset >= 0:
            rows = [one for one in found if one[1] == request.offset]
        else:
            rows = found[request.skip : request.skip + request.limit]
        wanted = {offset for _, offset, _ in rows}
        raws = []
        if request.values:
            raws = [raw for raw in queue.log.delays.batches
                    if wanted & set(decode(raw).offsets())]  # fmt: skip
        records = tuple(queues.DelayedRow(offset, due, lane) for due, offset, lane in rows)
        return queues.ListDelayedReply(records, len(found)), raws

    def _cancel_delayed(self, request: queues.CancelDelayed, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        pending = {offset for _, offset, _ in self._delayed(queue)}
        gone = [offset for offset in request.offsets if offset in pending]
        self.history += [("cancel", queue, offset) for offset in gone]
        return queues.CancelDelayedReply(tuple(gone))

    def _delay_stats(self, request: queues.DelayStats, node_id: int) -> Any:
        queue = self.queue_of(request.topic, request.partition, node_id)
        return queues.DelayStatsReply(len(self._delayed(queue)), queue.log.delays.end)

    def _dead_letters(self, request: queues.DeadLetters, node_id: int) -> Any:
        """Letters are the records of the topic; those gone are settled in group `__dlq`."""
        queue = self.queue_of(request.topic, request.partition, node_id)
        gone = {one[-1] for one in self.history if one[0] in ("redrive", "purge")
                and one[1] is queue}  # fmt: skip
        offsets: list[int] = []
        raws = []
        next_offset = queue.log.end
        for raw in queue.log.batches:
            batch = decode(raw)
            hit = False
            for offset, key, headers in zip(
                batch.offsets(), batch.keys(), batch.headers(), strict=True
            ):
                matches = (
                    offset >= request.offset
                    and offset not in gone
                    and (request.key is None or key == request.key)
                    and (not request.reason
                         or headers.get("x-dlq-reason") == request.reason.encode())
                    and (not request.group or headers.get("x-dlq-group") == request.group.encode())
                )  # fmt: skip
                if matches and len(offsets) == request.limit:
                    next_offset = min(next_offset, offset)
                elif matches:
                    offsets.append(offset)
                    hit = True
            if hit:
                raws.append(raw)
        if request.verb != "browse":
            self.history += [(request.verb, queue, offset) for offset in offsets]
            return queues.DeadLettersReply(len(offsets), (), next_offset), ()
        return queues.DeadLettersReply(len(offsets), tuple(offsets), next_offset), raws


def fill(log: FakePartition, values: list[bytes], **columns: Any) -> None:
    """Append these as one batch."""
    log.append(memoryview(encode(values, **columns)))


def fake_groups(nodes: int = 1, seed: int = 0) -> AbstractAsyncContextManager[FakeGroups]:
    return started(FakeGroups(random.Random(seed)), nodes)
