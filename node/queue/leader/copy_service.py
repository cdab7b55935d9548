"""Sends the pending copies of a led partition: dead letters and redrives. (Shell.)

copy_ledger.py explains the streams and why each record has one copy. One task per target partition
sends the rows of its stream, a batch at a time, and tries for as long as the epoch lasts. So an
unreachable target delays only its own stream. When a batch has arrived, one write settles its
source records and finishes the batch.

A dead letter that its target refuses for good is parked: the records behind it go first, its own
record stays unsettled, and it is tried again every PARKED_S. A redrive that is refused stays a dead
letter. A record that is gone before its copy was made is settled as skipped, never as dead.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Protocol

from msgspec.structs import replace

from raftq.client.common.errors import (
    CorruptBatch,
    FencedProducer,
    InvalidArgument,
    OutOfOrderSequence,
    RaftqError,
    RequestTimeout,
    TooLarge,
    UnknownPartition,
    UnknownTopic,
)
from raftq.client.common.names import DLQ_GROUP, DLQ_SUFFIX
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.wire.batch import BatchProducer, encode
from raftq.client.wire.record import BatchRecord, Headers
from raftq.node.queue.core.codec import encode_stored
from raftq.node.queue.core.copy_ledger import (
    NO_PRODUCER,
    CopiesAdded,
    CopiesDone,
    CopiesDropped,
    CopiesParked,
    CopiesUnparked,
    CopyEntry,
    CopyLedger,
    CopyProducer,
    CopyRow,
    CopyStream,
    Death,
    OpenBatch,
    Target,
)
from raftq.node.queue.core.dead_letter_headers import (
    UNREADABLE,
    dead_headers,
    redriven_headers,
)
from raftq.node.queue.core.entries import DEAD, SKIPPED, Row
from raftq.node.queue.core.group_delivery import DyingRecords
from raftq.node.queue.leader.deliveries import GroupDeliveries
from raftq.node.queue.leader.ledger import TAG_COPIES, Ledger
from raftq.node.queue.leader.record_reader import RecordReader
from raftq.node.replication.leader_log import Leadership

logger = logging.getLogger(__name__)

BATCH_RECORDS = 250
BATCH_BYTES = 1024 * 1024
TEXT_MAX = 1024
RETRY_S_MIN = 0.05
RETRY_S_MAX = 5.0
GONE_S = 60.0
"""After this time a redrive gives up on a topic that was deleted; the letters stay."""
REPAIR_S = 60.0
"""After this time the copies of damaged records are given up."""
DYING_RETRY_S = 60.0
PARKED_S = 600.0
"""How often parked rows are tried again; a new leader tries at once."""
REFUSALS = (TooLarge, InvalidArgument)
"""Errors of a target that it would repeat for the same batch."""


class CopySender(Protocol):
    """How a node reaches other topics."""

    async def make_dead_letters(self, topic: str) -> None:
        """Return when the topic has a dead letter topic with as many partitions."""

    async def producer_id(self) -> int:
        """A new producer id."""

    async def send(self, target: Target, batch: bytearray) -> None:
        """Return when the target has the batch replicated."""

    def exists(self, target: Target) -> bool:
        """Whether there is such a partition, as far as this node knows."""


class _Over(Exception):
    """The ledger takes no more entries: another leader goes on."""


class CopyService:
    """Sends the copies of one partition, until its engine stops."""

    def __init__(  # noqa: PLR0913 - what the engine and the node hand over
        self,
        leadership: Leadership,
        ledger: Ledger,
        deliveries: GroupDeliveries,
        copy_sender: CopySender,
        rng: Random,
        wall_ms: Callable[[], int],
        on_damage: Callable[[CorruptBatch], None] = lambda error: None,
    ) -> None:
        self.copies = CopyLedger()
        self._leadership = leadership
        self._ledger = ledger
        self._deliveries = deliveries
        self._copy_sender = copy_sender
        self._rng = rng
        self._wall_ms = wall_ms
        self._records = RecordReader(leadership.data.log, on_damage)
        self._tasks = Tasks(f"the copies of {leadership.ref}")
        self._sending: dict[Target, None] = {}
        self._redriving: dict[int, None] = {}
        self._moved: asyncio.Future[None] = leadership.loop.create_future()
        self._producer_lock = asyncio.Lock()
        self._one_by_one: dict[Target, int] = {}
        """By stream: this many records are sent one by one, because one of them is refused."""
        self._try_again: asyncio.TimerHandle | None = None
        self._lost_by_group: dict[str, int] = {}
        self._stopped = False

    # The section of the ledger

    def replay(self, content: bytes) -> None:
        self.copies.replay(content)

    def snapshot(self) -> Iterable[bytes]:
        return self.copies.snapshot()

    def begin(self) -> None:
        self._unpark()
        for stream in list(self.copies.streams.values()):
            for row in stream.rows:
                if row.death is None:
                    self._redriving.update(dict.fromkeys(range(row.start, row.end)))
                else:
                    nonce = row.death.nonce
                    self._deliveries.mark_dying(row.death.group, [(nonce, row.start, row.end)])
            self._start(stream)

    def stop(self) -> None:
        self._stopped = True
        if self._try_again is not None:
            self._try_again.cancel()
        self._tasks.cancel()

    # Adding copies

    def dead_letter(
        self, group: str, letters: Sequence[DyingRecords], error: str
    ) -> "asyncio.Future[None]":
        """Decide the dead letters of these dying records; done when that is replicated."""
        ref = self._leadership.ref
        found = self._deliveries.groups.get(group)
        if ref.topic.endswith(DLQ_SUFFIX) or found is None:
            # A dead letter has no dead letter of its own: it waits and is delivered again.
            self._deliveries.unmark_dying(group, letters, self._wall_ms() / 1000 + DYING_RETRY_S)
            return self._ledger.barrier()
        rows = []
        for each in letters:
            lease = found.core.leases.get(each.nonce)
            assert lease is not None, f"{each} dies without a lease"
            death = Death(
                *(group, each.nonce, each.attempt, each.first, each.last),
                *(each.reason[:TEXT_MAX], error[:TEXT_MAX]),
            )
            rows.append(CopyRow(each.start, each.end, lease.lane, death))
        target = (ref.topic + DLQ_SUFFIX, ref.number)
        return self._add({target: rows})

    def redrive(self, rows: Mapping[Target, Sequence[CopyRow]]) -> "asyncio.Future[None]":
        """Send these letters back to their origin; done when the decision is replicated."""
        for some in rows.values():
            for row in some:
                self._redriving.update(dict.fromkeys(range(row.start, row.end)))
        return self._add(rows)

    def is_leaving(self, offset: int) -> bool:
        """Whether a letter is being redriven."""
        return offset in self._redriving

    def _add(self, rows: Mapping[Target, Sequence[CopyRow]]) -> "asyncio.Future[None]":
        entries = [CopiesAdded(*target, tuple(some)) for target, some in rows.items()]
        added = self._write(*entries)
        for target in rows:
            self._start(self.copies.stream(target))
        return added

    def _write(self, *entries: CopyEntry) -> "asyncio.Future[None]":
        return self._ledger.write(self._applied(*entries))

    def _applied(self, *entries: CopyEntry) -> list[bytes]:
        for entry in entries:
            self.copies.apply(entry)
        return [TAG_COPIES + encode_stored(entry) for entry in entries]

    def parked(self, group: str) -> int:
        """Dying records of a group whose dead letters are refused."""
        return sum(
            row.end - row.start
            for stream in self.copies.streams.values()
            for row, _ in stream.parked
            if row.death is not None and row.death.group == group
        )

    def lost(self, group: str) -> int:
        """Dying records of a group that were gone before their copy was made."""
        return self._lost_by_group.get(group, 0)

    async def arrived(self, targets: Iterable[Target], timeout_s: float) -> None:
        """Return when the copies that are pending now have arrived, or after the timeout."""
        goals = []
        for target in targets:
            stream = self.copies.stream(target)
            goals.append((stream, stream.finished + stream.pending))
        until = self._leadership.loop.time() + timeout_s
        while any(stream.finished < goal for stream, goal in goals) and not self._stopped:
            left = until - self._leadership.loop.time()
            if left <= 0:
                return
            await asyncio.wait((self._moved,), timeout=left)

    # Sending

    def _start(self, stream: CopyStream) -> None:
        if stream.pending and stream.target not in self._sending and not self._stopped:
            self._sending[stream.target] = None
            self._tasks.spawn(self._send_all(stream))

    async def _send_all(self, stream: CopyStream) -> None:
        target = stream.target
        delay_s, failed_at = RETRY_S_MIN, 0.0
        try:
            while stream.pending:
                try:
                    await self._send_next(stream)
                    delay_s, failed_at = RETRY_S_MIN, 0.0
                    continue
                except (OutOfOrderSequence, FencedProducer) as error:
                    await self._renumber(stream, error)
                except REFUSALS as error:
                    if stream.open is not None:
                        await self._refused(stream, stream.open, error)
                        continue
                    logger.warning("%s copies for %s wait: %s", self._leadership.ref, target, error)
                except RaftqError as error:
                    now = self._leadership.loop.time()
                    failed_at = failed_at or now
                    if self._gives_up(stream, error, now - failed_at):
                        continue
                    ref = self._leadership.ref
                    logger.info("partition=%s copies for %s wait: %s", ref, target, error)
                await sleep(delay_s * (0.5 + self._rng.random()))
                delay_s = min(2 * delay_s, RETRY_S_MAX)
        except _Over:
            logger.info(
                "partition=%s copies for %s are another's now", self._leadership.ref, target
            )
        finally:
            self._sending.pop(target, None)

    async def _send_next(self, stream: CopyStream) -> None:
        if self.copies.producer_id == NO_PRODUCER:
            await self._take_producer()
        if stream.open is None and not await self._open(stream):
            return
        sent = stream.open
        assert sent is not None, stream
        batch = self._batch(stream, sent)
        if stream.rows[0].death is not None:
            await self._copy_sender.make_dead_letters(self._leadership.ref.topic)
        await self._copy_sender.send(stream.target, batch)
        self._finish(stream, sent.count)

    async def _take_producer(self) -> None:
        async with self._producer_lock:
            if self.copies.producer_id == NO_PRODUCER:
                producer_id = await self._copy_sender.producer_id()
                # Replicated before it is used, so that a partition has one producer id for ever.
                await self._replicated(self._write(CopyProducer(producer_id)))

    async def _replicated(self, written: "asyncio.Future[None]") -> None:
        while True:
            try:
                await asyncio.shield(written)
                return
            except RequestTimeout:
                written = self._ledger.barrier()
            except RaftqError as error:
                raise _Over from error

    async def _open(self, stream: CopyStream) -> bool:
        """Number the next batch. Returns False if its first record is gone for ever."""
        rows = stream.first(1 if stream.target in self._one_by_one else BATCH_RECORDS)
        count = size = 0
        for row in rows:
            if row.lane != rows[0].lane or size >= BATCH_BYTES:
                break
            found, rest = self._records.read(range(row.start, row.end), BATCH_BYTES - size)
            here = 0
            while row.start + here < row.end and row.start + here in found:
                size += len(found[row.start + here].value)
                here += 1
            count += here
            if here < row.end - row.start:
                if not count and row.start not in rest:
                    self._lost(stream, row)
                    return False
                break
        await self._replicated(self._write(stream.next_batch(count)))
        return True

    def _lost(self, stream: CopyStream, row: CopyRow) -> None:
        """The first pending record cannot be read."""
        log = self._leadership.data.log
        if log.start_offset <= row.start < log.end_offset:
            raise CorruptBatch(f"{self._leadership.ref} cannot read offset {row.start}")
        self._tell_lost(row, "it is not kept any more")
        self._finish(stream, 1, SKIPPED)

    def _tell_lost(self, row: CopyRow, why: str) -> None:
        group = "" if row.death is None else row.death.group
        self._lost_by_group[group] = self._lost_by_group.get(group, 0) + 1
        logger.error(
            "partition=%s event=copy_lost offset=%d group=%s no copy was made: %s",
            self._leadership.ref, row.start, group, why,
        )  # fmt: skip

    def _batch(self, stream: CopyStream, sent: OpenBatch) -> bytearray:
        """Encode the open batch; done again each time it is sent."""
        source = (self._leadership.ref.topic, self._leadership.ref.number)
        pairs: list[tuple[BatchRecord, Headers]] = []
        rows = stream.first(sent.count)
        for row in rows:
            found, _ = self._records.read(range(row.start, row.end))
            for offset in range(row.start, row.end):
                death = row.death
                record = found.get(offset)
                if record is None:
                    # It could be read when the batch was numbered, and the numbers stay.
                    record = BatchRecord(offset, 0, None, b"", {}, row.lane)
                    death = death and replace(death, error=UNREADABLE)
                if death is None:
                    pairs.append((record, redriven_headers(record, source)))
                else:
                    pairs.append((record, dead_headers(record.headers, offset, death, source)))
        keys = [record.key for record, _ in pairs]
        return encode(
            [record.value for record, _ in pairs],
            keys if any(key is not None for key in keys) else None,
            [headers for _, headers in pairs],
            self._wall_ms(),
            lane=rows[0].lane,
            producer=BatchProducer(self.copies.producer_id, sent.epoch, sent.sequence),
        )

    def _finish(self, stream: CopyStream, count: int, how: int = DEAD) -> None:
        """The first records of a stream are safe, or gone: settle their source records."""
        settled: dict[str, list[Row]] = {}
        redriven: list[tuple[int, int]] = []
        for row in stream.first(count):
            if row.death is None:
                redriven.append((row.start, row.end))
                for offset in range(row.start, row.end):
                    self._redriving.pop(offset, None)
            else:
                death = row.death
                settled.setdefault(death.group, []).append((death.nonce, row.start, row.end))
        for group, rows in settled.items():
            self._deliveries.settle_dead(group, rows, how=how)
        self._passed(stream, count)
        done = self._applied(CopiesDone(*stream.target, count))
        if redriven:
            self._deliveries.pass_over(DLQ_GROUP, redriven, done)
        else:
            self._ledger.write(done)
        self._tell()

    def _tell(self) -> None:
        moved, self._moved = self._moved, self._leadership.loop.create_future()
        if not moved.done():
            moved.set_result(None)

    # Failures

    async def _renumber(self, stream: CopyStream, error: RaftqError) -> None:
        """The target does not know the open batch, or knows another epoch: begin a new epoch."""
        sent = stream.open
        assert sent is not None, stream
        known = error.details.get("epoch")
        epoch = max(sent.epoch, known if isinstance(known, int) else 0) + 1
        logger.warning(
            "partition=%s copies for %s begin epoch %d: %s",
            self._leadership.ref, stream.target, epoch, error,
        )  # fmt: skip
        await self._replicated(self._write(stream.renumbered(epoch)))

    async def _refused(self, stream: CopyStream, sent: OpenBatch, error: RaftqError) -> None:
        """The target refuses the open batch for good: find the record that is to blame."""
        if sent.count > 1:
            self._one_by_one[stream.target] = sent.count
            await self._replicated(self._write(stream.shortened(1)))
            return
        (row,) = stream.first(1)
        ref, target = self._leadership.ref, stream.target
        given_back = stream.shortened(0)
        if row.death is None:
            logger.error(
                "partition=%s event=redrive_refused offset=%d target=%s the letter stays: %s",
                ref, row.start, target, error,
            )  # fmt: skip
            self._redriving.pop(row.start, None)
            self._write(given_back, CopiesDone(*stream.target, 1))
        else:
            logger.error(
                "partition=%s event=letter_parked offset=%d group=%s target=%s its record stays "
                "unsettled: %s", ref, row.start, row.death.group, target, error,
            )  # fmt: skip
            self._write(given_back, CopiesParked(*target, 1, str(error)[:TEXT_MAX]))
            self._arm()
        self._passed(stream, 1)
        self._tell()

    def _passed(self, stream: CopyStream, count: int) -> None:
        left = self._one_by_one.pop(stream.target, 0) - count
        if left > 0:
            self._one_by_one[stream.target] = left

    def _arm(self) -> None:
        if self._try_again is None:
            self._try_again = self._leadership.loop.call_later(PARKED_S, self._look_at_parked)

    def _look_at_parked(self) -> None:
        self._try_again = None
        if not self._stopped:
            self._unpark()

    def _unpark(self) -> None:
        """Try refused rows again: they may fit by now, or their records may be gone."""
        for stream in [one for one in self.copies.streams.values() if one.parked]:
            self._write(CopiesUnparked(*stream.target))
            self._start(stream)

    def _gives_up(self, stream: CopyStream, error: RaftqError, failing_s: float) -> bool:
        """Whether the first pending rows are given up."""
        if isinstance(error, CorruptBatch) and stream.open is None and failing_s > REPAIR_S:
            self._tell_lost(stream.rows[0], str(error))
            self._finish(stream, 1, SKIPPED)
            return True
        is_redrive = stream.rows[0].death is None
        is_gone = isinstance(error, UnknownTopic | UnknownPartition)
        if is_redrive and is_gone and failing_s > GONE_S:
            if self._copy_sender.exists(stream.target):
                return False
            for row in stream.rows:
                for offset in range(row.start, row.end):
                    self._redriving.pop(offset, None)
            self._write(CopiesDropped(*stream.target))
            self._tell()
            return True
        return False
