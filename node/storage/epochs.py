"""The history of leader epochs of a log, put together from its segments. (Pure.)"""

from raftq.node.storage.segment import Segments


def epoch_starts(segments: Segments, start: int, end: int) -> list[tuple[int, int]]:
    """(epoch, start_offset) of each epoch that has records in [start, end), in order."""
    merged: list[tuple[int, int]] = []
    for segment in segments.items:
        for epoch, base in segment.facts.epochs:
            base = max(base, start)
            if merged and merged[-1][1] == base:
                merged[-1] = (epoch, base)
            elif not merged or merged[-1][0] != epoch:
                merged.append((epoch, base))
    return [entry for entry in merged if entry[1] < end]
