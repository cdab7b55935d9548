"""Writes the golden batches of this folder. Run with `--overwrite` to replace existing ones.

Changing a golden batch means changing the format that is on users' disks: that is a new version,
not a new golden file.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from raftq.client.wire.batch import Batch, BatchProducer, encode, stamp
from raftq.client.wire.codecs import CODECS

FOLDER = Path(__file__).resolve().parent
TEXT = [b"the same words again and again " * 8, b"the same words again and again " * 9]

# Arguments of encode(), plus base_offset and epoch for stamp().
CASES: dict[str, dict[str, Any]] = {
    "plain": {"values": [b"one", b"two", b"three"], "timestamps": 1_700_000_000_000},
    "one_record": {"values": [b"alone"], "timestamps": 1_700_000_000_000},
    "empty_values": {"values": [b"", b"x", b""]},
    "null_and_empty_keys": {
        "values": [b"a", b"b", b"c", b"d", b"e", b"f", b"g", b"h", b"i"],
        "keys": [None, b"", b"k", None, b"key", b"", None, b"z", None],
    },
    "keys": {"values": [b"a", b"b"], "keys": [b"first", b"second"]},
    "headers": {
        "values": [b"a", b"b", b"c"],
        "headers": [{"trace": b"\x00\xff", "": b""}, None, {"gr\u00fc\u00df": b"gott"}],
    },
    "keys_and_headers": {"values": [b"v"], "keys": [b"k"], "headers": [{"h": b"1"}]},
    "timestamps": {"values": [b"a", b"b", b"c"], "timestamps": [1_000, 3_000, 2_000]},
    "negative_timestamp": {"values": [b"a"], "timestamps": -1},
    "expiries": {"values": [b"a", b"b"], "timestamps": 5, "expiries": [0, 1_700_000_060_000]},
    "deliver_at": {"values": [b"a", b"b"], "deliver_at": [1_700_000_001_000, 1_700_000_002_000]},
    "delay_offsets": {"values": [b"a", b"b"], "delay_offsets": [17, 4]},
    "offset_gaps": {"values": [b"a", b"b"], "offset_deltas": [1, 5], "span": 9},
    "filler": {"values": [], "offset_deltas": [], "span": 1_000, "timestamps": 42},
    "control": {"values": [b"\x01control"], "control": True},
    "producer": {"values": [b"a", b"b"], "producer": [123_456_789_012, 3, 4_000_000_000]},
    "stamped": {"values": [b"a"], "base_offset": 9_000_000_000, "epoch": 7},
    **{f"lane_{lane}": {"values": [b"a"], "lane": lane} for lane in range(5)},
    "lz4": {"values": TEXT, "keys": [b"k", None], "codec": "lz4", "headers": [{"a": b"b"}, None]},
    "zstd": {"values": TEXT, "keys": [b"k", None], "codec": "zstd", "headers": [{"a": b"b"}, None]},
    "incompressible": {"values": [b"q"], "codec": "zstd"},
    "everything": {
        "values": [b"first", b"", b"third"],
        "keys": [b"k1", None, b""],
        "headers": [{"a": b"1", "b": b"2"}, {}, {"c": b""}],
        "timestamps": [10, 30, 20],
        "expiries": [0, 99, 0],
        "deliver_at": [11, 31, 21],
        "delay_offsets": [5, 6, 8],
        "offset_deltas": [0, 2, 3],
        "span": 6,
        "lane": 1,
        "control": True,
        "producer": [1, 2, 3],
        "base_offset": 100,
        "epoch": 12,
    },
}


def build(case: dict[str, Any]) -> bytes:
    """The batch of one case."""
    arguments = dict(case)
    base_offset, epoch = arguments.pop("base_offset", 0), arguments.pop("epoch", 0)
    arguments["codec"] = CODECS[arguments.pop("codec", "none")]
    if "producer" in arguments:
        arguments["producer"] = BatchProducer(*arguments["producer"])
    batch = encode(**arguments)
    stamp(batch, base_offset, epoch)
    return bytes(batch)


def describe(batch: Batch) -> dict[str, Any]:
    """Everything a decoder must find in a batch; bytes as hex."""
    keys = batch.keys()
    return {
        "codec": batch.codec,
        "length": batch.length,
        "base_offset": batch.base_offset,
        "end_offset": batch.end_offset,
        "epoch": batch.epoch,
        "crc": batch.crc,
        "flags": batch.flags,
        "lane": batch.lane,
        "count": batch.count,
        "span": batch.span,
        "producer": [batch.producer_id, batch.producer_epoch, batch.base_sequence],
        "base_timestamp": batch.base_timestamp,
        "max_timestamp": batch.max_timestamp,
        "offsets": list(batch.offsets()),
        "timestamps": batch.timestamps(),
        "keys": [None if key is None else key.hex() for key in keys],
        "values": [value.hex() for value in batch.values()],
        "headers": [
            {name: item.hex() for name, item in headers.items()} for headers in batch.headers()
        ],
        "expiries": batch.expiries(),
        "deliver_at": batch.deliver_at(),
        "delay_offsets": batch.delay_offsets(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    overwrite = parser.parse_args().overwrite
    existing = sorted(path.name for path in FOLDER.glob("*.bin"))
    if existing and not overwrite:
        sys.exit(f"{len(existing)} golden batches exist; nothing was written (see --overwrite)")
    for name, case in CASES.items():
        data = build(case)
        (FOLDER / f"{name}.bin").write_bytes(data)
        text = json.dumps(describe(Batch(data)), indent=1)
        (FOLDER / f"{name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
