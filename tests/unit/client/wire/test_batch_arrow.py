"""A batch as Arrow columns: the same content, not copied, and safe when damaged."""

from itertools import pairwise
from pathlib import Path
from random import Random
from struct import Struct

import pytest
from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, UnknownFormat
from raftq.client.wire.batch import Batch, decode, encode, stamp
from raftq.client.wire.record import pack_headers

pa = pytest.importorskip("pyarrow")
from raftq.client.wire.arrow import SCHEMA, to_arrow  # noqa: E402 - only with pyarrow

FOLDER = Path(__file__).resolve().parents[3] / "golden"
GOLDEN = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.bin"))}
U32 = Struct("<I")


def check_same(batch: Batch) -> None:
    table = to_arrow(batch)
    table.validate(full=True)
    assert table.schema == SCHEMA
    assert table.column("key").to_pylist() == batch.keys()
    assert table.column("value").to_pylist() == batch.values()
    assert table.column("offset").to_pylist() == list(batch.offsets())
    assert table.column("timestamp").cast(pa.int64()).to_pylist() == batch.timestamps()
    assert table.column("priority").to_pylist() == [batch.lane] * batch.count
    packed = [pack_headers(headers) or None for headers in batch.headers()]
    assert table.column("headers").to_pylist() == packed


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_golden_batch_becomes_the_same_columns(name: str) -> None:
    check_same(decode(GOLDEN[name]))


@pytest.mark.parametrize("kind", [bytearray, memoryview])
def test_other_buffers_become_the_same_columns(kind: type) -> None:
    check_same(decode(kind(GOLDEN["everything"])))


def test_batches_at_any_position_become_the_same_columns() -> None:
    for position in range(1, 9):
        data = bytes(position) + GOLDEN["everything"] + b"behind"
        check_same(decode(data, position))


def test_columns_are_slices_of_the_batch() -> None:
    data = bytes(
        encode(
            [b"v%d" % index for index in range(50)],
            [None if index % 3 == 0 else b"k" * index for index in range(50)],
            [{"h": b"x"} if index % 2 else None for index in range(50)],
            list(range(50)),
        )
    )
    batch = decode(data)
    table = to_arrow(batch)
    origin = pa.py_buffer(data).address
    start = origin + 88
    validity, ends, keys = table.column("key").buffers()
    assert ends.address == start + batch.column_at("keys")
    assert keys.address == start + batch.section("keys")[0]
    assert validity.address == start + batch.section("keys")[0] - 7
    _, ends, values = table.column("value").buffers()
    assert ends.address == start + batch.column_at("values")
    assert values.address == start + batch.section("values")[0]
    _, ends, headers = table.column("headers").buffers()
    assert ends.address == start + batch.column_at("headers")
    assert headers.address == start + batch.section("headers")[0]
    assert table.column("timestamp").buffers()[1].address == start
    end = origin + len(data)
    assert all(origin <= part.address < end for part in (validity, ends, keys, values, headers))


def test_a_batch_behind_another_shares_its_bytes_and_copies_only_unaligned_numbers() -> None:
    data = bytes(3) + bytes(encode([b"value"], [b"key"], None, [7]))
    table = to_arrow(decode(data, 3))
    origin = pa.py_buffer(data).address
    _, ends, values = table.column("value").buffers()
    assert origin <= values.address < origin + len(data)
    assert ends.address % 4 == 0
    assert table.column("timestamp").buffers()[1].address % 8 == 0


def test_columns_outlive_the_batch_they_came_from() -> None:
    table = to_arrow(decode(bytes(encode([b"a" * 5_000, b"b"], [None, b"k"]))))
    assert table.column("value").to_pylist() == [b"a" * 5_000, b"b"]


def test_the_largest_offset_fits() -> None:
    data = encode([b"a", b"b"])
    stamp(data, 2**63 - 3, 0)
    assert to_arrow(decode(data)).column("offset").to_pylist() == [2**63 - 3, 2**63 - 2]


def test_damaged_columns_never_reach_arrow() -> None:
    rng = Random(20_240_604)
    batches = list(GOLDEN.values())
    answers = [0, 0]
    for case in range(15_000):
        data = bytearray(batches[case % len(batches)])
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(28, len(data))
            data[at] = rng.choice((data[at] ^ 1 << rng.randrange(8), 0, 255, 128))
        U32.pack_into(data, 24, crc32c(bytes(data[28:])))
        try:
            table = to_arrow(decode(bytes(data)))
        except (CorruptBatch, UnknownFormat):
            answers[0] += 1
            continue
        table.validate(full=True)
        table.column("value").to_pylist()
        table.column("key").to_pylist()
        answers[1] += 1
    assert min(answers) > 1_000, answers


@pytest.mark.parametrize("size", [1, 4, 1024])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
@pytest.mark.parametrize("by", [-5, -1, 1, 5, 2**31])
def test_an_offset_that_is_off_among_equal_ones_is_seen(size: int, at: int, by: int) -> None:
    """Columns of equal items are compared as a whole: what differs goes the long way."""
    batch = decode(encode([bytes([65 + number]) * size for number in range(3)]))
    data = bytearray(batch.buffer)
    ends = [0, size, 2 * size, 3 * size]
    ends[at] += by
    U32.pack_into(data, 88 + batch.column_at("values") + 4 * at, ends[at] % 2**32)
    U32.pack_into(data, 24, crc32c(bytes(data[28:])))
    damaged = decode(bytes(data))
    if at in (1, 2) and sorted(ends) == ends:
        whole = b"".join(batch.values())
        expected = [whole[a:b] for a, b in pairwise(ends)]
        assert damaged.values() == to_arrow(damaged).column("value").to_pylist() == expected
        return
    for read in (Batch.values, to_arrow):
        with pytest.raises(CorruptBatch):
            read(damaged)
