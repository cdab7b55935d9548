"""Replace damaged batches of a segment with a good copy. (Shell.)

The bytes are overwritten in place, so a crash in the middle leaves damage where damage was. The
index is rebuilt afterwards, because it lacks what was damaged when it was made.

Damage keeps its length, with one exception: a sealed segment that lost its end has too few bytes
there and nothing behind them, so the good copy may be longer.

A gap is a range of offsets that no file holds. It is filled with a segment of its own, which
appears as a whole or not at all. A large gap is filled with several segments, one after the other.

A good copy may come from another history, so batches must have the epochs that this log knows for
those offsets. Epochs that an index noted before the damage are known exactly. An index made from
damaged bytes, or for a gap, only knows the epochs around it. There the caller has to choose a
source that cannot have another history.
"""

from dataclasses import replace

from raftq.client.common.errors import CorruptBatch, InvalidArgument
from raftq.client.common.types import Buffer
from raftq.client.wire.batch import HEADER_BYTES
from raftq.client.wire.headers import read_front
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.reader import SegmentReader
from raftq.node.storage.scan import scan
from raftq.node.storage.segment import Segment, Segments
from raftq.node.storage.stamped import check_stamped


def repair_damage(segments: Segments, reader: SegmentReader, offset: int, batches: Buffer) -> None:
    """See `Log.repair`."""
    damage = reader.damage_at(offset)
    if damage is None:
        raise InvalidArgument(f"offset {offset} is not known to be damaged")
    view = memoryview(batches)
    if damage in reader.gaps:
        _fill(segments, reader, damage, view)
        return
    segment = segments.items[segments.number_holding(damage.start)]
    file = segments.file_of(segment)
    at_end = (
        not isinstance(segment.facts, SegmentIndex)
        and damage.end == segment.facts.end_offset
        and damage.end_position >= file.size
    )
    room = damage.end_position - damage.position
    if not len(view) or (len(view) != room and not at_end):
        raise CorruptBatch(
            f"{len(view)} bytes do not fit the {room} damaged ones of {segment.path} "
            f"at byte {damage.position}"
        )
    end = _check(segments, reader, damage, view, damage.start)
    if end != damage.end:
        raise CorruptBatch(f"batches up to offset {end} do not fit the damage up to {damage.end}")
    file.write_at(damage.position, view)
    if damage.position + len(view) < file.size and at_end:
        file.truncate(damage.position + len(view))
    file.sync()
    if isinstance(segment.facts, SegmentIndex):
        segment.facts = _index_again(segments, segment, segment.facts)
    else:
        segments.index_again(segment)
    if segments.items[segments.number_holding(offset)].facts.damaged and reader.damage_at(offset):
        raise CorruptBatch(f"offset {offset} of {segment.path} is still damaged after its repair")


def _check(
    segments: Segments, reader: SegmentReader, damage: DamagedRange, view: memoryview, first: int
) -> int:
    """Check the batches from offset `first` on and their epochs. Returns where they end."""
    epochs = segments.epoch_starts(0)
    rows, _ = check_stamped(view, first, _in_force(epochs, damage.start - 1)[0])
    if not rows:
        raise CorruptBatch(f"there is no batch for the damage from offset {damage.start} on")
    behind = damage.end
    while (more := reader.damage_at(behind)) is not None:
        behind = more.end
    # The epoch of the first batch behind all the damage, if there is one.
    most = None
    if behind < segments.active.facts.end_offset:
        most = _in_force(epochs, behind)[0]
    for _, base, _, _, _, epoch, _ in rows:
        known, since = _in_force(epochs, base)
        if (epoch != known) if since >= damage.start else (most is not None and epoch > most):
            raise CorruptBatch(
                f"the batch of offset {base} has epoch {epoch}, which does not fit the damage of "
                f"[{damage.start}, {damage.end}) in a log with the epochs {epochs}"
            )
    return rows[-1][1] + rows[-1][2]


def _in_force(epochs: list[tuple[int, int]], offset: int) -> tuple[int, int]:
    """Return (epoch, its start) that the log noted for this offset."""
    found = (0, -1)
    for epoch, start in epochs:
        if start > offset:
            break
        found = (epoch, start)
    return found


def _fill(segments: Segments, reader: SegmentReader, gap: DamagedRange, view: memoryview) -> None:
    """Put a segment with these batches at the front of a gap."""
    first = _first_offset(segments, gap, view)
    end = _check(segments, reader, gap, view, first)
    if not gap.start < end <= gap.end:
        raise CorruptBatch(
            f"batches of the offsets {first} to {end} do not fit the gap from {gap.start} to "
            f"{gap.end}"
        )
    segments.insert(first, end, view)
    left = [] if end == gap.end else [replace(gap, start=end)]
    at = reader.gaps.index(gap)
    reader.gaps[at : at + 1] = left


def _first_offset(segments: Segments, gap: DamagedRange, view: memoryview) -> int:
    """Return where the batches begin. At the front of a log a batch may begin below its start."""
    number = segments.number_holding(gap.start)
    if segments.bases[number] > gap.start:
        front = read_front(bytes(view[:HEADER_BYTES]), 0)
        if front is not None:
            return min(front.base_offset, gap.start)
    return gap.start


def _index_again(segments: Segments, segment: Segment, old: SegmentIndex) -> SegmentIndex:
    """Rebuild the index of the active segment from its bytes."""
    index = segments.new_index(segment.base_offset)
    file = segments.file_of(segment)
    tail = scan(file, segment.path, index, old.size)
    if tail is not None:
        index.add_damage(
            DamagedRange(
                *(index.end_offset, old.end_offset, segment.path),
                *(tail.position, old.size, tail.reason),
            )
        )
    assert (index.size, index.end_offset) == (old.size, old.end_offset), segment.path
    return index
