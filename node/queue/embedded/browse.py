"""Shell: looks at messages without taking them. One caller at a time."""

from raftq.client.wire.batch import FLAG_CONTROL
from raftq.node.queue.core.group_delivery import GroupDelivery
from raftq.node.queue.core.lanes import LANES
from raftq.node.queue.embedded.check import check_count
from raftq.node.queue.embedded.engine import QueueEngine
from raftq.node.queue.embedded.message import Held, Message
from raftq.node.queue.embedded.reader import BatchColumns, LaneReader

PEEK_MAX = 10_000


def peek(engine: QueueEngine, group: GroupDelivery, count: int) -> list[Message]:
    """Up to `count` messages, highest priority first, those that wait for a retry included."""
    check_count(count, "max_messages", PEEK_MAX)
    reader = LaneReader(engine.files.data)
    found: list[Message] = []
    for lane in range(LANES):
        for start, end, attempt in _ranges(engine, group, lane, count - len(found)):
            held = Held(engine.path, group.group, lane, attempt, 0)
            found += reader.read(start, min(end, start + count - len(found)), held)
            if len(found) >= count:
                return found
    return found


def browse(engine: QueueEngine, start: int, count: int) -> tuple[list[Message], int]:
    """Up to `count` messages in offset order, settled or not, and the offset to go on from.

    Damaged messages and those that are no longer kept are passed over.
    """
    data = engine.files.data
    at = max(start, data.start_offset)
    found: list[Message] = []
    for batch in data.batches(at, skip_damaged=True):
        if batch.count and not batch.flags & FLAG_CONTROL:
            held = Held(engine.path, "", batch.lane, 0, 0)
            found += BatchColumns(batch).messages(
                max(at, batch.base_offset), batch.end_offset, held
            )
        if len(found) >= count:
            del found[count:]
            return found, found[-1].offset + 1
    return found, max(at, data.end_offset)


def _ranges(
    engine: QueueEngine, group: GroupDelivery, lane: int, count: int
) -> list[tuple[int, int, int]]:
    """(start, end, attempts spent) of what the lane has, enough for `count` messages."""
    waits = sorted((w for w in group.state.waiting if w.lane == lane), key=lambda wait: wait.start)
    ranges = [(wait.start, wait.end, wait.attempt) for wait in waits]
    size = sum(end - start for start, end, _ in ranges)
    at = group.state.cursors[lane]
    while size < count and (run := engine.files.data.next_run(lane, at)) is not None:
        holes = group.settled.holes(run[0], min(run[1], run[0] + count))
        ranges += [(start, end, 0) for start, end in holes]
        size += sum(end - start for start, end in holes)
        at = min(run[1], run[0] + count)
    return ranges
