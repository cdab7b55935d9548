"""Shell: the blocking consumer. `poll` decodes batches in the caller's own thread.

Callbacks of a group are called in the thread that polls, so they may use the consumer. Everything
else happens on the loop while that thread waits for it.
"""

import inspect
import threading
from collections.abc import Callable
from time import perf_counter
from types import TracebackType
from typing import Any, TypeVar, Unpack

from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.consumer import POLL_BYTES
from raftq.client.consumer.ownership import OwnedPartitions
from raftq.client.consumer.records import Fetched, to_table
from raftq.client.options import Bootstrap, ConsumerSettings, Rebalanced
from raftq.client.results import Record
from raftq.client.sync.consumer_verbs import ConsumerVerbs

T = TypeVar("T")


class Consumer(ConsumerVerbs):
    """Reads records of partitions that it is assigned, or that its group gives it.

        with Consumer("127.0.0.1:7070", group="billing", topics=["orders"]) as consumer:
            records = consumer.poll()

    Settings are the fields of ConsumerOptions. One thread at a time may use it.
    """

    def __init__(self, bootstrap: Bootstrap, **settings: Unpack[ConsumerSettings]) -> None:
        super().__init__(bootstrap, **settings)
        self._client._threadsafe = True
        self._positions = self._client._positions
        self._polling = threading.Lock()

    def poll(self, max_records: int = 500, timeout: float = 1.0) -> list[Record]:
        """Records as they are there, at most `max_records`; [] when none comes in time."""
        if type(max_records) is not int or max_records < 1:
            raise InvalidArgument(f"max_records must be at least 1, not {max_records!r}")
        return self._poll(lambda: self._positions.take_records(max_records), timeout)

    def poll_batches(self, max_bytes: int = POLL_BYTES, timeout: float = 1.0) -> list[Fetched]:
        """Whole batches as they are stored, checksums not yet compared."""
        return self._poll(lambda: self._positions.take_batches(max_bytes), timeout)

    def poll_arrow(self, max_bytes: int = POLL_BYTES, timeout: float = 1.0) -> Any:
        """The next records as one `pyarrow.Table`, empty when none comes in time."""
        return to_table(self.poll_batches(max_bytes, timeout))

    def _poll(self, take: Callable[[], list[T]], timeout: float) -> list[T]:
        if not self._polling.acquire(blocking=False):
            raise InvalidArgument("another thread polls this consumer")
        group = self._client._group
        found: list[T] = []
        try:
            if group is not None:
                group.begin_poll()
            deadline = perf_counter() + timeout
            while True:
                if self._refusal is not None:
                    self._refuse()
                if group is not None and group.is_wanted:
                    self._come_back(group)
                found = take()
                left = deadline - perf_counter()
                if found or left <= 0:
                    return found
                self._positions.wait(left)
        finally:
            if group is not None:
                group.end_poll(found)
            self._polling.release()

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
            # An application that fails has not finished its records: they are delivered again.
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
