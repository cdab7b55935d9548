"""Shell: leases, settlements and dead letters of the groups of a queue. One caller at a time."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from raftq.client.common.errors import DiskFull, InvalidArgument, LeaseForeign
from raftq.client.wire.batch import encode
from raftq.client.wire.record import Headers
from raftq.node.queue.core.copy_ledger import Death
from raftq.node.queue.core.dead_letter_headers import dead_headers
from raftq.node.queue.core.entries import Entry, Row
from raftq.node.queue.core.group_delivery import DyingRecords, Grant, GroupDelivery
from raftq.node.queue.embedded.engine import QueueEngine, Target
from raftq.node.queue.embedded.message import Held, Message, record_bytes
from raftq.node.queue.embedded.reader import LaneReader

logger = logging.getLogger("raftq.queue")

# Rounds of one lease call: a round can come out empty when everything in it had expired.
ROUNDS_MAX = 100
# Dead letters copied by one commit, so that a mass expiry does not build one giant batch.
DEAD_RECORDS_MAX = 1000
DEAD_BYTES_MAX = 4 * 1024 * 1024
DEAD_READ_MAX = 16
DEAD_RETRY_S = 1.0

DeadPair = tuple[Message, DyingRecords]


class GroupConsumer:
    """The verbs of consumers."""

    def __init__(self, engine: QueueEngine) -> None:
        self._engine = engine
        self._dead_readers: dict[int, LaneReader] = {}
        self.delivered = 0
        self.unfinished = False
        """The last lease found nothing, but stopped before it had looked at everything."""

    def lease(
        self, group_name: str, records_max: int, now: float, lease_s: float | None
    ) -> list[Message]:
        """Deliver up to `records_max` messages to a group."""
        engine = self._engine
        group = engine.group(group_name)
        self.expire(group, now)
        self.unfinished = False
        for _ in range(ROUNDS_MAX):
            grants = group.lease(records_max, now, "", lease_s)
            if not grants:
                return []
            messages = self._deliver(group, grants, now)
            if messages:
                self.delivered += len(messages)
                return messages
        self.unfinished = True
        return []

    def expire(self, group: GroupDelivery, now: float) -> None:
        """End the leases whose time is up."""
        deadline = group.next_deadline()
        while deadline is not None and deadline <= now:
            entries, letters = group.expire(now)
            if not entries and not letters:
                return
            if entries:
                self._engine.write(entries)
            try:
                self.dead_letter(group, letters, now)
            except DiskFull as error:
                # They are looked at again later, and others are delivered meanwhile.
                logger.warning("group=%s event=dead_letters_wait error=%s", group.group, error)
            deadline = group.next_deadline()

    def abandon(self, group: GroupDelivery, now: float) -> None:
        """At open: whatever the last process had leased comes back at once."""
        entries, letters = group.abandon(now)
        if entries:
            self._engine.write(entries)
        self.dead_letter(group, letters, now)

    def ack(self, messages: Iterable[Message], now: float) -> list[Target]:
        """Settle all of them or none."""
        messages = tuple(messages)
        entries = self.ack_entries(messages, now)
        if self._engine.options.fsync == "always":
            self.keep_settled(messages)
        return [self._engine.write(entries)] if entries else []

    def ack_entries(self, messages: Iterable[Message], now: float) -> list[Entry]:
        """Checked entries that settle these messages; nothing is changed yet."""
        rows_by_group = self._rows(messages)
        groups = self._engine.state.groups
        return [groups[name].ack(rows, now) for name, rows in rows_by_group.items()]

    def keep_settled(self, messages: Iterable[Message]) -> None:
        """Sync the data log if it could lose one of these messages to a power cut.

        Needed before its settlement goes to the disk: a message that a power cut takes from the
        data log can come back at another offset (a delayed message fires again, an intent is
        applied again). There it would not be known as settled.
        """
        data = self._engine.files.data
        flushed = data.flushed_offset
        if any(message.offset >= flushed for message in messages):
            data.sync()

    def nack(self, message: Message, delay: float | None, now: float) -> list[Target]:
        group, nonce, offset = self._held(message)
        entry, letters = group.nack(nonce, offset, offset + 1, now, delay)
        if entry is not None:
            return [self._engine.write([entry])]
        return self.dead_letter(group, letters, now)

    def postpone(self, message: Message, delay: float, now: float) -> list[Target]:
        group, nonce, offset = self._held(message)
        return [self._engine.write([group.postpone(nonce, offset, offset + 1, now, delay)])]

    def extend(self, message: Message, extension: float, now: float) -> list[Target]:
        group, nonce, offset = self._held(message)
        return [self._engine.write([group.extend(nonce, offset, offset + 1, now, extension)])]

    def reject(self, message: Message, reason: str, error: str, now: float) -> list[Target]:
        group, nonce, offset = self._held(message)
        letters = group.reject(nonce, offset, offset + 1, now, reason)
        return self.dead_letter(group, letters, now, error)

    def release_all(self, now: float) -> None:
        """Give back every lease without spending its attempt: a graceful end."""
        entries = []
        for group in self._engine.state.groups.values():
            rows = [(lease.nonce, lease.start, lease.end) for lease in group.leases]
            held = [row for row in rows if _still_held(group, row, now)]
            if held:
                entries.append(group.release(held, now))
        if entries:
            self._engine.write(entries)

    def dead_letter(
        self, group: GroupDelivery, letters: Sequence[DyingRecords], now: float, error: str = ""
    ) -> list[Target]:
        """Copy to the dead letters and settle the source, in one commit each."""
        targets: list[Target] = []
        try:
            for part, pairs in self._portions(group, letters):
                appends = [("dead", batch) for batch in self._dead_batches(pairs, now, error)]
                targets += self._engine.commit(appends, [group.settle_dead(part)])
        except DiskFull:
            # All that are still dying, not only those of this portion.
            group.unmark_dying(letters, now + DEAD_RETRY_S)
            raise
        return targets

    def _deliver(self, group: GroupDelivery, grants: list[Grant], now: float) -> list[Message]:
        """Read what was granted, leave out what expired, and put it all in the ledger."""
        engine = self._engine
        messages: list[Message] = []
        expired: list[Row] = []
        missing: list[Row] = []
        now_ms = int(now * 1000)
        try:
            for grant in grants:
                held = Held(engine.path, group.group, grant.lane, grant.attempt, grant.nonce)
                reader = engine.reader(group.group, grant.lane)
                found = reader.read(grant.start, grant.end, held)
                if len(found) != grant.end - grant.start:
                    missing += _missing_rows(grant, found)
                if reader.has_expiries:
                    alive = [m for m in found if not 0 < m.expires_at_ms <= now_ms]
                    if len(alive) != len(found):
                        gone = [m for m in found if 0 < m.expires_at_ms <= now_ms]
                        expired += [(grant.nonce, m.offset, m.offset + 1) for m in gone]
                        found = alive
                messages += found
            entries = [group.granted_entry(grants, now, "")]
            engine.record(entries)
        except BaseException:
            group.take_back(grants)
            raise
        try:
            if missing:
                engine.write([group.skip(missing)])
                engine.note_damage()
            if expired:
                self._settle_expired(group, expired, now)
        except DiskFull as error:
            # They stay leased and are looked at again; the others must reach their consumer.
            logger.warning("group=%s event=settling_waits error=%s", group.group, error)
        return messages

    def _settle_expired(self, group: GroupDelivery, rows: list[Row], now: float) -> None:
        if not self._engine.options.dead_letter_expired:
            self._engine.write([group.expired_entry(_merge(rows))])
            return
        for nonce, start, end in _merge(rows):
            self.dead_letter(group, group.reject(nonce, start, end, now, "expired"), now)

    def _rows(self, messages: Iterable[Message]) -> dict[str, list[Row]]:
        """Messages as ranges per group: neighbours of one grant become one row."""
        rows_by_group: dict[str, list[Row]] = {}
        held: Held | None = None
        start = end = 0
        for message in messages:
            if type(message) is not Message:
                check_message(message)
            offset = message.offset
            if message.held is held and offset == end:
                end += 1
                continue
            if held is not None:
                rows_by_group.setdefault(held.group, []).append((held.nonce, start, end))
            held, start, end = message.held, offset, offset + 1
            self._check_own(held)
        if held is not None:
            rows_by_group.setdefault(held.group, []).append((held.nonce, start, end))
        return rows_by_group

    def _held(self, message: Message) -> tuple[GroupDelivery, int, int]:
        check_message(message)
        held = message.held
        self._check_own(held)
        return self._engine.state.groups[held.group], held.nonce, message.offset

    def _check_own(self, held: Held) -> None:
        if held.queue != self._engine.path:
            raise LeaseForeign(f"the message belongs to queue {held.queue!r}")
        if not held.nonce:
            raise LeaseForeign("the message was looked at, not dequeued: it has no lease")
        if held.group not in self._engine.state.groups:
            raise LeaseForeign(f"the message belongs to group {held.group!r}, which was deleted")

    def _portions(
        self, group: GroupDelivery, letters: Sequence[DyingRecords]
    ) -> Iterator[tuple[list[DyingRecords], list[DeadPair]]]:
        """Letters with their messages, in portions that one batch can hold; ranges are cut."""
        part: list[DyingRecords] = []
        pairs: list[DeadPair] = []
        size = 0
        for letter in letters:
            start = letter.start
            for message in self._dying_messages(group, letter):
                if pairs and (size > DEAD_BYTES_MAX or len(pairs) >= DEAD_RECORDS_MAX):
                    if start < message.offset:
                        part.append(replace(letter, start=start, end=message.offset))
                    yield part, pairs
                    part, pairs, size, start = [], [], 0, message.offset
                pairs.append((message, letter))
                size += record_bytes(message.value, message.key, message.headers)
            part.append(replace(letter, start=start))
        if part:
            yield part, pairs

    def _dying_messages(self, group: GroupDelivery, letter: DyingRecords) -> Iterator[Message]:
        lease = group.leases.get(letter.nonce)
        lane = 0 if lease is None else lease.lane
        held = Held(self._engine.path, group.group, lane, letter.attempt, letter.nonce)
        reader = self._dead_readers.setdefault(lane, LaneReader(self._engine.files.data))
        for start in range(letter.start, letter.end, DEAD_READ_MAX):
            found = reader.read(start, min(start + DEAD_READ_MAX, letter.end), held)
            self.keep_settled(found)
            yield from found

    def _dead_batches(self, pairs: list[DeadPair], now: float, error: str) -> list[bytearray]:
        rows: dict[int, list[DeadPair]] = {}
        for pair in pairs:
            rows.setdefault(pair[0].held.lane, []).append(pair)
        return [
            encode(
                [message.value for message, _ in pairs],
                keys=[message.key for message, _ in pairs],
                headers=[self._dead_headers(*pair, error) for pair in pairs],
                timestamps=int(now * 1000),
                lane=lane,
            )
            for lane, pairs in rows.items()
        ]

    def _dead_headers(self, message: Message, letter: DyingRecords, error: str) -> Headers:
        death = Death(
            *(message.group, letter.nonce, letter.attempt, letter.first, letter.last),
            *(letter.reason, error),
        )
        return dead_headers(message.headers, message.offset, death, (self._engine.name, 0))


def message_list(messages: Any) -> list[Message]:
    if not isinstance(messages, Iterable):
        raise InvalidArgument(f"{messages!r:.40} is not a list of messages")
    found = list(messages)
    for message in found:
        check_message(message)
    return found


def check_message(message: object) -> None:
    if not isinstance(message, Message):
        raise InvalidArgument(f"{message!r:.40} is not a message")


def _missing_rows(grant: Grant, found: list[Message]) -> list[Row]:
    """The ranges of a grant that hold no readable message."""
    edges = [grant.start - 1, *(message.offset for message in found), grant.end]
    return [(grant.nonce, a + 1, b) for a, b in pairwise(edges) if b > a + 1]


def _merge(rows: list[Row]) -> list[Row]:
    merged: list[Row] = []
    for nonce, start, end in rows:
        if merged and merged[-1][0] == nonce and merged[-1][2] == start:
            merged[-1] = (nonce, merged[-1][1], end)
        else:
            merged.append((nonce, start, end))
    return merged


def _still_held(group: GroupDelivery, row: Row, now: float) -> bool:
    lease = group.leases.get(row[0])
    return lease is not None and bool(lease.held_runs(row[1], row[2], now))
