"""RaftQ: a durable message queue and log.

The public names, loaded on first use so that `import raftq` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raftq.client.common import errors
    from raftq.client.common.errors import RaftqError as RaftqError
    from raftq.client.queue.handler_ends import Reject as Reject
    from raftq.client.results import Appended as Appended
    from raftq.client.sync.admin import Admin as Admin
    from raftq.client.sync.consumer import Consumer as Consumer
    from raftq.client.sync.producer import Producer as Producer
    from raftq.client.sync.queue_client import QueueClient as QueueClient
    from raftq.client.sync.worker import Worker as Worker
    from raftq.node.queue.embedded import AsyncQueue as AsyncQueue
    from raftq.node.queue.embedded import Message as Message
    from raftq.node.queue.embedded import Queue as Queue

_HOMES = {
    "Admin": "raftq.client.sync.admin",
    "Appended": "raftq.client.results",
    "AsyncQueue": "raftq.node.queue.embedded",
    "Consumer": "raftq.client.sync.consumer",
    "Message": "raftq.node.queue.embedded",
    "Producer": "raftq.client.sync.producer",
    "Queue": "raftq.node.queue.embedded",
    "QueueClient": "raftq.client.sync.queue_client",
    "RaftqError": "raftq.client.common.errors",
    "Reject": "raftq.client.queue.handler_ends",
    "Worker": "raftq.client.sync.worker",
}

__all__ = [
    "Admin", "Appended", "AsyncQueue", "Consumer", "Message", "Producer", "Queue", "QueueClient",
    "RaftqError", "Reject", "Worker", "errors",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("raftq.client.common.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raftq' has no attribute {name!r}")
    return getattr(import_module(home), name)
