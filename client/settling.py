"""Shell: acks, nacks and the like on their way to the leaders, many in one request.

What is said alike about records of one partition waits for its turn together: while a request is
under way, those that come later gather for the next. An attempt of unknown outcome is repeated; a
lease that is gone then is what was asked for, so it counts as done:

    ack, reject                settled already
    nack, postpone, release    not leased any more: it comes again, or has come again
"""

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

from raftq.client.attempts import Attempts
from raftq.client.leaders import Leaders, error_of_code
from raftq.client.leased import Place, Receipt, Row, merge, rows_by_place
from raftq.client.options import ClientOptions
from raftq.client.tasks import Tasks
from raftq.client.wire.errors import AlreadySettled, LeaseLost, RaftqError
from raftq.client.wire.queue_messages import ReceiptRow, Settle

Verb = Literal["ack", "nack", "postpone", "reject", "extend", "release"]

ROWS_MAX = 4_000  # in one request
REQUESTS_MAX = 2  # of one kind and partition under way


class Said(NamedTuple):
    """What is said about records."""

    verb: Verb
    delay_ms: int | None = None
    reason: str = ""
    error: str = ""


class Failed(NamedTuple):
    """Records of which it could not be said."""

    place: Place
    row: Row
    error: RaftqError


class _Item:
    """Rows of one caller, and who waits for what becomes of them."""

    __slots__ = ("failed", "future", "rows")

    def __init__(self, rows: Sequence[Row], future: "asyncio.Future[list[Failed]]") -> None:
        self.rows = rows
        self.future = future
        self.failed: list[Failed] = []


class _Channel:
    """What waits to be said about one partition."""

    __slots__ = ("running", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_Item] = deque()
        self.running = 0


class Settler:
    """Says it, for one group."""

    def __init__(
        self, group: str, leaders: Leaders, options: ClientOptions, tasks: Tasks, timeout_s: float
    ) -> None:
        self._group = group
        self._leaders = leaders
        self._options = options
        self._tasks = tasks
        self._timeout_s = timeout_s
        self._channels: dict[tuple[Place, Said], _Channel] = {}

    async def settle(self, receipts: Iterable[Receipt], said: Said) -> list[Failed]:
        """Say it about all of these; those of which it could not be said, and why."""
        futures = [
            self._submit(place, rows, said) for place, rows in rows_by_place(receipts).items()
        ]
        failed: list[Failed] = []
        for future in futures:
            failed += await future
        return failed

    def _submit(
        self, place: Place, rows: Sequence[Row], said: Said
    ) -> "asyncio.Future[list[Failed]]":
        future: asyncio.Future[list[Failed]] = asyncio.get_running_loop().create_future()
        channel = self._channels.get((place, said))
        if channel is None:
            channel = self._channels[(place, said)] = _Channel()
        channel.waiting.append(_Item(rows, future))
        if channel.running < REQUESTS_MAX:
            channel.running += 1
            self._tasks.spawn(self._drain(place, said, channel))
        return future

    async def _drain(self, place: Place, said: Said, channel: _Channel) -> None:
        taken: list[_Item] = []
        try:
            while channel.waiting:
                taken, count = [], 0
                while channel.waiting and (not taken or count < ROWS_MAX):
                    taken.append(channel.waiting.popleft())
                    count += len(taken[-1].rows)
                await self._say(place, said, taken)
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
                if self._channels.get((place, said)) is channel:
                    del self._channels[(place, said)]

    async def _say(self, place: Place, said: Said, items: list[_Item]) -> None:
        rows = merge([row for item in items for row in item.rows])
        bad = await self._ask(place, said, rows)
        if not bad:
            return
        for item in items:
            for row in item.rows:
                error = _error_of(row, bad)
                if error is None:
                    continue
                if said.verb == "ack" and isinstance(error, LeaseLost) and not _is_one(row, bad):
                    # A range of which a part is not held is settled as far as it is. What is wrong
                    # with which record is told when they are asked about one by one.
                    item.failed += await self._ask_singly(place, said, row)
                else:
                    item.failed.append(Failed(place, row, error))

    async def _ask_singly(self, place: Place, said: Said, row: Row) -> list[Failed]:
        nonce, start, end = row
        bad = await self._ask(place, said, [(nonce, at, at + 1) for at in range(start, end)])
        return [
            Failed(place, one, error)
            for one, error in bad.items()
            if not isinstance(error, AlreadySettled)
        ]

    async def _ask(self, place: Place, said: Said, rows: list[Row]) -> dict[Row, RaftqError]:
        """What is wrong with which row."""
        bad: dict[Row, RaftqError] = {}
        for at in range(0, len(rows), ROWS_MAX):
            part = rows[at : at + ROWS_MAX]
            request = Settle(
                self._group,
                *place,
                said.verb,
                tuple(ReceiptRow(*row) for row in part),
                said.delay_ms,
                said.reason,
                said.error,
            )
            what = f"{said.verb} for {place[0]}/{place[1]}"
            attempts = Attempts(what, self._options, self._timeout_s)
            try:
                reply = await self._leaders.ask(place, request, self._timeout_s, attempts)
            except RaftqError as error:
                bad.update(dict.fromkeys(part, error))
                continue
            for row, code in zip(part, reply.message.errors, strict=False):
                if code:
                    problem = error_of_code(code, place)
                    if not (attempts.unknown and _is_done(said.verb, problem)):
                        bad[row] = problem
        return bad


def _is_done(verb: Verb, error: RaftqError) -> bool:
    """Whether this is how a repeated request finds what an earlier attempt has done."""
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
