"""Put a good copy in the place of damaged batches of a segment. (Shell.)

The bytes are overwritten in place: a crash in the middle leaves damage where damage was. The index
is made again afterwards, because what was damaged when it was made is missing in it.

Damage has its old length, with one exception: a sealed segment that lost its end has too few bytes
there, and nothing behind them, so the good copy may be longer.
"""

from raftq.client.wire.batch import Buffer
from raftq.client.wire.errors import CorruptBatch, InvalidArgument
from raftq.node.storage.epochs import epoch_starts
from raftq.node.storage.header import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.reader import Reader
from raftq.node.storage.scan import scan
from raftq.node.storage.segment import Segment, Segments
from raftq.node.storage.stamped import check_stamped


def repair_damage(segments: Segments, reader: Reader, offset: int, batches: Buffer) -> None:
    """See `Log.repair`."""
    damage = reader.damage_at(offset)
    if damage is None:
        raise InvalidArgument(f"offset {offset} is not known to be damaged")
    segment = segments.items[segments.number_holding(damage.start)]
    if damage.position == damage.end_position or damage.path != segment.path:
        raise InvalidArgument(
            f"offsets {damage.start} to {damage.end} have no bytes here that could be repaired"
        )
    view = memoryview(batches)
    file = segments.file_of(segment)
    at_end = (
        not isinstance(segment.facts, SegmentIndex)
        and damage.end == segment.facts.end_offset
        and damage.end_position >= file.size
    )
    _check_fit(segments, segment, damage, view, at_end)
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


def _check_fit(
    segments: Segments, segment: Segment, damage: DamagedRange, view: memoryview, at_end: bool
) -> None:
    room = damage.end_position - damage.position
    if not len(view) or (len(view) != room and not at_end):
        raise CorruptBatch(
            f"{len(view)} bytes do not fit the {room} damaged ones of {segment.path} "
            f"at byte {damage.position}"
        )
    epochs = epoch_starts(segments, 0)
    before = max((epoch for epoch, base in epochs if base < damage.start), default=0)
    # The epoch that follows; where none starts later, what is damaged belongs to the last at most.
    last = epochs[-1][0] if epochs else None
    after = min((epoch for epoch, base in epochs if base >= damage.end), default=last)
    rows, _ = check_stamped(view, damage.start, before)
    _, base, span, _, _, epoch, _ = rows[-1]
    if base + span != damage.end or (after is not None and epoch > after):
        raise CorruptBatch(
            f"batches up to offset {base + span} in epoch {epoch} do not fit the damage up to "
            f"{damage.end}, after which epoch {after} comes"
        )


def _index_again(segments: Segments, segment: Segment, old: SegmentIndex) -> SegmentIndex:
    """The index of the active segment, made from its bytes."""
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
