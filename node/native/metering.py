"""Counts and times the requests that the native listener answers. (Shell.)

It adds to one histogram per request, after the answer is on its way. Requests that are parked on
purpose (fetches, requests of followers) count with the time they were held.
"""

from collections.abc import Callable

from raftq.client.common.errors import InternalError, RaftqError, UnknownTopic
from raftq.client.wire.messages import Produce, WireMessage
from raftq.node.metrics.counters import OTHER, NodeMetrics
from raftq.node.native.session import Observer


def meter(metrics: NodeMetrics, clock: Callable[[], float]) -> Observer:
    """Called by the listener for each answered request."""

    def observe(message: WireMessage, began: float, error: BaseException | None) -> None:
        seconds = clock() - began
        code = "" if error is None else _code(error)
        metrics.request(type(message).__name__, seconds, code)
        if type(message) is not Produce:
            return
        if error is None:
            metrics.produced(message.topic, seconds)
        else:
            metrics.refused(OTHER if isinstance(error, UnknownTopic) else message.topic, code)

    return observe


def _code(error: BaseException) -> str:
    return error.code if isinstance(error, RaftqError) else InternalError.code
