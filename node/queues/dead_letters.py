"""Looking at the dead letters of a led partition, sending them back, forgetting them. (Shell.)

A letter is gone when the internal group `__dlq` has settled it, or when it is owed to where it came
from. So a redrive that is asked for twice sends each letter once.

Letters are looked at in order, from an offset on, for a moment at a time; an answer may end before
everything was looked at, and says where to go on.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from raftq.client.tasks import let_others_run
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import FLAG_CONTROL, Buffer
from raftq.client.wire.errors import CorruptBatch, InvalidArgument, OffsetOutOfRange
from raftq.client.wire.record import Record
from raftq.node.queues.copies import Owed, Target
from raftq.node.queues.engine import Engine
from raftq.node.queues.letters import GROUP, SUFFIX, Filter, origin
from raftq.node.queues.packing import pack_records
from raftq.node.queues.transfers import LedTransfers

SLICE_S = 0.003
LOOK_S = 1.0
"""How long one request looks for letters that match."""
BYTES_MAX = 4 * 1024 * 1024
LETTERS_MAX = 10_000
READ_BYTES = 256 * 1024
ARRIVE_S = 5.0
"""So long a redrive waits for its letters to arrive; they will in any case."""

Answer = wire.DeadLettersReply | tuple[wire.DeadLettersReply, list[Buffer]]
Exists = Callable[[Target], bool]


@dataclass(slots=True)
class _Found:
    letters: list[Record] = field(default_factory=list)
    next_offset: int = 0


async def dead_letters(engine: Engine, message: wire.DeadLetters, exists: Exists) -> Answer:
    """Do what the verb says with the letters that match."""
    topic = message.topic
    if not topic.endswith(SUFFIX):
        raise InvalidArgument(f"topic {topic!r} has no dead letters: ask for those of a {SUFFIX}")
    transfers = engine.transfers
    assert isinstance(transfers, LedTransfers), transfers
    which = Filter(message.group, message.reason, message.key, message.since, message.until)
    found = await _find(engine, transfers, message, which)
    if message.verb == "browse":
        offsets = tuple(letter.offset for letter in found.letters)
        reply = wire.DeadLettersReply(len(offsets), offsets, found.next_offset)
        return reply, list(pack_records(found.letters, engine.led.epoch))
    engine.check_writable()
    # Nothing was awaited for since: nobody else has taken them.
    letters = [one for one in found.letters if not _is_gone(engine, transfers, one.offset)]
    if message.verb == "purge":
        if letters:
            ranges = [(one.offset, one.offset + 1) for one in letters]
            await asyncio.shield(engine.deliveries.pass_over(GROUP, _merged(ranges)))
        return wire.DeadLettersReply(len(letters), (), found.next_offset)
    count = await _redrive(engine, transfers, letters, exists)
    return wire.DeadLettersReply(count, (), found.next_offset)


async def _redrive(
    engine: Engine, transfers: LedTransfers, letters: list[Record], exists: Exists
) -> int:
    rows: dict[Target, list[Owed]] = {}
    sent: list[int] = []
    for letter in letters:
        target = origin(letter)
        if target is None or not exists(target):
            continue  # it stays: there is nowhere to send it
        row = Owed(letter.offset, letter.offset + 1, letter.priority, None)
        rows.setdefault(target, []).append(row)
        sent.append(letter.offset)
    if rows:
        await asyncio.shield(transfers.redrive(rows))
        await transfers.arrived(rows, ARRIVE_S)
    # Those that were refused are letters still.
    return len([offset for offset in sent if _is_gone(engine, transfers, offset)])


async def _find(
    engine: Engine, transfers: LedTransfers, message: wire.DeadLetters, which: Filter
) -> _Found:
    """Letters that match and are not gone, and where to go on."""
    found = _Found()
    loop = engine.led.loop
    limit = min(message.limit, LETTERS_MAX)
    size = 0
    until = loop.time() + LOOK_S
    data = engine.led.data
    found.next_offset = max(message.offset, data.log.start_offset)
    async for records, end in _letters(engine, found.next_offset):
        for letter in records:
            if letter.offset < found.next_offset:
                continue
            if len(found.letters) >= limit or size >= BYTES_MAX:
                return found
            found.next_offset = letter.offset + 1
            if which.matches(letter) and not _is_gone(engine, transfers, letter.offset):
                found.letters.append(letter)
                size += len(letter.value)
        found.next_offset = end
        if len(found.letters) >= limit or loop.time() >= until:
            return found
    return found


async def _letters(engine: Engine, start: int) -> AsyncIterator[tuple[list[Record], int]]:
    """All records from an offset on, a batch at a time, and the offset after each batch."""
    loop, data = engine.led.loop, engine.led.data
    position, end = start, data.high_watermark
    until = loop.time() + SLICE_S
    while position < end:
        try:
            for batch in data.log.batches(position, end, READ_BYTES, skip_damaged=True):
                position = batch.end_offset
                yield [] if batch.flags & FLAG_CONTROL else batch.records(), position
                if loop.time() >= until:
                    await let_others_run()
                    until = loop.time() + SLICE_S
            return
        except OffsetOutOfRange:
            position = max(position, data.log.start_offset)  # retention was faster
        except CorruptBatch:
            return


def _is_gone(engine: Engine, transfers: LedTransfers, offset: int) -> bool:
    group = engine.deliveries.groups.get(GROUP)
    return transfers.is_leaving(offset) or (group is not None and offset in group.core.settled)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
