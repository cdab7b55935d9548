"""Counts an open queue for its owner. One caller at a time."""

from raftq.client.common.names import LANE_NAMES
from raftq.node.queue.core.group_delivery import GroupDelivery
from raftq.node.queue.embedded.dead import EmbeddedDeadLetters
from raftq.node.queue.embedded.engine import DEFAULT_GROUP, QueueEngine
from raftq.node.queue.embedded.message import LaneStats, QueueStats


def take_stats(engine: QueueEngine, dead: EmbeddedDeadLetters) -> QueueStats:
    data = engine.files.data
    group = engine.state.groups[DEFAULT_GROUP]
    pending = group.pending_by_lane()
    start = data.start_offset
    lanes = {
        name: LaneStats(pending=pending[lane], total=data.count_from(lane, start))
        for lane, name in enumerate(LANE_NAMES)
    }
    counts = group.state.counters
    return QueueStats(
        total=data.end_offset - start,
        pending=sum(pending),
        in_flight=group.in_flight,
        waiting=group.state.waiting.count,
        delayed=engine.delays.schedule.pending_count,
        dead=dead.count,
        settled=max(group.settled.prefix - start, 0) + group.settled.count_above,
        damaged=sum(
            each.end - each.start for log in engine.files.message_logs for each in log.damaged
        ),
        lanes=lanes,
        groups={name: group_stats(each) for name, each in engine.state.groups.items()},
        counters=dict(zip(counts.__slots__, counts.to_row(), strict=True)),
        segments=data.segment_count,
        disk_bytes=engine.files.size_bytes,
        start_offset=start,
        end_offset=data.end_offset,
        flushed_offset=data.flushed_offset,
        settled_offset=group.settled.prefix,
        paused=group.state.paused,
    )


def group_stats(group: GroupDelivery) -> dict[str, int]:
    return {
        "pending": group.pending(),
        "in_flight": group.in_flight,
        "waiting": group.state.waiting.count,
        "settled_offset": group.settled.prefix,
        "acked": group.state.counters.acked,
        "dead": group.state.counters.dead,
        "paused": int(group.state.paused),
    }
