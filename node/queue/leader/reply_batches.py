"""Batches made for an answer: just these records, at the offsets they are known by. (Pure.)"""

from collections.abc import Iterable, Mapping

from raftq.client.wire.batch import encode, stamp
from raftq.client.wire.record import BatchRecord

SPAN_MAX = (1 << 32) - 1


def pack_records(
    records: Iterable[BatchRecord], epoch: int, deliver_at: Mapping[int, int] | None = None
) -> list[bytearray]:
    """As few batches as hold these records: one lane and at most `SPAN_MAX` offsets each."""
    lanes: dict[int, list[BatchRecord]] = {}
    for record in sorted(records, key=lambda record: record.offset):
        lanes.setdefault(record.priority, []).append(record)
    batches = []
    for lane, rows in lanes.items():
        start = 0
        for at in range(1, len(rows) + 1):
            if at == len(rows) or rows[at].offset - rows[start].offset >= SPAN_MAX:
                batches.append(_packed(lane, rows[start:at], epoch, deliver_at))
                start = at
    return batches


def _packed(
    lane: int, rows: list[BatchRecord], epoch: int, deliver_at: Mapping[int, int] | None
) -> bytearray:
    base = rows[0].offset
    expiries = [record.expires_at for record in rows]
    batch = encode(
        [record.value for record in rows],
        [record.key for record in rows] if any(r.key is not None for r in rows) else None,
        [record.headers for record in rows],
        [record.timestamp for record in rows],
        expiries if any(expiries) else None,
        deliver_at=None if deliver_at is None else [deliver_at[r.offset] for r in rows],
        offset_deltas=[record.offset - base for record in rows],
        span=rows[-1].offset - base + 1,
        lane=lane,
    )
    stamp(batch, base, epoch)
    return batch
