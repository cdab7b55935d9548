"""What a partition remembers of its producers: a batch sent twice is appended once. (Core.)

A producer numbers its records (u32, wrapping) and sends a batch again, with the same numbers, until
it gets an answer. The last batches of each producer are kept, so a repeated batch is answered with
the offset that it already has.

    unknown producer, or a newer epoch   must begin at sequence 0
    older epoch                          FencedProducer: a newer instance has taken over
    one of the last 5 batches            a duplicate: its base offset
    the next sequence                    to be appended
    anything else                        OutOfOrderSequence: a batch before it is missing

`check` decides for a leader before it appends. `note` follows the log afterwards, on leaders and
followers alike, and never refuses: what is in the log has been decided. So every replica that has
noted the same batches gives the same answers. The state is bounded: producers that are idle for
long are forgotten, and beyond `producers_max` those that wrote least recently. A forgotten producer
is unknown and gets that error, unless it sends its first batch again.

Snapshots and the rebuild from a log are in producer_files.py.
"""

from collections.abc import Iterable, Iterator
from struct import Struct

from crc32c import crc32c

from raftq.client.common.errors import (
    CorruptFile,
    FencedProducer,
    OutOfOrderSequence,
    UnknownFormat,
)
from raftq.node.storage.config import DAY_MS

WINDOW = 5
PRODUCERS_MAX = 100_000
"""The largest limit, and the default."""
IDLE_MS_MAX = 7 * DAY_MS
"""The longest time for which an idle producer is remembered, and the default."""
MAGIC = b"RQPS"
VERSION = 1
_SEQUENCE_MASK = (1 << 32) - 1

# magic version crc end_offset now_ms count; the crc is that of everything else.
_HEAD = Struct("<4sIIqqI")
_PREFIX_BYTES = 8
_CRC_END = 12
# producer_id epoch seen_ms batches, then (base_sequence, count, base_offset) for each batch
_PRODUCER = Struct("<qIqB")
_BATCH = Struct("<IIq")
BYTES_MAX = _HEAD.size + PRODUCERS_MAX * (_PRODUCER.size + WINDOW * _BATCH.size)

_Batch = tuple[int, int, int]


class _Producer:
    """One producer: its epoch, when it last wrote, and its last batches, oldest first."""

    __slots__ = ("batches", "epoch", "seen_ms")

    def __init__(self, epoch: int, seen_ms: int, batches: list[_Batch]) -> None:
        self.epoch = epoch
        self.seen_ms = seen_ms
        self.batches = batches


