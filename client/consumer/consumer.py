"""Shell: the asyncio consumer of partitions that it is assigned or that its group gives it.

    async with Consumer("127.0.0.1:7070") as consumer:
        await consumer.assign([("orders", 0)])
        await consumer.seek("orders", 0, to="earliest")
        for record in await consumer.poll(max_records=500, timeout=1.0):
            ...

    async with Consumer("127.0.0.1:7070", group="billing", topics=["orders"]) as consumer:
        async for record in consumer:
            ...

The fetcher (fetcher.py) fetches records in the background while there is room for them; `poll`
returns them (positions.py). ownership.py handles what a group gives and takes; the application
learns of it in a poll. Only one poll may run at a time.
"""

import asyncio
import inspect
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self, TypeVar, Unpack

from raftq.client.common.backoff import copy_error, out_of_time
from raftq.client.common.errors import InvalidArgument, OffsetOutOfRange, RaftqError
from raftq.client.common.tasks import yield_to_loop
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import Fetcher
from raftq.client.consumer.member import GroupMember, holder_name
from raftq.client.consumer.ownership import COMMIT_S, OwnedPartitions
from raftq.client.consumer.positions import PAUSED, Assigned, Positions, Start
from raftq.client.consumer.records import Fetched, to_table
from raftq.client.consumer.stored_offsets import Offsets
from raftq.client.net.client import Client
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Answers, Leaders
from raftq.client.options import Bootstrap, ConsumerOptions, ConsumerSettings, Rebalanced
from raftq.client.results import Record
from raftq.client.wire.layout import OFFSET_MAX
from raftq.client.wire.messages import ListOffsets, ListOffsetsReply, OffsetQuery

POLL_BYTES = 4 * 1024 * 1024
ITERATION_RECORDS = 500
ITERATION_S = 30.0

T = TypeVar("T")


