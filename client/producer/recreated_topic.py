"""Pure: a topic was deleted, and another one may have its name: where its batches go now.

A batch that was certainly not written may go to the new topic if the partitions of its records stay
right: a partition chosen by number needs the same number, a key needs the partition that the key
chooses, and the others go anywhere. A batch cannot be split any more, so records with keys move
only if the number of partitions is the same. Batches that cannot move fail.
"""

from raftq.client.common.errors import RaftqError, UnknownPartition, UnknownTopic
from raftq.client.producer.outbox import Outbox, OutgoingBatch, OutgoingTopic


def target_outbox(batch: OutgoingBatch, old: OutgoingTopic, new: OutgoingTopic) -> Outbox | None:
    """The outbox of the new topic for a batch of the old one, if there is one."""
    partition = batch.outbox.partition
    if batch.by_key and len(old.outboxes) != len(new.outboxes):
        return None
    target: Outbox | None = None
    if not batch.by_key and not batch.by_number:
        target = new.choose()
    elif partition < len(new.outboxes):
        target = new.outboxes[partition]
    return target.for_later() if target is not None and batch.outbox.delayed else target


def gone_error(outbox: Outbox, old: OutgoingTopic, new: OutgoingTopic | None) -> RaftqError:
    """The error for batches that cannot move."""
    if new is None:
        return UnknownTopic(f"no topic is named {old.name!r}")
    return UnknownPartition(
        f"topic {old.name!r} was deleted and created again with {len(new.outboxes)} partitions; "
        f"this was for partition {outbox.partition} of {len(old.outboxes)}"
    )
