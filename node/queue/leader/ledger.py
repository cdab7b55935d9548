"""The ledger log of a led partition: its only writer, and its replay. (Shell.)

A ledger record is a tag byte and content. The tag names the section that the content belongs to:

    D  leases and settlements of each group            (deliveries.py)
    O  stored offsets and owners of stream groups      (stored_offsets.py)
    T  copies that are being sent to other topics      (copy_service.py)
    S  the rest of the record is part of a snapshot; S alone begins one, SE ends it
    P  a piece of a record that is too long for one; the byte after P tells if more follow

A section changes its memory first and then writes, without an await between. All records that are
written in one turn of the event loop become one batch, in order. The future is done when that batch
is replicated, and only then may a client get its answer. The records of one `write` survive
together or not at all, unless they are longer than BATCH_BYTES together.

If the batch cannot be written (disk full), memory is ahead of the log: the future fails, and
`on_lost` makes the owner start anew from the log, as a new leader does. So a section never has to
undo anything.

A snapshot replaces everything before it. It counts only at the very beginning of a ledger: a later
one repeats what is known, and one that a change of leaders cut short is not needed, because the
prefix is dropped only when the whole snapshot is replicated and flushed.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from raftq.client.common.errors import (
    CorruptFile,
    LeaderLost,
    NotLeader,
    RaftqError,
    RequestTimeout,
)
from raftq.client.wire.batch import encode
from raftq.client.wire.encoder import encode_control
from raftq.node.replication.leader_log import LeaderLog

logger = logging.getLogger(__name__)

TAG_DELIVERY = b"D"
TAG_OFFSETS = b"O"
TAG_COPIES = b"T"
TAG_SNAPSHOT = b"S"
TAG_PIECE = b"P"
SNAPSHOT_END = b"SE"

BATCH_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024
SNAPSHOT_BYTES = 4 * 1024 * 1024
SNAPSHOT_RECORDS = 25_000
REPLICATED_S = 30.0
"""After this time without enough replicas the outcome of a write is unknown."""
_MORE, _LAST = b"\x01", b"\x00"


class LedgerSection(Protocol):
    """The records of one tag. Content is given and returned without the tag byte."""

    def replay(self, content: bytes) -> None:
        """Apply a record. Raises CorruptFile if it makes no sense."""

    def snapshot(self) -> Iterable[bytes]:
        """Contents that give the present state when an empty section replays them in order."""


class Ledger:
    """Writes and replays the ledger log, for one epoch or until `on_lost`."""

    def __init__(
        self,
        partition_log: LeaderLog,
        loop: asyncio.AbstractEventLoop,
        on_lost: Callable[[RaftqError], None],
    ) -> None:
        self.partition_log = partition_log
        self._loop = loop
        self._on_lost = on_lost
        self._sections: Mapping[bytes, LedgerSection] = {}
        self._records: list[bytes] = []
        self._turn: asyncio.Future[None] | None = None
        self._soon = False
        self._under_way = 0  # batches that are not replicated
        self._ended: RaftqError | None = None
        self._since_bytes = 0
        self._since_records = 0
        self._snapshot_bytes = 0
        self._snapshotting = False
        self._replayed = partition_log.log.end_offset

    def set_sections(self, sections: Mapping[bytes, LedgerSection]) -> None:
        """Set the section of each tag, once, before the replay."""
        self._sections = sections

    # Writing

    def write(self, records: Sequence[bytes], patient: bool = False) -> "asyncio.Future[None]":
        """Write these with all others of this turn; done when they are replicated.

        While a batch is on its way to the followers, `patient` records wait for it. So under load
        many of them share the next batch; they would not be answered earlier anyway. The future is
        shared: never cancel it; add a callback or shield it.
        """
        turn = self._turn
        if turn is None:
            turn = self._loop.create_future()
            if self._ended is not None:
                turn.set_exception(self._ended)
                turn.exception()
                return turn
            self._turn = turn
        self._records += records
        if not self._soon and not (patient and self._under_way):
            self._soon = True
            self._loop.call_soon(self._flush)
        return turn

    def barrier(self) -> "asyncio.Future[None]":
        """Done when everything that was written so far is replicated."""
        if self._turn is not None:
            return self._turn
        end = self.partition_log.log.end_offset
        future: asyncio.Future[None] = self._loop.create_future()
        if self._ended is not None:
            future.set_exception(self._ended)
            future.exception()
        elif end <= self.partition_log.high_watermark:
            future.set_result(None)
        else:
            self._await_replicated(end, future)
        return future

    def stop(self, error: RaftqError) -> None:
        """Write nothing more; records that are not written yet fail."""
        if self._ended is None:
            self._ended = error
        turn, self._turn = self._turn, None
        self._records = []
        if turn is not None:
            _fail(turn, error)

    def _flush(self) -> None:
        self._soon = False
        turn, records = self._turn, self._records
        if turn is None:
            return
        self._turn, self._records = None, []
        try:
            end = self._append(records)
        except RaftqError as error:
            _fail(turn, error)
            if self._ended is None and not isinstance(error, NotLeader):
                self._ended = error
                self._on_lost(error)
            return
        self._under_way += 1
        turn.add_done_callback(self._arrived)
        self._await_replicated(end, turn)
        self._since_records += len(records)
        if self._wants_snapshot():
            self.begin_snapshot()

    def _arrived(self, turn: "asyncio.Future[None]") -> None:
        self._under_way -= 1
        if not self._under_way and self._turn is not None and not self._soon:
            self._flush()

    def _append(self, records: Sequence[bytes]) -> int:
        """Write the records, in one batch if they fit; the offset after the last."""
        end, written = self.partition_log.log.end_offset, False
        for part in _portions(records):
            batch = encode_control(part[0]) if len(part) == 1 else encode(part, control=True)
            size = len(batch)
            try:
                end = self.partition_log.append(batch) + len(part)
            except RaftqError as error:
                if written:
                    error.outcome = "unknown"
                raise
            written = True
            self._since_bytes += size
        return end

    def _await_replicated(self, end: int, future: "asyncio.Future[None]") -> None:
        """Finish the future when the log is replicated up to `end`, or with the error."""
        replicated = self.partition_log.replicated(end)
        if replicated.done():
            _pass_on(replicated, future)
            return
        timer = self._loop.call_later(REPLICATED_S, _time_out, future)

        def done(replicated: "asyncio.Future[None]") -> None:
            timer.cancel()
            _pass_on(replicated, future)

        replicated.add_done_callback(done)

    # Snapshots

    def _wants_snapshot(self) -> bool:
        # A big state is written less often, so that writing it stays a part of the work.
        return (
            not self._snapshotting
            and (self._since_bytes >= SNAPSHOT_BYTES or self._since_records >= SNAPSHOT_RECORDS)
            and self._since_bytes >= self._snapshot_bytes
        )

    def begin_snapshot(self) -> None:
        """Write the whole state, and drop everything before it once that is safe."""
        partition_log = self.partition_log
        records = [TAG_SNAPSHOT]
        for tag, section in self._sections.items():
            records += [TAG_SNAPSHOT + tag + content for content in section.snapshot()]
        records.append(SNAPSHOT_END)
        before = self._since_bytes
        try:
            partition_log.log.roll()
            start = partition_log.log.end_offset
            end = self._append(records)
        except RaftqError as error:
            # An incomplete snapshot is ignored; the ledger goes on without it.
            logger.warning(
                "log=%s event=snapshot_failed error=%s", partition_log.log.directory, error
            )
            self._since_bytes = self._since_records = 0
            return
        self._snapshot_bytes = self._since_bytes - before
        self._since_bytes = self._since_records = 0
        self._snapshotting = True
        replicated = partition_log.replicated(end)
        replicated.add_done_callback(lambda done: self._snapshot_replicated(done, start))

    def _snapshot_replicated(self, replicated: "asyncio.Future[None]", start: int) -> None:
        self._snapshotting = False
        if replicated.cancelled() or replicated.exception() is not None or self._ended is not None:
            return
        try:
            self.partition_log.truncate_prefix(start)
        except RaftqError as error:
            logger.warning(
                "log=%s event=prefix_kept error=%s", self.partition_log.log.directory, error
            )

    # Replay

    def replay(self, skip_damaged: bool = False) -> Iterator[None]:
        """Give each section its records; yields after each batch.

        Raises CorruptBatch or CorruptFile if part of the log cannot be read or makes no sense.
        With `skip_damaged` it uses the rest instead.
        """
        log = self.partition_log.log
        joiner = _Joiner()
        start = _Start(log.start_offset > 0 and not skip_damaged)
        for batch in log.batches(log.start_offset, self._replayed, skip_damaged=skip_damaged):
            for piece in batch.values():
                record = joiner.add(piece)
                if record is None:
                    continue
                try:
                    wanted = start.unwrap(record)
                    if wanted:
                        self._section(wanted).replay(wanted[1:])
                except CorruptFile as error:
                    if not skip_damaged:
                        raise
                    logger.error("log=%s event=record_skipped error=%s", log.directory, error)
            self._since_records += batch.count
            self._since_bytes += batch.length
            yield

    def _section(self, record: bytes) -> LedgerSection:
        found = self._sections.get(record[:1])
        if found is None:
            raise CorruptFile(f"a ledger record has the unknown tag {record[:1]!r}")
        return found


class _Start:
    """Tells the snapshot at the beginning of a ledger from later ones, which are ignored."""

    def __init__(self, needs_snapshot: bool) -> None:
        self._needs_snapshot = needs_snapshot
        self._is_over = False

    def unwrap(self, record: bytes) -> bytes:
        """The record without the mark of a snapshot; empty if it is to be ignored."""
        if not record.startswith(TAG_SNAPSHOT):
            if self._needs_snapshot:
                raise CorruptFile("the ledger has no beginning")
            self._is_over = True
            return record
        if self._is_over or record == TAG_SNAPSHOT:
            return b""
        if record == SNAPSHOT_END:
            self._is_over, self._needs_snapshot = True, False
            return b""
        return record[1:]


class _Joiner:
    """Puts records together that were cut into pieces."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def add(self, record: bytes) -> bytes | None:
        """A whole record, or None while pieces are missing."""
        if not record.startswith(TAG_PIECE):
            self._pieces = []  # a change of leaders cut off the last pieces of that record
            return record
        self._pieces.append(record[2:])
        if record[1:2] == _MORE:
            return None
        whole = b"".join(self._pieces)
        self._pieces = []
        return whole


