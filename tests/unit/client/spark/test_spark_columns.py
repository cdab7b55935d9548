"""Arrow batches for Spark: whatever the log batches are like, rows are what their records say."""

from random import Random

import pytest

from raftq.client.spark.columns import TYPES, Gathered
from raftq.client.wire.batch import Batch, encode, stamp
from raftq.client.wire.outline import outlines

FIELDS = [(name, True) for name in TYPES]


def made(rng: Random, base: int) -> Batch:
    """A batch with a random choice of columns."""
    count = rng.randrange(1, 9)
    values = [rng.randbytes(rng.randrange(40)) for _ in range(count)]
    keys = [rng.choice([None, b"k"]) for _ in values] if rng.random() < 0.4 else None
    headers = [rng.choice([None, {"h": b"1"}]) for _ in values] if rng.random() < 0.3 else None
    times = [rng.randrange(10**12) for _ in values] if rng.random() < 0.5 else 77
    raw = encode(values, keys, headers, times, lane=rng.choice([2, 2, 2, 0]))
    stamp(raw, base, 1)
    return Batch(bytes(raw))


def plain(batches: list[Batch], start: int, end: int) -> list[tuple[object, ...]]:
    """The rows, record by record."""
    return [
        (key, value, "t", 3, offset, time * 1000, batch.lane, list(headers.items()) or None)
        for batch in batches
        for offset, time, key, value, headers in batch.tuples()
        if start <= offset < end
    ]


def rows(table) -> list[tuple[object, ...]]:
    whole = table.set_column(
        table.schema.get_field_index("timestamp"),
        "timestamp",
        table.column("timestamp").cast("int64"),
    )
    found = [tuple(row[name] for name in TYPES) for row in whole.to_pylist()]
    return [
        (*row[:-1], None if row[-1] is None else [(one["key"], one["value"]) for one in row[-1]])
        for row in found
    ]


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_those_of_the_records(seed: int) -> None:
    rng = Random(seed)
    batches, at = [], rng.randrange(100)
    for _ in range(rng.randrange(1, 12)):
        batches.append(made(rng, at))
        at = batches[-1].end_offset + rng.choice([0, 0, 0, 5])  # compaction leaves gaps
    start, end = batches[0].base_offset, at
    start, end = start + rng.randrange(3), max(end - rng.randrange(3), start + 3)
    gathered, found = Gathered("t", 3, FIELDS), []
    for batch in batches:
        gathered.add(batch, start, end)
        if gathered.rows and rng.random() < 0.2:
            found += rows(gathered.take())
    if gathered.rows:
        table = gathered.take()
        table.validate(full=True)
        assert [field.type for field in table.schema] == list(TYPES.values())
        found += rows(table)
    assert found == plain(batches, start, end)


def test_an_outline_has_the_same_numbers() -> None:
    rng = Random(9)
    batch = made(rng, 50)
    names = ["topic", "partition", "offset", "timestamp", "priority"]
    tables = []
    for one in (batch, Batch(outlines(bytes(batch.buffer)))):
        gathered = Gathered("t", 3, [(name, True) for name in names])
        gathered.add(one, 0, 1000)
        tables.append(gathered.take())
    assert tables[0] == tables[1]


def test_more_rows_than_were_counted_before() -> None:
    raw = encode([b""] * 10_000, timestamps=1)
    stamp(raw, 7, 1)
    gathered = Gathered("t", 0, [("offset", True)])
    gathered.add(Batch(bytes(raw)), 8, 10_006)
    assert gathered.take().column("offset").to_pylist() == list(range(8, 10_006))
