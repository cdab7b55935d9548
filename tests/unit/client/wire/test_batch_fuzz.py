"""Damaged batches: 100,000 seeded cases of flipped, overwritten and cut bytes.

Damage that the checksums see must be refused. Damage with the checksums made right again, as a
hostile or broken producer would send it, meets only the structural checks: it is refused, or it
decodes cleanly into what its header promises. No other exception, and no allocation out of bounds.
"""

import tracemalloc
from contextlib import suppress
from pathlib import Path
from random import Random
from struct import Struct

import pytest
import zstandard
from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch, RaftqError, UnknownFormat
from raftq.client.wire.batch import BATCH_BYTES_MAX, RECORDS_MAX, Batch, decode, encode, validate

FOLDER = Path(__file__).resolve().parents[3] / "golden"
GOLDEN = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.bin"))}
U32 = Struct("<I")
EXTREMES = (
    *(0, 1, 2, 7, 8, 127, 255, 2**16 - 1, 2**20, 2**20 + 1),
    *(2**26, 2**31 - 1, 2**31, 2**32 - 1),
)
FIELDS = (4, 8, 12, 32, 36, 40, 48, 56, 60, 64, 68, 72, 76, 80, 84)
CASES_EACH = 50_000


def read_everything(batch: Batch) -> None:
    """Decode all columns, and hold them against the header."""
    count = batch.count
    values, keys, headers = batch.values(), batch.keys(), batch.headers()
    assert len(values) == len(keys) == len(headers) == count <= RECORDS_MAX
    assert sum(map(len, values)) == batch.values_length
    assert sum(len(key) for key in keys if key is not None) <= batch.keys_length
    assert len(batch.timestamps()) == count
    for column in (batch.expiries(), batch.deliver_at(), batch.delay_offsets()):
        assert column is None or len(column) == count
    offsets = list(batch.offsets())
    assert offsets == sorted(set(offsets))
    assert all(batch.base_offset <= offset < batch.end_offset for offset in offsets)
    assert [record.value for record in batch.records()] == values
    if count == 1:
        assert batch.one_value() == values[0]


def damaged(data: bytes, rng: Random) -> bytes:
    """One to four changes: bits flipped, fields and stretches overwritten, bytes cut or added."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        kind = rng.randrange(8)
        at = rng.randrange(len(out)) if out else 0
        if kind == 0:
            del out[at:]
        elif kind == 1:
            del out[at : at + rng.randint(1, 8)]
        elif kind == 2:
            out[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 3 and len(out) >= 88:
            U32.pack_into(out, rng.choice(FIELDS), rng.choice(EXTREMES))
        elif kind == 4 and len(out) >= at + 4:
            U32.pack_into(out, at, rng.choice(EXTREMES))
        elif kind == 5:
            out[at : at + 4] = rng.randbytes(len(out[at : at + 4]))
        elif out:
            out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


def damaged_inside(data: bytes, rng: Random) -> bytes:
    """Bytes changed behind the header's stamp, none added or cut: gets past most header checks."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(88 if rng.random() < 0.9 else 28, len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            out[at] = rng.choice((0, 1, 127, 128, 255, 0x80, 0x81, 0xC1, 0xDD, 0xDF))
        elif kind == 2 and at + 4 <= len(out):
            U32.pack_into(out, at, rng.choice(EXTREMES))
        else:
            other = rng.randrange(88, len(out))
            out[at], out[other] = out[other], out[at]
    return bytes(out)


def repaired(data: bytes, rng: Random) -> bytes:
    """Checksums right again, and often the total length too, so that checks further in are met."""
    out = bytearray(data)
    if len(out) < 88:
        return data
    if rng.random() < 0.8:
        out[0:2] = b"RQ"
        if rng.random() < 0.95:
            out[2] = 1
        U32.pack_into(out, 4, len(out))
        if out[3] == 0 and rng.random() < 0.7:
            U32.pack_into(out, 84, len(out) - 88)
    U32.pack_into(out, 20, crc32c(bytes(out[:20])))
    U32.pack_into(out, 24, crc32c(bytes(out[28:])))
    return bytes(out)


