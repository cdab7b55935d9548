"""The golden batches of tests/golden: decoded, encoded again, and read by a second, dumb reader."""

import importlib.util
import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgpack
import pytest

from raftq.client.wire.batch import BatchProducer, decode, encode, stamp, validate

FOLDER = Path(__file__).resolve().parents[3] / "golden"
NAMES = sorted(path.stem for path in FOLDER.glob("*.bin"))


def load(name: str) -> tuple[bytes, dict[str, Any]]:
    return (FOLDER / f"{name}.bin").read_bytes(), json.loads((FOLDER / f"{name}.json").read_text())


def generator() -> Any:
    spec = importlib.util.spec_from_file_location("golden_generate", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_case_of_the_generator_has_its_files() -> None:
    assert sorted(generator().CASES) == NAMES
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_batch_decodes_to_what_is_expected(name: str) -> None:
    data, expected = load(name)
    batch = decode(data)
    validate(batch)
    assert generator().describe(batch) == expected


@pytest.mark.parametrize("name", NAMES)
def test_expected_content_encodes_to_the_golden_bytes(name: str) -> None:
    data, expected = load(name)
    batch = encode(
        [bytes.fromhex(value) for value in expected["values"]],
        encoded_keys(expected),
        encoded_headers(expected),
        expected["timestamps"] if expected["flags"] & 4 else expected["base_timestamp"],
        expected["expiries"],
        deliver_at=expected["deliver_at"],
        delay_offsets=expected["delay_offsets"],
        offset_deltas=deltas(expected) if expected["flags"] & 128 else None,
        span=expected["span"],
        lane=expected["lane"],
        codec=expected["codec"],
        control=bool(expected["flags"] & 256),
        producer=BatchProducer(*expected["producer"]),
    )
    stamp(batch, expected["base_offset"], expected["epoch"])
    if expected["codec"] == 0:
        assert bytes(batch) == data
    else:
        # Compressors may change their output; what it decompresses to may not.
        again, golden = decode(bytes(batch)), decode(data)
        assert again.codec == golden.codec
        assert again.body() == golden.body()


def encoded_keys(expected: dict[str, Any]) -> list[bytes | None] | None:
    if not expected["flags"] & 1:
        return None
    return [None if key is None else bytes.fromhex(key) for key in expected["keys"]]


def encoded_headers(expected: dict[str, Any]) -> list[dict[str, bytes] | None]:
    return [
        {name: bytes.fromhex(item) for name, item in headers.items()}
        for headers in expected["headers"]
    ]


def deltas(expected: dict[str, Any]) -> list[int]:
    return [offset - expected["base_offset"] for offset in expected["offsets"]]


def read_plainly(data: bytes) -> dict[str, Any]:
    """An uncompressed batch, read field by field as batch.py draws it, without its code."""
    fields = struct.unpack("<2sBBIqIIIHBBIIqIIqqIIII", data[:88])
    base_offset, flags, count = fields[4], fields[8], fields[11]
    sizes = fields[18:21]
    at = 88

    def numbers(code: str, amount: int, present: bool) -> list[int] | None:
        nonlocal at
        if not present:
            return None
        column = list(struct.unpack_from(f"<{amount}{code}", data, at))
        at += struct.calcsize(f"<{amount}{code}")
        return column

    timestamps = numbers("q", count, bool(flags & 4))
    wide = [numbers("q", count, bool(flags & flag)) for flag in (8, 32, 64)]
    steps = numbers("I", count, bool(flags & 128))
    ends = [numbers("I", count + 1, bool(flag)) for flag in (1, flags & 1, flags & 16)]
    valid = [True] * count
    if flags & 2:
        valid = [bool(data[at + i // 8] >> (i % 8) & 1) for i in range(count)]
        at += (count + 7) // 8
    items = []
    for column, size in zip((ends[1], ends[0], ends[2]), sizes, strict=True):
        items.append([data[at + a : at + b] for a, b in zip(column or [], (column or [])[1:])])  # noqa: B905
        at += size
    assert at == len(data)
    keys = [key.hex() if ok else None for key, ok in zip(items[0], valid, strict=False)]
    return {
        "offsets": [base_offset + step for step in (range(count) if steps is None else steps)],
        "timestamps": [fields[16]] * count if timestamps is None else timestamps,
        "expiries": wide[0],
        "deliver_at": wide[1],
        "delay_offsets": wide[2],
        "keys": keys if flags & 1 else [None] * count,
        "values": [value.hex() for value in items[1]],
        "headers": [
            {name: item.hex() for name, item in (msgpack.unpackb(one) if one else {}).items()}
            for one in (items[2] if flags & 16 else [b""] * count)
        ],
    }


@pytest.mark.parametrize("name", NAMES)
def test_a_second_reader_that_follows_the_drawing_finds_the_same(name: str) -> None:
    data, expected = load(name)
    if expected["codec"]:
        batch = decode(data)
        body, start = batch.body()
        data = data[:88] + body[start:]
    plain = read_plainly(data)
    assert plain == {column: expected[column] for column in plain}


def test_the_generator_refuses_to_replace_golden_batches() -> None:
    before = {name: load(name)[0] for name in NAMES}
    done = subprocess.run(
        [sys.executable, FOLDER / "generate.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "nothing was written" in done.stderr
    assert {name: load(name)[0] for name in NAMES} == before
