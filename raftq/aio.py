"""The asyncio clients: `from raftq.aio import Producer, Consumer, Admin`.

They have the verbs of the blocking ones in `raftq`, to be awaited.
"""

from raftq.client.admin import Admin
from raftq.client.consumer import Consumer
from raftq.client.producer import Producer
from raftq.client.results import Appended, Delivery, Record

__all__ = ["Admin", "Appended", "Consumer", "Delivery", "Producer", "Record"]
