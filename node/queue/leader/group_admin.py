"""Pause, reset, purge, delete and describe the groups of a partition. (Shell.)

A group may consist of workers (deliveries), of readers (a stored offset), or both; a verb changes
what there is. A reset of a group that does not exist stores an offset, where workers begin, too.
"""

from dataclasses import fields

from raftq.client.common.errors import Detail, OffsetOutOfRange, UnknownGroup
from raftq.client.common.names import is_internal
from raftq.client.wire.queue_messages import QueueGroup, SteerGroup, SteerGroupReply
from raftq.node.queue.core.delivery_state import Counters
from raftq.node.queue.core.entries import DeletedEntry
from raftq.node.queue.core.group_delivery import GroupDelivery
from raftq.node.queue.leader.deliveries import GroupState
from raftq.node.queue.leader.engine import LedgerEngine
from raftq.node.queue.leader.stored_offsets import NOTHING, StoredPosition

_COUNTERS = tuple(field.name for field in fields(Counters))


def start_group(engine: LedgerEngine, name: str, start: str = "earliest") -> GroupState:
    """The group of that name. A new one begins at its stored offset, or else at `start`."""
    found = engine.deliveries.groups.get(name)
    if found is not None:
        return found
    data = engine.leadership.data
    offset = engine.offsets.of(name).offset
    if offset == NOTHING:
        offset = data.high_watermark if start == "latest" else data.log.start_offset
    offset = min(max(offset, data.log.start_offset), data.high_watermark)
    return engine.deliveries.create(name, offset)


def steer(engine: LedgerEngine, message: SteerGroup) -> SteerGroupReply:
    """Apply the verb. The reply is valid when the ledger is replicated."""
    engine.check_writable()
    name = message.group
    if message.verb in ("pause", "resume"):
        group = start_group(engine, name)
        engine.deliveries.write([group.core.pause(message.verb == "pause")])
        return SteerGroupReply(offset=group.core.settled.prefix)
    if message.verb == "delete":
        return _delete(engine, name)
    offset = engine.leadership.data.high_watermark
    if message.verb == "reset":
        offset = _reset_offset(engine, message)
    found = engine.deliveries.groups.get(name)
    count = 0
    if found is not None:
        count = unsettled(found.core)
        engine.deliveries.write([found.core.reset(offset)])
    if found is None or name in engine.offsets.positions:
        engine.offsets.reset(name, offset)
    return SteerGroupReply(offset, count)


def _delete(engine: LedgerEngine, name: str) -> SteerGroupReply:
    works, reads = name in engine.deliveries.groups, name in engine.offsets.positions
    if not works and not reads:
        raise UnknownGroup(f"{engine.leadership.ref} has no group {name!r}")
    if works:
        engine.deliveries.write([DeletedEntry(name)])
    if reads:
        engine.offsets.forget(name)
    return SteerGroupReply(count=1)


def _reset_offset(engine: LedgerEngine, message: SteerGroup) -> int:
    """The offset that a reset means."""
    log, end = engine.leadership.data.log, engine.leadership.data.high_watermark
    if message.to == "earliest":
        return log.start_offset
    if message.to == "latest":
        return end
    if message.to == "time":
        return min(log.offset_for_time(message.at), end)
    if not log.start_offset <= message.at <= end:
        raise OffsetOutOfRange(
            f"offset {message.at} is not kept: "
            f"{engine.leadership.ref} has {log.start_offset} to {end}"
        )
    return message.at


def unsettled(core: GroupDelivery) -> int:
    """Records that are neither settled nor gone: fresh, waiting or leased."""
    return core.pending() + core.leases.records


def describe(engine: LedgerEngine, name: str) -> tuple[QueueGroup, ...]:
    """The group of that name; without a name, all groups of the partition."""
    known = {**engine.deliveries.groups, **engine.offsets.positions}
    wanted = [name] if name else [group for group in known if not is_internal(group)]
    return tuple(_described(engine, group) for group in sorted(wanted) if group in known)


def _described(engine: LedgerEngine, name: str) -> QueueGroup:
    position = engine.offsets.of(name)
    group = engine.deliveries.groups.get(name)
    if group is None:
        return _reader(engine, name, position)
    core = group.core
    counters: dict[str, Detail] = dict(zip(_COUNTERS, core.state.counters.to_row(), strict=True))
    counters |= {"rejected": group.rejected, "extended": group.extended}
    counters |= {"parked": engine.copy_service.parked(name), "lost": engine.copy_service.lost(name)}
    return QueueGroup(
        group=name,
        settled_offset=max(core.settled.prefix, engine.leadership.data.log.start_offset),
        stored_offset=position.offset,
        owner_epoch=position.owner_epoch,
        member=position.member,
        in_flight=core.leases.records,
        waiting=core.state.waiting.count,
        unsettled=unsettled(core),
        paused=core.state.paused,
        counters=counters,
        lanes=tuple(group.given),
        lane_wait_ms=tuple(group.waited_ms),
    )


def _reader(engine: LedgerEngine, name: str, position: StoredPosition) -> QueueGroup:
    start, end = engine.leadership.data.log.start_offset, engine.leadership.data.high_watermark
    at = position.offset
    return QueueGroup(
        group=name,
        settled_offset=max(at, 0),
        stored_offset=at,
        owner_epoch=position.owner_epoch,
        member=position.member,
        unsettled=end - min(max(at, start), end),
    )
