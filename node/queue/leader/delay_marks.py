"""The control records of a delays log, and what a new leader learns from the two logs. (Shell.)

delay_line.py says what the records mean. Each is msgpack in a control batch; ids are packed as
64-bit numbers, little-endian.
"""

import asyncio
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from msgspec.msgpack import Decoder

from raftq.client.common.errors import CorruptBatch, CorruptFile, OffsetOutOfRange
from raftq.client.common.tasks import sleep, yield_to_loop
from raftq.client.wire.batch import FLAG_CONTROL, FLAG_DELAY_OFFSETS, Batch
from raftq.client.wire.encoder import encode_control
from raftq.node.queue.core.codec import encode_stored, stored_decoder
from raftq.node.queue.core.entries import LedgerStruct
from raftq.node.queue.core.pending_delays import PendingDelays
from raftq.node.storage.log import Log

logger = logging.getLogger(__name__)

CANCELLED_KEPT = 65_536
"""How many cancelled records are remembered, the last ones."""
READ_BYTES = 256 * 1024
SLICE_S = 0.002
SEARCH_MAX = 1_000_000
"""So many records of the data log are searched even when nothing is pending: they may name ids that
the delays log has lost, and that nobody else must get."""
REPAIR_S = 5.0
REPAIRS_MAX = 12
"""For so many times as long damage may be repaired; then what can be read has to do."""

assert sys.byteorder == "little"


class CancelledMark(LedgerStruct, tag=1, frozen=True):
    """These delayed records are cancelled."""

    ids: bytes


class FiredMark(LedgerStruct, tag=2, frozen=True):
    """Rows of ids, and the end of the data batch that has their records."""

    rows: tuple[tuple[bytes, int], ...]


class SeenMark(LedgerStruct, tag=3, frozen=True):
    """Everything that fired below `data_end` in the data log has its mark."""

    data_end: int


class RewoundMark(LedgerStruct, tag=4, frozen=True):
    """Older marks were about data that is gone; the data log was read up to `data_end`."""

    data_end: int


DelayMark = CancelledMark | FiredMark | SeenMark | RewoundMark
_decode = stored_decoder(Decoder[DelayMark](DelayMark), "control record of a delays log")


def cancelled(ids: Sequence[int]) -> bytearray:
    return _control(CancelledMark(_packed(ids)))


def fired(rows: Iterable[tuple[Sequence[int], int]]) -> bytearray:
    """Rows of ids and the end of the data batch that has them."""
    return _control(FiredMark(tuple((_packed(ids), end) for ids, end in rows)))


def seen(data_end: int) -> bytearray:
    return _control(SeenMark(data_end))


def rewound(data_end: int) -> bytearray:
    return _control(RewoundMark(data_end))


def _control(mark: DelayMark) -> bytearray:
    return encode_control(encode_stored(mark))


def _packed(ids: Sequence[int]) -> bytes:
    return array("q", ids).tobytes()


def _unpacked(data: bytes) -> "array[int]":
    if len(data) % 8:
        raise CorruptFile(f"a control record of the delays log has {len(data)} bytes of ids")
    ids = array("q")
    ids.frombytes(data)
    return ids


@dataclass(slots=True)
class Rebuilt:
    """What the logs of a new leader say."""

    pending_delays: PendingDelays
    seen_end: int = 0
    """Below it in the data log, whatever fired has its mark."""
    unmarked: list[tuple[list[int], int, int]] = field(default_factory=list)
    """(ids, base, end) of data batches without a mark."""
    void: list[int] = field(default_factory=list)
    """Pending, though there are marks of them: their data is gone."""
    rewinds: bool = False
    """Whether marks speak of data that is gone."""
    cancelled: dict[int, None] = field(default_factory=dict)
    ids_end: int = 0
    """Above every id that the data log names."""


