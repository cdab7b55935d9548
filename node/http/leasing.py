"""A poll of a queue group: leases at whichever leaders have something. (Shell.)

First every leader is asked for what it has now. When none has anything, a request is parked at each
of them, and the first that brings records ends the poll. What the others bring after that is given
back at once, without spending an attempt; usually the member's next poll takes their place before.
"""

import asyncio
from collections.abc import Sequence

from raftq.client.common.errors import RaftqError
from raftq.client.consumer.records import Fetched, to_records
from raftq.client.net.connection import Reply
from raftq.client.options import Address
from raftq.client.results import Record
from raftq.client.wire.batch import Batch
from raftq.client.wire.queue_messages import (
    Lease,
    LeasedPartition,
    LeasePartition,
    LeaseReply,
    ReceiptRow,
    Settle,
)
from raftq.node.http.cluster_calls import ClusterCalls, error_of
from raftq.node.http.queue_gateway import Ask, Delivered, PartitionName
from raftq.node.http.receipts import ReceiptText

ANSWER_S = 5.0
"""Beyond the wait that a leader was asked for."""
ROWS_MAX = 1_000
"""Of one settlement."""


class Leases:
    """See the module's docstring."""

    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls

    async def poll(
        self, group: str, holder: str, names: Sequence[PartitionName], ask: Ask
    ) -> list[Delivered]:
        """Records of these partitions; waits for at most `ask.wait_ms` when there are none."""
        leaders = await self._calls.by_leader(names)
        found: list[Delivered] = []
        room = ask.bytes_max
        for address, leadership in leaders.items():
            request = _request(group, holder, leadership, ask, ask.records_max - len(found), room)
            got = await self._ask(address, leadership, request)
            found += got
            room -= sum(len(one.record.value) for one in got)
            if len(found) >= ask.records_max or room <= 0:
                break
        if found or not ask.wait_ms:
            return found
        return await self._wait(group, holder, leaders, ask)

    async def _wait(
        self,
        group: str,
        holder: str,
        leaders: dict[Address, list[PartitionName]],
        ask: Ask,
    ) -> list[Delivered]:
        loop = asyncio.get_running_loop()
        parked: dict[asyncio.Future[list[Delivered]], None] = {}
        for address, leadership in leaders.items():
            request = _request(
                group, holder, leadership, ask, ask.records_max, ask.bytes_max, ask.wait_ms
            )
            parked[loop.create_task(self._ask(address, leadership, request))] = None
        try:
            while parked:
                done, _ = await asyncio.wait(parked, return_when=asyncio.FIRST_COMPLETED)
                found: list[Delivered] = []
                for one in done:
                    del parked[one]
                    found += one.result()
                if found:
                    return found
            return []
        finally:
            for one in parked:
                # Its answer may bring leases after all, whatever became of the caller.
                self._calls.spawn(self._return_late(group, one))

    async def _return_late(self, group: str, late: "asyncio.Future[list[Delivered]]") -> None:
        await self.give_back(group, await late)

    async def _ask(
        self, address: Address, leadership: Sequence[PartitionName], request: Lease
    ) -> list[Delivered]:
        """What one leader gives. A leader that moved or fell silent has nothing to give: the poll
        goes on with the others, and finds it the next time."""
        try:
            timeout_s = request.wait_ms / 1000 + ANSWER_S
            reply = await self._calls.request(address, request, timeout_s)
        except RaftqError as error:
            if not error.retriable:
                raise
            for name in leadership:
                self._calls.learn(name, error)
            return []
        for one in reply.message.partitions:
            if one.error:
                problem = error_of(one.error, (one.topic, one.partition))
                if not problem.retriable:
                    raise problem
                self._calls.learn((one.topic, one.partition), problem)
        return _delivered(reply)

    async def give_back(self, group: str, delivered: Sequence[Delivered]) -> None:
        """They are delivered again at once, and no attempt is spent. What cannot be given back
        comes again when its lease ends."""
        rows: dict[PartitionName, list[ReceiptRow]] = {}
        for one in delivered:
            if one.receipt is not None:
                row = ReceiptRow(one.receipt.nonce, one.receipt.offset, one.receipt.offset + 1)
                rows.setdefault((one.topic, one.partition), []).append(row)
        for (topic, partition), several in rows.items():
            for at in range(0, len(several), ROWS_MAX):
                part = tuple(several[at : at + ROWS_MAX])
                request = Settle(group, topic, partition, "release", part)
                try:
                    await self._calls.lead((topic, partition), request)
                except RaftqError:
                    break


def _request(  # noqa: PLR0913 - what a lease consists of
    group: str,
    holder: str,
    leadership: Sequence[PartitionName],
    ask: Ask,
    records_max: int,
    bytes_max: int,
    wait_ms: int = 0,
) -> Lease:
    return Lease(
        group,
        holder,
        tuple(LeasePartition(*name) for name in leadership),
        records_max,
        bytes_max,
        ask.lease_ms,
        wait_ms,
    )


def _delivered(reply: Reply[LeaseReply]) -> list[Delivered]:
    found: list[Delivered] = []
    for one in reply.message.partitions:
        if one.ranges:
            raw = bytes(reply.raw[one.start : one.start + one.length])
            found += _of_partition(one, _records(one.topic, one.partition, raw))
    return found


def _of_partition(leased: LeasedPartition, records: dict[int, Record]) -> list[Delivered]:
    topic, partition = leased.topic, leased.partition
    return [
        Delivered(
            topic,
            partition,
            records[offset],
            ReceiptText(topic, partition, offset, one.attempt, one.nonce),
        )
        for one in leased.ranges
        for offset in range(one.start, one.end)
        if offset in records
    ]


def _records(topic: str, partition: int, raw: bytes) -> dict[int, Record]:
    """The records of batches that lie back to back, by offset."""
    found: dict[int, Record] = {}
    at = 0
    while at < len(raw):
        batch = Batch(raw, at)
        at += batch.length
        for record in to_records(Fetched(topic, partition, 0, batch)):
            found[record.offset] = record
    return found
