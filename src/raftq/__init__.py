"""RaftQ: a durable message queue and log.

The public names, loaded on first use so that `import raftq` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raftq.client.admin.letter_filter import LetterFilter as LetterFilter
    from raftq.client.admin.recovery import Leaderless as Leaderless
    from raftq.client.admin.recovery import ReplicaCopy as ReplicaCopy
    from raftq.client.admin.results import DeadLetter as DeadLetter
    from raftq.client.admin.results import DelayedPage as DelayedPage
    from raftq.client.admin.results import DelayedRecord as DelayedRecord
    from raftq.client.admin.results import DelaySums as DelaySums
    from raftq.client.admin.results import DelayTotals as DelayTotals
    from raftq.client.admin.results import GroupDescription as GroupDescription
    from raftq.client.admin.results import GroupPartition as GroupPartition
    from raftq.client.admin.results import LetterPage as LetterPage
    from raftq.client.admin.results import LetterPlace as LetterPlace
    from raftq.client.admin.results import QueueSums as QueueSums
    from raftq.client.admin.results import Swept as Swept
    from raftq.client.common import errors as errors
    from raftq.client.common.errors import RaftqError as RaftqError
    from raftq.client.consumer.pages import Page as Page
    from raftq.client.consumer.pages import Position as Position
    from raftq.client.consumer.records import Fetched as Fetched
    from raftq.client.queue.handler_ends import Reject as Reject
    from raftq.client.queue.leased import LeasedRecord as LeasedRecord
    from raftq.client.results import Appended as Appended
    from raftq.client.results import Deliveries as Deliveries
    from raftq.client.results import Delivery as Delivery
    from raftq.client.results import PartitionDescription as PartitionDescription
    from raftq.client.results import Record as Record
    from raftq.client.results import TopicDescription as TopicDescription
    from raftq.client.sync.admin import Admin as Admin
    from raftq.client.sync.consumer import Consumer as Consumer
    from raftq.client.sync.producer import Producer as Producer
    from raftq.client.sync.queue_client import QueueClient as QueueClient
    from raftq.client.sync.worker import Worker as Worker
    from raftq.client.wire.admin_messages import ClusterStatusReply as ClusterStatusReply
    from raftq.client.wire.batch import Batch as Batch
    from raftq.client.wire.group_messages import GivenPartition as GivenPartition
    from raftq.client.wire.group_messages import GroupSummary as GroupSummary
    from raftq.client.wire.group_messages import MemberInfo as MemberInfo
    from raftq.client.wire.messages import NodeInfo as NodeInfo
    from raftq.client.wire.record import BatchRecord as BatchRecord
    from raftq.node.queue.embedded import AsyncQueue as AsyncQueue
    from raftq.node.queue.embedded import DeadMessage as DeadMessage
    from raftq.node.queue.embedded import DelayedMessage as DelayedMessage
    from raftq.node.queue.embedded import LaneStats as LaneStats
    from raftq.node.queue.embedded import Message as Message
    from raftq.node.queue.embedded import Queue as Queue
    from raftq.node.queue.embedded import QueueStats as QueueStats
    from raftq.node.queue.embedded import Transaction as Transaction

_HOMES = {
    "raftq.client.admin.letter_filter": "LetterFilter",
    "raftq.client.admin.recovery": "Leaderless ReplicaCopy",
    "raftq.client.admin.results": (
        "DeadLetter DelayedPage DelayedRecord DelaySums DelayTotals GroupDescription "
        "GroupPartition LetterPage LetterPlace QueueSums Swept"
    ),
    "raftq.client.common.errors": "RaftqError",
    "raftq.client.consumer.pages": "Page Position",
    "raftq.client.consumer.records": "Fetched",
    "raftq.client.queue.handler_ends": "Reject",
    "raftq.client.queue.leased": "LeasedRecord",
    "raftq.client.results": (
        "Appended Deliveries Delivery PartitionDescription Record TopicDescription"
    ),
    "raftq.client.sync.admin": "Admin",
    "raftq.client.sync.consumer": "Consumer",
    "raftq.client.sync.producer": "Producer",
    "raftq.client.sync.queue_client": "QueueClient",
    "raftq.client.sync.worker": "Worker",
    "raftq.client.wire.admin_messages": "ClusterStatusReply",
    "raftq.client.wire.batch": "Batch",
    "raftq.client.wire.group_messages": "GivenPartition GroupSummary MemberInfo",
    "raftq.client.wire.messages": "NodeInfo",
    "raftq.client.wire.record": "BatchRecord",
    "raftq.node.queue.embedded": (
        "AsyncQueue DeadMessage DelayedMessage LaneStats Message Queue QueueStats Transaction"
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = sorted([*_HOME_OF, "errors"])


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("raftq.client.common.errors")
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'raftq' has no attribute {name!r}")
    return getattr(import_module(home), name)
