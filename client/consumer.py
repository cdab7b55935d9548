"""Shell: the asyncio consumer of assigned partitions.

    async with Consumer("127.0.0.1:7070") as consumer:
        await consumer.assign([("orders", 0)])
        await consumer.seek("orders", 0, to="earliest")
        for record in await consumer.poll(max_records=500, timeout=1.0):
            ...

Records are fetched in the background as far as there is room for them (fetcher.py); `poll` hands
out what is there (positions.py). One poll at a time.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, Unpack

from raftq.client.base import Client
from raftq.client.fetcher import Fetcher
from raftq.client.options import Bootstrap, ConsumerOptions, ConsumerSettings
from raftq.client.positions import Assigned, Positions, Start
from raftq.client.records import Fetched, to_table
from raftq.client.results import Record
from raftq.client.retry import again, out_of_time
from raftq.client.tasks import let_others_run
from raftq.client.wire.errors import InvalidArgument, OffsetOutOfRange
from raftq.client.wire.layout import OFFSET_MAX

POLL_BYTES = 4 * 1024 * 1024

T = TypeVar("T")


class Consumer(Client):
    """Reads records. Settings are the fields of ConsumerOptions."""

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ConsumerSettings]) -> None:
        self.options = ConsumerOptions(**settings)
        super().__init__(bootstrap, self.options, "consumer")
        self._positions: Positions
        self._fetcher: Fetcher
        self._threadsafe = False  # whether polls come from other threads than the loop's

    def _on_start(self) -> None:
        self._positions = Positions(self._loop, self._wake)
        self._fetcher = Fetcher(
            self.options, self._positions, self._routes, self._pool, self._tasks
        )

    def _wake(self) -> None:
        if self._threadsafe:
            self._loop.call_soon_threadsafe(self._fetcher.wake)
        else:
            self._fetcher.wake()

    async def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Read these (topic, partition) from now on, and no others. Those that were assigned
        before keep their positions; the others begin by `seek`, or as `reset` says."""
        self._ensure_started()
        keys = _checked(partitions)
        self._routes.want([topic for topic, _ in keys])
        for part in self._positions.assign(keys, self.options.fetch_bytes):
            reset = self.options.reset
            if reset == "none":
                self._positions.move(part, None, None)
                part.error = OffsetOutOfRange(f"{part.describe()} has no position; seek one")
            else:
                self._positions.move(part, None, (reset, 0))
        if any(topic not in self._routes.topics for topic, _ in keys):
            self._routes.request_refresh()
        self._fetcher.wake()

    def assignment(self) -> list[tuple[str, int]]:
        return list(self._positions.parts) if self._started else []

    async def seek(
        self,
        topic: str,
        partition: int,
        offset: int | None = None,
        time: int | None = None,
        to: str | None = None,
        timeout: float = 10.0,  # noqa: ASYNC109 - as in the blocking form
    ) -> None:
        """Go on at an offset, at the first record of a time (ms) or later, or at an end of the log
        as it is now: `to` is "earliest" or "latest"."""
        self._ensure_started()
        part = self._positions.get(topic, partition)
        start = _start(offset, time, to)
        self._positions.move(part, offset, start)
        self._fetcher.wake()
        if start is not None:
            await self._located(part, timeout)

    async def position(
        self,
        topic: str,
        partition: int,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> int:
        """The offset of the next record that `poll` gives, at the earliest."""
        self._ensure_started()
        part = self._positions.get(topic, partition)
        return await self._located(part, timeout)

    async def poll(
        self,
        max_records: int = 500,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> list[Record]:
        """Records as they are there, at most `max_records`; [] when none comes in time."""
        _check_count(max_records)
        return await self._poll(lambda: self._positions.take_records(max_records), timeout)

    async def poll_batches(
        self,
        max_bytes: int = POLL_BYTES,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> list[Fetched]:
        """Whole batches as they are stored, checksums not yet compared."""
        return await self._poll(lambda: self._positions.take_batches(max_bytes), timeout)

    async def poll_arrow(
        self,
        max_bytes: int = POLL_BYTES,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> Any:
        """The next records as one `pyarrow.Table`, empty when none comes in time."""
        return to_table(await self.poll_batches(max_bytes, timeout))

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """The end of what can be read, as the last fetch has told."""
        return self._positions.get(topic, partition).high_watermark

    async def close(self) -> None:
        if self._started and not self._ended:
            self._fetcher.stop()
        try:
            await self._end()
        finally:
            if self._started and not self._loop.is_closed():
                self._positions.notify()

    async def _poll(self, take: Callable[[], list[T]], timeout_s: float) -> list[T]:
        self._ensure_started()
        # Without this a consumer whose buffers never run dry would keep the loop to itself.
        await let_others_run()
        found = take()
        if found or timeout_s <= 0:
            return found
        try:
            async with asyncio.timeout(timeout_s):
                while not found:
                    await self._positions.waiter()
                    self._ensure_started()
                    found = take()
        except TimeoutError:
            return []
        return found

    async def _located(self, part: Assigned, timeout_s: float) -> int:
        turn = part.turn
        try:
            async with asyncio.timeout(timeout_s):
                while part.position is None and part.turn == turn:
                    if part.error is not None:
                        raise again(part.error)
                    await self._positions.waiter()
                    self._ensure_started()
        except TimeoutError:
            leader = self._routes.describe_leader(part.topic, part.partition)
            raise out_of_time(
                f"the position of {part.describe()} is not known after {timeout_s} s "
                f"(its leader: {leader})",
                None,
            ).with_outcome("failed") from None
        return part.position if part.position is not None else 0


def _checked(partitions: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    keys = []
    for one in partitions:
        if (
            not isinstance(one, tuple | list)
            or len(one) != 2
            or not isinstance(one[0], str)
            or type(one[1]) is not int
            or one[1] < 0
        ):
            raise InvalidArgument(f"partitions are given as (topic, partition), not {one!r}")
        keys.append((one[0], one[1]))
    return keys


def _check_count(max_records: int) -> None:
    if type(max_records) is not int or max_records < 1:
        raise InvalidArgument(f"max_records must be at least 1, not {max_records!r}")


def _start(offset: int | None, time: int | None, to: str | None) -> Start | None:
    if [offset, time, to].count(None) != 2:
        raise InvalidArgument("seek needs one of offset, time and to")
    if offset is not None:
        if type(offset) is not int or not 0 <= offset <= OFFSET_MAX:
            raise InvalidArgument(f"an offset is a number from 0 on, not {offset!r}")
        return None
    if time is not None:
        if type(time) is not int:
            raise InvalidArgument(f"a time is a number of ms, not {time!r}")
        return "time", time
    if to == "earliest":
        return "earliest", 0
    if to == "latest":
        return "latest", 0
    raise InvalidArgument(f"to is 'earliest' or 'latest', not {to!r}")