class Producers:
    """The producers of one partition, as of `end_offset`."""

    __slots__ = ("_known", "_now_ms", "end_offset", "forgotten", "producers_max")

    def __init__(self, end_offset: int = 0, producers_max: int = PRODUCERS_MAX) -> None:
        # In the order of their last batches.
        self._known: dict[int, _Producer] = {}
        self._now_ms = 0
        self.producers_max = producers_max
        self.end_offset = end_offset
        """All batches below this offset are accounted for, as far as the owner noted them."""
        self.forgotten = 0
        """How many producers were forgotten since this was made, because of their number or
        idleness."""

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._known

    def check(self, producer_id: int, epoch: int, base_sequence: int, count: int) -> int | None:
        """Return None for a batch to append, or the offset at which it was appended before.
        Raises when it must not be appended."""
        if producer_id < 0:
            return None
        producer = self._known.get(producer_id)
        if producer is None or epoch > producer.epoch:
            if base_sequence == 0:
                return None
            raise _out_of_order(producer_id, epoch, base_sequence, 0)
        if epoch < producer.epoch:
            raise FencedProducer(
                f"producer {producer_id} has epoch {producer.epoch}, this is from epoch {epoch}"
            ).with_details(epoch=producer.epoch)
        last_sequence, last_count, _ = producer.batches[-1]
        due = (last_sequence + last_count) & _SEQUENCE_MASK
        if base_sequence == due:
            return None
        for sequence, size, base_offset in reversed(producer.batches):
            if sequence == base_sequence and size == count:
                return base_offset
        raise _out_of_order(producer_id, epoch, base_sequence, due)

    def note(
        self,
        producer_id: int,
        epoch: int,
        base_sequence: int,
        count: int,
        base_offset: int,
        timestamp: int = 0,
    ) -> None:
        """Note a batch that was appended. `count` is its number of sequences: the span of the
        batch.

        Its producer counts as active at `timestamp`, or at the last known time if that is later:
        records may carry times long past.
        """
        self.end_offset = base_offset + count
        if producer_id < 0:
            return
        known = self._known
        producer = known.pop(producer_id, None)
        seen_ms = max(timestamp, self._now_ms)
        batch = (base_sequence, count, base_offset)
        if producer is None:
            producer = _Producer(epoch, seen_ms, [batch])
            if len(known) >= self.producers_max:
                del known[next(iter(known))]
                self.forgotten += 1
        elif producer.epoch != epoch:
            producer = _Producer(epoch, seen_ms, [batch])
        else:
            batches = producer.batches
            batches.append(batch)
            if len(batches) > WINDOW:
                del batches[0]
            producer.seen_ms = seen_ms
        known[producer_id] = producer

    def note_all(self, facts: Iterable[tuple[int, int, int, int, int, int]]) -> None:
        """Note what `Log.append_stamped` returned."""
        for fact in facts:
            self.note(*fact)

    def expire(self, now_ms: int, idle_ms_max: int = IDLE_MS_MAX) -> int:
        """Forget producers that were idle for too long, and return how many. Also sets the time."""
        first = not self._now_ms
        self._now_ms = max(now_ms, self._now_ms)
        if first:
            # The time was not known before: what was noted so far may look older than it is.
            for producer in self._known.values():
                producer.seen_ms = max(producer.seen_ms, now_ms)
            return 0
        limit = self._now_ms - idle_ms_max
        idle = [name for name, producer in self._known.items() if producer.seen_ms < limit]
        for name in idle:
            del self._known[name]
        self.forgotten += len(idle)
        return len(idle)

    def clear(self, end_offset: int) -> None:
        """Forget everything, because the log starts over at this offset."""
        self._known.clear()
        self.end_offset = end_offset

    def describe(self) -> str:
        return f"{len(self._known)} producers as of offset {self.end_offset}"

    def dump(self) -> bytes:
        """Return everything as bytes, for `load`."""
        parts = [b""]
        for name, producer in self._known.items():
            batches = producer.batches
            parts.append(_PRODUCER.pack(name, producer.epoch, producer.seen_ms, len(batches)))
            parts += [_BATCH.pack(*batch) for batch in batches]
        parts[0] = _HEAD.pack(MAGIC, VERSION, 0, self.end_offset, self._now_ms, len(self._known))
        data = bytearray().join(parts)
        data[_PREFIX_BYTES:_CRC_END] = _crc(data).to_bytes(4, "little")
        return bytes(data)

    @staticmethod
    def load(data: bytes, producers_max: int = PRODUCERS_MAX) -> "Producers":
        """Return the dumped state. Raises CorruptFile or UnknownFormat when `data` is something
        else.

        Keeps the last `producers_max` producers; the limit may have been larger then.
        """
        if len(data) < _HEAD.size or data[:4] != MAGIC:
            raise CorruptFile("this is no snapshot of producers")
        _, version, crc, end_offset, now_ms, count = _HEAD.unpack_from(data)
        if _crc(data) != crc:
            raise CorruptFile("a snapshot of producers fails its checksum")
        if version != VERSION:
            raise UnknownFormat(
                f"snapshot of producers version {version} is not known here "
                f"(newest known: {VERSION}); it was written by a newer version of RaftQ"
            )
        producers = Producers(end_offset, producers_max)
        producers._now_ms = now_ms
        known = producers._known
        for name, producer in _entries(data, count):
            known[name] = producer
        if end_offset < 0 or len(producers) != count or count > PRODUCERS_MAX:
            raise CorruptFile("a snapshot of producers contradicts itself")
        for name in list(known)[: max(count - producers_max, 0)]:
            del known[name]
        return producers


def _crc(data: bytes | bytearray) -> int:
    with memoryview(data) as view:
        return int(crc32c(view[_CRC_END:], crc32c(view[:_PREFIX_BYTES])))


def _entries(data: bytes, count: int) -> Iterator[tuple[int, _Producer]]:
    at, size = _HEAD.size, len(data)
    for _ in range(count):
        if at + _PRODUCER.size > size:
            raise CorruptFile("a snapshot of producers is cut")
        name, epoch, seen_ms, batches = _PRODUCER.unpack_from(data, at)
        at += _PRODUCER.size
        end = at + batches * _BATCH.size
        if not 1 <= batches <= WINDOW or end > size:
            raise CorruptFile("a snapshot of producers contradicts itself")
        yield name, _Producer(epoch, seen_ms, list(_BATCH.iter_unpack(data[at:end])))
        at = end
    if at != size:
        raise CorruptFile("a snapshot of producers goes on after its end")


def _out_of_order(producer_id: int, epoch: int, sequence: int, due: int) -> OutOfOrderSequence:
    return OutOfOrderSequence(
        f"sequence {sequence} of producer {producer_id} epoch {epoch} came, {due} is due"
    ).with_details(due=due)