class Consumer(Client):
    """Reads records. Settings are the fields of ConsumerOptions."""

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ConsumerSettings]) -> None:
        self.options = ConsumerOptions(**settings)
        super().__init__(bootstrap, self.options, "consumer")
        self._positions: Positions
        self._fetcher: Fetcher
        self._leaders: Leaders
        self._group: OwnedPartitions | None = None
        self._unseen: deque[Record] = deque()  # of an iteration
        self._threadsafe = False  # whether polls come from other threads than the loop's

    def _on_start(self) -> None:
        options = self.options
        self._positions = Positions(self._loop, self._wake)
        self._fetcher = Fetcher(options, self._positions, self._routes, self._pool, self._tasks)
        self._leaders = Leaders(self._routes, self._pool, options)
        if options.group:
            offsets = Offsets(options.group, self._leaders)
            self._group = group = OwnedPartitions(
                options, self._positions, self._fetcher, self._routes, offsets, self._tasks
            )
            group.unseen = self._unseen
            coordinator = CoordinatorClient(options.group, self._routes, self._pool, options)
            name = holder_name(options, "consumer")
            group.member = GroupMember(options, options, "stream", name, coordinator, group)
            group.start()

    def _wake(self) -> None:
        if self._threadsafe:
            self._loop.call_soon_threadsafe(self._fetcher.wake)
        else:
            self._fetcher.wake()

    async def assign(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Reads these (topic, partition) from now on, and no others.

        Partitions that were assigned before keep their positions. New ones begin by `seek`, or as
        `reset` says."""
        self._ensure_started()
        if self._group is not None:
            raise InvalidArgument("a group assigns the partitions of this consumer")
        keys = checked(partitions)
        self._routes.want([topic for topic, _ in keys])
        for assigned in self._positions.assign(keys, self.options.fetch_bytes):
            reset = self.options.reset
            if reset == "none":
                self._positions.move(assigned, None, None)
                assigned.error = OffsetOutOfRange(
                    f"{assigned.describe()} has no position; seek one"
                )
            else:
                self._positions.move(assigned, None, (reset, 0))
        if any(topic not in self._routes.topics for topic, _ in keys):
            self._routes.request_refresh()
        self._fetcher.wake()

    def assignment(self) -> list[tuple[str, int]]:
        """The (topic, partition) whose records polls return."""
        return list(self._positions.partitions) if self._started else []

    async def pause(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Returns no records of these until `resume`; they stay assigned."""
        self._ensure_started()
        for assigned in [self._positions.get(*key) for key in checked(partitions)]:
            self._forget_unseen(assigned.key)
            self._positions.hold(assigned, PAUSED)

    async def resume(self, partitions: Iterable[tuple[str, int]]) -> None:
        self._ensure_started()
        for assigned in [self._positions.get(*key) for key in checked(partitions)]:
            self._positions.let_go_on(assigned, PAUSED)
        self._fetcher.wake()

    def paused(self) -> list[tuple[str, int]]:
        partitions = self._positions.partitions if self._started else {}
        return [key for key, assigned in partitions.items() if assigned.held & PAUSED]

    async def lag(self, timeout: float = 10.0) -> dict[tuple[str, int], int]:  # noqa: ASYNC109
        """The number of offsets between the position and the end of each assigned partition.

        For a partition whose leader does not answer in time it is the last known number."""
        self._ensure_started()
        keys = list(self._positions.partitions)
        ends = await self._leaders.ask_each(keys, _ask_ends, _read_ends, timeout)
        found = {}
        for key in keys:
            assigned = self._positions.partitions.get(key)
            position = None if assigned is None else self._position(assigned)
            answer = ends[key]
            known = None if assigned is None else assigned.high_watermark
            end = answer if isinstance(answer, int) else known
            if end is not None and position is not None:
                found[key] = max(end - position, 0)
        return found

    async def commit(
        self,
        offsets: Mapping[tuple[str, int], int] | None = None,
        timeout: float = COMMIT_S,  # noqa: ASYNC109
    ) -> None:
        """Stores the group's positions: those after the records returned so far, or the given ones.

        A position is the next offset to read. Raises FencedGeneration if a partition has gone to
        another member; the positions of the others are stored."""
        self._ensure_started()
        if self._group is None:
            raise InvalidArgument("only a consumer of a group stores positions")
        if offsets is not None:
            checked(offsets)
            for offset in offsets.values():
                _start(offset, None, None)
        await self._group.commit(offsets, timeout)

    async def seek(
        self,
        topic: str,
        partition: int,
        offset: int | None = None,
        time: int | None = None,
        to: str | None = None,
        timeout: float = 10.0,  # noqa: ASYNC109 - as in the blocking form
    ) -> None:
        """Continues at an offset, at the first record of a time (ms) or later, or at an end of the
        log.

        `to` is "earliest" or "latest", as it is now."""
        self._ensure_started()
        assigned = self._positions.get(topic, partition)
        start = _start(offset, time, to)
        self._forget_unseen(assigned.key)
        self._positions.move(assigned, offset, start)
        self._fetcher.wake()
        if start is not None:
            await self._located(assigned, timeout)

    async def stop_at(self, topic: str, partition: int, offset: int) -> None:
        """Stops fetching a partition when everything before this offset has come.

        For readers of a range. Batches are whole, so the last one may go beyond it."""
        self._ensure_started()
        self._positions.stop_at(self._positions.get(topic, partition), offset)

    async def position(
        self,
        topic: str,
        partition: int,
        timeout: float = 10.0,  # noqa: ASYNC109
    ) -> int:
        """The offset of the next record that `poll` returns, at the earliest."""
        self._ensure_started()
        assigned = self._positions.get(topic, partition)
        located = await self._located(assigned, timeout)
        unseen = self._position(assigned)
        return located if unseen is None else unseen

    async def poll(
        self,
        max_records: int = 500,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> list[Record]:
        """Returns available records, at most `max_records`; [] if none comes in time."""
        _check_count(max_records)
        return await self._poll(lambda: self._take(max_records), timeout)

    async def poll_batches(
        self,
        max_bytes: int = POLL_BYTES,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> list[Fetched]:
        """Returns whole batches as they are stored; their checksums are not compared yet."""
        self._rewind()
        return await self._poll(lambda: self._positions.take_batches(max_bytes), timeout)

    async def poll_arrow(
        self,
        max_bytes: int = POLL_BYTES,
        timeout: float = 1.0,  # noqa: ASYNC109
    ) -> Any:
        """The next records as one `pyarrow.Table`, empty if none comes in time."""
        return to_table(await self.poll_batches(max_bytes, timeout))

    def high_watermark(self, topic: str, partition: int) -> int | None:
        """The end of the readable records, as the last fetch returned it."""
        return self._positions.get(topic, partition).high_watermark

    async def close(self) -> None:
        """Closes the consumer. With auto-commit, a member of a group stores its positions; it
        leaves."""
        await self._close(is_done=True)

    async def __aexit__(self, *error: object) -> None:
        # An application that fails has not finished its records: they are delivered again.
        await self._close(is_done=error[0] is None)

    async def _close(self, is_done: bool, is_told: bool = False) -> None:
        if self._started and not self._ended and not self._loop.is_closed():
            try:
                await self._leave(is_done, is_told)
            finally:
                self._fetcher.stop()
        try:
            await self._end()
        finally:
            if self._started and not self._loop.is_closed():
                self._positions.notify()

    async def _leave(self, is_done: bool, is_told: bool) -> None:
        group = self._group
        if group is None:
            return
        try:
            if not is_told:
                await call_back(self.options.on_revoked, await group.every())
        finally:
            self._group = None
            await group.leave(is_done)

    # Iteration.

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Record:
        """The next record, however long it takes. Ends when the consumer is closed."""
        if self._ended:
            raise StopAsyncIteration
        self._ensure_started()
        group = self._group
        if group is not None:
            group.last = ()
            if group.is_wanted:
                await self._come_back(group)
        while not self._unseen:
            try:
                found = await self._poll(
                    lambda: self._positions.take_records(ITERATION_RECORDS), ITERATION_S
                )
            except RaftqError:
                if self._ended:
                    raise StopAsyncIteration from None
                raise
            self._unseen.extend(found)
        record = self._unseen.popleft()
        if group is not None:
            group.last = (record,)
        return record

    def _take(self, records_max: int) -> list[Record]:
        if not self._unseen:
            return self._positions.take_records(records_max)
        count = min(records_max, len(self._unseen))
        return [self._unseen.popleft() for _ in range(count)]

    def _position(self, assigned: Assigned) -> int | None:
        """The position of the application: before the records that an iteration has not returned
        yet."""
        for record in self._unseen:
            if (record.topic, record.partition) == assigned.key:
                return record.offset
        return assigned.position

    def _forget_unseen(self, key: PartitionKey) -> None:
        """Drops what an iteration holds of this partition. It continues at the first dropped
        record."""
        assigned = self._positions.partitions.get(key)
        if not self._unseen or assigned is None:
            return
        position = self._position(assigned)
        kept = [record for record in self._unseen if (record.topic, record.partition) != key]
        if len(kept) < len(self._unseen):
            self._unseen.clear()
            self._unseen.extend(kept)
            self._positions.move(assigned, position, None)

    def _rewind(self) -> None:
        for key in {(record.topic, record.partition): None for record in self._unseen}:
            self._forget_unseen(key)
        if self._started:
            self._fetcher.wake()

    # Polling.

    async def _poll(self, take: Callable[[], list[T]], timeout_s: float) -> list[T]:
        self._ensure_started()
        group = self._group
        # Without this a consumer whose buffers are never empty would block the loop.
        await yield_to_loop()
        deadline = self._loop.time() + timeout_s
        if group is not None:
            group.begin_poll()
        found: list[T] = []
        is_over = False
        try:
            while True:
                if group is not None and group.is_wanted:
                    await self._come_back(group)
                found = take()
                left_s = deadline - self._loop.time()
                if found or left_s <= 0 or is_over:
                    return found
                is_over = not await self._something(left_s)
                self._ensure_started()
        finally:
            if group is not None:
                group.end_poll(found)

    async def _something(self, timeout_s: float) -> bool:
        """Waits until there may be something to take. Says whether there may, or time is over."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._positions.waiter()
        except TimeoutError:
            return False
        return True

    async def _come_back(self, group: OwnedPartitions) -> None:
        """Handles what the group has given and taken, and tells the application."""
        revoked = await group.come_back()
        if revoked:
            try:
                await call_back(self.options.on_revoked, revoked)
            finally:
                await self._give_up(group, revoked)
        assigned = await group.activate()
        if assigned:
            await call_back(self.options.on_assigned, assigned)

    async def _give_up(self, group: OwnedPartitions, keys: list[PartitionKey]) -> None:
        await group.give_up(keys)
        gone = set(keys)
        kept = [record for record in self._unseen if (record.topic, record.partition) not in gone]
        self._unseen.clear()
        self._unseen.extend(kept)

    async def _located(self, assigned: Assigned, timeout_s: float) -> int:
        turn = assigned.turn
        try:
            async with asyncio.timeout(timeout_s):
                while assigned.position is None and assigned.turn == turn:
                    if assigned.error is not None:
                        raise copy_error(assigned.error)
                    await self._positions.waiter()
                    self._ensure_started()
        except TimeoutError:
            leader = self._routes.describe_leader(assigned.topic, assigned.partition)
            raise out_of_time(
                f"the position of {assigned.describe()} is not known after {timeout_s} s "
                f"(its leader: {leader})",
                None,
            ).with_outcome("failed") from None
        return assigned.position if assigned.position is not None else 0


async def call_back(callback: Rebalanced | None, keys: list[PartitionKey]) -> None:
    if callback is not None and keys:
        result = callback(keys)
        if inspect.isawaitable(result):
            await result


def _ask_ends(keys: list[PartitionKey]) -> ListOffsets:
    return ListOffsets(tuple(OffsetQuery(*key, "latest") for key in keys))


def _read_ends(reply: ListOffsetsReply) -> Answers[int]:
    return [
        ((answer.topic, answer.partition), answer.error, answer.offset) for answer in reply.answers
    ]


def checked(partitions: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    keys = []
    for partition in partitions:
        if (
            not isinstance(partition, tuple | list)
            or len(partition) != 2
            or not isinstance(partition[0], str)
            or type(partition[1]) is not int
            or partition[1] < 0
        ):
            raise InvalidArgument(f"partitions are given as (topic, partition), not {partition!r}")
        keys.append((partition[0], partition[1]))
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
