"""Cutting records out of a batch gives the same records, whatever columns it has."""

import random

import pytest

from raftq.client.wire.batch import (
    CODEC_LZ4,
    CODEC_NONE,
    CODEC_ZSTD,
    decode,
    encode,
    stamp,
    validate,
)
from raftq.client.wire.cutting import cut_batch


@pytest.mark.parametrize("codec", [CODEC_NONE, CODEC_LZ4, CODEC_ZSTD])
@pytest.mark.parametrize("seed", range(20))
def test_a_cut_holds_exactly_the_records_asked_for(codec: int, seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 60)
    maybe = lambda make: make() if rng.random() < 0.6 else None  # noqa: E731
    batch = encode(
        [rng.randbytes(rng.randint(0, 30)) for _ in range(count)],
        keys=maybe(lambda: [rng.choice([None, b"", b"key"]) for _ in range(count)]),
        headers=maybe(lambda: [rng.choice([{}, {"a": b"b"}]) for _ in range(count)]),
        timestamps=maybe(lambda: [rng.randint(0, 99) for _ in range(count)]) or 7,
        expiries=maybe(lambda: [rng.randint(0, 99) for _ in range(count)]),
        delay_offsets=maybe(lambda: list(range(count))),
        lane=rng.randint(0, 4),
        codec=codec,
    )
    stamp(batch, 1000, 3)
    whole = decode(bytes(batch))
    start = rng.randint(1000, 1000 + count - 1)
    end = rng.randint(start + 1, 1000 + count)
    cut = decode(bytes(cut_batch(whole, start, end)))
    validate(cut)
    assert cut.epoch == 3
    assert cut.records() == whole.records()[start - 1000 : end - 1000]
    assert (cut.delay_offsets() or []) == (whole.delay_offsets() or [])[start - 1000 : end - 1000]
