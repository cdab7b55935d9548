"""Rewrite sealed segments without records that are not needed, keeping every offset. (Shell.)

A batch that loses some records is encoded again with the offsets of the others. Batches that lose
all records become one filler batch that covers their offsets. So the records that stay keep their
offsets, epochs, order and lanes, and every offset still belongs to some batch.

The new file is written beside the old one, synced, and renamed over it. The index is removed first
and rebuilt afterwards, so a crash leaves the old or the new segment, always whole. A segment with
damage is left as it is, because its bytes may still be repaired.
"""

from collections.abc import Callable, Iterator
from hashlib import blake2b

from raftq.client.common.disk import File
from raftq.client.common.errors import CorruptBatch
from raftq.client.wire.batch import (
    FLAG_CONTROL,
    FLAG_HEADERS,
    FLAG_KEYS,
    FLAG_TIMESTAMPS,
    Batch,
    BatchProducer,
    decode,
    encode,
    stamp,
)
from raftq.node.storage.config import DAY_MS
from raftq.node.storage.log import Log
from raftq.node.storage.segment import Segment

Keep = Callable[[Batch], list[int] | None]
"""Chooses the records of a batch to keep, by position in the batch, in order; None keeps all."""

KEYS_MAX = 1_000_000
_SPAN_MAX = (1 << 32) - 1
_WRITE_BYTES = 1024 * 1024
_READ_BYTES = 1024 * 1024


def compact(log: Log, keep: Keep) -> int:
    """Rewrite every sealed segment. Returns the bytes freed."""
    return sum(compaction_steps(log, keep))


def compaction_steps(log: Log, keep: Keep) -> Iterator[int]:
    """Rewrite one sealed segment per step and yield the bytes freed, so that an owner can do
    other work between."""
    base = log.start_offset
    while True:
        segments = log.segments
        number = segments.number_holding(base)
        if number >= len(segments.items) - 1:
            return
        base = segments.bases[number + 1]
        yield compact_segment(log, segments.items[number], keep)


def compact_segment(log: Log, segment: Segment, keep: Keep) -> int:
    """Rewrite one sealed segment unless all of it is kept. Returns the bytes freed."""
    if segment.facts.damaged:
        return 0
    disk, temporary = log.disk, segment.path + ".tmp"
    before = segment.facts.size
    file = disk.open(temporary, create=True)
    changed = False
    try:
        file.truncate(0)
        changed = _rewrite(log, segment, keep, file)
        if changed:
            file.sync()
    except CorruptBatch:
        changed = False  # damage found while reading: the segment stays as it is
    finally:
        file.close()
        if not changed:
            disk.remove(temporary)
    if changed:
        log.replace_segment(segment, temporary)
    return before - segment.facts.size


def _rewrite(log: Log, segment: Segment, keep: Keep, target: File) -> bool:
    """Write what is kept of the segment to the target. Returns False when that is everything."""
    writer = _Writer(target)
    for batch in _batches_of(log, segment):
        kept = keep(batch) if batch.count else []
        if kept is None or (kept and len(kept) == batch.count):
            writer.add(bytes(batch.buffer[batch.position : batch.position + batch.length]))
        elif kept:
            writer.changed = True
            writer.add(_without(batch, kept))
        else:
            writer.add_filler(batch)
    writer.finish()
    return writer.changed


def _batches_of(log: Log, segment: Segment) -> Iterator[Batch]:
    """Yield every batch of a segment, checked, also those below the start of the log."""
    index, file = log.segments.index_of(segment), log.segments.file_of(segment)
    position, expected = 0, segment.base_offset
    while position < index.size:
        end = position + _READ_BYTES
        if end >= index.size:
            end = index.size
        else:
            end = index.last_entry_until(end)
            if end == position:
                end = index.block_end(position)  # one large batch
        data = file.read(position, end - position)
        at = 0
        while at < len(data):
            batch = decode(data, at)
            if batch.base_offset != expected:
                raise CorruptBatch(f"{segment.path} has {batch.base_offset}, not {expected}")
            yield batch
            at += batch.length
            expected = batch.end_offset
        position = end


