"""Shell: sends batches to the leaders, those of each partition in order. On the loop only.

    closed ──encode──> sent ──reply──> appended
                        │ └──refused for good, or out of time──> failed
                        └──retriable──> waits ──all of the window answered, backoff──> sent

The window of a partition is the batches from the oldest unsettled one on, at most `in_flight_max`.
A batch gets its sequence numbers when it is encoded, and every attempt sends the same bytes, so a
node that already has it answers with its offset. When an attempt fails, nothing new of that
partition is sent until everything in the window has an answer; then the window is sent again in
order.

A batch that is given up leaves a gap in the sequence. Later batches that were certainly not written
get new numbers. The others are sent again, and either turn out to be written or are refused as out
of order: then their outcome is unknown. When the window is empty, the partition continues with the
next epoch of its producer id, from sequence 0. A node that has seen the new epoch refuses the old
one: nothing that is still on its way is confused with new batches, or appended behind them. When a
topic is deleted and created again, the new one gets a new id; recreated_topic.py decides where the
batches of the old topic go.
"""

import asyncio
from collections import deque
from functools import partial
from typing import Any

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import (
    ConnectionLost,
    InternalError,
    NotLeader,
    OutOfOrderSequence,
    RaftqError,
)
from raftq.client.common.tasks import Tasks
from raftq.client.net.connection import Connection
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, ProducerOptions
from raftq.client.producer.accumulator import Accumulator
from raftq.client.producer.outbox import Outbox, OutgoingBatch, OutgoingTopic, too_late
from raftq.client.producer.probes import Probes
from raftq.client.producer.producer_ids import Identities
from raftq.client.producer.recreated_topic import gone_error, target_outbox
from raftq.client.producer.sequencing import assign
from raftq.client.wire.messages import Produce

AGES_SPARE = 1_000  # settled batches that may wait for their removal
EXPIRE_S = 0.1  # for the answers of attempts that end with their batches
DOUBTS_MAX = 2
STALLED_S = 0.2
"""The pause between two requests for routes while a batch is in flight for long."""


