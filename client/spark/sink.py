"""Shell: topics as sinks of batch writes and of streams.

Tasks append immediately, so nothing is left to do when Spark commits. A task that runs again
appends nothing twice because of the batches' identities, see outgoing.py. They begin with the id of
the write: for a stream the query's id, which its checkpoint keeps, and the number of the
micro-batch; for a batch write an id that is made when it is planned, or the option `writeId`.
"""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from raftq.client.common.errors import ConfigError, InternalError
from raftq.client.options import wall_clock_ms
from raftq.client.spark.appender import Appender
from raftq.client.spark.layout import DestinationRouter, check_schema, columns_of
from raftq.client.spark.options import WriteOptions, write_options
from raftq.client.spark.outgoing import Cutter, Destination, Encoder, place
from raftq.client.spark.worker_input import check_complete
from raftq.client.spark.worker_memory import spare_imports
from raftq.client.wire.codecs import CODECS

# Names that Spark does not promise to keep; a test notices if it changes them.
QUERY_ID = "sql.streaming.queryId"
BATCH_ID = "streaming.sql.batchId"
PENDING_BYTES_MAX = 64 * 1024 * 1024


@dataclass
class Written(WriterCommitMessage):
    """What a task has appended."""

    rows: int
    batches: int


class BatchSink(DataSourceArrowWriter):
    """`df.write.format("raftq")`, in mode append."""

    def __init__(self, given: dict[str, str], schema: StructType, overwrite: bool) -> None:
        self._options = write_options(given, streaming=False)
        check_schema(schema, self._options.topic)
        if overwrite:
            raise ConfigError("a topic is only appended to: use mode('append')")
        self._scope = f"write {self._options.write_id or uuid.uuid4().hex}"

    def write(self, iterator: Iterator[Any]) -> Written:
        return write_rows(self._options, self._scope, _context().partitionId(), iterator)


class StreamSink(DataSourceStreamArrowWriter):
    """`df.writeStream.format("raftq")`."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self._options = write_options(given, streaming=True)
        check_schema(schema, self._options.topic)

    def write(self, iterator: Iterator[Any]) -> Written:
        context = _context()
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        if not query or not batch:
            raise InternalError(
                "this version of Spark does not tell its tasks the query and micro-batch "
                f"({QUERY_ID}, {BATCH_ID}), so a repeated one could not be recognised"
            )
        scope = f"query {query} batch {batch}"
        return write_rows(self._options, scope, context.partitionId(), iterator)


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise InternalError("rows are written by tasks of Spark only")
    return context


def write_rows(options: WriteOptions, scope: str, task: int, iterator: Iterator[Any]) -> Written:
    """Appends all rows of a task; returns when they are acknowledged."""
    spare_imports()
    with Appender(options) as appender:
        writing = _Writing(options, Encoder(scope, task, CODECS[options.compression]), appender)
        for batch in iterator:
            writing.add(batch, task)
        check_complete()
        return writing.finish(task)


class _Writing:
    """The rows of one task on their way."""

    def __init__(self, options: WriteOptions, encoder: Encoder, appender: Appender) -> None:
        self._cutter = Cutter(options.batch_records, options.batch_bytes)
        self._router = DestinationRouter(options.topic, appender.partitions)
        self._encoder = encoder
        self._appender = appender
        self._written = Written(0, 0)
        self._rate = options.records_per_second
        self._began = perf_counter()

    def add(self, batch: Any, task: int) -> None:
        for to, rows in self._router.route(batch):
            for cut in self._cutter.add(to, rows):
                self._send(*cut, task)
        if self._cutter.size > PENDING_BYTES_MAX:  # of very many partitions
            self._rest(task)

    def finish(self, task: int) -> Written:
        self._rest(task)
        self._appender.flush()
        return self._written

    def _rest(self, task: int) -> None:
        for cut in self._cutter.finish():
            self._send(*cut, task)

    def _send(self, to: Destination, number: int, rows: Any, task: int) -> None:
        where = place(to, task, number, self._appender.partitions(to.topic))
        now_ms = wall_clock_ms()
        columns, known = columns_of(rows, to, now_ms)
        raw = self._encoder.encode(to, number, columns, known, now_ms)
        self._appender.put(where, raw, to.delayed)
        self._written.rows += len(rows)
        if self._rate:
            ahead_s = self._written.rows / self._rate - (perf_counter() - self._began)
            if ahead_s > 0:
                sleep(ahead_s)
        self._written.batches += 1
