"""Every partial struct of a batch header agrees with the whole, and the whole with its drawing."""

import re

import pytest

from raftq.client.wire import batch as batch_module
from raftq.client.wire import headers
from raftq.client.wire.batch import Batch, BatchProducer, encode, stamp
from raftq.client.wire.headers import FORMATS, HEADER, position_of

PARTS = {
    "FRONT": (0, ("magic", "version", "codec", "length", "base_offset", "epoch")),
    "CRCS": (20, ("stamp_crc", "crc")),
    "CRC": (24, ("crc",)),
    "REST": (28, tuple(FORMATS)[8:]),
    "STAMP": (8, ("base_offset", "epoch")),
    "PRODUCER": (40, ("producer_id", "producer_epoch", "base_sequence")),
    "FACTS": (28, ("flags", "lane", "count", "span", "max_timestamp")),
    "BOUNDS": (0, ("magic", "version", "length", "base_offset", "stamp_crc", "span")),
    "CHECKED": (0, tuple(
        name for name in list(FORMATS)[:18] if name not in ("codec", "reserved")
    )),
}  # fmt: skip


@pytest.fixture
def raw() -> bytearray:
    """A batch in which no two fields of a header have the same value."""
    records = encode(
        [b"value", b"b" * 40], [b"key", b"k"], [{"name": b"h"}, None], [5_000, 9_000],
        lane=3, producer=BatchProducer(70, 80, 90), offset_deltas=[0, 6], span=7,
    )  # fmt: skip
    stamp(records, 1_200, 30)
    return records


@pytest.mark.parametrize("name", PARTS)
def test_every_partial_struct_agrees_with_the_full_layout(raw: bytearray, name: str) -> None:
    at, fields = PARTS[name]
    whole = dict(zip(FORMATS, HEADER.unpack_from(raw), strict=True))
    assert position_of(fields[0]) == at
    part = getattr(headers, name).unpack_from(raw, at)
    assert part == tuple(whole[field] for field in fields)


def test_the_full_layout_is_the_one_that_batch_draws(raw: bytearray) -> None:
    rows = re.findall(r"^    (\d+) +(\d+) +(\w+)", batch_module.__doc__ or "", re.MULTILINE)
    assert [(int(at), name) for at, _, name in rows] == [(position_of(one), one) for one in FORMATS]
    assert HEADER.format == "<2sBBIqIIIHBBIIqIIqqIIII"
    batch = Batch(raw)
    whole = dict(zip(FORMATS, HEADER.unpack_from(raw), strict=True))
    for field in ("length", "base_offset", "epoch", "crc", "span", "max_timestamp", "body_length"):
        assert whole[field] == getattr(batch, field)
    assert len({whole[field] for field in whole if field not in ("reserved", "codec")}) == 20
