"""Verify sealed segments bit by bit in the background, in small steps. (Shell.)

Bit rot in a segment without readers is found while other copies can still repair it. Each step
reads about as many bytes as it was given, so that its owner decides how much of the disk it may
use. After the last sealed segment it starts again with the first. The active segment is not
scrubbed: it is read at every open.
"""

from dataclasses import dataclass, field

from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.scan import scan
from raftq.node.storage.segment import Segment, Segments


@dataclass(slots=True)
class ScrubState:
    """The position at which the next step starts."""

    offset: int = 0
    rounds: int = 0
    """How often every sealed segment was verified."""


@dataclass(slots=True)
class ScrubStep:
    """What one step did."""

    verified_bytes: int = 0
    wrapped: bool = False
    """The step reached the end of the sealed segments; the next one starts at the front."""
    damaged: list[DamagedRange] = field(default_factory=list)
    """Damage that was not known before."""


def scrub_step(segments: Segments, state: ScrubState, bytes_max: int) -> ScrubStep:
    """Verify from `state.offset` on."""
    step = ScrubStep()
    while step.verified_bytes < bytes_max:
        number = segments.number_holding(state.offset)
        segment = segments.items[number]
        if number == len(segments.items) - 1:
            state.offset = 0
            state.rounds += 1
            step.wrapped = True
            break
        _scrub_segment(segments, segment, state, step, bytes_max - step.verified_bytes)
        if state.offset >= segment.facts.end_offset:
            state.offset = segments.bases[number + 1]
    return step


def _scrub_segment(
    segments: Segments, segment: Segment, state: ScrubState, step: ScrubStep, bytes_max: int
) -> None:
    index = segments.index_of(segment)
    offset = max(state.offset, segment.base_offset)
    known = index.damage_at(offset)
    if known is not None:
        state.offset = known.end
        return
    start, position = index.entry_for_offset(offset)
    end = index.damage_position_from(position)
    bytes_max = max(bytes_max, index.block_end(position) - position)
    probe = SegmentIndex(start, index.size + 1, with_lanes=False)
    probe.size = position
    tail = scan(segments.file_of(segment), segment.path, probe, end, bytes_max)
    if tail is not None:
        probe.add_damage(_rest(segment, index, probe, end, tail.reason))
    step.verified_bytes += max(probe.size - position, 1)
    step.damaged += probe.damaged
    for damage in probe.damaged:
        index.insert_damage(damage)
    state.offset = max(probe.end_offset, offset + 1)


def _rest(
    segment: Segment, index: SegmentIndex, probe: SegmentIndex, end: int, reason: str
) -> DamagedRange:
    """Damage from where the probe stopped up to the next known damage or the segment's end."""
    end_offset = index.end_offset
    for known in index.damaged:
        if known.position == end:
            end_offset = known.start
    return DamagedRange(probe.end_offset, end_offset, segment.path, probe.size, end, reason)
