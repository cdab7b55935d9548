"""The asyncio clients: `from raftq.aio import Producer, Consumer, QueueClient, Worker, Admin`.

They have the verbs of the blocking ones in `raftq`, to be awaited.
"""

from raftq.client.admin.admin import Admin
from raftq.client.consumer.consumer import Consumer
from raftq.client.producer.producer import Producer
from raftq.client.queue.client import QueueClient
from raftq.client.queue.handler_ends import Reject
from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.worker import Worker
from raftq.client.results import Appended, Delivery, Record

__all__ = [
    "Admin", "Appended", "Consumer", "Delivery", "LeasedRecord", "Producer", "QueueClient",
    "Record", "Reject", "Worker",
]  # fmt: skip