def _portions(records: Sequence[bytes]) -> Iterator[list[bytes]]:
    """Records for one batch each; usually all of them for one."""
    part: list[bytes] = []
    size = 0
    for record in records:
        for piece in _pieces(record):
            if part and size + len(piece) > BATCH_BYTES:
                yield part
                part, size = [], 0
            part.append(piece)
            size += len(piece)
    if part:
        yield part


def _pieces(record: bytes) -> Iterable[bytes]:
    if len(record) <= PIECE_BYTES:
        return (record,)
    starts = range(0, len(record), PIECE_BYTES)
    return [
        TAG_PIECE
        + (_MORE if start + PIECE_BYTES < len(record) else _LAST)
        + record[start : start + PIECE_BYTES]
        for start in starts
    ]


def _fail(future: "asyncio.Future[None]", error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # so that asyncio does not complain if no caller waits


def _pass_on(done: "asyncio.Future[None]", future: "asyncio.Future[None]") -> None:
    if done.cancelled():
        _fail(future, LeaderLost("the leader stood down"))
    elif (error := done.exception()) is not None:
        _fail(future, error)
    elif not future.done():
        future.set_result(None)


def _time_out(future: "asyncio.Future[None]") -> None:
    _fail(future, RequestTimeout("it is written, but not enough replicas have it in time"))
