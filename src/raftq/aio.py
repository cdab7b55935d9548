"""The asyncio clients: `from raftq.aio import Producer, Consumer, QueueClient, Worker, Admin`.

They have the verbs of the blocking ones in `raftq`, to be awaited.
"""

from raftq.client.admin.admin import Admin
from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.recovery import Leaderless, ReplicaCopy
from raftq.client.admin.results import (
    DeadLetter,
    DelayedPage,
    DelayedRecord,
    DelaySums,
    DelayTotals,
    GroupDescription,
    GroupPartition,
    LetterPage,
    LetterPlace,
    QueueSums,
    Swept,
)
from raftq.client.common import errors
from raftq.client.common.errors import RaftqError
from raftq.client.consumer.consumer import Consumer
from raftq.client.consumer.pages import Page, Position
from raftq.client.consumer.records import Fetched
from raftq.client.producer.producer import Producer
from raftq.client.queue.client import QueueClient
from raftq.client.queue.handler_ends import Reject
from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.worker import Worker
from raftq.client.results import (
    Appended,
    Deliveries,
    Delivery,
    PartitionDescription,
    Record,
    TopicDescription,
)
from raftq.client.wire.admin_messages import ClusterStatusReply
from raftq.client.wire.batch import Batch
from raftq.client.wire.group_messages import GivenPartition, GroupSummary, MemberInfo
from raftq.client.wire.messages import NodeInfo
from raftq.client.wire.record import BatchRecord

__all__ = [
    "Admin", "Appended", "Batch", "BatchRecord", "ClusterStatusReply", "Consumer",
    "DeadLetter", "DelaySums", "DelayTotals", "DelayedPage", "DelayedRecord", "Deliveries",
    "Delivery", "Fetched", "GivenPartition", "GroupDescription", "GroupPartition",
    "GroupSummary", "Leaderless", "LeasedRecord", "LetterFilter", "LetterPage", "LetterPlace",
    "MemberInfo", "NodeInfo", "Page", "PartitionDescription", "Position", "Producer",
    "QueueClient", "QueueSums", "RaftqError", "Record", "Reject", "ReplicaCopy", "Swept",
    "TopicDescription", "Worker", "errors",
]  # fmt: skip
