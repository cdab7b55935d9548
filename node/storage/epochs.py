"""The history of leader epochs of a log, put together from its segments. (Pure.)"""

from raftq.node.storage.segment import Segments


def epoch_starts(segments: Segments, start: int) -> list[tuple[int, int]]:
    """(epoch, start_offset) of each epoch in the segments, in order, none below `start`."""
    merged: list[tuple[int, int]] = []
    for segment in segments.items:
        for epoch, base in segment.facts.epochs:
            base = max(base, start)
            if merged and merged[-1][1] == base:
                merged[-1] = (epoch, base)
            elif not merged or merged[-1][0] != epoch:
                merged.append((epoch, base))
    return merged


def last_epoch(segments: Segments, none: int) -> int:
    """The epoch of the newest batch that the segments tell of; `none` when there is no batch."""
    for segment in reversed(segments.items):
        if segment.facts.epochs:
            return segment.facts.epochs[-1][0]
    return none
