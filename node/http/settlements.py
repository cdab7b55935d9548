"""Settles receipts at the leaders of their partitions. (Shell.)

A receipt does not name its group, only a mark of it. Without a name from the caller the groups of
the partition are looked through for that mark, and the answer is remembered.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from raftq.client.common.errors import AlreadySettled, LeaseForeign, LeaseLost, RaftqError
from raftq.client.wire.queue_messages import DescribeQueue, ReceiptRow, Settle, SettleReply
from raftq.node.http.cluster_calls import ClusterCalls, error_of
from raftq.node.http.queue_gateway import PartitionName, SettleCall, Settled
from raftq.node.http.receipts import ReceiptText
from raftq.node.queue.core.leases import TAG_SHIFT

GROUPS_MAX = 10_000
"""Whose marks are remembered."""

Result = Settled | RaftqError


class Settlements:
    """See the module's docstring."""

    def __init__(self, calls: ClusterCalls) -> None:
        self._calls = calls
        self._groups: OrderedDict[tuple[PartitionName, int], list[str]] = OrderedDict()

    async def settle(self, asked: SettleCall) -> list[Result]:
        """One result per receipt, in order."""
        together: dict[PartitionName, list[int]] = {}
        for at, receipt in enumerate(asked.receipts):
            together.setdefault((receipt.topic, receipt.partition), []).append(at)
        results: dict[int, Result] = {}
        parts = [self._partition(asked, where, at) for where, at in together.items()]
        for found in await asyncio.gather(*parts):
            results |= found
        return [results[at] for at in range(len(asked.receipts))]

    async def _partition(
        self, asked: SettleCall, where: PartitionName, positions: list[int]
    ) -> dict[int, Result]:
        by_groups: dict[tuple[str, ...], list[int]] = {}
        results: dict[int, Result] = {}
        for at in positions:
            try:
                groups = await self._candidates(asked, asked.receipts[at])
            except RaftqError as error:
                results[at] = error
            else:
                by_groups.setdefault(tuple(groups), []).append(at)
        for candidates, several in by_groups.items():
            # What becomes of a record that is delivered again is said per request.
            cuts = [several] if asked.verb in ("ack", "release") else [[at] for at in several]
            made = [self._try(asked, where, candidates, cut) for cut in cuts]
            for found in await asyncio.gather(*made):
                results |= found
        return results

    async def _candidates(self, asked: SettleCall, receipt: ReceiptText) -> list[str]:
        """The groups whose receipt it can be."""
        if asked.group is not None:
            return [asked.group]
        where = (receipt.topic, receipt.partition)
        key = (where, receipt.nonce >> TAG_SHIFT)
        found = self._groups.get(key)
        if found is None:
            reply = await self._calls.lead(where, DescribeQueue(*where))
            found = [one.group for one in reply.message.groups if receipt.is_of(one.group)]
            if not found:
                raise LeaseForeign(f"no group of {where[0]}/{where[1]} has given this receipt")
            self._groups[key] = found
            if len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)
        self._groups.move_to_end(key)
        return found

    async def _try(
        self,
        asked: SettleCall,
        where: PartitionName,
        groups: Sequence[str],
        positions: list[int],
    ) -> dict[int, Result]:
        """Ask for one group after the other until one knows the receipts."""
        results: dict[int, Result] = {}
        left = positions
        for group in groups:
            try:
                found = await self._ask(asked, where, group, left)
            except RaftqError as error:
                found = dict.fromkeys(left, error)
            results |= found
            left = [at for at in left if isinstance(found[at], LeaseLost)]
            if not left:
                break
        if asked.group is None and any(isinstance(results[at], LeaseLost) for at in left):
            # Groups come and go; the next receipt is looked for anew.
            self._groups.pop((where, asked.receipts[left[0]].nonce >> TAG_SHIFT), None)
        return results

    async def _ask(
        self, asked: SettleCall, where: PartitionName, group: str, positions: list[int]
    ) -> dict[int, Result]:
        receipts = [asked.receipts[at] for at in positions]
        rows = tuple(ReceiptRow(one.nonce, one.offset, one.offset + 1) for one in receipts)
        reason = asked.reason if asked.verb == "reject" else ""
        error = asked.reason if asked.verb == "nack" else ""
        request = Settle(group, *where, asked.verb, rows, asked.delay_ms, reason, error)
        reply, unknown = await self._calls.lead_knowing(where, request)
        told = reply.message
        results: dict[int, Result] = {}
        for at, code in zip(positions, told.errors, strict=True):
            again = unknown and asked.verb == "ack" and code == AlreadySettled.code
            results[at] = error_of(code, where) if code and not again else _settled(told)
        return results


def _settled(told: SettleReply) -> Settled:
    return Settled(told.settled_offset, told.in_flight, told.dead > 0, told.next_visible)
