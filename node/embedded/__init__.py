"""The queue in one process: messages in a directory, no server."""

from raftq.node.embedded.async_queue import AsyncQueue
from raftq.node.embedded.message import DeadLetter, DelayedMessage, Message, QueueStats
from raftq.node.embedded.queue import Queue
from raftq.node.embedded.transaction import Transaction

__all__ = [
    "AsyncQueue",
    "DeadLetter",
    "DelayedMessage",
    "Message",
    "Queue",
    "QueueStats",
    "Transaction",
]
