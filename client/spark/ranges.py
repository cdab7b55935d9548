"""Pure: which offsets a Spark job reads: ranges, their split into tasks, and rate limits.

    selection (options) ──> ends of each partition ──> one Range each ──split──> tasks

Ranges are half-open. Every function depends on its arguments alone: a micro-batch that is planned
again after a restart has the same tasks with the same records in the same order.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import PartitionKey

Offsets = dict[PartitionKey, int]


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """The records of one partition in [start, end)."""

    topic: str
    partition: int
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start

    def describe(self) -> str:
        return f"{self.topic}/{self.partition} [{self.start}, {self.end})"


def between(
    start: Mapping[PartitionKey, int], end: Mapping[PartitionKey, int]
) -> list[OffsetRange]:
    """The ranges that are not empty. A partition that `start` does not know is new: all of it."""
    found = []
    for key in sorted(end):
        first = start.get(key, 0)
        if first < end[key]:
            found.append(OffsetRange(*key, first, end[key]))
    return found


def split(
    ranges: Iterable[OffsetRange], parts_min: int = 0, records_max: int = 0
) -> list[OffsetRange]:
    """Cuts ranges by size so that there are about `parts_min` of them, and none is longer than
    `records_max`; 0 leaves them as they are."""
    whole = list(ranges)
    total = sum(span.size for span in whole)
    found = []
    for span in whole:
        pieces = 1
        if parts_min > len(whole) and total:
            pieces = max(1, round(span.size * parts_min / total))
        if records_max:
            pieces = max(pieces, -(-span.size // records_max))
        found += _cut(span, min(pieces, span.size))
    return found


def _cut(one: OffsetRange, pieces: int) -> list[OffsetRange]:
    if pieces <= 1:
        return [one]
    cuts = [one.start + one.size * at // pieces for at in range(pieces + 1)]
    return [OffsetRange(one.topic, one.partition, first, end) for first, end in pairwise(cuts)]


def admit(
    start: Mapping[PartitionKey, int], end: Mapping[PartitionKey, int], records_max: int
) -> Offsets:
    """How far to read with a limit of records: each partition by its share of what is there, and
    at least one record of each partition that has some."""
    sizes = {key: max(end[key] - start.get(key, 0), 0) for key in sorted(end)}
    total = sum(sizes.values())
    if total <= records_max:
        return dict(end)
    admitted = {}
    for key, size in sizes.items():
        share = max(size * records_max // total, 1) if size else 0
        admitted[key] = start.get(key, 0) + min(share, size)
    return admitted


def to_json(offsets: Mapping[PartitionKey, int]) -> dict[str, dict[str, int]]:
    """The JSON for Spark's checkpoint. Spark compares the text, so keys are in order."""
    found: dict[str, dict[str, int]] = {}
    for topic, partition in sorted(offsets):
        found.setdefault(topic, {})[str(partition)] = offsets[topic, partition]
    return found


def from_json(told: object) -> Offsets:
    """Parses the JSON of `to_json` or of a user: {"topic": {"0": 23}}."""
    found: Offsets = {}
    if not isinstance(told, dict):
        raise InvalidArgument(f"offsets are like {{'topic': {{'0': 23}}}}, not {told!r}")
    for topic, parts in told.items():
        if not isinstance(parts, dict):
            raise InvalidArgument(f"the offsets of {topic!r} are like {{'0': 23}}, not {parts!r}")
        for partition, offset in parts.items():
            if not str(partition).isdecimal() or type(offset) is not int:
                raise InvalidArgument(f"{topic!r}: {partition!r}: {offset!r} is no offset")
            found[topic, int(partition)] = offset
    return found
