"""Shell: everything that puts messages into a queue. One caller at a time.

Values arrive here from users, so this is where arguments, limits and the room left are checked:
whatever is refused is refused before anything is written.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import groupby, repeat
from math import ceil
from typing import Any

from raftq.client.common.errors import DiskFull, InvalidArgument, QueueFull, RaftqError, TooLarge
from raftq.client.common.names import LANE_NAMES
from raftq.client.common.times import due_ms, expiry_ms
from raftq.client.wire.batch import LANE_NORMAL, encode, encode_one
from raftq.client.wire.codecs import CODECS
from raftq.client.wire.record import Headers, check_record_limits
from raftq.node.queue.embedded.engine import QueueEngine, Target
from raftq.node.queue.embedded.message import delayed_id, record_bytes

logger = logging.getLogger("raftq.queue")

BATCH_BYTES_TARGET = 1024 * 1024
BATCH_RECORDS_MAX = 10_000
DEDUP_ID_CHARS_MAX = 1024
_LANES = {name: lane for lane, name in enumerate(LANE_NAMES)}


@dataclass(slots=True)
class Draft:
    """Messages to publish, checked and ready to encode: all of one lane, delay and ttl."""

    values: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers | None] | None = None
    lane: int = LANE_NORMAL
    deliver_at_ms: int = 0
    expires_at_ms: int = 0
    dedup_id: str | None = None

    def sizes(self) -> list[int]:
        """About how many bytes each message takes."""
        if self.keys is None and self.headers is None:
            return list(map(len, self.values))
        nothing = repeat(None)
        return list(map(record_bytes, self.values, self.keys or nothing, self.headers or nothing))


class Single:
    """A plain message of one thread, and what became of it."""

    __slots__ = ("error", "lane", "offset", "value")

    def __init__(self, value: bytes, lane: int) -> None:
        self.value = value
        self.lane = lane
        self.offset = -1
        self.error: RaftqError | None = None


class Publisher:
    """Appends drafts to the data log, or to the delays log when they are not yet due."""

    def __init__(self, engine: QueueEngine) -> None:
        self._engine = engine
        self._codec = CODECS[engine.options.compression]
        self._limited = (
            engine.options.max_messages is not None or engine.options.max_bytes is not None
        )

    def publish_one(self, value: bytes, lane: int, now_ms: int) -> int:
        """The short way for a plain message; returns its offset."""
        engine = self._engine
        if engine.unapplied is not None or engine.files.reserve_missing:
            engine.check_publish()
        if self._limited:
            self.check_room(1, len(value))
        self._engine.published += 1
        return engine.files.data.append(encode_one(value, now_ms, lane))

    def publish_singles(self, messages: list[Single], now_ms: int) -> None:
        """Append plain messages of several threads with one write; each gets its offset or error.

        When the group as a whole is refused, each is tried alone: some may still fit.
        """
        engine = self._engine
        if not self._limited and engine.unapplied is None and not engine.files.reserve_missing:
            try:
                self._append_singles(messages, now_ms)
            except DiskFull as error:
                logger.debug("queue=%s event=group_refused error=%s", engine.name, error)
            else:
                return
        for one in messages:
            try:
                one.offset = self.publish_one(one.value, one.lane, now_ms)
            except RaftqError as error:
                one.error = error

    def _append_singles(self, messages: list[Single], now_ms: int) -> None:
        """One batch per lane, all of them with one write."""
        by_lane: dict[int, list[Single]] = {}
        for one in messages:
            by_lane.setdefault(one.lane, []).append(one)
        batches = [
            encode([one.value for one in group], timestamps=now_ms, lane=lane)
            for lane, group in by_lane.items()
        ]
        bases = self._engine.files.data.append_many(batches)
        for base, group in zip(bases, by_lane.values(), strict=True):
            for offset, one in enumerate(group, base):
                one.offset = offset
        self._engine.published += len(messages)

    def publish(self, draft: Draft, now_ms: int) -> tuple[list[str], list[Target]]:
        """Append a draft; returns its ids and what must be synced for it to be durable."""
        engine = self._engine
        if not draft.values:
            return [], []
        if draft.dedup_id is not None:
            return self._publish_once(draft, draft.dedup_id, now_ms)
        engine.check_publish()
        delayed = draft.deliver_at_ms > now_ms
        if self._limited:
            self.check_room(len(draft.values), sum(draft.sizes()))
        batches = self.encode(draft, now_ms)
        if delayed:
            first = engine.files.delays.end_offset
            engine.delays.append(batches)
            log = engine.files.delays
        else:
            log = engine.files.data
            first = log.append_many(batches)[0]
        count = len(draft.values)
        self._engine.published += count
        return ids_of(first, count, delayed), [(log, log.end_offset)]

    def encode(self, draft: Draft, now_ms: int) -> list[bytearray]:
        """A draft as batches of a size that readers like."""
        values = draft.values
        sizes = draft.sizes()
        if len(values) <= BATCH_RECORDS_MAX and sum(sizes) <= 2 * BATCH_BYTES_TARGET:
            return [self._encode(draft, 0, len(values), now_ms)]
        batches = []
        start = room = 0
        for index, size in enumerate(sizes):
            if index > start and (
                room + size > BATCH_BYTES_TARGET or index - start >= BATCH_RECORDS_MAX
            ):
                batches.append(self._encode(draft, start, index, now_ms))
                start, room = index, 0
            room += size
        batches.append(self._encode(draft, start, len(values), now_ms))
        return batches

    def encode_all(
        self, drafts: list[Draft], now_ms: int
    ) -> tuple[list[tuple[str, bytearray]], list[str]]:
        """Batches with the names of their logs, and the ids that their messages will have."""
        appends: list[tuple[str, bytearray]] = []
        ids: list[str] = []
        ends = {name: log.end_offset for name, log in self._engine.files.logs.items()}
        for draft in _merge_drafts(drafts):
            delayed = draft.deliver_at_ms > now_ms
            name = "delays" if delayed else "data"
            appends += [(name, batch) for batch in self.encode(draft, now_ms)]
            ids += ids_of(ends[name], len(draft.values), delayed)
            ends[name] += len(draft.values)
        return appends, ids

    def _encode(self, draft: Draft, start: int, end: int, now_ms: int) -> bytearray:
        count = end - start
        whole = count == len(draft.values)
        delayed = draft.deliver_at_ms > now_ms
        return encode(
            draft.values if whole else draft.values[start:end],
            keys=None if draft.keys is None else draft.keys[start:end],
            headers=None if draft.headers is None else draft.headers[start:end],
            timestamps=now_ms,
            expiries=[draft.expires_at_ms] * count if draft.expires_at_ms else None,
            deliver_at=[draft.deliver_at_ms] * count if delayed else None,
            lane=draft.lane,
            codec=self._codec if count > 1 else 0,
        )

    def _publish_once(
        self, draft: Draft, dedup_id: str, now_ms: int
    ) -> tuple[list[str], list[Target]]:
        """Publish under a dedup id: the message and the memory of its id are one intent."""
        engine = self._engine
        state = engine.state
        state.forget_old_dedups(now_ms)
        known = state.dedup.get(dedup_id)
        # Ids of an earlier, longer window can stand before those of a shorter one.
        if known is not None and known[1] > now_ms:
            return [known[0]], []
        delayed = draft.deliver_at_ms > now_ms
        self.check_room(1, sum(draft.sizes()))
        name = "delays" if delayed else "data"
        message_id = ids_of(engine.files.logs[name].end_offset, 1, delayed)[0]
        forget_at = now_ms + int(engine.options.dedup_window * 1000)
        appends = [(name, batch) for batch in self.encode(draft, now_ms)]
        targets = engine.commit(
            appends,
            dedups=[(dedup_id, message_id, forget_at)],
            sync=engine.options.fsync == "always",
        )
        self._engine.published += 1
        return [message_id], targets

    def check_room(self, count: int, size: int) -> None:
        """Raise QueueFull when so many more messages, of so many bytes, are over a limit."""
        options, engine = self._engine.options, self._engine
        if options.max_messages is not None:
            unsettled = self.unsettled()
            if unsettled + count > options.max_messages:
                raise QueueFull(
                    f"queue {engine.name!r} holds {unsettled} unsettled messages of at most "
                    f"{options.max_messages}"
                )
        limit = options.max_bytes
        if limit is not None and engine.files.message_bytes + size > limit:
            engine.drop_settled()
            if engine.files.message_bytes + size > limit:
                engine.drop_fired()
            used = engine.files.message_bytes
            if used + size > limit:
                raise QueueFull(
                    f"queue {engine.name!r} uses {used} bytes of at most {limit}, and {size} more "
                    "do not fit; settled segments were dropped already"
                )

    def unsettled(self) -> int:
        """Messages that some group has not settled, delayed ones included."""
        engine = self._engine
        end = engine.files.data.end_offset
        groups = engine.state.groups.values()
        open_counts = [end - g.settled.prefix - g.settled.count_above for g in groups]
        return max(open_counts, default=0) + engine.delays.schedule.pending_count


def ids_of(first: int, count: int, delayed: bool) -> list[str]:
    if delayed:
        return [delayed_id(offset) for offset in range(first, first + count)]
    return list(map(str, range(first, first + count)))


def lane_of(priority: str | int) -> int:
    """The lane of a priority given by name or number."""
    lane = _LANES.get(priority) if isinstance(priority, str) else priority
    if type(lane) is not int or not 0 <= lane < len(LANE_NAMES):
        names = ", ".join(LANE_NAMES)
        raise InvalidArgument(f"priority {priority!r} is none of {names} and not 0..4")
    return lane


def check_list(values: Any) -> Sequence[bytes]:
    """The values of a batch; whatever can be walked through once will do."""
    if isinstance(values, list | tuple):
        return values
    if isinstance(values, Iterable) and not isinstance(values, bytes | str | dict):
        return list(values)
    raise InvalidArgument("enqueue_batch takes a list of bytes values")


def check_values(
    values: Sequence[bytes],
    keys: Sequence[bytes | None] | None,
    headers: Sequence[Headers | None] | None,
    value_bytes_max: int,
) -> None:
    """Refuse what is not bytes or over a limit, naming the first offender."""
    for column, name in ((keys, "keys"), (headers, "headers")):
        if column is not None and not isinstance(column, list | tuple):
            raise InvalidArgument(f"{name} must be a list, one for each value")
        if column is not None and len(column) != len(values):
            raise InvalidArgument(f"{len(values)} values but {len(column)} {name}")
    # The common case in one pass at C speed; the slow pass below only finds whom to blame.
    if set(map(type, values)) <= {bytes} and not keys and not headers:
        if not values or max(map(len, values)) <= value_bytes_max:
            return
        raise TooLarge(
            f"a value of {max(map(len, values))} bytes is over the limit of {value_bytes_max}"
        )
    for index, value in enumerate(values):
        key = keys[index] if keys else None
        if not isinstance(value, bytes) or not isinstance(key, bytes | None):
            raise InvalidArgument(f"values and keys are bytes; number {index} is not")
        about = headers[index] if headers else None
        if not isinstance(about, dict | None):
            raise InvalidArgument(f"headers map str names to bytes values; number {index} do not")
        check_record_limits(value, key, about, value_bytes_max)


def message_times(
    delay: float | None, deliver_at: float | datetime | None, ttl: float | None, now: float
) -> tuple[int, int]:
    """When a message is due (0: at once), and when it ends (0: never), in ms since 1970."""
    # due_ms() takes a clock that was rounded down, and makes up for that with one millisecond.
    due = due_ms(delay, deliver_at, ceil(now * 1000) - 1)
    return due, expiry_ms(ttl, due, int(now * 1000))


def _merge_drafts(drafts: list[Draft]) -> list[Draft]:
    """Neighbours that can share a batch, joined; the order stays."""
    merged: list[Draft] = []
    for _, alike in groupby(drafts, key=lambda d: (d.lane, d.deliver_at_ms, d.expires_at_ms)):
        rows = list(alike)
        keys = [key for row in rows for key in row.keys or [None]]
        headers = [each for row in rows for each in row.headers or [None]]
        merged.append(
            replace(
                rows[0],
                values=[value for row in rows for value in row.values],
                keys=keys if any(key is not None for key in keys) else None,
                headers=headers if any(headers) else None,
            )
        )
    return merged
