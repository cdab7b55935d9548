"""Shell: what the blocking clients have in common.

A blocking client has the verbs of its asyncio twin, without `await`. The twin lives on the loop of
a background thread (loop_thread.py). Calls that happen often do not go there: `send` fills batches
and `poll` decodes them in the caller's own thread, and only what needs the network is handed over.

.ci/make_sync.py writes the modules of this package that only call the twin.
"""

from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

from raftq.client.common.errors import QueueClosed, RaftqError
from raftq.client.net.client import Client
from raftq.client.sync import loop_thread

T = TypeVar("T")


class Blocking:
    """What the blocking clients have in common: the thread, opening and closing."""

    def __init__(self, client: Client) -> None:
        self._refusal: str | None = None
        self._base = client
        self._thread = loop_thread.join(self)
        self._call(client.start())

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._refusal is not None:
            work.close()
            self._refuse()
        return self._thread.call(work)

    def _refuse(self) -> None:
        raise QueueClosed(f"this client cannot be used: {self._refusal}")

    def forbid(self, reason: str) -> None:
        self._refusal = reason

    def _close(self, work: Coroutine[Any, Any, None]) -> None:
        if self._refusal is not None:
            work.close()
            return
        try:
            self._call(work)
        finally:
            if self._refusal is None:
                self._refusal = "it is closed"
                loop_thread.leave(self, self._thread)

    def close(self) -> None:
        self._close(self._base.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except RaftqError:
            if kind is None:
                raise
