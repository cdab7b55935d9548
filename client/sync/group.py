"""Shell: what the blocking consumer does as a member of a group.

Callbacks are called in the thread that polls, so they may use the consumer. Everything else happens
on the loop while that thread waits for it.
"""

import inspect
from collections.abc import Coroutine, Iterable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.ownership import COMMIT_S, OwnedPartitions
from raftq.client.options import Rebalanced

if TYPE_CHECKING:
    from raftq.client.consumer.consumer import Consumer as AsyncConsumer

T = TypeVar("T")


class GroupVerbs:
    """The verbs of groups, for the blocking Consumer, which has the rest."""

    _client: "AsyncConsumer"
    _refusal: str | None

    if TYPE_CHECKING:

        def _call(self, work: Coroutine[Any, Any, T]) -> T: ...
        def _close(self, work: Coroutine[Any, Any, None]) -> None: ...

    def commit(
        self, offsets: Mapping[tuple[str, int], int] | None = None, timeout: float = COMMIT_S
    ) -> None:
        """Store the group's positions: those after the records handed out so far, or the given
        ones, each the next offset to read. FencedGeneration when a partition has gone to another
        member; those that have not are stored."""
        self._call(self._client.commit(offsets, timeout))

    def lag(self, timeout: float = 10.0) -> dict[tuple[str, int], int]:
        """How many offsets are between the position and the end of each assigned partition."""
        return self._call(self._client.lag(timeout))

    def pause(self, partitions: Iterable[tuple[str, int]]) -> None:
        """Give no records of these until `resume`; they stay assigned."""
        self._call(self._client.pause(partitions))

    def resume(self, partitions: Iterable[tuple[str, int]]) -> None:
        self._call(self._client.resume(partitions))

    def paused(self) -> list[tuple[str, int]]:
        return self._client.paused()

    def close(self) -> None:
        """End. The member of a group stores its positions first, if it does that by itself, and
        leaves."""
        self._close_group(is_done=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            # Whoever fails is not done with what it got: it shall get it again.
            self._close_group(is_done=kind is None)
        except RaftqError:
            if kind is None:
                raise

    def _close_group(self, is_done: bool) -> None:
        group = self._client._group
        try:
            if group is not None and self._refusal is None:
                call_back(self._client.options.on_revoked, self._call(group.every()))
        finally:
            self._close(self._client._close(is_done, is_told=True))

    def _come_back(self, group: OwnedPartitions) -> None:
        """Learn what the group has given and taken, and tell the application."""
        options = self._client.options
        revoked = self._call(group.come_back())
        if revoked:
            try:
                call_back(options.on_revoked, revoked)
            finally:
                self._call(group.give_up(revoked))
        assigned = self._call(group.activate())
        if assigned:
            call_back(options.on_assigned, assigned)


def call_back(callback: Rebalanced | None, keys: list[PartitionKey]) -> None:
    if callback is not None and keys:
        result = callback(keys)
        if inspect.iscoroutine(result):
            result.close()
            raise InvalidArgument("callbacks of the blocking consumer are plain functions")
