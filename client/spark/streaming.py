"""Shell: a topic as a stream of micro-batches. Spark's checkpoint is the only source of truth.

    initialOffset ──> latestOffset(start, limit) ──> partitions(start, end) ──> read ──> commit(end)

One object lives on the driver as long as the query does. Copies of it, made from its options, read
on the executors. Offsets are {"topic": {"0": 23}}, keys in order, each the next to be read. They
never go back, even if a newly elected leader reports less. A partition that appears while the query
runs is read from its beginning.

A leader that does not answer delays only its own partitions: they stay where they are until the
next trigger. If no leader answers at all, the query waits for `pollTimeoutMs`, then fails.
"""

import logging
from collections.abc import Iterator
from time import perf_counter
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from raftq.client.common.errors import RaftqError, RequestTimeout, UnknownTopic
from raftq.client.common.types import PartitionKey
from raftq.client.spark import planning
from raftq.client.spark.options import read_options
from raftq.client.spark.ranges import OffsetRange, Offsets, admit, between, from_json, to_json
from raftq.client.spark.reading import DataLoss, ReadTask, loss_message, read
from raftq.client.spark.schema import fields_of
from raftq.client.spark.survey import Found, Survey

logger = logging.getLogger(__name__)

ANSWER_S = 5.0  # for a leader, after others have answered
BACK_S = 10.0  # for a leader whose end is below what was read: it may not know better yet
STORE_S = 5.0

Json = dict[str, dict[str, int]]


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read."""

    def __init__(self, given: dict[str, str], schema: StructType) -> None:
        self._options = read_options(given, streaming=True)
        self._fields = fields_of(schema)
        self._survey: Survey | None = None
        self._target: Offsets | None = None  # the end of a query that only reads what is there
        self._latest: Offsets = {}
        self._started_at: float | None = None  # when the last batch with records began

    def _asks(self) -> Survey:
        if self._survey is None:
            self._survey = Survey(self._options)
        return self._survey

    # The end of the next batch.

    def initialOffset(self) -> Json:
        survey = self._asks()
        return to_json(planning.starting(survey, self._options, survey.keys()))

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_offsets_per_trigger
        return ReadMaxRows(most) if most else ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        survey = self._asks()
        self._target = survey.all_of(survey.keys(), planning.LATEST)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> Json:
        begun = from_json(start)
        end = self._ends(begun)
        new = sum(max(end[key] - begun.get(key, 0), 0) for key in end)
        if self._waits_for_more(new, limit):
            return to_json(begun)
        if isinstance(limit, ReadMaxRows):
            end = admit(begun, end, limit.max_rows)
        if new:
            self._started_at = perf_counter()
        # A new and still empty partition must not cause an empty batch.
        return to_json({key: at for key, at in end.items() if key in begun or at > 0})

    def reportLatestOffset(self) -> Json | None:
        return to_json(self._latest) if self._latest else None

    def _waits_for_more(self, new: int, limit: ReadLimit) -> bool:
        least = self._options.min_offsets_per_trigger
        if isinstance(limit, ReadMinRows):
            least = limit.min_rows
        if not least or new >= least or not new or self._target is not None:
            return False
        if self._started_at is None:
            self._started_at = perf_counter()
        delay_s = self._options.max_trigger_delay_ms / 1000
        return perf_counter() - self._started_at < delay_s

    def _ends(self, begun: Offsets) -> Offsets:
        """How far every partition can be read; never less than before."""
        if self._target is not None:
            known = {**dict.fromkeys(begun, 0), **self._target}
            return {key: max(end, begun.get(key, 0)) for key, end in known.items()}
        answers = self._answers(begun)
        ends: Offsets = {}
        for key, answer in answers.items():
            first = begun.get(key, 0)
            if isinstance(answer, RaftqError):
                if isinstance(answer, UnknownTopic):
                    self._gone(key, first)
                elif key in begun:
                    logger.warning("%s/%d waits for the next trigger: %s", *key, answer)
                if key in begun:
                    ends[key] = first
            else:
                ends[key] = max(answer, first)
        self._latest = ends
        return ends

    def _answers(self, begun: Offsets) -> Found:
        """The end of each partition, or the error. Raises if there is no end at all."""
        survey, options = self._asks(), self._options
        deadline = perf_counter() + options.poll_timeout_ms / 1000
        while True:
            gone: Found = {}
            try:
                keys = survey.keys()
                gone = {
                    key: UnknownTopic(f"no topic is named {key[0]!r}")
                    for key in begun
                    if key not in set(keys)
                }
            except UnknownTopic:
                keys = []
                gone = {key: UnknownTopic(f"no topic is named {key[0]!r}") for key in begun}
            answers = survey.ask(keys, planning.LATEST, ANSWER_S)
            answers = self._without_doubt(survey, begun, answers)
            known = [answer for answer in answers.values() if not isinstance(answer, RaftqError)]
            if known or not keys:
                return {**gone, **answers}
            if perf_counter() > deadline:
                problem = next(
                    answer for answer in answers.values() if isinstance(answer, RaftqError)
                )
                raise RequestTimeout(
                    f"no leader has told its end for {options.poll_timeout_ms} ms "
                    f"(pollTimeoutMs): {problem}"
                ).with_outcome("failed")

    def _without_doubt(self, survey: Survey, begun: Offsets, answers: Found) -> Found:
        """Asks again for ends that are below what was read. If one stays there, records are
        gone."""
        behind = _behind(begun, answers)
        deadline = perf_counter() + BACK_S
        while behind and perf_counter() < deadline:
            answers |= survey.ask(behind, planning.LATEST, ANSWER_S)
            behind = _behind(begun, answers)
        for key in behind:
            end = answers[key]
            why = f"the log ends at {end}; was the topic deleted and created again?"
            self._loss(OffsetRange(*key, end if isinstance(end, int) else 0, begun[key]), why)
        return answers

    def _gone(self, key: PartitionKey, first: int) -> None:
        self._loss(OffsetRange(*key, first, first), "the topic is not there any more")

    def _loss(self, lost: OffsetRange, why: str) -> None:
        message = loss_message(lost, why)
        if self._options.fail_on_data_loss:
            raise DataLoss(message)
        logger.warning("%s", message)

    # The tasks of a batch.

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> list[InputPartition]:
        ranges = between(from_json(start), from_json(end))
        return [InputPartition(task) for task in planning.tasks(self._options, ranges)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        task = partition.value
        return read(task, self._fields) if isinstance(task, ReadTask) else iter(())

    # Afterwards.

    def commit(self, end: dict[str, Any]) -> None:
        """Stores positions for a group, so that its lag can be watched.

        Nothing depends on them, so an error is only logged."""
        group = self._options.commit_group
        if not group:
            return
        try:
            self._asks().store(group, from_json(end), STORE_S)
        except RaftqError as error:
            logger.warning("positions were not stored for group %r: %s", group, error)

    def stop(self) -> None:
        survey, self._survey = self._survey, None
        if survey is not None:
            survey.close()


def _behind(begun: Offsets, answers: Found) -> list[PartitionKey]:
    return [key for key, end in answers.items() if isinstance(end, int) and end < begun.get(key, 0)]
