"""Shell: how the admin client reaches delayed records."""

from collections.abc import Sequence

from raftq.client.admin.requests import AdminRequests, records_of
from raftq.client.admin.results import DelayedRecord
from raftq.client.common.backoff import copy_error
from raftq.client.wire.queue_messages import CancelDelayed, ListDelayed

PORTION = 500


async def delayed(
    requests: AdminRequests, topic: str, number: int, limit: int, values: bool
) -> list[DelayedRecord]:
    """The delayed records of one partition that are due next."""
    key = topic, number
    found: list[DelayedRecord] = []
    while len(found) < limit:
        count = min(limit - len(found), PORTION)
        request = ListDelayed(*key, len(found), count, values=values)
        reply = await requests.ask_leader(key, request)
        records = {record.offset: record for record in records_of(key, reply.raw)}
        for scheduled in reply.message.records:
            record = records.get(scheduled.offset)
            more = () if record is None else (record.key, record.value, record.headers)
            found.append(
                DelayedRecord(
                    *key, scheduled.offset, scheduled.deliver_at, scheduled.priority, *more
                )
            )
        if not reply.message.records or len(found) >= reply.message.pending:
            break
    return found


async def cancel(
    requests: AdminRequests, topic: str, partition: int, offsets: Sequence[int]
) -> list[int]:
    key = topic, partition
    found: list[int] = []
    for at in range(0, len(offsets), PORTION):
        part = tuple(offsets[at : at + PORTION])
        attempts = requests.attempts(f"CancelDelayed for {topic}/{partition}")
        reply = await requests.ask_leader(key, CancelDelayed(*key, part), attempts)
        if attempts.unknown and attempts.last and len(reply.message.cancelled) < len(part):
            # An earlier attempt may have cancelled the others, or they were due before it.
            raise copy_error(attempts.last).with_outcome("unknown")
        found += reply.message.cancelled
    return found
