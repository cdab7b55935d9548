"""RaftQ: a durable message queue and log.

The public names, loaded on first use so that `import raftq` stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from raftq.client.blocking import Admin as Admin
    from raftq.client.blocking import Consumer as Consumer
    from raftq.client.blocking import Producer as Producer
    from raftq.client.blocking_queue import QueueClient as QueueClient
    from raftq.client.blocking_queue import Worker as Worker
    from raftq.client.handler_ends import Reject as Reject
    from raftq.client.results import Appended as Appended
    from raftq.client.wire import errors as errors
    from raftq.client.wire.errors import RaftqError as RaftqError
    from raftq.node.embedded import AsyncQueue as AsyncQueue
    from raftq.node.embedded import Message as Message
    from raftq.node.embedded import Queue as Queue

_HOMES = {
    "Admin": "raftq.client.blocking",
    "Appended": "raftq.client.results",
    "AsyncQueue": "raftq.node.embedded",
    "Consumer": "raftq.client.blocking",
    "Message": "raftq.node.embedded",
    "Producer": "raftq.client.blocking",
    "Queue": "raftq.node.embedded",
    "QueueClient": "raftq.client.blocking_queue",
    "RaftqError": "raftq.client.wire.errors",
    "Reject": "raftq.client.handler_ends",
    "Worker": "raftq.client.blocking_queue",
}

__all__ = [
    "Admin", "Appended", "AsyncQueue", "Consumer", "Message", "Producer", "Queue", "QueueClient",
    "RaftqError", "Reject", "Worker", "errors",
]  # fmt: skip


def __getattr__(name: str) -> object:
    if name == "errors":
        return import_module("raftq.client.wire.errors")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raftq' has no attribute {name!r}")
    return getattr(import_module(home), name)