class Sender:
    """Sends the batches of an accumulator, which calls `wake`."""

    def __init__(self, options: ProducerOptions, routes: Routes, pool: Pool, tasks: Tasks) -> None:
        self._options = options
        self._routes = routes
        self._pool = pool
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self._identities = Identities(options, routes, pool, tasks)
        self._probes = Probes(options, routes, pool, tasks)
        self._accumulator: Accumulator
        self._ages: deque[OutgoingBatch] = deque()  # by deadline
        self._lingering: deque[tuple[float, OutgoingBatch]] = deque()
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._busy: dict[Outbox, None] = {}  # outboxes with batches in their window
        self._connecting: dict[Address, list[Outbox]] = {}
        self._window_max = options.in_flight_max
        if not options.sequenced and options.acks != "none":
            self._window_max = 1
        self._seen: dict[
            OutgoingBatch, float
        ] = {}  # the oldest in flight, and since when they were seen
        self.failed: list[OutgoingBatch] = []  # no caller has asked about these yet
        routes.watch(self._routes_changed)

    def attach(self, accumulator: Accumulator) -> None:
        self._accumulator = accumulator

    # New work.

    def look(self) -> None:
        """Handles what callers have brought since the last call."""
        opened, ready = self._accumulator.look()
        now = self._loop.time()
        deadline = now + self._options.delivery_timeout_ms / 1000
        linger_s = self._options.linger_ms / 1000
        for batch in opened:
            batch.deadline = deadline
            self._ages.append(batch)
            if linger_s:
                self._lingering.append((now + linger_s, batch))
            else:
                ready.append(batch.outbox)
        if len(self._ages) > AGES_SPARE + 2 * len(self._accumulator.unsettled):
            self._ages = deque([batch for batch in self._ages if not batch.done])
        if self._ages:
            self._arm("ages", self._ages[0].deadline + EXPIRE_S, self._expire)
        if self._lingering:
            self._arm("linger", self._lingering[0][0], self._linger)
        for outbox in ready:
            self.pump(outbox)

    def _arm(self, name: str, at: float, call: Any) -> None:
        """Starts each kind of timer once; they start themselves again."""
        if name not in self._timers:
            self._timers[name] = self._loop.call_at(at, call)

    def _linger(self) -> None:
        del self._timers["linger"]
        now = self._loop.time()
        lingering = self._lingering
        while lingering and (lingering[0][1].closed or lingering[0][0] <= now):
            batch = lingering.popleft()[1]
            if not batch.closed:
                batch.due = True
                self.pump(batch.outbox)
        if lingering:
            self._arm("linger", lingering[0][0], self._linger)

    def push(self, batches: list[OutgoingBatch]) -> None:
        """Sends these batches without waiting for more records."""
        self.look()
        for outbox in {batch.outbox: None for batch in batches}:
            self.pump(outbox)

    # One partition.

    def pump(self, outbox: Outbox) -> None:
        """Sends what can be sent now. Whatever prevents that calls this again when it ends."""
        if outbox.timer is not None or outbox.connecting or outbox.identifying or outbox.gone:
            return
        waiting = [batch for batch in outbox.window if batch.waits]
        if waiting:
            if len(waiting) < len(outbox.window):
                return  # an answer is missing; it calls this again
        elif not self._goes_on(outbox):
            return
        connection = self._connection(outbox)
        if connection is None:
            return
        for batch in waiting:
            if not outbox.timer:
                self._send(connection, outbox, batch)
        while not (outbox.timer or outbox.identifying or self._is_waiting(outbox)):
            if not self._goes_on(outbox):
                return
            self._send_next(connection, outbox)

    def _goes_on(self, outbox: Outbox) -> bool:
        if self._has_new(outbox) and self._has_identity(outbox):
            return True
        self._probes.watch(outbox)
        return False

    def _has_identity(self, outbox: Outbox) -> bool:
        if outbox.identity is None and self._options.sequenced:
            outbox.identifying = True
            self._identities.give(outbox, self.pump)
            return False
        return True

    def _is_waiting(self, outbox: Outbox) -> bool:
        return any(batch.waits for batch in outbox.window)

    def _has_new(self, outbox: Outbox) -> bool:
        """Whether there is a batch to send that is not in the window, and room for it."""
        # Counted from the oldest unsettled batch: nodes remember a limited number of batches, and
        # that one must still be among them when it is sent again.
        if outbox.window and outbox.encoded - outbox.window[0].number >= self._window_max:
            return False
        if outbox.gap:
            if outbox.window:
                return False
            outbox.begin_epoch()
        idle = not self._options.linger_ms and not outbox.window
        return bool(outbox.returned) or self._accumulator.has_work(outbox, idle)

    def _send_next(self, connection: Connection, outbox: Outbox) -> None:
        if outbox.returned:
            batch = outbox.returned.popleft()
        else:
            idle = not self._options.linger_ms and not outbox.window
            taken = self._accumulator.take(outbox, idle)
            if taken is None:
                return
            batch = taken
        try:
            assign(outbox, batch, self._options.codec)
        except RaftqError as error:
            self._end(batch, error)
            return
        outbox.window.append(batch)
        self._busy[outbox] = None
        self._arm("stall", self._loop.time() + self._options.stall_ms / 1000, self._stalled)
        self._send(connection, outbox, batch)

    def _send(self, connection: Connection, outbox: Outbox, batch: OutgoingBatch) -> None:
        options = self._options
        left_s = batch.deadline - self._loop.time()
        if left_s <= 0:
            self._give_up(outbox, batch, too_late(batch, self._options.delivery_timeout_ms))
            return
        timeout_s = min(left_s, options.request_ms / 1000)
        batch.turn += 1
        batch.waits = False
        message = Produce(
            outbox.topic, outbox.partition, acks=options.acks, timeout_ms=int(timeout_s * 1000),
            delayed=outbox.delayed,
        )  # fmt: skip
        assert batch.raw is not None
        try:
            future = connection.submit(message, (batch.raw,), timeout_s)
        except RaftqError as error:
            self._refused(outbox, batch, error)
            return
        future.add_done_callback(partial(self._answered, outbox, batch, batch.turn))

    # Answers.

    def _answered(self, outbox: Outbox, batch: OutgoingBatch, turn: int, future: Any) -> None:
        error = ConnectionLost("the client is closed") if future.cancelled() else future.exception()
        if batch.done or batch.turn != turn:
            return  # it was sent to another node meanwhile, whose answer counts
        if error is None:
            offsets = future.result().message.base_offsets
            batch.base_offset = offsets[0] if offsets else -1
            outbox.attempts = outbox.doubts = 0
            outbox.stuck = False
            self._leave_window(outbox, batch)
            self._accumulator.finish(batch, None)
            self.pump(outbox)
        else:
            known = isinstance(error, RaftqError)
            problem = error if known else InternalError(f"{type(error).__name__}: {error}")
            self._refused(outbox, batch, problem)

    def _refused(self, outbox: Outbox, batch: OutgoingBatch, error: RaftqError) -> None:
        """Decides what a failed attempt means: retry, new sequence numbers, or the end."""
        if error.outcome == "unknown":
            batch.maybe_written = True
        outbox.last_error = error
        if outbox.gone is not None:
            self._leave_window(outbox, batch)
            explained = self._is_final(error) and not isinstance(error, OutOfOrderSequence)
            self._end(batch, error if explained else outbox.gone)
            return
        if isinstance(error, OutOfOrderSequence):
            self._out_of_order(outbox, batch, error)
        elif self._is_final(error):
            self._give_up(outbox, batch, error)
        elif self._loop.time() >= batch.deadline:
            self._give_up(outbox, batch, too_late(batch, self._options.delivery_timeout_ms))
        else:
            batch.waits = True
        if outbox.gap:
            self._return_unwritten(outbox)
        if any(not one.waits for one in outbox.window):
            return
        if outbox.window:
            self._back_off(outbox, error)
        else:
            self.pump(outbox)

    def _out_of_order(self, outbox: Outbox, batch: OutgoingBatch, error: RaftqError) -> None:
        if batch is not outbox.window[0]:
            batch.waits = True  # for the previous batch, which is not settled
        elif batch.maybe_written:
            self._give_up(outbox, batch, error)
        elif not outbox.gap and outbox.doubts < DOUBTS_MAX:
            # The partition may belong to another topic now.
            outbox.doubts += 1
            batch.waits = True
            self._routes.request_refresh()
        elif not (outbox.gap or self._options.acks == "leader" or error.details.get("due") == 0):
            self._give_up(outbox, batch, error)
        else:
            # The previous batch was given up, or a leader without followers has lost it, or the
            # node has forgotten a producer that was idle for long.
            outbox.gap = True
            self._leave_window(outbox, batch)
            outbox.returned.append(batch)

    def _return_unwritten(self, outbox: Outbox) -> None:
        """After a gap: batches that were certainly not written get new numbers.

        Their old numbers would be refused. Only from the front, so that the order is kept."""
        window = outbox.window
        while window and window[0].waits and not window[0].maybe_written:
            outbox.returned.append(window.popleft())
        if not window:
            self._busy.pop(outbox, None)

    def _is_final(self, error: RaftqError) -> bool:
        if not error.retriable:
            return True
        return error.outcome == "unknown" and not self._options.sequenced

    def _give_up(self, outbox: Outbox, batch: OutgoingBatch, error: RaftqError) -> None:
        self._leave_window(outbox, batch)
        if self._options.sequenced:
            outbox.gap = True
        self._end(batch, error)

    def _end(self, batch: OutgoingBatch, error: RaftqError) -> None:
        final = copy_error(error)
        if batch.maybe_written:
            final.outcome = "unknown"
        if len(self.failed) < 10_000:
            self.failed.append(batch)
        self._accumulator.finish(batch, final)

    def _leave_window(self, outbox: Outbox, batch: OutgoingBatch) -> None:
        outbox.window.remove(batch)
        if not outbox.window:
            self._busy.pop(outbox, None)

    # The connection to the leader.

    def _connection(self, outbox: Outbox) -> Connection | None:
        """The connection to the leader, or None: then `pump` is called when there may be one."""
        found = self._routes.leader(outbox.topic, outbox.partition)
        if found is None:
            if self._routes.is_missing(outbox.topic, self._loop.time()):
                self._close_topic(self._accumulator.forget(outbox.topic), None)
                return None
            self._back_off(outbox, NotLeader(f"no leader is known for {outbox.label}"))
            return None
        outbox.node, address = found
        connection = self._pool.peek(address)
        if connection is None:
            outbox.connecting = True
            waiting = self._connecting.setdefault(address, [])
            waiting.append(outbox)
            if len(waiting) == 1:
                self._tasks.spawn(self._connect(address))
        return connection

    async def _connect(self, address: Address) -> None:
        problem: RaftqError | None = None
        try:
            await self._pool.get(address)
        except RaftqError as error:
            problem = error
        for outbox in self._connecting.pop(address):
            outbox.connecting = False
            if problem is None:
                self.pump(outbox)
            elif outbox.gone is None:
                self._back_off(outbox, problem)

    def _back_off(self, outbox: Outbox, error: RaftqError) -> None:
        """Waits before the next attempt, and requests the routes meanwhile."""
        outbox.last_error = error
        outbox.stuck = True
        wait_s = self._options.backoff().after_s(outbox.attempts)
        outbox.attempts += 1
        outbox.timer = self._loop.call_later(wait_s, self._resume, outbox)
        if error.refresh_route:
            self._routes.request_refresh()
            self._routes.hint(outbox.topic, outbox.partition, error)

    def _resume(self, outbox: Outbox) -> None:
        outbox.end_timer()
        self.pump(outbox)

    def _routes_changed(self) -> None:
        now = self._loop.time()
        for name in list(self._accumulator.topics):
            info = self._routes.topics.get(name)
            if info is not None:
                count = len(info.partitions)
                old = self._accumulator.set_partitions(name, count, info.topic_id)
                self._close_topic(old, self._accumulator.topics[name])
            elif self._routes.is_missing(name, now):
                self._close_topic(self._accumulator.forget(name), None)
        outboxes = {batch.outbox: None for batch in list(self._accumulator.unsettled)}
        for outbox in outboxes:
            found = self._routes.leader(outbox.topic, outbox.partition)
            if found is None or found[0] == outbox.node or outbox.gone is not None:
                continue
            if outbox.window:
                self._abandon(outbox)
            if outbox.timer is not None and not outbox.connecting:
                self._resume(outbox)
            else:
                self.pump(outbox)

    # The end of a topic.

    def _close_topic(self, old: OutgoingTopic | None, new: OutgoingTopic | None) -> None:
        """A topic is gone: waiting batches go to the new topic of its name, or fail.

        Batches in flight get their answer."""
        if old is None:
            return
        self._identities.start_over()
        for outbox in old.every():
            outbox.gone = gone_error(outbox, old, new)
            outbox.end_timer()
            waiting = [batch for batch in outbox.window if batch.waits]
            for batch in waiting:
                self._leave_window(outbox, batch)
            waiting += outbox.returned
            waiting += outbox.closed
            outbox.returned.clear()
            outbox.closed.clear()
            for batch in waiting:
                self._reroute(batch, None if new is None else target_outbox(batch, old, new))

    def _reroute(self, batch: OutgoingBatch, target: Outbox | None) -> None:
        problem = batch.outbox.gone
        assert problem is not None
        if target is None or batch.maybe_written:
            self._end(batch, problem)
            return
        batch.outbox = target
        batch.waits = False
        target.returned.append(batch)
        self._loop.call_soon(self.pump, target)

    def _abandon(self, outbox: Outbox) -> None:
        """Another node leads: does not wait for answers of the previous leader."""
        if not self._options.sequenced:
            return
        for batch in outbox.window:
            if not batch.waits:
                batch.waits = True
                batch.maybe_written = True
                batch.turn += 1

    # Time.

    def _stalled(self) -> None:
        """A batch has been in flight for long: the leader may be cut off from the others."""
        del self._timers["stall"]
        now, limit_s = self._loop.time(), self._options.stall_ms / 1000
        oldest = [outbox.window[0] for outbox in self._busy]
        self._seen = {batch: self._seen.get(batch, now) for batch in oldest}
        if not oldest:
            return
        stalled = [batch.outbox for batch, at in self._seen.items() if now - at >= limit_s * 0.9]
        if stalled:
            # Such a leader does not know who leads now.
            leaders = (self._routes.leader(one.topic, one.partition) for one in stalled)
            self._routes.avoid(*(found[1] for found in leaders if found is not None))
            self._routes.request_refresh()
        self._arm("stall", now + (STALLED_S if stalled else limit_s), self._stalled)

    def _expire(self) -> None:
        """Ends batches whose time is over.

        An attempt in flight ends at the same time and knows its outcome better. This comes a little
        later and does not wait for it."""
        del self._timers["ages"]
        now = self._loop.time() - EXPIRE_S
        ages = self._ages
        while ages and (ages[0].done or ages[0].deadline <= now):
            batch = ages.popleft()
            if not batch.done:
                outbox = batch.outbox
                self._remove(batch)
                self._end(batch, too_late(batch, self._options.delivery_timeout_ms))
                if outbox.gap:
                    self._return_unwritten(outbox)
                self.pump(outbox)
        if ages:
            self._arm("ages", ages[0].deadline + EXPIRE_S, self._expire)

    def _remove(self, batch: OutgoingBatch) -> None:
        """Removes a batch from the queue in which it waits."""
        outbox = batch.outbox
        if batch in outbox.window:
            if not batch.waits:
                batch.maybe_written = True
            self._leave_window(outbox, batch)
            outbox.gap = self._options.sequenced
        elif batch in outbox.returned:
            outbox.returned.remove(batch)
        else:
            self._accumulator.withdraw(batch)

    def fail_all(self, error: RaftqError) -> None:
        """The producer ends: every unsettled batch fails."""
        for batch in list(self._accumulator.unsettled):
            self._remove(batch)
            self._end(batch, error)

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        for topic in self._accumulator.topics.values():
            for outbox in topic.every():
                outbox.end_timer()
