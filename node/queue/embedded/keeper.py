"""Shell: what an open queue does by itself, in one thread.

It fires delayed messages, ends leases, restores the disk reserve, snapshots the ledger, drops what
retention allows, and reads sealed files again to find damage early. Nothing here holds the queue's
lock across an fsync.
"""

import logging
import threading
from collections.abc import Callable

from raftq.client.common.errors import DiskFull, RaftqError, StorageFailed
from raftq.node.queue.embedded.consume import GroupConsumer
from raftq.node.queue.embedded.dead import EmbeddedDeadLetters
from raftq.node.queue.embedded.engine import DEFAULT_GROUP, QueueEngine

logger = logging.getLogger("raftq.queue")

UPKEEP_S = 1.0
RETENTION_S = 10.0
SNAPSHOT_LEDGER_BYTES = 8 * 1024 * 1024
RATE_SECONDS = 10
SCRUB_BYTES_PER_S = 4 * 1024 * 1024


class Keeper:
    """Runs the timers and the housekeeping of one queue."""

    def __init__(
        self,
        engine: QueueEngine,
        consumer: GroupConsumer,
        dead: EmbeddedDeadLetters,
        lock: threading.Lock,
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._consumer = consumer
        self._dead = dead
        self._lock = lock
        self._tell = wake
        self._clock = clock
        self._wake = threading.Event()
        self._stopped = False
        self.failure: Exception | None = None
        """What ended the thread before its time."""
        self._planned = 0.0
        self._fire_after = 0.0
        self._last_retention = 0.0
        self._last_upkeep = 0.0
        # What earlier sessions left counts as growth: many short ones must not add up for ever.
        self._snapshot_bytes = 0
        self._history: list[tuple[float, int, int]] = []
        self._thread = threading.Thread(target=self._run, name="raftq-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def plan(self, when: float) -> None:
        """Something is due at `when`; wake up earlier if that is sooner than planned."""
        if when < self._planned:
            self._wake.set()

    def tick(self, now: float) -> bool:
        """Fire and expire what is due; True when consumers may find something new. Lock held."""
        changed = self._fire(now)
        for group in list(self._engine.state.groups.values()):
            deadline = group.next_deadline()
            if deadline is not None and deadline <= now:
                self._consumer.expire(group, now)
                changed = True
        return changed

    def _fire(self, now: float) -> bool:
        """Fire due delays. A full disk makes them wait, but not what can be delivered without."""
        changed = False
        now_ms = int(now * 1000)
        delays = self._engine.delays
        if now < self._fire_after <= now + UPKEEP_S:
            return False
        try:
            while (due := delays.next_due_ms()) is not None and due <= now_ms:
                if not delays.fire(now_ms):
                    break
                changed = True
        except DiskFull as error:
            self._fire_after = now + UPKEEP_S
            logger.warning("queue=%s event=firing_waits error=%s", self._engine.name, error)
        return changed

    def next_deadline(self) -> float:
        """When `tick` has something to do. Lock held."""
        deadlines = [group.next_deadline() for group in self._engine.state.groups.values()]
        due = self._engine.delays.next_due_ms()
        known = [deadline for deadline in deadlines if deadline is not None]
        if due is not None:
            known.append(max(due / 1000, self._fire_after))
        return min(known, default=float("inf"))

    def rates(self, now: float) -> dict[str, float]:
        """Messages per second over the last seconds. Lock held."""
        published, acked = self._counts()
        if not self._history or now <= self._history[0][0]:
            return {"enqueued_per_s": 0.0, "acked_per_s": 0.0}
        then, published_then, acked_then = self._history[0]
        elapsed = now - then
        return {
            "enqueued_per_s": round((published - published_then) / elapsed, 1),
            "acked_per_s": round((acked - acked_then) / elapsed, 1),
        }

    def _counts(self) -> tuple[int, int]:
        group = self._engine.state.groups.get(DEFAULT_GROUP)
        return self._engine.published, 0 if group is None else group.state.counters.acked

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._once()
            except DiskFull as error:
                logger.warning("queue=%s event=disk_full error=%s", self._engine.name, error)
                self._wake.wait(UPKEEP_S)
            except StorageFailed as error:
                logger.error("queue=%s event=storage_failed error=%s", self._engine.name, error)
                return
            except RaftqError as error:
                logger.error("queue=%s event=upkeep_failed error=%s", self._engine.name, error)
                self._wake.wait(UPKEEP_S)
            except Exception as error:
                # A broken invariant: without timers the queue is not whole, so it says so.
                logger.exception("queue=%s event=keeper_died", self._engine.name)
                self.failure = error
                return

    def _once(self) -> None:
        with self._lock:
            now = self._clock()
            if self.tick(now):
                self._tell()
            wait = min(self.next_deadline() - now, UPKEEP_S)
            self._planned = now + wait
            self._wake.clear()
        if now - self._last_upkeep >= UPKEEP_S or now < self._last_upkeep:
            self._last_upkeep = now
            self._upkeep(now)
        self._wake.wait(max(wait, 0.0))

    def _upkeep(self, now: float) -> None:
        engine = self._engine
        with self._lock:
            self._history.append((now, *self._counts()))
            del self._history[:-RATE_SECONDS]
            engine.finish_intent()
            if engine.files.reserve_missing:
                engine.files.restore_reserve()
            engine.delays.upkeep()
            engine.state.forget_old_dedups(int(now * 1000))
            if now - self._last_retention >= RETENTION_S:
                self._last_retention = now
                self.retain(now)
            if engine.files.data.scrub(SCRUB_BYTES_PER_S).damaged:
                engine.note_damage()
        grown = engine.files.ledger.size_bytes - self._snapshot_bytes
        if grown > self._growth_max():
            self.snapshot()

    def _growth_max(self) -> int:
        """Bytes the ledger may grow by before it is replaced by a snapshot."""
        files = self._engine.files
        if files.reserve_missing and files.reserve_bytes:
            # The disk is full: acks live on the reserve, and must not use it up.
            return files.reserve_bytes // 4
        return max(SNAPSHOT_LEDGER_BYTES, 2 * self._snapshot_bytes)

    def retain(self, now: float) -> int:
        """Drop settled files that are old enough or too many. Lock held."""
        engine, options = self._engine, self._engine.options
        now_ms = int(now * 1000)
        age_ms = None if options.retention is None else int(options.retention * 1000)
        kept = options.dead_letter_retention
        self._dead.upkeep(now_ms, None if kept is None else int(kept * 1000))
        return engine.files.data.retain(
            now_ms, age_ms=age_ms, bytes_max=options.retention_bytes, below=engine.settled_floor()
        )

    def snapshot(self) -> None:
        """Snapshot the ledger and drop its past, with the fsyncs outside the lock."""
        engine = self._engine
        files = engine.files
        logs = (files.data, files.delays, files.dead)
        files.flusher.wait([(log, log.end_offset) for log in logs])
        with self._lock:
            # An intent may only be forgotten once its appends are on disk.
            logs_by_name = files.logs
            for name, end in engine.intent_ends.items():
                if name != "ledger" and logs_by_name[name].flushed_offset < end:
                    return
            offset, target = engine.write_snapshot()
        files.flusher.wait([target])
        with self._lock:
            files.ledger.truncate_prefix(offset)
            self._snapshot_bytes = files.ledger.size_bytes
