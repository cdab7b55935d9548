"""Shell: one task of a read: the records of a range, straight from the leader of the partition.

The client handles a leader that goes away: it finds the next one, and the task only waits. Two
kinds of missing records are distinguished: offsets below the log's first one are lost to retention;
a jump between two batches is a gap that compaction or a control record left.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from raftq.client.common.errors import OffsetOutOfRange, RaftqError, RequestTimeout
from raftq.client.spark.columns import CONTENT, Gathered
from raftq.client.spark.ranges import OffsetRange
from raftq.client.spark.worker_memory import spare_imports
from raftq.client.sync.consumer import Consumer

logger = logging.getLogger(__name__)

POLL_S = 1.0
RECORD_BYTES = 2 * 1024  # a guess: with bigger records a short range takes some more fetches
FETCH_BYTES_MIN = 64 * 1024
ROWS_MAX = 65_536  # of an Arrow batch, where records take little or nothing of the wire
PREFETCHED = 3  # fetches in flight or waiting while one is passed to Spark


class DataLoss(OffsetOutOfRange):
    """Records that a job was to read are gone."""

    code = "spark_data_loss"


@dataclass(frozen=True, slots=True)
class ReadTask:
    """Everything that an executor needs to read a range; it is pickled."""

    bootstrap: str
    range: OffsetRange
    fail_on_data_loss: bool
    fetch_bytes: int
    batch_bytes: int
    poll_timeout_ms: int


def read(task: ReadTask, fields: Sequence[tuple[str, bool]]) -> Iterator[Any]:
    """The records of the range as `pyarrow.RecordBatch`es with these fields."""
    spare_imports()
    wanted = task.range
    where = wanted.topic, wanted.partition
    gathered = Gathered(*where, fields)
    outlines = not any(name in CONTENT for name, _ in fields)
    with _consumer(task, outlines) as consumer:
        consumer.assign([where])
        consumer.stop_at(*where, wanted.end)
        consumer.seek(*where, offset=wanted.start)
        yield from _Reading(task, consumer, gathered).batches()


def _consumer(task: ReadTask, outlines: bool) -> Consumer:
    fetch = fetch_bytes(task)
    prefetch = PREFETCHED * fetch
    return Consumer(
        task.bootstrap,
        name="spark",
        reset="none",
        outlines=outlines,
        fetch_bytes=fetch,
        prefetch_bytes_partition=prefetch,
        prefetch_bytes=prefetch,
        bootstrap_ms=task.poll_timeout_ms,
    )


def fetch_bytes(task: ReadTask) -> int:
    """The size of a fetch: as the task says, but not far more than a short range may have.

    Records of a fetch behind the range's end would be thrown away."""
    return min(task.fetch_bytes, max(task.range.size * RECORD_BYTES, FETCH_BYTES_MIN))


class _Reading:
    """A range that is being read, from `position` on."""

    def __init__(self, task: ReadTask, consumer: Consumer, gathered: Gathered) -> None:
        self._task = task
        self._range = task.range
        self._consumer = consumer
        self._gathered = gathered
        self.position = task.range.start
        self._moved_at = perf_counter()

    def batches(self) -> Iterator[Any]:
        gathered, end = self._gathered, self._range.end
        while self.position < end:
            for batch in self._poll():
                if batch.base_offset >= end:
                    self.position = end
                    break
                gathered.add(batch, self.position, end)
                self.position = batch.end_offset
                full = gathered.size >= self._task.batch_bytes or gathered.rows >= ROWS_MAX
                if full and gathered.rows:
                    yield gathered.take()
                if self.position >= end:
                    break
        if gathered.rows:
            yield gathered.take()

    def _poll(self) -> list[Any]:
        """The next batches (possibly none). Skips offset ranges that contain no records."""
        where = self._range.topic, self._range.partition
        try:
            fetched = self._consumer.poll_batches(self._task.batch_bytes, POLL_S)
        except OffsetOutOfRange as error:
            self._lost(error)
            return []
        if fetched:
            self._moved_at = perf_counter()
            return [item.batch for item in fetched]
        position = self._consumer.position(*where, timeout=self._task.poll_timeout_ms / 1000)
        if position > self.position:
            self.position = position
            self._moved_at = perf_counter()
        elif perf_counter() - self._moved_at > self._task.poll_timeout_ms / 1000:
            raise RequestTimeout(
                f"{self._range.describe()}: nothing came after offset {self.position} for "
                f"{self._task.poll_timeout_ms} ms (pollTimeoutMs)"
            ).with_outcome("failed")
        return []

    def _lost(self, error: RaftqError) -> None:
        """Continues where the log begins, or fails: part of the range is gone."""
        one = self._range
        first = self._edge("earliest")
        until = min(first, one.end) if first > self.position else one.end
        message = loss_message(
            OffsetRange(one.topic, one.partition, self.position, until), str(error)
        )
        if self._task.fail_on_data_loss:
            raise DataLoss(message) from error
        logger.warning("%s; going on at offset %d (failOnDataLoss=false)", message, until)
        self.position = until
        if until < one.end:
            self._consumer.seek(one.topic, one.partition, offset=until)

    def _edge(self, to: str) -> int:
        one, timeout_s = self._range, self._task.poll_timeout_ms / 1000
        self._consumer.seek(one.topic, one.partition, to=to, timeout=timeout_s)
        return self._consumer.position(one.topic, one.partition, timeout=timeout_s)


def loss_message(lost: OffsetRange, why: str) -> str:
    return (
        f"offsets [{lost.start}, {lost.end}) of {lost.topic}/{lost.partition} are lost: they were "
        f"to be read and are not in the log any more ({why}). Retention may be too short for how "
        "late this job runs; with failOnDataLoss=false it goes on with what is left"
    )
