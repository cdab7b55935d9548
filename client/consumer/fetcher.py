"""Shell: fetches assigned partitions ahead of the polls. On the loop only.

One Fetch goes to each leader, with all its partitions that have room in their buffers; while it is
parked there, partitions that get room later go in one more, up to FETCHES_MAX per node. A partition
is never in two at once, but for one that was sought anew: what it asked for before is not waited
for, as it may be parked. So the next fetch is sent before anybody is told of what the last one
brought: a poller would have the interpreter for as long as it decodes, with the node idle.

    position unknown ──ListOffsets──> idle ──room──> in flight ──batches──> idle
                          ^              ^               └──error──> backs off ──> idle
                          └──out of range, by the reset policy──┘

A position past the leader's end is not out of range at once: a leader that was just elected may not
know yet how far it is replicated. Before `reset_grace_ms` have passed it is asked again.

A topic that was deleted and created again is another one, as its id tells, and positions in the old
one mean nothing there: the reset policy applies at once. The id comes with the routes; they are
asked for when a fetch fails, as one does that is under way when the topic goes, when the end of a
partition moves back, and when a partition was not fetched for PAUSE_S.
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
ANSWER_S = 3.0  # beyond the wait that was asked for
PARTITIONS_MAX = 1_000  # in one request
PAUSE_S = 0.5  # a topic is not deleted and created again in less

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
        self._filled = False  # something came that nobody was told of
        routes.watch(self._routes_changed)

    def wake(self) -> None:
        """Look for something to fetch, soon and once."""
        if not self._scheduled and not self._stopped:
            self._scheduled = True
            self._loop.call_soon(self._pump)

    def stop(self) -> None:
        self._stopped = True
        for part in self._positions.parts.values():
            if part.timer is not None:
                part.timer.cancel()
                part.timer = None

    def _routes_changed(self) -> None:
        for part in self._positions.parts.values():
            info = self._routes.topics.get(part.topic)
            if info is not None and part.topic_id not in (None, info.topic_id):
                self._begin_again(part, info.topic_id)
            # Whoever waits for another leader need not wait any longer.
            leader = self._routes.leader(part.topic, part.partition)
            if part.timer is not None and leader is not None and leader[0] != part.node:
                self._resume(part)

    def _begin_again(self, part: Assigned, topic_id: int) -> None:
        """The position was in another topic of the same name."""
        error = OffsetOutOfRange(
            f"topic {part.topic!r} was deleted and created again: offset {part.position} of "
            f"{part.describe()} was in the old one"
        )
        reset = self._options.reset
        if reset == "none":
            self._positions.move(part, None, None)
            self._positions.fail(part, error)
        else:
            logger.warning("%s; going on at the %s", error, reset)
            self._positions.move(part, None, (reset, 0))
        part.topic_id = topic_id
        part.node = None
        self.wake()

    def _topic_id(self, part: Assigned) -> int | None:
        info = self._routes.topics.get(part.topic)
        return None if info is None else info.topic_id

    def _pump(self) -> None:
        self._scheduled = False
        if self._stopped:
            return
        unknown: dict[Leader, list[Assigned]] = {}
        wanted: dict[Leader, list[Assigned]] = {}
        for part in list(self._positions.parts.values()):
            leader = self._leader(part) if self._is_ready(part) else None
            if leader is None:
                continue
            if part.fetch_offset is None:
                unknown.setdefault(leader, []).append(part)
            else:
                wanted.setdefault(leader, []).append(part)
                self._reserved += part.bytes_max
        for leader, parts in unknown.items():
            self._start(leader, parts, self._resolve)
        for leader, parts in wanted.items():
            self._reserved -= sum([part.bytes_max for part in parts])
            if self._fetches.get(leader[0], 0) < FETCHES_MAX:
                # A reply has a limit, and those at the front of the request fill it first.
                self._rounds += 1
                first = self._rounds % len(parts)
                turned = parts[first:] + parts[:first]
                self._start(leader, turned[:PARTITIONS_MAX], self._fetch)
        if self._filled:
            self._filled = False
            # The tasks that were just started run first, then the loop writes what they sent.
            self._loop.call_soon(self._loop.call_soon, self._positions.notify)

    def _is_ready(self, part: Assigned) -> bool:
        if part.in_flight == part.turn or part.timer is not None or part.error is not None:
            return False
        if part.fetch_offset is None:
            return part.start is not None
        return not part.held and not part.whole and self._has_room(part)

    def _start(self, leader: Leader, parts: list[Assigned], work: Work) -> None:
        reserved = 0
        for part in parts:
            part.in_flight = part.turn
            reserved += part.bytes_max
        self._reserved += reserved
        node_id = leader[0]
        self._fetches[node_id] = self._fetches.get(node_id, 0) + 1
        self._tasks.spawn(self._run(leader, parts, work, reserved))

    async def _run(self, leader: Leader, parts: list[Assigned], work: Work, reserved: int) -> None:
        """Do something for these partitions at their leader; they are in flight meanwhile."""
        turns = [part.turn for part in parts]
        problem: RaftqError | None = None
        try:
            await work(await self._pool.get(leader[1]), parts)
        except RaftqError as error:
            problem = error
        finally:
            self._fetches[leader[0]] -= 1
            self._reserved -= reserved
            for part, turn in zip(parts, turns, strict=True):
                if part.in_flight == turn:
                    part.in_flight = None
                part.asked_at = self._loop.time()
        if problem is not None:
            for part, turn in zip(parts, turns, strict=True):
                if part.turn == turn:
                    self._failed(part, problem)
        self.wake()

    def _has_room(self, part: Assigned) -> bool:
        options, positions = self._options, self._positions
        used = positions.buffered_bytes + self._reserved
        if part.buffered_bytes < options.prefetch_bytes_partition and (
            not used or used + part.bytes_max <= options.prefetch_bytes
        ):
            return True
        positions.held = True
        return False

    def _leader(self, part: Assigned) -> Leader | None:
        """Who to ask; without a leader the partition waits, and in the end it fails."""
        leader = self._routes.leader(part.topic, part.partition)
        if leader is not None:
            now = self._loop.time()
            if part.topic_id is not None and now - part.asked_at > PAUSE_S:
                part.asked_at = now
                self._pause(part, 0)
                part.asking = self._routes.request_refresh()
                return None
            part.node = leader[0]
            return leader
        part.node = None
        info = self._routes.topics.get(part.topic)
        if info is None and self._routes.is_missing(part.topic, self._loop.time()):
            self._positions.fail(part, UnknownTopic(f"no topic is named {part.topic!r}"))
        elif info is not None and part.partition >= len(info.partitions):
            count = len(info.partitions)
            error = UnknownPartition(
                f"topic {part.topic!r} has {count} partitions, so no partition {part.partition}"
            )
            self._failed_for_long(part, error)
        else:
            self._back_off(part, NotLeader(f"no leader is known for {part.describe()}"))
        return None

    # Fetching.

    async def _fetch(self, connection: Connection, parts: list[Assigned]) -> None:
        options = self._options
        turns = {part.key: part.turn for part in parts}
        ids = {part.key: self._topic_id(part) for part in parts}
        asked = []
        for part in parts:
            if part.fetch_offset is not None:
                where = part.topic, part.partition, part.fetch_offset, part.bytes_max
                asked.append(FetchPartition(*where, outlines=options.outlines))
        began = self._loop.time()
        timeout_s = options.fetch_wait_ms / 1000 + ANSWER_S
        reply = await connection.request(
            Fetch(tuple(asked), options.fetch_wait_ms), timeout_s=timeout_s
        )
        hasty = self._loop.time() - began < min(0.005, options.fetch_wait_ms / 2000)
        for partition in reply.message.partitions:
            held = self._positions.parts.get((partition.topic, partition.partition))
            if held is not None and turns.get(held.key) == held.turn:
                if held.topic_id is None and not partition.error:
                    held.topic_id = ids[held.key]
                self._take(held, partition, reply, hasty)

    def _take(
        self, part: Assigned, one: FetchedPartition, reply: Reply[FetchReply], hasty: bool
    ) -> None:
        if one.error:
            self._failed(part, error_of(one.error, part))
            return
        before, part.high_watermark = part.high_watermark, one.high_watermark
        part.lost_since = None
        if part.doubtful or (before is not None and one.high_watermark < before):
            # A new leader, or a new topic: what it is has to be known before anything is taken.
            part.doubtful = False
            self._pause(part, 0)
            part.asking = self._routes.request_refresh()
            return
        if not one.length:
            part.attempts = 0
            if hasty and not len(reply.raw):
                # The node does not wait although there is nothing: do not ask in a circle.
                self._pause(part, self._options.retry_backoff_ms / 1000)
            return
        assert part.fetch_offset is not None
        try:
            batches = read_batches(reply.raw[one.start : one.start + one.length].toreadonly())
        except RaftqError as error:
            self._positions.fail(part, error)
            self._back_off(part, error)
            return
        if not batches:
            part.bytes_max = min(part.bytes_max * 2, BATCH_BYTES_MAX)
            return
        part.attempts = 0
        part.bytes_max = self._options.fetch_bytes
        wanted = [batch for batch in batches if batch.end_offset > part.fetch_offset]
        if wanted:
            part.fetch_offset = wanted[-1].end_offset
            self._positions.fill(part, wanted)
            self._filled = True

    # Finding a position.

    async def _resolve(self, connection: Connection, parts: list[Assigned]) -> None:
        queries = []
        turns = {part.key: part.turn for part in parts}
        for part in parts:
            if part.start is not None:  # else a seek has found a position before the connection
                by, at = part.start
                queries.append(OffsetQuery(part.topic, part.partition, by, at))
        if not queries:
            return
        reply = (await connection.request(ListOffsets(tuple(queries)))).message
        for answer in reply.answers:
            held = self._positions.parts.get((answer.topic, answer.partition))
            if held is None or turns.get(held.key) != held.turn:
                continue
            if answer.error:
                self._failed(held, error_of(answer.error, held))
            else:
                held.attempts = 0
                held.start = None
                held.position = held.fetch_offset = answer.offset
                self._positions.notify()

    async def _judge(self, connection: Connection, parts: list[Assigned]) -> None:
        """A leader has refused an offset: is it gone, or is it not yet there?"""
        (part,) = parts
        turn = part.turn
        where = part.topic, part.partition
        queries = (OffsetQuery(*where, "earliest"), OffsetQuery(*where, "latest"))
        answers = (await connection.request(ListOffsets(queries))).message.answers
        if part.turn != turn or part.fetch_offset is None:
            return
        if len(answers) != 2 or answers[0].error or answers[1].error:
            code = next((answer.error for answer in answers if answer.error), "remote_protocol")
            self._failed(part, error_of(code, part))
            return
        self._reset(part, answers[0], answers[1])

    def _reset(self, part: Assigned, earliest: OffsetAnswer, latest: OffsetAnswer) -> None:
        options = self._options
        offset = part.fetch_offset
        assert offset is not None
        if earliest.offset <= offset <= latest.offset:
            self._pause(part, options.retry_backoff_ms / 1000)
            return
        error = OffsetOutOfRange(
            f"offset {offset} of {part.describe()} is not kept: "
            f"[{earliest.offset}, {latest.offset}) are"
        )
        if offset > latest.offset and not self._lost_for(part, options.reset_grace_ms):
            self._back_off(part, error)
            return
        if options.reset == "none":
            self._positions.fail(part, error)
            return
        chosen = earliest if options.reset == "earliest" else latest
        logger.warning("%s; going on at %d, the %s", error, chosen.offset, options.reset)
        part.fetch_offset = chosen.offset
        if not part.buffered_bytes and part.rows_at >= len(part.rows):
            part.position = chosen.offset
        part.lost_since = None

    # Failures.

    def _failed(self, part: Assigned, error: RaftqError) -> None:
        if isinstance(error, OffsetOutOfRange):
            leader = self._routes.leader(part.topic, part.partition)
            if leader is None or part.timer is not None:
                self._back_off(part, error)
            else:
                self._loop.call_soon(self._start_judging, leader, part, part.turn)
        elif isinstance(error, UnknownTopic | UnknownPartition):
            part.doubtful = True
            self._failed_for_long(part, error)
        elif error.retriable:
            self._back_off(part, error)
        else:
            self._positions.fail(part, copy_error(error))

    def _start_judging(self, leader: Leader, part: Assigned, turn: int) -> None:
        if part.turn == turn and part.in_flight != turn and not self._stopped:
            self._start(leader, [part], self._judge)

    def _lost_for(self, part: Assigned, grace_ms: int) -> bool:
        now = self._loop.time()
        if part.lost_since is None:
            part.lost_since = now
        return now - part.lost_since >= grace_ms / 1000

    def _failed_for_long(self, part: Assigned, error: RaftqError) -> None:
        """Such an error counts only when it does not go away."""
        if self._lost_for(part, self._options.topic_grace_ms):
            part.lost_since = None
            self._positions.fail(part, error)
        else:
            self._back_off(part, error)

    def _back_off(self, part: Assigned, error: RaftqError) -> None:
        options = self._options
        most = min(options.retry_backoff_ms << min(part.attempts, 20), options.retry_backoff_ms_max)
        part.attempts += 1
        self._pause(part, most / 1000 * options.rng.uniform(0.5, 1.0))
        if error.refresh_route:
            part.asking = self._routes.request_refresh()

    def _pause(self, part: Assigned, seconds: float) -> None:
        if part.timer is not None:
            part.timer.cancel()
        part.timer = self._loop.call_later(seconds, self._resume, part)

    def _resume(self, part: Assigned) -> None:
        if part.timer is not None:
            part.timer.cancel()
        if part.asking is not None and not part.asking.done():
            # The position may be in a topic that is gone: that has to be known first.
            part.asking.add_done_callback(lambda _: self._resume(part))
            return
        part.timer = part.asking = None
        self.wake()


def error_of(code: str, part: Assigned) -> RaftqError:
    """The error behind a code in a reply."""
    known = RaftqError.registry.get(code)
    if known is None:
        return UnknownCode(f"{part.describe()}: {code}").with_details(code=code)
    return known(f"{part.describe()}: the node says {code}")


def read_batches(raw: memoryview) -> list[Batch]:
    """The whole batches in a reply, their headers checked; a cut one at the end is left out."""
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
