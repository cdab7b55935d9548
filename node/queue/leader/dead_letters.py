"""Browse, redrive and purge the dead letters of a led partition. (Shell.)

A letter is gone when the internal group `__dlq` has settled it, or when its redrive is decided. So
a redrive that is requested twice sends each letter once.

Letters are read in order, from an offset on, for LOOK_S at most. An answer may end before all
letters were read, and has the offset to go on from.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.errors import CorruptBatch, InvalidArgument, OffsetOutOfRange
from raftq.client.common.names import DLQ_GROUP, DLQ_SUFFIX
from raftq.client.common.tasks import yield_to_loop
from raftq.client.common.types import Buffer
from raftq.client.wire import queue_messages as wire
from raftq.client.wire.batch import FLAG_CONTROL
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.core.copy_ledger import CopyRow, Target
from raftq.node.queue.core.dead_letter_headers import matches, origin
from raftq.node.queue.leader.copy_service import CopyService
from raftq.node.queue.leader.engine import LedgerEngine
from raftq.node.queue.leader.reply_batches import pack_records

SLICE_S = 0.003
LOOK_S = 1.0
"""How long one request searches for letters that match."""
BYTES_MAX = 4 * 1024 * 1024
LETTERS_MAX = 10_000
READ_BYTES = 256 * 1024
ARRIVE_S = 5.0
"""How long a redrive waits for its letters to arrive; they arrive in any case."""

Answer = wire.DeadLettersReply | tuple[wire.DeadLettersReply, list[Buffer]]
Exists = Callable[[Target], bool]


@dataclass(slots=True)
class _Found:
    letters: list[BatchRecord] = field(default_factory=list)
    next_offset: int = 0


async def dead_letters(engine: LedgerEngine, message: wire.DeadLetters, exists: Exists) -> Answer:
    """Apply the verb to the letters that match."""
    topic = message.topic
    if not topic.endswith(DLQ_SUFFIX):
        raise InvalidArgument(
            f"topic {topic!r} has no dead letters: ask for those of a {DLQ_SUFFIX}"
        )
    copy_service = engine.copy_service
    which = LetterFilter(message.group, message.reason, message.key, message.since, message.until)
    found = await _find(engine, copy_service, message, which)
    if message.verb == "browse":
        offsets = tuple(letter.offset for letter in found.letters)
        reply = wire.DeadLettersReply(len(offsets), offsets, found.next_offset)
        return reply, list(pack_records(found.letters, engine.leadership.epoch))
    engine.check_writable()
    # From here to the write nothing is awaited, so no other request takes these letters.
    letters = [one for one in found.letters if not _is_gone(engine, copy_service, one.offset)]
    if message.verb == "purge":
        if letters:
            ranges = [(one.offset, one.offset + 1) for one in letters]
            await asyncio.shield(engine.deliveries.pass_over(DLQ_GROUP, _merged(ranges)))
        return wire.DeadLettersReply(len(letters), (), found.next_offset)
    count = await _redrive(engine, copy_service, letters, exists)
    return wire.DeadLettersReply(count, (), found.next_offset)


async def _redrive(
    engine: LedgerEngine, copy_service: CopyService, letters: list[BatchRecord], exists: Exists
) -> int:
    rows: dict[Target, list[CopyRow]] = {}
    sent: list[int] = []
    for letter in letters:
        target = origin(letter)
        if target is None or not exists(target):
            continue  # its origin is gone, so it stays
        row = CopyRow(letter.offset, letter.offset + 1, letter.priority, None)
        rows.setdefault(target, []).append(row)
        sent.append(letter.offset)
    if rows:
        await asyncio.shield(copy_service.redrive(rows))
        await copy_service.arrived(rows, ARRIVE_S)
    # Letters that were refused are still there.
    return len([offset for offset in sent if _is_gone(engine, copy_service, offset)])


async def _find(
    engine: LedgerEngine, copy_service: CopyService, message: wire.DeadLetters, which: LetterFilter
) -> _Found:
    """Letters that match and are not gone, and where to go on."""
    found = _Found()
    loop = engine.leadership.loop
    limit = min(message.limit, LETTERS_MAX)
    size = 0
    until = loop.time() + LOOK_S
    data = engine.leadership.data
    found.next_offset = max(message.offset, data.log.start_offset)
    async for records, end in _letters(engine, found.next_offset):
        for letter in records:
            if letter.offset < found.next_offset:
                continue
            if len(found.letters) >= limit or size >= BYTES_MAX:
                return found
            found.next_offset = letter.offset + 1
            if matches(which, letter) and not _is_gone(engine, copy_service, letter.offset):
                found.letters.append(letter)
                size += len(letter.value)
        found.next_offset = end
        if len(found.letters) >= limit or loop.time() >= until:
            return found
    return found


async def _letters(
    engine: LedgerEngine, start: int
) -> AsyncIterator[tuple[list[BatchRecord], int]]:
    """All records from an offset on, a batch at a time, and the offset after each batch."""
    loop, data = engine.leadership.loop, engine.leadership.data
    position, end = start, data.high_watermark
    until = loop.time() + SLICE_S
    while position < end:
        try:
            for batch in data.log.batches(position, end, READ_BYTES, skip_damaged=True):
                position = batch.end_offset
                yield [] if batch.flags & FLAG_CONTROL else batch.records(), position
                if loop.time() >= until:
                    await yield_to_loop()
                    until = loop.time() + SLICE_S
            return
        except OffsetOutOfRange:
            position = max(position, data.log.start_offset)  # retention was faster
        except CorruptBatch:
            return


def _is_gone(engine: LedgerEngine, copy_service: CopyService, offset: int) -> bool:
    group = engine.deliveries.groups.get(DLQ_GROUP)
    return copy_service.is_leaving(offset) or (group is not None and offset in group.core.settled)


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged
