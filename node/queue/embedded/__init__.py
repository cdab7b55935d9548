"""The queue in one process: messages in a directory, no server."""

from raftq.node.queue.embedded.async_queue import AsyncQueue
from raftq.node.queue.embedded.message import (
    DeadMessage,
    DelayedMessage,
    LaneStats,
    Message,
    QueueStats,
)
from raftq.node.queue.embedded.queue import Queue
from raftq.node.queue.embedded.transaction import Transaction

__all__ = [
    "AsyncQueue",
    "DeadMessage",
    "DelayedMessage",
    "LaneStats",
    "Message",
    "Queue",
    "QueueStats",
    "Transaction",
]
