"""The asyncio clients: `from raftq.aio import Producer, Consumer, QueueClient, Worker, Admin`.

They have the verbs of the blocking ones in `raftq`, to be awaited.
"""

from raftq.client.admin import Admin
from raftq.client.consumer import Consumer
from raftq.client.handler_ends import Reject
from raftq.client.leased import LeasedRecord
from raftq.client.producer import Producer
from raftq.client.queue_client import QueueClient
from raftq.client.results import Appended, Delivery, Record
from raftq.client.worker import Worker

__all__ = [
    "Admin", "Appended", "Consumer", "Delivery", "LeasedRecord", "Producer", "QueueClient",
    "Record", "Reject", "Worker",
]  # fmt: skip