class _Writer:
    """Collects batches into large writes and neighbouring removed batches into one filler."""

    def __init__(self, target: File) -> None:
        self._target = target
        self._pending: list[bytes | bytearray] = []
        self._pending_bytes = 0
        self._filler: tuple[int, int, int, int] | None = None
        self.changed = False

    def add_filler(self, batch: Batch) -> None:
        filler = (batch.base_offset, batch.span, batch.epoch, batch.max_timestamp)
        self.changed = self.changed or batch.count > 0
        if self._filler is not None:
            base, span, epoch, time = self._filler
            # The start of an epoch must stay visible in the log, so a filler stays within one
            # epoch.
            if epoch == batch.epoch and span + batch.span <= _SPAN_MAX:
                self.changed = True
                filler = (base, span + batch.span, epoch, max(time, batch.max_timestamp))
            else:
                self._end_filler()
        self._filler = filler

    def _end_filler(self) -> None:
        if self._filler is not None:
            base, span, epoch, time = self._filler
            self._filler = None
            batch = encode([], timestamps=time, offset_deltas=[], span=span)
            stamp(batch, base, epoch)
            self._put(batch)

    def add(self, batch: bytes | bytearray) -> None:
        self._end_filler()
        self._put(batch)

    def _put(self, batch: bytes | bytearray) -> None:
        self._pending.append(batch)
        self._pending_bytes += len(batch)
        if self._pending_bytes >= _WRITE_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._pending:
            self._target.append(self._pending)
            self._pending = []
            self._pending_bytes = 0

    def finish(self) -> None:
        self._end_filler()
        self._flush()


def _without(batch: Batch, kept: list[int]) -> bytearray:
    """Return the batch with only the kept records, at their offsets."""
    flags, base = batch.flags, batch.base_offset
    offsets, values = batch.offsets(), batch.values()
    keys, headers, times = batch.keys(), batch.headers(), batch.timestamps()
    wide = [batch.expiries(), batch.deliver_at(), batch.delay_offsets()]
    expiries, deliver_at, delay_offsets = (
        None if column is None else [column[at] for at in kept] for column in wide
    )
    smaller = encode(
        [values[at] for at in kept],
        [keys[at] for at in kept] if flags & FLAG_KEYS else None,
        [headers[at] for at in kept] if flags & FLAG_HEADERS else None,
        [times[at] for at in kept] if flags & FLAG_TIMESTAMPS else batch.base_timestamp,
        expiries,
        deliver_at=deliver_at,
        delay_offsets=delay_offsets,
        offset_deltas=[offsets[at] - base for at in kept],
        span=batch.span,
        lane=batch.lane,
        codec=batch.codec,
        control=bool(flags & FLAG_CONTROL),
        producer=BatchProducer(batch.producer_id, batch.producer_epoch, batch.base_sequence),
    )
    stamp(smaller, base, batch.epoch)
    return smaller


def compact_by_key(
    log: Log, now_ms: int, tombstone_ms: int = DAY_MS, keys_max: int = KEYS_MAX
) -> int:
    """Keep the last record of each key. Returns the bytes freed.

    Records without a key stay. An empty value with a key is a tombstone: it removes the older
    records of the key, and is removed itself once it is older than `tombstone_ms`. Memory is
    bounded by `keys_max` keys (about 150 bytes each). Records of further keys stay until a later
    run.
    """
    # A record may be dropped only because of a record that survives a crash.
    log.sync()
    latest = _latest_offsets(log, keys_max)
    # Older records hidden by a tombstone may be in a damaged segment, which is not rewritten.
    oldest_ms = now_ms - tombstone_ms if not log.damaged else None

    def keep(batch: Batch) -> list[int] | None:
        if not batch.flags & FLAG_KEYS:
            return None
        rows = zip(batch.offsets(), batch.keys(), batch.values(), batch.timestamps(), strict=True)
        kept = []
        for at, (offset, key, value, time) in enumerate(rows):
            last = offset if key is None else latest.get(_digest(key))
            old = oldest_ms is not None and time < oldest_ms
            tombstone = key is not None and not value and last == offset
            if last is None or (last <= offset and not (tombstone and old)):
                kept.append(at)
        return kept

    return compact(log, keep)


def _latest_offsets(log: Log, keys_max: int) -> dict[bytes, int]:
    """Return the last offset of each key, for the first `keys_max` keys."""
    latest: dict[bytes, int] = {}
    for batch in log.batches(log.start_offset, skip_damaged=True):
        if batch.flags & FLAG_KEYS:
            for offset, key in zip(batch.offsets(), batch.keys(), strict=True):
                if key is not None:
                    digest = _digest(key)
                    if digest in latest or len(latest) < keys_max:
                        latest[digest] = offset
    return latest


def _digest(key: bytes) -> bytes:
    """Return a digest of a key, of fixed size. At 128 bits two keys never meet by chance."""
    return blake2b(key, digest_size=16).digest()