def test_damage_that_checksums_see_is_always_refused() -> None:
    rng = Random(20_240_601)
    batches = list(GOLDEN.values())
    refused = case = 0
    while refused < CASES_EACH:
        case += 1
        data = batches[case % len(batches)]
        bad = damaged(data, rng)
        # Changes that undo each other, and bytes behind a whole batch, are no damage to it.
        if bad[: len(data)] == data:
            continue
        try:
            decode(bad)
        except CorruptBatch:
            refused += 1
            continue
        pytest.fail(f"case {case}: damage was not seen in {bad.hex()}")


def test_damage_under_right_checksums_is_refused_or_decodes_cleanly() -> None:
    rng = Random(20_240_602)
    batches = list(GOLDEN.values())
    answers = {"valid": 0, "CorruptBatch": 0, "UnknownFormat": 0}
    inside = case = 0
    while sum(answers.values()) < CASES_EACH:
        case += 1
        data = batches[case % len(batches)]
        damage = damaged if rng.random() < 0.5 else damaged_inside
        bad = repaired(damage(data, rng), rng)
        if bad == data:
            continue
        answer = "valid"
        try:
            batch = decode(bad)
            inside += 1
            read_everything(batch)
            validate(batch)
        except (CorruptBatch, UnknownFormat) as error:
            answer = type(error).__name__
        except Exception as error:
            pytest.fail(f"case {case}: {error!r} from {bad.hex()}")
        answers[answer] += 1
    # Often enough of each for this test to mean something: most reach the columns.
    assert inside > 25_000, inside
    assert answers["valid"] > 5_000, answers
    assert answers["CorruptBatch"] > 15_000, answers
    assert answers["UnknownFormat"] > 50, answers


def test_damaged_small_batches_never_allocate_much() -> None:
    rng = Random(20_240_603)
    batches = list(GOLDEN.values())
    tracemalloc.start()
    try:
        for case in range(3_000):
            bad = repaired(damaged(batches[case % len(batches)], rng), rng)
            before = tracemalloc.get_traced_memory()[0]
            tracemalloc.reset_peak()
            with suppress(RaftqError):
                read_everything(decode(bad))
            peak = tracemalloc.get_traced_memory()[1] - before
            assert peak < 1_000_000, f"case {case}: {peak} bytes for {bad.hex()}"
    finally:
        tracemalloc.stop()


def peak_of(data: bytes) -> int:
    """Bytes allocated at most while a batch that must be refused is decoded."""
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatch):
            read_everything(decode(data))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def claiming(data: bytearray, fields: dict[int, int]) -> bytes:
    for at, number in fields.items():
        U32.pack_into(data, at, number)
    U32.pack_into(data, 4, len(data))
    U32.pack_into(data, 20, crc32c(bytes(data[:20])))
    U32.pack_into(data, 24, crc32c(bytes(data[28:])))
    return bytes(data)


@pytest.mark.parametrize("codec", [0, 1, 2])
@pytest.mark.parametrize(
    "fields",
    [
        {32: 2**32 - 1, 36: 2**32 - 1},
        {32: 2**32 - 1, 36: 2**32 - 1, 84: 2**31},
        {32: RECORDS_MAX, 36: RECORDS_MAX, 76: 0, 84: 4 * RECORDS_MAX + 4},
        {76: 2**31, 84: 2**31 + 8},
        {76: BATCH_BYTES_MAX - 8, 84: BATCH_BYTES_MAX},
        {76: 2**32 - 1},
    ],
)
def test_a_header_that_claims_much_allocates_little(codec: int, fields: dict[int, int]) -> None:
    data = encode([bytes(1_000)], timestamps=1, codec=codec)
    assert peak_of(claiming(data, fields)) < 200_000


def test_an_honest_bomb_allocates_its_declared_size_once() -> None:
    """A frame that really expands to the largest body, whose offsets are then wrong."""
    body = b"\1" * BATCH_BYTES_MAX
    data = encode([bytes(1_000)], timestamps=1, codec=2)[:88]
    data += zstandard.ZstdCompressor().compress(body)
    bomb = claiming(data, {76: BATCH_BYTES_MAX - 8, 84: BATCH_BYTES_MAX})
    assert len(bomb) < 10_000
    assert peak_of(bomb) < BATCH_BYTES_MAX + 1_000_000


def test_every_single_bit_flip_and_cut_of_every_golden_batch_is_refused() -> None:
    for data in GOLDEN.values():
        for at in range(len(data)):
            for bad in (data[:at], flipped(data, at, at % 8)):
                with pytest.raises(CorruptBatch):
                    decode(bad)


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
