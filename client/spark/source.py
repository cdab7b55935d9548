"""Shell: the data source `raftq`, as Spark calls it.

Spark makes new objects in several processes (one plans, one follows a stream, each executor reads),
so they hold options and nothing else. Connections are made where they are used.

There is no filter push-down on purpose: Spark keeps the plan of a DataFrame, and if filters have
narrowed it, other queries on the same DataFrame get too few rows. Ranges of offsets and times,
partitions and columns are options instead.
"""

from collections.abc import Iterator, MutableMapping
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    InputPartition,
)
from pyspark.sql.types import StructType

from raftq.client.spark import planning
from raftq.client.spark.options import columns_option, read_options
from raftq.client.spark.reading import ReadTask, read
from raftq.client.spark.schema import fields_of, read_schema
from raftq.client.spark.sink import BatchSink, StreamSink
from raftq.client.spark.streaming import StreamReader
from raftq.client.spark.survey import Survey


class RaftqSource(DataSource):
    """`spark.dataSource.register(RaftqSource)`, then `format("raftq")`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        self.options = options
        self._given = dict(options)

    @classmethod
    def name(cls) -> str:
        return "raftq"

    def schema(self) -> StructType:
        # Called before it is known whether a stream is meant; each reader checks its own options.
        return read_schema(columns_option(self._given))

    def reader(self, schema: StructType) -> "BatchReader":
        return BatchReader(self._given, schema)

    def streamReader(self, schema: StructType) -> StreamReader:
        return StreamReader(self._given, schema)

    def writer(self, schema: StructType, overwrite: bool) -> BatchSink:
        return BatchSink(self._given, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> StreamSink:
        return StreamSink(self._given, schema)


class BatchReader(DataSourceReader):
    """A batch read: planned once, on the driver."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self._options = read_options(given, streaming=False)
        self._fields = fields_of(schema)

    def partitions(self) -> list[InputPartition]:
        with Survey(self._options) as survey:
            ranges = planning.batch_ranges(survey, self._options)
        return [InputPartition(task) for task in planning.tasks(self._options, ranges)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return read_task(partition, self._fields)


def read_task(partition: InputPartition, fields: list[tuple[str, bool]]) -> Iterator[Any]:
    task = partition.value
    if not isinstance(task, ReadTask):
        return iter(())  # what Spark plans if there is nothing to read
    return read(task, fields)
