"""Shell: acks, nacks and the like on their way to the leaders, many in one request.

Equal settlements of one partition share requests: while a request is under way, those that come
later wait together for the next one. An attempt of unknown outcome is repeated. When the repetition
finds one of these, the first attempt took effect, so it counts as done:

    ack, reject                settled already
    nack, postpone, release    not leased any more: the record comes again, or has come again
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from raftq.client.common.errors import AlreadySettled, LeaseLost, RaftqError
from raftq.client.common.tasks import Tasks
from raftq.client.common.types import PartitionKey
from raftq.client.net.attempts import Attempts
from raftq.client.net.leaders import Leaders, error_of_code
from raftq.client.options import ClientOptions
from raftq.client.queue.leased import Receipt, Row, merge, rows_by_partition
from raftq.client.wire.queue_messages import ReceiptRow, Settle

Verb = Literal["ack", "nack", "postpone", "reject", "extend", "release"]

ROWS_MAX = 4_000  # in one request
REQUESTS_MAX = 2  # of one kind and partition in flight


class Settlement(NamedTuple):
    """What a holder does with leased records."""

    verb: Verb
    delay_ms: int | None = None
    reason: str = ""
    error: str = ""


class SettleFailure(NamedTuple):
    """Records that could not be settled, and why."""

    partition_key: PartitionKey
    row: Row
    error: RaftqError


class _Item:
    """The rows of one caller, and the future with their result."""

    __slots__ = ("failed", "future", "rows")

    def __init__(self, rows: Sequence[Row], future: "asyncio.Future[list[SettleFailure]]") -> None:
        self.rows = rows
        self.future = future
        self.failed: list[SettleFailure] = []


class _Channel:
    """Settlements of one kind that wait for one partition."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Item] = deque()
        self.running = 0


class Settler:
    """Settles the records of one group."""

    def __init__(
        self, group: str, leaders: Leaders, options: ClientOptions, tasks: Tasks, timeout_s: float
    ) -> None:
        self._group = group
        self._leaders = leaders
        self._options = options
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._channels: dict[tuple[PartitionKey, Settlement], _Channel] = {}

    async def settle(
        self, receipts: Iterable[Receipt], settlement: Settlement
    ) -> list[SettleFailure]:
        """Settle these receipts. Returns the ones that failed, each with its error."""
        futures = [
            self._submit(partition_key, rows, settlement)
            for partition_key, rows in rows_by_partition(receipts).items()
        ]
        failed: list[SettleFailure] = []
        for future in futures:
            failed += await future
        return failed

    def _submit(
        self, partition_key: PartitionKey, rows: Sequence[Row], settlement: Settlement
    ) -> "asyncio.Future[list[SettleFailure]]":
        future: asyncio.Future[list[SettleFailure]] = asyncio.get_running_loop().create_future()
        channel = self._channels.get((partition_key, settlement))
        if channel is None:
            channel = self._channels[(partition_key, settlement)] = _Channel()
        channel.waiting.append(_Item(rows, future))
        if channel.running < REQUESTS_MAX:
            channel.running += 1
            self._tasks.spawn(self._drain(partition_key, settlement, channel))
        return future

    async def _drain(
        self, partition_key: PartitionKey, settlement: Settlement, channel: _Channel
    ) -> None:
        taken: list[_Item] = []
        try:
            while channel.waiting:
                taken, count = [], 0
                while channel.waiting and (not taken or count < ROWS_MAX):
                    taken.append(channel.waiting.popleft())
                    count += len(taken[-1].rows)
                await self._send(partition_key, settlement, taken)
                for item in taken:
                    if not item.future.done():
                        item.future.set_result(item.failed)
        finally:
            for item in taken:
                item.future.cancel()  # of those that are not done, as the client is being closed
            channel.running -= 1
            if not channel.running:
                for item in channel.waiting:
                    item.future.cancel()
                if self._channels.get((partition_key, settlement)) is channel:
                    del self._channels[(partition_key, settlement)]

    async def _send(
        self, partition_key: PartitionKey, settlement: Settlement, items: list[_Item]
    ) -> None:
        rows = merge([row for item in items for row in item.rows])
        bad = await self._ask(partition_key, settlement, rows)
        if not bad:
            return
        for item in items:
            for row in item.rows:
                error = _error_of(row, bad)
                if error is None:
                    continue
                if (
                    settlement.verb == "ack"
                    and isinstance(error, LeaseLost)
                    and not _is_one(row, bad)
                ):
                    # A range of which a part is not held is settled as far as it is. What is wrong
                    # with which record is told when they are asked about one by one.
                    item.failed += await self._ask_singly(partition_key, settlement, row)
                else:
                    item.failed.append(SettleFailure(partition_key, row, error))

    async def _ask_singly(
        self, partition_key: PartitionKey, settlement: Settlement, row: Row
    ) -> list[SettleFailure]:
        nonce, start, end = row
        bad = await self._ask(
            partition_key, settlement, [(nonce, at, at + 1) for at in range(start, end)]
        )
        return [
            SettleFailure(partition_key, one, error)
            for one, error in bad.items()
            if not isinstance(error, AlreadySettled)
        ]

    async def _ask(
        self, partition_key: PartitionKey, settlement: Settlement, rows: list[Row]
    ) -> dict[Row, RaftqError]:
        """The error of each row that has one."""
        bad: dict[Row, RaftqError] = {}
        for at in range(0, len(rows), ROWS_MAX):
            part = rows[at : at + ROWS_MAX]
            request = Settle(
                self._group,
                *partition_key,
                settlement.verb,
                tuple(ReceiptRow(*row) for row in part),
                settlement.delay_ms,
                settlement.reason,
                settlement.error,
            )
            what = f"{settlement.verb} for {partition_key[0]}/{partition_key[1]}"
            attempts = Attempts(what, self._options, self._timeout_s)
            try:
                reply = await self._leaders.ask(partition_key, request, self._timeout_s, attempts)
            except RaftqError as error:
                bad.update(dict.fromkeys(part, error))
                continue
            for row, code in zip(part, reply.message.errors, strict=False):
                if code:
                    problem = error_of_code(code, partition_key)
                    if not (attempts.unknown and _is_done(settlement.verb, problem)):
                        bad[row] = problem
        return bad


def _is_done(verb: Verb, error: RaftqError) -> bool:
    """Whether a repeated request gets this error because an earlier attempt has worked."""
    if verb in ("ack", "reject"):
        return isinstance(error, AlreadySettled)
    return verb != "extend" and isinstance(error, LeaseLost)


def _error_of(row: Row, bad: dict[Row, RaftqError]) -> RaftqError | None:
    nonce, start, end = row
    for (other, low, high), error in bad.items():
        if other == nonce and low < end and start < high:
            return error
    return None


def _is_one(row: Row, bad: dict[Row, RaftqError]) -> bool:
    """Whether the node was asked about exactly this row, and it is one record."""
    return row in bad and row[2] - row[1] == 1
