"""Counts and times what the native listener's handlers do. (Shell.)

Wrapped around each handler: a look at the clock before and after, and one bump of a histogram per
request. What is parked on purpose (fetches, followers' requests) counts with the time it was held.
"""

import asyncio
from collections.abc import Awaitable, Mapping
from functools import partial
from typing import Any

from raftq.client.wire.errors import InternalError, RaftqError, UnknownTopic
from raftq.client.wire.messages import Message, Produce
from raftq.node.metrics import OTHER, NodeMetrics
from raftq.node.server.session import Handler, Session


class _Meter:
    """Around one handler."""

    __slots__ = ("_clock", "_handler", "_metrics", "_name", "_produces")

    def __init__(self, kind: type[Message], handler: Handler, metrics: NodeMetrics) -> None:
        self._name = kind.__name__
        self._produces = kind is Produce
        self._handler = handler
        self._metrics = metrics
        self._clock = asyncio.get_running_loop().time

    def __call__(self, message: Any, raw: memoryview, session: Session) -> Any:
        began = self._clock()
        try:
            answer = self._handler(message, raw, session)
        except RaftqError as error:
            self._note(message, began, error)
            raise
        if isinstance(answer, Message | tuple):
            self._note(message, began, None)
        elif isinstance(answer, asyncio.Future):
            answer.add_done_callback(partial(self._done, message, began))
        else:
            return self._waited(message, began, answer)
        return answer

    def _done(self, message: Any, began: float, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            self._note(message, began, future.exception())

    async def _waited(self, message: Any, began: float, work: Awaitable[Any]) -> Any:
        try:
            answer = await work
        except RaftqError as error:
            self._note(message, began, error)
            raise
        self._note(message, began, None)
        return answer

    def _note(self, message: Any, began: float, error: BaseException | None) -> None:
        seconds = self._clock() - began
        code = "" if error is None else getattr(error, "code", InternalError.code)
        self._metrics.request(self._name, seconds, code)
        if not self._produces:
            return
        if error is None:
            self._metrics.produced(message.topic, seconds)
        else:
            topic = OTHER if isinstance(error, UnknownTopic) else message.topic
            self._metrics.refused(topic, code)


def metered(handlers: Mapping[type[Message], Handler], metrics: NodeMetrics) -> dict[Any, Handler]:
    """The same handlers, counted."""
    return {kind: _Meter(kind, handler, metrics) for kind, handler in handlers.items()}
