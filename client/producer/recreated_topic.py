"""A topic was deleted, and perhaps another one has its name: where its batches go now. (Pure.)

A batch that was certainly not written may go to the new topic as long as that keeps what its
records asked for: a partition by its number wants the same number, a key wants the partition that
the key chooses, the others go anywhere. Those of a batch cannot be parted any more, so records with
keys move only if there are as many partitions as before. What cannot move has failed.
"""

from raftq.client.common.errors import RaftqError, UnknownPartition, UnknownTopic
from raftq.client.producer.outbox import Outbox, OutgoingBatch, OutgoingTopic


def successor(batch: OutgoingBatch, old: OutgoingTopic, new: OutgoingTopic) -> Outbox | None:
    """The outbox of the new topic for a batch of the old one, if there is one."""
    partition = batch.outbox.partition
    if batch.by_key and len(old.outboxes) != len(new.outboxes):
        return None
    heir: Outbox | None = None
    if not batch.by_key and not batch.by_number:
        heir = new.choose()
    elif partition < len(new.outboxes):
        heir = new.outboxes[partition]
    return heir.for_later() if heir is not None and batch.outbox.delayed else heir


def why_gone(outbox: Outbox, old: OutgoingTopic, new: OutgoingTopic | None) -> RaftqError:
    """What to tell about batches that stay behind."""
    if new is None:
        return UnknownTopic(f"no topic is named {old.name!r}")
    return UnknownPartition(
        f"topic {old.name!r} was deleted and created again with {len(new.outboxes)} partitions; "
        f"this was for partition {outbox.partition} of {len(old.outboxes)}"
    )
