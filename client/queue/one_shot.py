"""Shell: leases and settlements for any group and holder, one request at a time.

A lease first asks every leader for what it has now. When none has anything, a request waits at each
of them, and the first one that brings records ends the wait. What the others bring after that is
given back at once, and no attempt is spent.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from raftq.client.common.errors import AlreadySettled, RaftqError
from raftq.client.common.tasks import Tasks
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import read_batches
from raftq.client.net.attempts import Attempts
from raftq.client.net.leaders import Leaders, error_of_code
from raftq.client.net.pool import Pool
from raftq.client.options import Address, ClientOptions
from raftq.client.queue.leased import LeasedRecord, Receipt, receipt_of, to_leased
from raftq.client.queue.settling import Settlement
from raftq.client.wire.queue_messages import Lease, LeasePartition, ReceiptRow, Settle

ANSWER_S = 5.0  # beyond the wait that a leader was asked for
ROWS_MAX = 1_000  # in one settlement

Leading = Mapping[Address, Sequence[PartitionKey]]


class LeaseWish(NamedTuple):
    """What is leased for whom. `lease_ms` 0 is the topic's setting."""

    group: str
    holder: str
    records_max: int
    bytes_max: int
    lease_ms: int = 0


class Settled(NamedTuple):
    """What became of a receipt. `next_visible` is 0 where nothing will be delivered again."""

    settled_offset: int
    in_flight: int
    dead: bool = False
    next_visible: int = 0


class OneShots:
    """Leases and settles with the connections of a client."""

    def __init__(
        self, leaders: Leaders, pool: Pool, tasks: Tasks, options: ClientOptions, timeout_s: float
    ) -> None:
        self._leaders = leaders
        self._pool = pool
        self._tasks = tasks
        self._options = options
        self._timeout_s = timeout_s

    async def lease(self, wish: LeaseWish, leading: Leading, wait_ms: int) -> list[LeasedRecord]:
        """Records of the partitions that these nodes lead; waits at most `wait_ms` for some."""
        found: list[LeasedRecord] = []
        room = wish.bytes_max
        for address, keys in leading.items():
            part = wish._replace(records_max=wish.records_max - len(found), bytes_max=room)
            got = await self._ask(part, address, keys, 0)
            found += got
            room -= sum(len(record.value) for record in got)
            if len(found) >= wish.records_max or room <= 0:
                break
        if found or not wait_ms:
            return found
        return await self._wait(wish, leading, wait_ms)

    async def _wait(self, wish: LeaseWish, leading: Leading, wait_ms: int) -> list[LeasedRecord]:
        loop = asyncio.get_running_loop()
        parked = {
            loop.create_task(self._ask(wish, address, keys, wait_ms)): None
            for address, keys in leading.items()
        }
        try:
            while parked:
                done, _ = await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
                found: list[LeasedRecord] = []
                for task in done:
                    del parked[task]
                    found += task.result()
                if found:
                    return found
            return []
        finally:
            for task in parked:
                # Its answer may still bring leases, whatever became of the caller.
                self._tasks.spawn(self._return_late(wish.group, task))

    async def _return_late(self, group: str, late: "asyncio.Task[list[LeasedRecord]]") -> None:
        receipts = [receipt_of(record) for record in await late]
        await self.settle(group, receipts, Settlement("release"))

    async def _ask(
        self, wish: LeaseWish, address: Address, keys: Sequence[PartitionKey], wait_ms: int
    ) -> list[LeasedRecord]:
        """What one leader gives. A leader that moved or is silent gives nothing: the lease goes on
        with the others, and the next one finds the new leader."""
        partitions = tuple(LeasePartition(*key) for key in keys)
        request = Lease(
            wish.group, wish.holder, partitions, wish.records_max, wish.bytes_max, wish.lease_ms,
            wait_ms,
        )  # fmt: skip
        try:
            connection = await self._pool.get(address)
            reply = await connection.request(request, timeout_s=wait_ms / 1000 + ANSWER_S)
        except RaftqError as error:
            if not error.retriable:
                raise
            for key in keys:
                self._leaders.learn(key, error)
            return []
        found: list[LeasedRecord] = []
        for partition in reply.message.partitions:
            key = partition.topic, partition.partition
            if partition.error:
                problem = error_of_code(partition.error, key)
                if not problem.retriable:
                    raise problem
                self._leaders.learn(key, problem)
            elif partition.ranges:
                raw = reply.raw[partition.start : partition.start + partition.length]
                found += to_leased(key, partition.ranges, read_batches(raw))
        return found

    async def settle(
        self, group: str, receipts: Sequence[Receipt], said: Settlement
    ) -> list[Settled | RaftqError]:
        """Say the same about each of these receipts: one result per receipt, in order."""
        together: dict[PartitionKey, list[int]] = {}
        for at, receipt in enumerate(receipts):
            together.setdefault((receipt.topic, receipt.partition), []).append(at)
        # An answer says when a record is delivered again once per request, not per receipt.
        step = ROWS_MAX if said.verb in ("ack", "release") else 1
        cuts = [
            positions[at : at + step]
            for positions in together.values()
            for at in range(0, len(positions), step)
        ]
        results: dict[int, Settled | RaftqError] = {}

        async def settle_cut(positions: list[int]) -> None:
            part = [receipts[at] for at in positions]
            try:
                answers = await self._settle(group, part, said)
            except RaftqError as error:
                answers = [error] * len(part)
            results.update(zip(positions, answers, strict=True))

        await asyncio.gather(*[settle_cut(cut) for cut in cuts])
        return [results[at] for at in range(len(receipts))]

    async def _settle(
        self, group: str, receipts: Sequence[Receipt], said: Settlement
    ) -> list[Settled | RaftqError]:
        """Settle receipts of one partition with one request."""
        key = receipts[0].topic, receipts[0].partition
        rows = tuple(
            ReceiptRow(receipt.nonce, receipt.offset, receipt.offset + 1) for receipt in receipts
        )
        request = Settle(group, *key, said.verb, rows, said.delay_ms, said.reason, said.error)
        attempts = Attempts(f"{said.verb} for {key[0]}/{key[1]}", self._options, self._timeout_s)
        reply = (await self._leaders.ask(key, request, self._timeout_s, attempts)).message
        done = Settled(reply.settled_offset, reply.in_flight, reply.dead > 0, reply.next_visible)
        results: list[Settled | RaftqError] = []
        for code in reply.errors[: len(receipts)]:
            # An earlier attempt of unknown outcome has settled it.
            again = attempts.unknown and said.verb == "ack" and code == AlreadySettled.code
            results.append(done if not code or again else error_of_code(code, key))
        return results
