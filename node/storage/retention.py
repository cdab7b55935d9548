"""Which segments a log may drop from its front. (Pure.)"""

from raftq.node.storage.index import TIME_NONE
from raftq.node.storage.segment import Segments


def segments_to_drop(
    segments: Segments,
    now_ms: int,
    age_ms: int | None,
    bytes_max: int | None,
    below: int | None,
) -> int:
    """How many sealed segments are too old or too many bytes; none that reaches `below`."""
    sealed = segments.items[:-1]
    size = segments.size_bytes
    count = 0
    # A segment in which nothing is readable has no time of its own: it is as old as its successor.
    times = [segment.facts.max_timestamp for segment in segments.items]
    for number in range(len(times) - 2, -1, -1):
        if times[number] == TIME_NONE:
            times[number] = times[number + 1]
    for number, segment in enumerate(sealed):
        if below is not None and segments.bases[number + 1] > below:
            break
        old = age_ms is not None and TIME_NONE < times[number] <= now_ms - age_ms
        if not old and (bytes_max is None or size <= bytes_max):
            break
        size -= segment.facts.size
        count += 1
    return count
