"""Shell: the dead letters of a queue: browse, redrive, purge. One caller at a time."""

from collections.abc import Iterable, Iterator
from itertools import islice

from raftq.client.common.names import DLQ_HEADER, LANE_NAMES
from raftq.client.wire.batch import encode
from raftq.client.wire.record import BatchRecord
from raftq.node.queue.embedded.engine import QueueEngine
from raftq.node.queue.embedded.ledger import DeadLettersDone
from raftq.node.queue.embedded.message import DLQ_FACTS, DeadMessage, record_bytes

REDRIVE_RECORDS_MAX = 500
REDRIVE_BYTES_MAX = 4 * 1024 * 1024


class EmbeddedDeadLetters:
    """The dead letters that are neither redriven nor purged."""

    def __init__(self, engine: QueueEngine) -> None:
        self._engine = engine

    @property
    def count(self) -> int:
        done, log = self._engine.state.dead_done, self._engine.files.dead
        return log.end_offset - max(done.prefix, log.start_offset) - done.count_above

    def browse(self, reason: str | None = None, limit: int | None = None) -> list[DeadMessage]:
        found: list[DeadMessage] = []
        for _, letter in self._letters(reason):
            if limit is not None and len(found) >= limit:
                break
            found.append(letter)
        return found

    def redrive(self, reason: str | None, limit: int | None, now_ms: int) -> int:
        """Put dead letters back into the queue as they were; each exactly once."""
        redriven = 0
        part: list[tuple[BatchRecord, DeadMessage]] = []
        size = 0
        for record, letter in islice(self._letters(reason), limit):
            part.append((record, letter))
            size += record_bytes(record.value, record.key, record.headers)
            if len(part) >= REDRIVE_RECORDS_MAX or size >= REDRIVE_BYTES_MAX:
                self._redrive(part, now_ms)
                redriven += len(part)
                part, size = [], 0
        if part:
            self._redrive(part, now_ms)
        return redriven + len(part)

    def purge(self) -> int:
        """Forget all dead letters; returns how many there were."""
        count = self.count
        log = self._engine.files.dead
        if count:
            self._keep_done(log.end_offset)
            self._engine.write_shell(DeadLettersDone([(log.start_offset, log.end_offset)]))
        self.upkeep(0, None)
        return count

    def upkeep(self, now_ms: int, retention_ms: int | None) -> None:
        """Drop files whose dead letters are too old or done."""
        log, done = self._engine.files.dead, self._engine.state.dead_done
        if retention_ms is not None:
            log.retain(now_ms, age_ms=retention_ms)
        if log.start_offset > done.prefix:
            self._engine.write_shell(DeadLettersDone([(done.prefix, log.start_offset)]))
        if done.prefix > log.start_offset:
            log.truncate_prefix(min(done.prefix, log.end_offset))

    def _letters(self, reason: str | None) -> Iterator[tuple[BatchRecord, DeadMessage]]:
        log, done = self._engine.files.dead, self._engine.state.dead_done
        start = max(done.prefix, log.start_offset)
        for batch in log.batches(start, skip_damaged=True):
            for record in batch.records():
                if record.offset < start or record.offset in done:
                    continue
                letter = _letter(record)
                if reason is None or letter.reason == reason:
                    yield record, letter

    def _keep_done(self, end: int) -> None:
        """Sync the dead letters below `end` before the ledger says they are done.

        A letter that a power cut takes from this log is appended again from the ledger, at another
        offset. There it would not be known as done.
        """
        log = self._engine.files.dead
        if log.flushed_offset < end:
            log.sync()

    def _redrive(self, part: list[tuple[BatchRecord, DeadMessage]], now_ms: int) -> None:
        by_lane: dict[int, list[DeadMessage]] = {}
        for record, letter in part:
            by_lane.setdefault(record.priority, []).append(letter)
        appends = [
            (
                "data",
                encode(
                    [letter.value for letter in letters],
                    keys=[letter.key for letter in letters],
                    headers=[letter.headers for letter in letters],
                    timestamps=now_ms,
                    lane=lane,
                ),
            )
            for lane, letters in by_lane.items()
        ]
        self._keep_done(max(record.offset for record, _ in part) + 1)
        self._engine.commit(appends, dead_done=_ranges(record.offset for record, _ in part))


def _letter(record: BatchRecord) -> DeadMessage:
    facts = {
        name.removeprefix(DLQ_HEADER): value.decode("utf-8", "replace")
        for name, value in record.headers.items()
        if name in DLQ_FACTS
    }
    headers = {n: v for n, v in record.headers.items() if n not in DLQ_FACTS}
    return DeadMessage(
        dead_offset=record.offset,
        value=record.value,
        key=record.key,
        headers=headers,
        priority=LANE_NAMES[record.priority],
        timestamp=record.timestamp / 1000,
        reason=facts.get("reason", ""),
        error=facts.get("error", ""),
        group=facts.get("group", ""),
        offset=int(facts.get("offset", "-1")),
        attempts=int(facts.get("attempts", "0")),
        first_delivery=_seconds(facts.get("first-delivery", "0")),
        last_delivery=_seconds(facts.get("last-delivery", "0")),
    )


def _seconds(fact: str) -> float:
    # Directories of older versions have seconds, with a dot; all others have milliseconds.
    return float(fact) if "." in fact else int(fact) / 1000


def _ranges(offsets: Iterable[int]) -> list[tuple[int, int]]:
    ranges: list[tuple[int, int]] = []
    for offset in sorted(offsets):
        if ranges and ranges[-1][1] == offset:
            ranges[-1] = (ranges[-1][0], offset + 1)
        else:
            ranges.append((offset, offset + 1))
    return ranges
