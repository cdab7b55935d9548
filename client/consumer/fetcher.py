"""Shell: fetches assigned partitions ahead of the polls. On the loop only.

One Fetch goes to each leader, with all its partitions that have room in their buffers. While the
leader holds it, partitions that get room later go in another one, up to FETCHES_MAX per node. A
partition is never in two at once, except after a seek: its earlier request is not waited for, as
the leader may hold it. The next fetch is sent before pollers are notified of the last one: a poller
uses the interpreter for as long as it decodes, and the node would be idle meanwhile.

    position unknown ──ListOffsets──> idle ──room──> in flight ──batches──> idle
                          ^              ^               └──error──> backs off ──> idle
                          └──out of range, by the reset policy──┘

A position beyond the leader's end is not out of range at once: a newly elected leader may not know
yet how far it is replicated. It is asked again until `reset_grace_ms` have passed.

A topic that was deleted and created again is another topic with another id. Positions in the old
one are meaningless there, so the reset policy applies at once. The id comes with the routes. They
are requested when a fetch fails (which happens to a fetch in flight when its topic is deleted),
when the end of a partition moves back, and when a partition was not fetched for PAUSE_S.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import (
    CorruptBatch,
    NotLeader,
    OffsetOutOfRange,
    RaftqError,
    RemoteProtocolError,
    UnknownCode,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.tasks import Tasks
from raftq.client.consumer.positions import Assigned, Positions
from raftq.client.net.connection import Connection, Reply
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, ConsumerOptions
from raftq.client.wire.batch import Batch
from raftq.client.wire.layout import BATCH_BYTES_MAX
from raftq.client.wire.messages import (
    Fetch,
    FetchedPartition,
    FetchPartition,
    FetchReply,
    ListOffsets,
    OffsetAnswer,
    OffsetQuery,
)

logger = logging.getLogger(__name__)

FETCHES_MAX = 4
ANSWER_S = 3.0  # beyond the wait that the request asks for
PARTITIONS_MAX = 1_000  # in one request
PAUSE_S = 0.5  # deleting and creating a topic again takes longer

Leader = tuple[int, Address]
Work = Callable[[Connection, list[Assigned]], Coroutine[Any, Any, None]]


class Fetcher:
    """Keeps the buffers of `positions` filled."""

    def __init__(
        self, options: ConsumerOptions, positions: Positions, routes: Routes, pool: Pool,
        tasks: Tasks,
    ) -> None:  # fmt: skip
        self._options = options
        self._positions = positions
        self._routes = routes
        self._pool = pool
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._fetches: dict[int, int] = {}  # in flight, by node
        self._reserved = 0  # bytes that the fetches in flight may bring
        self._rounds = 0
        self._scheduled = False
        self._stopped = False
        self._filled = False  # data came that no poller was notified of
        routes.watch(self._routes_changed)

    def wake(self) -> None:
        """Looks for something to fetch, soon and once."""
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def stop(self) -> None:
        self._stopped = True
        for assigned in self._positions.partitions.values():
            if assigned.timer is not None:
                assigned.timer.cancel()
                assigned.timer = None

    def _routes_changed(self) -> None:
        for assigned in self._positions.partitions.values():
            info = self._routes.topics.get(assigned.topic)
            if info is not None and assigned.topic_id not in (None, info.topic_id):
                self._begin_again(assigned, info.topic_id)
            # A partition that waits for another leader need not wait any longer.
            leader = self._routes.leader(assigned.topic, assigned.partition)
            if assigned.timer is not None and leader is not None and leader[0] != assigned.node:
                self._resume(assigned)

    def _begin_again(self, assigned: Assigned, topic_id: int) -> None:
        """The position belonged to another topic of the same name: starts again."""
        error = OffsetOutOfRange(
            f"topic {assigned.topic!r} was deleted and created again: "
            f"offset {assigned.position} of {assigned.describe()} was in the old one"
        )
        reset = self._options.reset
        if reset == "none":
            self._positions.move(assigned, None, None)
            self._positions.fail(assigned, error)
        else:
            logger.warning("%s; going on at the %s", error, reset)
            self._positions.move(assigned, None, (reset, 0))
        assigned.topic_id = topic_id
        assigned.node = None
        self.wake()

    def _topic_id(self, assigned: Assigned) -> int | None:
        info = self._routes.topics.get(assigned.topic)
        return None if info is None else info.topic_id

    def _pump(self) -> None:
        self._scheduled = False
        if self._stopped:
            return
        unknown: dict[Leader, list[Assigned]] = {}
        wanted: dict[Leader, list[Assigned]] = {}
        for assigned in list(self._positions.partitions.values()):
            leader = self._leader(assigned) if self._is_ready(assigned) else None
            if leader is None:
                continue
            if assigned.fetch_offset is None:
                unknown.setdefault(leader, []).append(assigned)
            else:
                wanted.setdefault(leader, []).append(assigned)
                self._reserved += assigned.bytes_max
        for leader, partitions in unknown.items():
            self._start(leader, partitions, self._resolve)
        for leader, partitions in wanted.items():
            self._reserved -= sum([assigned.bytes_max for assigned in partitions])
            if self._fetches.get(leader[0], 0) < FETCHES_MAX:
                # A reply has a size limit, and the partitions at the front of the request fill it
                # first.
                self._rounds += 1
                first = self._rounds % len(partitions)
                turned = partitions[first:] + partitions[:first]
                self._start(leader, turned[:PARTITIONS_MAX], self._fetch)
        if self._filled:
            self._filled = False
            # Two turns of the loop, so that the next fetch is on its way before a poller wakes: in
            # the first turn the new tasks run and submit their requests; at its end the loop writes
            # them to the sockets; in the second turn pollers are notified.
            self._loop.call_soon(self._loop.call_soon, self._positions.notify)

    def _is_ready(self, assigned: Assigned) -> bool:
        if (
            assigned.in_flight == assigned.turn
            or assigned.timer is not None
            or assigned.error is not None
        ):
            return False
        if assigned.fetch_offset is None:
            return assigned.start is not None
        return not assigned.held and not assigned.whole and self._has_room(assigned)

    def _start(self, leader: Leader, partitions: list[Assigned], work: Work) -> None:
        reserved = 0
        for assigned in partitions:
            assigned.in_flight = assigned.turn
            reserved += assigned.bytes_max
        self._reserved += reserved
        node_id = leader[0]
        self._fetches[node_id] = self._fetches.get(node_id, 0) + 1
        self._tasks.spawn(self._run(leader, partitions, work, reserved))

    async def _run(
        self, leader: Leader, partitions: list[Assigned], work: Work, reserved: int
    ) -> None:
        """Does something for these partitions at their leader; they are in flight meanwhile."""
        turns = [assigned.turn for assigned in partitions]
        problem: RaftqError | None = None
        try:
            await work(await self._pool.get(leader[1]), partitions)
        except RaftqError as error:
            problem = error
        finally:
            self._fetches[leader[0]] -= 1
            self._reserved -= reserved
            for assigned, turn in zip(partitions, turns, strict=True):
                if assigned.in_flight == turn:
                    assigned.in_flight = None
                assigned.asked_at = self._loop.time()
        if problem is not None:
            for assigned, turn in zip(partitions, turns, strict=True):
                if assigned.turn == turn:
                    self._failed(assigned, problem)
        self.wake()

    def _has_room(self, assigned: Assigned) -> bool:
        options, positions = self._options, self._positions
        used = positions.buffered_bytes + self._reserved
        if assigned.buffered_bytes < options.prefetch_bytes_partition and (
            not used or used + assigned.bytes_max <= options.prefetch_bytes
        ):
            return True
        positions.held = True
        return False

    def _leader(self, assigned: Assigned) -> Leader | None:
        """The leader to ask. Without a leader the partition waits, and finally fails."""
        leader = self._routes.leader(assigned.topic, assigned.partition)
        if leader is not None:
            now = self._loop.time()
            if assigned.topic_id is not None and now - assigned.asked_at > PAUSE_S:
                assigned.asked_at = now
                self._pause(assigned, 0)
                assigned.asking = self._routes.request_refresh()
                return None
            assigned.node = leader[0]
            return leader
        assigned.node = None
        info = self._routes.topics.get(assigned.topic)
        if info is None and self._routes.is_missing(assigned.topic, self._loop.time()):
            self._positions.fail(assigned, UnknownTopic(f"no topic is named {assigned.topic!r}"))
        elif info is not None and assigned.partition >= len(info.partitions):
            count = len(info.partitions)
            error = UnknownPartition(
                f"topic {assigned.topic!r} has {count} partitions, "
                f"so no partition {assigned.partition}"
            )
            self._failed_for_long(assigned, error)
        else:
            self._back_off(assigned, NotLeader(f"no leader is known for {assigned.describe()}"))
        return None

    # Fetching.

    async def _fetch(self, connection: Connection, partitions: list[Assigned]) -> None:
        options = self._options
        turns = {assigned.key: assigned.turn for assigned in partitions}
        ids = {assigned.key: self._topic_id(assigned) for assigned in partitions}
        asked = []
        for assigned in partitions:
            if assigned.fetch_offset is not None:
                where = (
                    assigned.topic,
                    assigned.partition,
                    assigned.fetch_offset,
                    assigned.bytes_max,
                )
                asked.append(FetchPartition(*where, outlines=options.outlines))
        began = self._loop.time()
        timeout_s = options.fetch_wait_ms / 1000 + ANSWER_S
        reply = await connection.request(
            Fetch(tuple(asked), options.fetch_wait_ms), timeout_s=timeout_s
        )
        hasty = self._loop.time() - began < min(0.005, options.fetch_wait_ms / 2000)
        for partition in reply.message.partitions:
            held = self._positions.partitions.get((partition.topic, partition.partition))
            if held is not None and turns.get(held.key) == held.turn:
                if held.topic_id is None and not partition.error:
                    held.topic_id = ids[held.key]
                self._take(held, partition, reply, hasty)

    def _take(
        self, assigned: Assigned, one: FetchedPartition, reply: Reply[FetchReply], hasty: bool
    ) -> None:
        if one.error:
            self._failed(assigned, error_of(one.error, assigned))
            return
        before, assigned.high_watermark = assigned.high_watermark, one.high_watermark
        assigned.lost_since = None
        if assigned.doubtful or (before is not None and one.high_watermark < before):
            # A new leader, or a new topic: its routes must be known before its records are
            # accepted.
            assigned.doubtful = False
            self._pause(assigned, 0)
            assigned.asking = self._routes.request_refresh()
            return
        if not one.length:
            assigned.attempts = 0
            if hasty and not len(reply.raw):
                # The node does not wait although it has no records: avoid a busy loop.
                self._pause(assigned, self._options.retry_backoff_ms / 1000)
            return
        assert assigned.fetch_offset is not None
        try:
            batches = read_batches(reply.raw[one.start : one.start + one.length].toreadonly())
        except RaftqError as error:
            self._positions.fail(assigned, error)
            self._back_off(assigned, error)
            return
        if not batches:
            assigned.bytes_max = min(assigned.bytes_max * 2, BATCH_BYTES_MAX)
            return
        assigned.attempts = 0
        assigned.bytes_max = self._options.fetch_bytes
        wanted = [batch for batch in batches if batch.end_offset > assigned.fetch_offset]
        if wanted:
            assigned.fetch_offset = wanted[-1].end_offset
            self._positions.fill(assigned, wanted)
            self._filled = True

    # Finding a position.

    async def _resolve(self, connection: Connection, partitions: list[Assigned]) -> None:
        queries = []
        turns = {assigned.key: assigned.turn for assigned in partitions}
        for assigned in partitions:
            if assigned.start is not None:  # otherwise a seek has set a position meanwhile
                by, at = assigned.start
                queries.append(OffsetQuery(assigned.topic, assigned.partition, by, at))
        if not queries:
            return
        reply = (await connection.request(ListOffsets(tuple(queries)))).message
        for answer in reply.answers:
            held = self._positions.partitions.get((answer.topic, answer.partition))
            if held is None or turns.get(held.key) != held.turn:
                continue
            if answer.error:
                self._failed(held, error_of(answer.error, held))
            else:
                held.attempts = 0
                held.start = None
                held.position = held.fetch_offset = answer.offset
                self._positions.notify()

    async def _judge(self, connection: Connection, partitions: list[Assigned]) -> None:
        """A leader has refused an offset: decides whether it is gone or not there yet."""
        (assigned,) = partitions
        turn = assigned.turn
        where = assigned.topic, assigned.partition
        queries = (OffsetQuery(*where, "earliest"), OffsetQuery(*where, "latest"))
        answers = (await connection.request(ListOffsets(queries))).message.answers
        if assigned.turn != turn or assigned.fetch_offset is None:
            return
        if len(answers) != 2 or answers[0].error or answers[1].error:
            code = next((answer.error for answer in answers if answer.error), "remote_protocol")
            self._failed(assigned, error_of(code, assigned))
            return
        self._reset(assigned, answers[0], answers[1])

    def _reset(self, assigned: Assigned, earliest: OffsetAnswer, latest: OffsetAnswer) -> None:
        options = self._options
        offset = assigned.fetch_offset
        assert offset is not None
        if earliest.offset <= offset <= latest.offset:
            self._pause(assigned, options.retry_backoff_ms / 1000)
            return
        error = OffsetOutOfRange(
            f"offset {offset} of {assigned.describe()} is not kept: "
            f"[{earliest.offset}, {latest.offset}) are"
        )
        if offset > latest.offset and not self._lost_for(assigned, options.reset_grace_ms):
            self._back_off(assigned, error)
            return
        if options.reset == "none":
            self._positions.fail(assigned, error)
            return
        chosen = earliest if options.reset == "earliest" else latest
        logger.warning("%s; going on at %d, the %s", error, chosen.offset, options.reset)
        assigned.fetch_offset = chosen.offset
        if not assigned.buffered_bytes and assigned.rows_at >= len(assigned.rows):
            assigned.position = chosen.offset
        assigned.lost_since = None

    # Failures.

    def _failed(self, assigned: Assigned, error: RaftqError) -> None:
        if isinstance(error, OffsetOutOfRange):
            leader = self._routes.leader(assigned.topic, assigned.partition)
            if leader is None or assigned.timer is not None:
                self._back_off(assigned, error)
            else:
                self._loop.call_soon(self._start_judging, leader, assigned, assigned.turn)
        elif isinstance(error, UnknownTopic | UnknownPartition):
            assigned.doubtful = True
            self._failed_for_long(assigned, error)
        elif error.retriable:
            self._back_off(assigned, error)
        else:
            self._positions.fail(assigned, copy_error(error))

    def _start_judging(self, leader: Leader, assigned: Assigned, turn: int) -> None:
        if assigned.turn == turn and assigned.in_flight != turn and not self._stopped:
            self._start(leader, [assigned], self._judge)

    def _lost_for(self, assigned: Assigned, grace_ms: int) -> bool:
        now = self._loop.time()
        if assigned.lost_since is None:
            assigned.lost_since = now
        return now - assigned.lost_since >= grace_ms / 1000

    def _failed_for_long(self, assigned: Assigned, error: RaftqError) -> None:
        """Such an error counts only if it does not go away."""
        if self._lost_for(assigned, self._options.topic_grace_ms):
            assigned.lost_since = None
            self._positions.fail(assigned, error)
        else:
            self._back_off(assigned, error)

    def _back_off(self, assigned: Assigned, error: RaftqError) -> None:
        self._pause(assigned, self._options.backoff().after_s(assigned.attempts))
        assigned.attempts += 1
        if error.refresh_route:
            assigned.asking = self._routes.request_refresh()

    def _pause(self, assigned: Assigned, seconds: float) -> None:
        if assigned.timer is not None:
            assigned.timer.cancel()
        assigned.timer = self._loop.call_later(seconds, self._resume, assigned)

    def _resume(self, assigned: Assigned) -> None:
        if assigned.timer is not None:
            assigned.timer.cancel()
        if assigned.asking is not None and not assigned.asking.done():
            # The position may be in a topic that is gone: that has to be known first.
            assigned.asking.add_done_callback(lambda _: self._resume(assigned))
            return
        assigned.timer = assigned.asking = None
        self.wake()


def error_of(code: str, assigned: Assigned) -> RaftqError:
    """The error for a code in a reply."""
    known = RaftqError.registry.get(code)
    if known is None:
        return UnknownCode(f"{assigned.describe()}: {code}").with_details(code=code)
    return known(f"{assigned.describe()}: the node says {code}")


def read_batches(raw: memoryview) -> list[Batch]:
    """The whole batches in a reply, their headers checked; an incomplete one at the end is left
    out."""
    batches: list[Batch] = []
    at, end = 0, len(raw)
    while at < end:
        try:
            batch = Batch(raw, at)
        except CorruptBatch:
            if end - at >= 88:
                raise
            break
        at += batch.length
        if at > end:
            break
        if batches and batch.base_offset < batches[-1].end_offset:
            raise RemoteProtocolError("fetched batches are not in order")
        batches.append(batch)
    return batches
