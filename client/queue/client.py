"""Shell: the asyncio queue client: leases records of topics, and settles them.

    async with QueueClient("127.0.0.1:7070", group="emails", topics=["orders"]) as queue:
        for record in await queue.lease(max_records=100, timeout=1.0):
            await queue.ack(record)

`lease` asks one node after the other while they have records, and waits at all of them when they
have none. Records that a second node sends after the first has answered are kept for the next
`lease`, or released if none comes soon: no attempt is spent on a record that the caller did not
see.

The client is a member of its group, so that the group's description shows it; leasing does not
depend on that.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Unpack

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.common.tasks import resolve
from raftq.client.common.times import milliseconds
from raftq.client.consumer.member import GroupMember, holder_name
from raftq.client.net.client import Client
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Leaders
from raftq.client.options import Address, Bootstrap
from raftq.client.queue.leased import LeasedRecord, Receipt, receipt_of
from raftq.client.queue.leasing import Leasing, Partitions
from raftq.client.queue.options import QueueOptions, QueueSettings
from raftq.client.queue.settling import SettleFailure, Settlement, Settler, Verb
from raftq.client.wire.group_messages import GroupHeartbeatReply, Owned
from raftq.client.wire.schema import TEXT_MAX

logger = logging.getLogger(__name__)

DRY_S = 1.0  # for this long a node without records counts as having none
SPARE_S = 0.2  # for this long unrequested records wait for the next lease
WAIT_S_MAX = 20.0
FIND_S = 1.0  # for the first answer about the topics, however little time there is
CLOSE_S = 1.0
RECORDS_MAX = 100_000

Proof = LeasedRecord | str


class Registered:
    """A membership listener that owns nothing."""

    def __init__(self, leasing: Leasing, pattern: str) -> None:
        self._leasing = leasing
        self._pattern = pattern

    def owned(self) -> tuple[Owned, ...]:
        return ()

    def on_reply(self, reply: GroupHeartbeatReply) -> None:
        if self._pattern:
            self._leasing.add_topics({partition.topic: None for partition in reply.assigned})

    def lost(self, error: RaftqError | None) -> None:
        """Leases do not depend on membership."""

    def refused(self, error: RaftqError) -> None:
        logger.warning("the group does not list this client: %s", error)


class QueueBase(Client):
    """What queue clients and workers have in common."""

    def __init__(self, bootstrap: Bootstrap, options: QueueOptions, kind: str) -> None:
        super().__init__(bootstrap, options, kind)
        self.queue_options = options
        self.holder = holder_name(options, "queue")
        self._leasing: Leasing
        self._settler: Settler
        self._member: GroupMember

    def _on_start(self) -> None:
        options = self.queue_options
        leaders = Leaders(self._routes, self._pool, options)
        settle_s = options.settle_ms / 1000
        self._settler = Settler(options.group, leaders, options, self._tasks, settle_s)
        self._leasing = Leasing(
            options, self.holder, self._routes, self._pool, self._settler, self._tasks
        )
        coordinator = CoordinatorClient(options.group, self._routes, self._pool, options)
        part = Registered(self._leasing, options.pattern)
        self._member = GroupMember(options, options, "queue", self.holder, coordinator, part)
        self._member.start(self._tasks)
        self._routes.request_refresh()

    async def _depart(self) -> None:
        """Leaves the group, before the connections end."""
        self._leasing.stop()
        await self._member.leave()


class QueueClient(QueueBase):
    """Leases records and settles them.

        async with QueueClient("127.0.0.1:7070", group="emails", topics=["orders"]) as queue:
            ...

    Settings are the fields of QueueOptions. A record is settled by itself or by its receipt.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[QueueSettings]) -> None:
        self.options = QueueOptions(**settings)
        super().__init__(bootstrap, self.options, "queue client")
        self._one_at_a_time = asyncio.Lock()
        self._asked: dict[Address, tuple[asyncio.Task[None], Partitions, bool]] = {}
        self._dry: dict[Address, float] = {}
        self._spare: deque[LeasedRecord] = deque()
        self._error: RaftqError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn = 0

    def _on_start(self) -> None:
        super()._on_start()
        self._leasing.watch(self._wake)

    # Leasing.

    async def lease(
        self,
        max_records: int = 100,
        timeout: float = 1.0,  # noqa: ASYNC109 - as in the blocking form
        visibility_timeout: float | None = None,
    ) -> list[LeasedRecord]:
        """At most `max_records` records that no other client gets until their lease ends.

        Waits up to `timeout` seconds for the first one, and returns [] when none comes. A lease
        lasts `visibility_timeout` seconds.
        """
        self._ensure_started()
        if type(max_records) is not int or not 1 <= max_records <= RECORDS_MAX:
            raise InvalidArgument(f"max_records is 1 to {RECORDS_MAX}, not {max_records!r}")
        lease_s = self.options.visibility_timeout
        if visibility_timeout is not None:
            lease_s = visibility_timeout
        lease_ms = 0 if lease_s is None else milliseconds(lease_s, "visibility_timeout")
        deadline = self._loop.time() + timeout
        try:
            async with asyncio.timeout(max(timeout, 0.0) if self._one_at_a_time.locked() else None):
                await self._one_at_a_time.acquire()
        except TimeoutError:
            return []
        try:
            return await self._lease(max_records, lease_ms, deadline)
        finally:
            self._one_at_a_time.release()
            self._call_off()
            self._keep_spare()

    async def _lease(self, records_max: int, lease_ms: int, deadline: float) -> list[LeasedRecord]:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        left_s = deadline - self._loop.time()
        if left_s <= 0:
            self._dry.clear()
        if not await self._leasing.is_found(max(left_s, FIND_S)):
            return []
        asked_once: dict[Address, None] = {}
        while True:
            self._ensure_started()
            if self._spare:
                count = min(records_max, len(self._spare))
                return [self._spare.popleft() for _ in range(count)]
            self._raise_problem()
            left_s = deadline - self._loop.time()
            waits = self._ask(records_max, lease_ms, left_s, asked_once)
            if left_s <= 0 and not waits:
                return []
            if not await self._something(left_s if left_s > 0 else None) and not self._spare:
                return []

    def _raise_problem(self) -> None:
        error = self._error or self._leasing.problem
        self._error = self._leasing.problem = None
        if error is not None:
            raise copy_error(error)

    def _ask(
        self, records_max: int, lease_ms: int, left_s: float, asked_once: dict[Address, None]
    ) -> bool:
        """Asks the next node that may have records, or waits at all of them. Says whether any is
        asked.

        Without time to wait each node is asked once."""
        nodes = self._leasing.nodes()
        now = self._loop.time()
        hot = [
            address
            for address in nodes
            if now - self._dry.get(address, -DRY_S) >= DRY_S
            and address not in self._asked
            and (left_s > 0 or address not in asked_once)
        ]
        if hot:
            if not any(not parked for _, _, parked in self._asked.values()):
                self._turn += 1
                address = hot[self._turn % len(hot)]
                asked_once[address] = None
                self._start(address, nodes[address], records_max, 0, lease_ms)
        elif left_s > 0:
            wait_ms = max(int(min(left_s, WAIT_S_MAX) * 1000), 1)
            for address, partitions in nodes.items():
                if address not in self._asked:
                    self._start(address, partitions, records_max, wait_ms, lease_ms)
        return bool(self._asked)

    def _start(
        self, address: Address, partitions: Partitions, records_max: int, wait_ms: int,
        lease_ms: int,
    ) -> None:  # fmt: skip
        work = self._take(address, partitions, records_max, wait_ms, lease_ms)
        self._asked[address] = (self._tasks.spawn(work), partitions, wait_ms > 0)

    async def _take(
        self, address: Address, partitions: Partitions, records_max: int, wait_ms: int,
        lease_ms: int,
    ) -> None:  # fmt: skip
        try:
            found = await self._leasing.take(address, partitions, records_max, wait_ms, lease_ms)
            if found:
                self._dry.pop(address, None)
                self._spare.extend(found)
            else:
                self._dry[address] = self._loop.time()
        except RaftqError as error:
            self._error = error
        finally:
            del self._asked[address]
            self._wake()
            self._keep_spare()

    def _wake(self) -> None:
        if self._waiter is not None:
            resolve(self._waiter)

    async def _something(self, timeout_s: float | None) -> bool:
        """Waits until something has changed. Says whether it has, or time is over."""
        self._waiter = self._loop.create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiter
        except TimeoutError:
            return False
        finally:
            self._waiter = None
        return True

    def _call_off(self) -> None:
        """Ends the requests that wait at nodes: they must not take records any more."""
        for address, (_, partitions, parked) in self._asked.items():
            if parked:
                self._leasing.call_off(address, partitions)

    # Records that were not requested.

    def _keep_spare(self) -> None:
        is_leasing = self._one_at_a_time.locked()
        if self._spare and self._timer is None and not is_leasing and not self._ended:
            self._timer = self._loop.call_later(SPARE_S, self._give_back)

    def _give_back(self) -> None:
        self._timer = None
        if self._spare:
            self._tasks.spawn(self._release_spare())

    async def _release_spare(self) -> None:
        receipts = [receipt_of(record) for record in self._spare]
        self._spare.clear()
        failed = await self._settler.settle(receipts, Settlement("release"))
        if failed:
            logger.info("%d leases were not given back: %s", len(failed), failed[0].error)

    # Settling.

    async def ack(self, record: Proof) -> None:
        """Settle a record: it is not delivered to this group again. LeaseLost when the lease has
        ended."""
        await self._settle([record], Settlement("ack"))

    async def ack_many(self, records: Iterable[Proof]) -> None:
        """Ack many records. Every record that can be acked is; afterwards the first error, if any,
        is raised."""
        await self._settle(records, Settlement("ack"))

    async def nack(self, record: Proof, delay: float | None = None, error: str = "") -> None:
        """Have a record delivered again because it failed.

        It comes after `delay` seconds, or after the backoff of its attempts. When all attempts are
        used up, it becomes a dead letter with the text `error`.
        """
        delay_ms = None if delay is None else milliseconds(delay, "delay")
        await self._settle([record], Settlement("nack", delay_ms, "", error[:TEXT_MAX]))

    async def postpone(self, record: Proof, delay: float) -> None:
        """Have a record delivered again after `delay` seconds. This does not spend an attempt."""
        await self._settle([record], Settlement("postpone", milliseconds(delay, "delay")))

    async def reject(self, record: Proof, reason: str = "", error: str = "") -> None:
        """Make a record a dead letter now, because it will never succeed."""
        said = Settlement("reject", None, reason[:TEXT_MAX], error[:TEXT_MAX])
        await self._settle([record], said)

    async def extend(self, record: Proof, extension: float) -> int:
        """Let the lease end `extension` seconds from now. Returns that time in ms since 1970."""
        extension_ms = milliseconds(extension, "extension")
        await self._settle([record], Settlement("extend", extension_ms))
        deadline = self.options.wall_ms() + extension_ms
        if isinstance(record, LeasedRecord):
            record.deadline = deadline
        return deadline

    async def release(self, record: Proof) -> None:
        """Give a record back: others get it at once. This does not spend an attempt."""
        await self._settle([record], Settlement("release"))

    async def settle_many(
        self,
        records: Iterable[Proof],
        verb: Verb,
        delay: float | None = None,
        reason: str = "",
        error: str = "",
    ) -> list[tuple[str, RaftqError]]:
        """Do the same with many records: ack, nack, postpone, reject, extend or release them.

        `delay` (seconds) is for nack, postpone and extend. Returns "topic:partition:offset" of each
        record that could not be settled, with its error.
        """
        self._ensure_started()
        delay_ms = None if delay is None else milliseconds(delay, "delay")
        settlement = Settlement(verb, delay_ms, reason[:TEXT_MAX], error[:TEXT_MAX])
        failed = await self._settler.settle([receipt_of(record) for record in records], settlement)
        return [
            (f"{failure.partition_key[0]}:{failure.partition_key[1]}:{offset}", failure.error)
            for failure in failed
            for offset in range(failure.row[1], failure.row[2])
        ]

    async def _settle(self, records: Iterable[Proof], settlement: Settlement) -> None:
        self._ensure_started()
        receipts: list[Receipt] = [receipt_of(record) for record in records]
        failed = await self._settler.settle(receipts, settlement)
        if failed:
            raise _first(failed, len(receipts))

    async def close(self) -> None:
        """Closes the client. Records that are not settled stay leased until their deadline."""
        if self._started and not self._ended and not self._loop.is_closed():
            self._call_off()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            try:
                await self._depart_orderly()
            finally:
                await self._end()
        else:
            await self._end()

    async def _depart_orderly(self) -> None:
        asked = [task for task, _, _ in self._asked.values()]
        if asked:
            await asyncio.wait(asked, timeout=CLOSE_S)
        if self._timer is not None:
            self._timer.cancel()
        if self._spare:
            await self._release_spare()
        await self._depart()


def _first(failed: Sequence[SettleFailure], count: int) -> RaftqError:
    first = failed[0]
    error = copy_error(first.error)
    if count > 1:
        number = sum([failure.row[2] - failure.row[1] for failure in failed])
        error.args = (f"{number} of {count} records, the first because: {first.error}",)
        error.details = {**error.details, "failed": number}
    return error
