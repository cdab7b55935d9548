"""Round trips of the record batch over all columns, codecs, lanes and kinds of buffer."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.wire.batch import BatchProducer, decode, encode, encode_one, stamp, validate
from raftq.client.wire.record import BatchRecord, pack_headers

FAST = settings(deadline=None, max_examples=150)
I64 = st.integers(-(2**63), 2**63 - 1)
HEADERS = st.dictionaries(st.text(max_size=8), st.binary(max_size=12), max_size=3)
PRODUCERS = st.builds(BatchProducer, I64, st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of encode()."""
    count = draw(st.integers(0, 20))

    def column(items: st.SearchStrategy[Any]) -> Any:
        return draw(st.none() | st.lists(items, min_size=count, max_size=count))

    gaps = draw(st.booleans()) or count == 0
    # Repeated bytes, so that compression has something to do in some examples.
    values = st.binary(max_size=40) | st.builds(bytes, st.integers(0, 2_000))
    arguments = {
        "values": draw(st.lists(values, min_size=count, max_size=count)),
        "keys": column(st.none() | st.binary(max_size=10)),
        "headers": column(st.none() | HEADERS),
        "timestamps": draw(I64 | st.lists(I64, min_size=count, max_size=count)),
        "expiries": column(I64),
        "deliver_at": column(I64),
        "delay_offsets": column(I64),
        "lane": draw(st.integers(0, 4)),
        "codec": draw(st.integers(0, 2)),
        "control": draw(st.booleans()),
        "producer": draw(PRODUCERS),
    }
    if gaps:
        steps = draw(st.lists(st.integers(1, 50), min_size=count + 1, max_size=count + 1))
        ends = [sum(steps[: index + 1]) for index in range(count + 1)]
        arguments["offset_deltas"] = [end - 1 for end in ends[:-1]]
        arguments["span"] = ends[-1]
    return arguments


@FAST
@given(batches(), st.integers(0, 2**62), st.integers(0, 2**32 - 1))
def test_what_is_encoded_is_decoded(given_: dict[str, Any], base_offset: int, epoch: int) -> None:
    data = encode(**given_)
    stamp(data, base_offset, epoch)
    batch = decode(bytes(data))
    validate(batch)
    count = len(given_["values"])
    times = given_["timestamps"]
    steps = given_.get("offset_deltas", range(count))
    assert (batch.base_offset, batch.epoch, batch.count) == (base_offset, epoch, count)
    assert batch.end_offset == base_offset + given_.get("span", count)
    assert batch.values() == given_["values"]
    assert batch.keys() == (given_["keys"] or [None] * count)
    assert batch.headers() == [item or {} for item in given_["headers"] or [None] * count]
    assert batch.timestamps() == ([times] * count if isinstance(times, int) else times)
    assert batch.expiries() == given_["expiries"]
    assert batch.deliver_at() == given_["deliver_at"]
    assert batch.delay_offsets() == given_["delay_offsets"]
    assert list(batch.offsets()) == [base_offset + step for step in steps]
    assert batch.lane == given_["lane"]
    assert bool(batch.flags & 256) == given_["control"]
    origin = BatchProducer(batch.producer_id, batch.producer_epoch, batch.base_sequence)
    assert origin == given_["producer"]


@FAST
@given(batches())
def test_records_are_the_columns_side_by_side(given_: dict[str, Any]) -> None:
    batch = decode(bytes(encode(**given_)))
    columns = (batch.offsets(), batch.timestamps(), batch.keys(), batch.values(), batch.headers())
    assert batch.tuples() == list(zip(*columns, strict=True))
    expiries = given_["expiries"] or [0] * batch.count
    assert batch.records() == [
        BatchRecord(*row, given_["lane"], expiry)
        for row, expiry in zip(batch.tuples(), expiries, strict=True)
    ]


@FAST
@given(batches(), st.integers(0, 2**62), st.integers(0, 2**32 - 1))
def test_a_stamp_leaves_everything_else_alone(
    given_: dict[str, Any], base_offset: int, epoch: int
) -> None:
    data = encode(**given_)
    before = bytes(data)
    stamp(memoryview(data), base_offset, epoch)
    assert data[:8] == before[:8]
    assert data[24:] == before[24:]
    batch = decode(data)
    assert (batch.base_offset, batch.epoch) == (base_offset, epoch)


@FAST
@given(batches(), st.binary(max_size=30), st.binary(max_size=30))
def test_any_buffer_and_position_decodes_alike(
    given_: dict[str, Any], before: bytes, after: bytes
) -> None:
    data = bytes(encode(**given_))
    expected = decode(data).records()
    around = before + data + after
    for buffer in (around, bytearray(around), memoryview(around), memoryview(bytearray(around))):
        batch = decode(buffer, len(before))
        assert batch.records() == expected
        assert batch.length == len(data)
        assert all(type(value) is bytes for value in batch.values())


@FAST
@given(
    st.binary(max_size=50),
    st.none() | st.binary(max_size=9),
    st.none() | HEADERS,
    I64,
    I64,
    st.integers(0, 4),
)
def test_encode_one_is_a_shorter_way_to_the_same_bytes(
    value: bytes,
    key: bytes | None,
    headers: dict[str, bytes] | None,
    timestamp: int,
    expiry: int,
    lane: int,
) -> None:
    one = encode_one(value, timestamp, lane, key, pack_headers(headers), expiry)
    keys = None if key is None else [key]
    expiries = [expiry] if expiry else None
    # A span takes the general way through encode().
    general = encode([value], keys, [headers], timestamp, expiries, lane=lane, span=1)
    assert one == general
    assert one == encode(
        [value], keys, [headers], timestamp, [expiry] if expiry else None, lane=lane
    )
    batch = decode(one)
    assert batch.one_value() == value
    assert batch.records() == [BatchRecord(0, timestamp, key, value, headers or {}, lane, expiry)]


@FAST
@given(st.lists(st.none() | st.just(b""), min_size=1, max_size=40))
def test_null_keys_and_empty_keys_are_told_apart(keys: list[bytes | None]) -> None:
    assert decode(encode([b""] * len(keys), keys)).keys() == keys
