"""Check batches that a leader has stamped, before a follower writes them unchanged. (Pure.)

A follower copies the bytes of the leader. Only here can it notice that they were damaged on the way
or do not continue its own log. No `Batch` is built: this runs for every replicated byte.
"""

from collections.abc import Sequence
from typing import NamedTuple

from crc32c import crc32c

from raftq.client.common.errors import CorruptBatch
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import (
    BATCH_BYTES_MAX,
    FLAG_CONTROL,
    FLAG_OFFSET_DELTAS,
    FLAGS_KNOWN,
    HEADER_BYTES,
    MAGIC,
    VERSION,
    Batch,
)
from raftq.client.wire.headers import CHECKED, CRCS_AT, REST_AT, facts_make_sense
from raftq.client.wire.layout import OFFSET_MAX

Facts = tuple[int, int, int, int, int, int]
"""(producer_id, producer_epoch, base_sequence, span, base_offset, max_timestamp) of one batch.

The span is the number of sequences: compaction takes records out of a batch, never sequences.
"""

Row = tuple[int, int, int, int, int, int, Sequence[int] | None]
"""(length, base_offset, span, lane, max_timestamp, epoch, offsets or None when there is no gap)."""


class Checked(NamedTuple):
    """Good batches: what an index and what the state of the producers needs of each."""

    rows: list[Row]
    facts: list[Facts]


def check_stamped(view: memoryview, expected: int, epoch_now: int) -> Checked:
    """Check all batches of the view, which must continue a log that ends at `expected` in
    `epoch_now`.

    Raises CorruptBatch (UnknownFormat for a newer version) at the first batch that does not.
    """
    unpack, checksum = CHECKED.unpack_from, crc32c
    rows: list[Row] = []
    facts: list[Facts] = []
    at, size = 0, len(view)
    headers_until = size - HEADER_BYTES
    while at <= headers_until:
        (
            magic, version, length, base, epoch, stamp_crc, crc, flags, lane, count, span,
            producer_id, producer_epoch, base_sequence, _, time,
        ) = unpack(view, at)  # fmt: skip
        end = at + length
        if (
            base != expected
            or epoch < epoch_now
            or magic != MAGIC
            or version != VERSION
            or not at + HEADER_BYTES <= end <= size
            or length > BATCH_BYTES_MAX
            or checksum(view[at : at + CRCS_AT]) != stamp_crc
            or checksum(view[at + REST_AT : end]) != crc
            or flags > FLAGS_KNOWN
            or not facts_make_sense(lane, count, span)
        ):
            raise why_not(view, at, expected, epoch_now)
        offsets = Batch(view, at).offsets() if flags & FLAG_OFFSET_DELTAS else None
        rows.append((length, base, span, lane, time, epoch, offsets))
        facts.append((producer_id, producer_epoch, base_sequence, span, base, time))
        epoch_now = epoch
        expected += span
        at = end
    if at != size or expected > OFFSET_MAX:
        raise why_not(view, at, expected, epoch_now)
    return Checked(rows, facts)


def why_not(buffer: Buffer, at: int, expected: int, epoch_now: int) -> CorruptBatch:
    """Return what is wrong with the batch at `at`. A newer version is raised as UnknownFormat."""
    try:
        batch = Batch(buffer, at)
        batch.check_crc()
    except CorruptBatch as error:
        return CorruptBatch(f"the batch due at offset {expected}: {error}")
    if batch.base_offset != expected:
        return CorruptBatch(
            f"a batch with offset {batch.base_offset} arrived where {expected} is due"
        )
    if batch.epoch < epoch_now:
        return CorruptBatch(f"{batch} has epoch {batch.epoch}, the log is at {epoch_now} already")
    return CorruptBatch(f"{batch} does not make sense: {batch.describe()}")


def good_facts(view: memoryview, offset: int) -> tuple[list[Facts], int]:
    """Return the facts of the good batches from the one that holds `offset` on, and their end.

    Control batches are skipped. Stops without an error at the first batch that is not good.
    """
    facts: list[Facts] = []
    at, size = 0, len(view)
    while at + HEADER_BYTES <= size:
        (
            magic, version, length, base, _, stamp_crc, crc, flags, lane, count, span,
            producer_id, producer_epoch, base_sequence, _, time,
        ) = CHECKED.unpack_from(view, at)  # fmt: skip
        end = at + length
        if (
            not base <= offset < base + span
            or magic != MAGIC
            or version != VERSION
            or not at + HEADER_BYTES <= end <= size
            or crc32c(view[at : at + CRCS_AT]) != stamp_crc
            or crc32c(view[at + REST_AT : end]) != crc
            or not facts_make_sense(lane, count, span)
        ):
            break
        if not flags & FLAG_CONTROL:
            facts.append((producer_id, producer_epoch, base_sequence, span, base, time))
        offset = base + span
        at = end
    return facts, offset
