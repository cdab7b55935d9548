"""Shell: makes tasks from options and a survey of the cluster."""

from collections.abc import Iterable

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import PartitionKey
from raftq.client.spark.options import Point, ReadOptions
from raftq.client.spark.ranges import OffsetRange, Offsets, between, split
from raftq.client.spark.reading import DataLoss, ReadTask, loss_message
from raftq.client.spark.survey import Survey

LATEST: Point = ("latest", 0)
EARLIEST: Point = ("earliest", 0)


def batch_ranges(survey: Survey, options: ReadOptions) -> list[OffsetRange]:
    """The ranges of a batch read, partition by partition."""
    keys = survey.keys()
    start = starting(survey, options, keys)
    end = survey.resolve(keys, options.ending)
    latest = survey.all_of([key for key in keys if options.ending.at(key)[0] == "offset"], LATEST)
    for key, last in latest.items():
        if end[key] > last:
            raise InvalidArgument(
                f"endingOffsets: {key[0]}/{key[1]} ends at offset {last}, before {end[key]}"
            )
    return between(start, end)


def starting(survey: Survey, options: ReadOptions, keys: Iterable[PartitionKey]) -> Offsets:
    """Where reading begins.

    Offsets that are gone already are a loss. If no record of a partition has reached the time, it
    is an error or means the end, as the options say."""
    keys = list(keys)
    found = survey.resolve(keys, options.starting)
    given = [key for key in keys if options.starting.at(key)[0] == "offset"]
    first = survey.all_of(given, EARLIEST)
    for key in given:
        if first[key] > found[key]:
            if options.fail_on_data_loss:
                lost = OffsetRange(*key, found[key], first[key])
                raise DataLoss(loss_message(lost, f"the log begins at {first[key]}"))
            found[key] = first[key]
    if options.no_time == "error":
        timed = [key for key in keys if options.starting.at(key)[0] == "time"]
        last = survey.all_of(timed, LATEST)
        late = [key for key in timed if found[key] >= last[key]]
        if late:
            topic, partition = late[0]
            at = options.starting.at(late[0])[1]
            raise InvalidArgument(
                f"{topic}/{partition} has no record at or after {at} ms; "
                "startingOffsetsByTimestampStrategy=latest begins at its end instead"
            )
    return found


def tasks(options: ReadOptions, ranges: Iterable[OffsetRange]) -> list[ReadTask]:
    cut = split(ranges, options.min_partitions, options.max_records_per_partition)
    return [
        ReadTask(
            options.bootstrap,
            piece,
            options.fail_on_data_loss,
            options.fetch_bytes,
            options.batch_bytes,
            options.poll_timeout_ms,
        )
        for piece in cut
    ]
