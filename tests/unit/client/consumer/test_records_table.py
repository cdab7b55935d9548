"""A table of many fetched batches holds the same records as the batches."""

import pytest

pytest.importorskip("pyarrow")

from raftq.client.consumer.records import Fetched, to_records, to_table
from raftq.client.wire.batch import Batch, encode, stamp


def stamped(base: int, **columns: object) -> Batch:
    batch = encode(**columns)  # type: ignore[arg-type]
    stamp(batch, base, 1)
    return Batch(memoryview(batch).toreadonly())


def test_runs_gaps_lanes_partitions_and_a_cut_beginning() -> None:
    values = [b"v%d" % number for number in range(300)]
    fetched = [
        Fetched("t", 0, 4, stamped(0, values=values[:10])),
        Fetched("t", 0, 10, stamped(10, values=values[10:12], lane=1)),
        Fetched("t", 0, 12, stamped(12, values=[b"a", b"b"], offset_deltas=[1, 5], span=8)),
        Fetched("t", 0, 20, stamped(20, values=values, keys=[b"k", None] * 150)),
        Fetched("t", 0, 320, stamped(320, values=[b""] * 5_000)),
        Fetched("u", 3, 5_320, stamped(5_320, values=[b"x"], headers=[{"h": b"1"}])),
        Fetched("u", 3, 0, stamped(0, values=[b"x"] * 3, timestamps=[5, 6, 7])),
    ]
    table = to_table(fetched)
    table.validate(full=True)
    expected = [record for one in fetched for record in to_records(one)]
    rows = table.to_pylist()
    assert [(r["topic"], r["partition"], r["offset"], r["key"], r["value"]) for r in rows] == [
        (r.topic, r.partition, r.offset, r.key, r.value) for r in expected
    ]
    assert [r["priority"] for r in rows] == [r.priority for r in expected]
    assert [r["timestamp"].timestamp() * 1000 for r in rows] == [r.timestamp for r in expected]
    assert [r["headers"] is None for r in rows] == [not r.headers for r in expected]


def test_no_batches_are_an_empty_table_with_all_columns() -> None:
    table = to_table([])
    assert table.num_rows == 0
    assert table.column_names[:3] == ["topic", "partition", "key"]