async def rebuild(
    delays: Log, data: Log, delays_end: int, data_end: int, learn: Callable[[Batch], None]
) -> Rebuilt:
    """Read the delays log up to `delays_end` and what is needed of the data log up to `data_end`.

    Every batch of delayed records is shown to `learn`.

    Damage is waited for, because another replica may repair it: a mark that cannot be read lets a
    record fire twice. When it stays, all of the data log tells what has fired.
    """
    for _ in range(REPAIRS_MAX):
        try:
            return await _Rebuild(delays, data, data_end, learn, False).run(delays_end)
        except (CorruptBatch, CorruptFile) as error:
            logger.error("log=%s delays wait for repair: %s", delays.directory, error)
            await sleep(REPAIR_S)
    return await _Rebuild(delays, data, data_end, learn, True).run(delays_end)


class _Rebuild:
    def __init__(
        self, delays: Log, data: Log, data_end: int, learn: Callable[[Batch], None], careless: bool
    ) -> None:
        self._learn = learn
        self._delays = delays
        self._data = data
        self._data_end = data_end
        self._careless = careless
        self._found = Rebuilt(PendingDelays())
        self._loop = asyncio.get_running_loop()
        self._until = self._loop.time() + SLICE_S

    async def run(self, delays_end: int) -> Rebuilt:
        found, delays = self._found, self._delays
        batches = delays.batches(delays.start_offset, delays_end, READ_BYTES, self._careless)
        for batch in batches:
            self._read(batch)
            await self._breathe()
        if len(found.pending_delays) or (
            delays.end_offset > 0 and self._data_end - found.seen_end < SEARCH_MAX
        ):
            await self._search()
        found.void = [one for one in dict.fromkeys(found.void) if one in found.pending_delays]
        return found

    async def _breathe(self) -> None:
        if self._loop.time() >= self._until:
            await yield_to_loop()
            self._until = self._loop.time() + SLICE_S

    def _read(self, batch: Batch) -> None:
        if batch.flags & FLAG_CONTROL:
            for value in batch.values() if batch.count else ():
                self._control(value)
            return
        deliver_at = batch.deliver_at()
        if deliver_at is None or batch.count != batch.span:
            raise CorruptFile(f"the delays log has a batch without times: {batch.describe()}")
        ids = batch.delay_offsets()
        if ids is None:
            self._found.pending_delays.scheduled(batch.base_offset, deliver_at, batch.length)
        else:
            self._found.pending_delays.moved(ids, deliver_at, batch.base_offset, batch.length)
        self._learn(batch)

    def _control(self, value: bytes) -> None:
        found = self._found
        mark = _decode(value)
        if isinstance(mark, CancelledMark):
            ids = _unpacked(mark.ids)
            found.pending_delays.cancelled(ids)
            known = found.cancelled
            known.update(dict.fromkeys(ids))
            while len(known) > CANCELLED_KEPT:
                del known[next(iter(known))]
        elif isinstance(mark, FiredMark):
            for packed, end in mark.rows:
                self._fired(_unpacked(packed), end)
        else:
            if isinstance(mark, RewoundMark):
                found.seen_end, found.rewinds = 0, False
                found.void.clear()
            self._seen(mark.data_end)

    def _fired(self, ids: "array[int]", end: int) -> None:
        found = self._found
        if end > self._data_end:
            found.void += [one for one in ids if one in found.pending_delays]
        else:
            found.pending_delays.released(found.pending_delays.fired(ids))
        self._seen(end)

    def _seen(self, end: int) -> None:
        found = self._found
        if end > self._data_end:
            found.rewinds = True
        found.seen_end = max(found.seen_end, min(end, self._data_end))

    async def _search(self) -> None:
        """Find what fired and has no mark."""
        found, data = self._found, self._data
        if self._careless:
            found.seen_end = 0
        position = found.seen_end
        while position < self._data_end:
            position = max(position, data.start_offset)
            try:
                batches = data.batches(position, self._data_end, READ_BYTES, self._careless)
                for batch in batches:
                    position = batch.end_offset
                    if batch.flags & FLAG_DELAY_OFFSETS:
                        self._note(batch)
                    await self._breathe()
                return
            except OffsetOutOfRange:
                continue  # retention dropped what was to be read next

    def _note(self, batch: Batch) -> None:
        found = self._found
        ids = batch.delay_offsets() or []
        found.ids_end = max(found.ids_end, max(ids) + 1)
        pending = found.pending_delays.fired(ids)
        if pending:
            found.unmarked.append((pending, batch.base_offset, batch.end_offset))
