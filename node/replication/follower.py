"""Follower side of replication: one fetcher per leader node. (Shell.)

    wanted ──subscribe──> subscribed ──append──> subscribed
      ^                       │ truncate, reset: cut the log, subscribe again
      └──a while later────────┴ refuse, damage, full disk

A fetcher holds one connection to its leader and keeps one request open on it, two while it has
something new to report. A request names what changed here: subscriptions and ends of logs. What
arrives is appended at once. With fsync `always` the new end is reported when it is on disk.

Everything is checked against the epoch and the assignment that this node knows: batches of an older
leader are dropped, and so are those for a replica that is gone.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from raftq.client.common.errors import (
    CorruptBatch,
    FencedEpoch,
    NotLeader,
    RaftqError,
    StorageError,
    StorageFailed,
    UnknownPartition,
)
from raftq.client.net.connection import Connection, Reply
from raftq.client.wire.node_messages import (
    EPOCHS_MAX,
    Progress,
    Replicate,
    Replicated,
    ReplicateReply,
    Subscription,
)
from raftq.node.replication.partition_log import LogKey, PartitionLog

logger = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], object]
RETRY_S_MIN, RETRY_S_MAX = 0.05, 1.0
ITEMS_PER_REQUEST = 500
GRACE_S = 5.0
NOT_YET = (FencedEpoch.code, NotLeader.code, UnknownPartition.code)
"""Errors of leaders that do not have the latest metadata yet, mostly about their own election."""


class Net(Protocol):
    """How a fetcher connects to its leader."""

    loop: asyncio.AbstractEventLoop
    node_id: int
    incarnation: int
    fetch_bytes_max: int
    wait_ms: int
    join_timeout_s: float
    """How long a new leader waits for a follower that has not contacted it."""

    async def connect(self, node_id: int) -> Connection: ...


class LeaderFetcher:
    """Follows every log of the partitions that one node leads."""

    def __init__(self, net: Net, leader: int, on_fatal: Callable[[BaseException], None]) -> None:
        self._net = net
        self.leader = leader
        self._on_fatal = on_fatal
        self._wanted: dict[LogKey, PartitionLog] = {}  # all logs to follow
        self._to_subscribe: dict[LogKey, PartitionLog] = {}
        self._ends_to_report: dict[LogKey, PartitionLog] = {}
        self._to_leave: dict[LogKey, None] = {}
        self._subscribed: dict[LogKey, tuple[int, int]] = {}  # -> epoch, assignment
        self._delays: dict[LogKey, float] = {}
        self._refused: dict[LogKey, None] = {}  # whose batches failed their checks here
        self._connection: Connection | None = None
        self._ended = asyncio.Event()
        self._woken = asyncio.Event()
        self._number = 0
        self._open = 0
        self._send_scheduled = False
        self._stopped = False

    @property
    def idle(self) -> bool:
        return not self._wanted

    def want(self, partition_log: PartitionLog) -> None:
        """Follow this log, in its present epoch and under its present assignment."""
        key = partition_log.key
        self._wanted[key] = partition_log
        self._to_leave.pop(key, None)
        self._delays.pop(key, None)
        self._resubscribe(key)
        self._woken.set()

    def _resubscribe(self, key: LogKey) -> None:
        partition_log = self._wanted.get(key)
        if partition_log is not None and not self._stopped:
            self._subscribed.pop(key, None)
            self._ends_to_report.pop(key, None)
            self._to_subscribe[key] = partition_log
            self._send_soon()

    def drop(self, key: LogKey) -> None:
        """Stop to follow this log."""
        if self._wanted.pop(key, None) is not None:
            self._to_subscribe.pop(key, None)
            self._ends_to_report.pop(key, None)
            self._delays.pop(key, None)
            self._refused.pop(key, None)
            if self._subscribed.pop(key, None) is not None:
                self._to_leave[key] = None
                self._send_soon()

    def report_end(self, partition_log: PartitionLog) -> None:
        """Report the new end of this log to the leader."""
        key = partition_log.key
        if key in self._subscribed:
            self._ends_to_report[key] = partition_log
            self._send_soon()

    # The connection

    async def run(self) -> None:
        """Keep a connection while there is something to follow, until stopped."""
        delay = RETRY_S_MIN
        while not self._stopped:
            await self._woken.wait()
            self._woken.clear()
            while self._wanted and not self._stopped:
                try:
                    self._connection = await self._net.connect(self.leader)
                except RaftqError as error:
                    logger.info("leader=%d unreachable: %s", self.leader, error)
                    await self._pause(delay)
                    delay = min(delay * 2, RETRY_S_MAX)
                    continue
                delay = RETRY_S_MIN
                await self._run_session()
                await self._pause(RETRY_S_MIN)

    async def _pause(self, seconds: float) -> None:
        """Wait, but only until there is something new to follow."""
        try:
            async with asyncio.timeout(seconds):
                await self._woken.wait()
        except TimeoutError:
            return
        self._woken.clear()

    async def _run_session(self) -> None:
        self._ended.clear()
        self._number = self._open = 0
        self._to_leave.clear()
        self._ends_to_report.clear()
        self._subscribed.clear()
        self._to_subscribe = dict(self._wanted)
        self._send()
        await self._ended.wait()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    def stop(self) -> None:
        self._stopped = True
        self._wanted.clear()
        self._end(None)
        self._woken.set()

    def _end(self, error: BaseException | None) -> None:
        if error is not None and not self._ended.is_set():
            logger.info("leader=%d session ended: %s", self.leader, error)
        self._ended.set()

    # Requests

    def _send_soon(self) -> None:
        """Send a request soon, with everything that comes up until then."""
        if not self._send_scheduled and self._open < 2 and self._connection is not None:
            self._send_scheduled = True
            self._net.loop.call_soon(self._send_news)

    def _send_news(self) -> None:
        self._send_scheduled = False
        if self._open < 2 and self._has_news():
            self._send()

    def _has_news(self) -> bool:
        return bool(self._to_subscribe or self._ends_to_report or self._to_leave)

    def _send(self) -> None:
        connection, net = self._connection, self._net
        if connection is None or self._ended.is_set():
            return
        try:
            subscriptions = tuple(self._subscriptions())
        except StorageError as error:
            self._on_fatal(error)
            return
        request = Replicate(
            net.node_id,
            net.incarnation,
            self._number,
            subscriptions,
            tuple(self._progress()),
            tuple(self._leaving()),
            net.fetch_bytes_max,
            net.wait_ms,
        )
        try:
            future = connection.submit(request, (), net.wait_ms / 1000 + GRACE_S)
        except RaftqError as error:
            self._end(error)
            return
        self._number += 1
        self._open += 1
        future.add_done_callback(partial(self._replied, connection))

    def _subscriptions(self) -> list[Subscription]:
        found = []
        for key, partition_log in list(self._to_subscribe.items())[:ITEMS_PER_REQUEST]:
            del self._to_subscribe[key]
            log, replica = partition_log.log, partition_log.replica
            pairs = log.epoch_pairs(EPOCHS_MAX)
            self._subscribed[key] = replica.epoch, replica.assignment
            if partition_log.own_end < log.end_offset:
                # A subscription also reports how much is safe here.
                log.sync()
            partition_log.subscribes()
            found.append(
                Subscription(
                    key[0],
                    key[1],
                    replica.epoch,
                    replica.assignment,
                    log.start_offset,
                    log.end_offset,
                    tuple(number for pair in pairs for number in pair),
                    key[2],
                    key in self._refused,
                )
            )
            self._refused.pop(key, None)
        return found

    def _progress(self) -> list[Progress]:
        found = []
        for key, partition_log in list(self._ends_to_report.items())[:ITEMS_PER_REQUEST]:
            del self._ends_to_report[key]
            topic_id, number, log_number = key
            epoch, assignment = self._subscribed[key]
            found.append(
                Progress(topic_id, number, epoch, assignment, partition_log.own_end, log_number)
            )
        return found

    def _leaving(self) -> list[int]:
        found: list[int] = []
        for key in list(self._to_leave)[:ITEMS_PER_REQUEST]:
            del self._to_leave[key]
            found += key
        return found

    # Replies

    def _replied(
        self, connection: Connection, future: "asyncio.Future[Reply[ReplicateReply]]"
    ) -> None:
        if future.cancelled():
            return
        error = future.exception()
        if self._connection is None or connection is not self._connection:
            return
        if error is not None:
            self._end(error)
            return
        reply = future.result()
        self._open -= 1
        try:
            for item in reply.message.partitions:
                self._apply(item, reply.raw)
        except Exception as broken:
            self._on_fatal(broken)
            return
        if self._open == 0 or (self._open < 2 and self._has_news()):
            self._send()

    def _apply(self, item: Replicated, raw: memoryview) -> None:
        key = (item.topic_id, item.partition, item.log_number)
        partition_log = self._wanted.get(key)
        if partition_log is None or key not in self._subscribed:
            return
        if item.verb == "refuse":
            # A leader that learns late of its election gives its followers the full time from then
            # on. A follower that came too early must be back within that time.
            early = item.error in NOT_YET
            self._postpone(key, item.error, self._net.join_timeout_s / 2 if early else RETRY_S_MAX)
            return
        replica = partition_log.replica
        if replica.role != "follower" or (
            (item.epoch, item.assignment) != (replica.epoch, replica.assignment)
        ):
            return
        try:
            if item.verb == "append":
                batches = raw[item.start : item.start + item.length]
                partition_log.take(batches, item.high_watermark, item.start_offset)
            else:
                if item.verb == "truncate":
                    partition_log.cut(item.offset)
                else:
                    partition_log.restart_at(item.offset)
                self._resubscribe(key)
        except CorruptBatch as error:
            # Mostly the disk of the leader is damaged: it hands over batches unchecked.
            self._refused[key] = None
            self._postpone(key, str(error))
        except StorageError as error:
            if item.verb != "append" and isinstance(error, StorageFailed):
                # The log may be cut while its producers are not, or it refuses every cut until it
                # is opened again. The log itself reports an append that fails.
                self._on_fatal(error)
            self._postpone(key, str(error))

    def _postpone(self, key: LogKey, reason: str, most_s: float = RETRY_S_MAX) -> None:
        """Subscribe again after a delay that grows with every failure."""
        partition_log = self._wanted[key]
        delay = min(self._delays.get(key, RETRY_S_MIN), max(most_s, RETRY_S_MIN))
        self._delays[key] = min(delay * 2, RETRY_S_MAX)
        logger.info(
            "partition=%s leader=%d retry_in=%.2fs reason=%s",
            partition_log, self.leader, delay, reason,
        )  # fmt: skip
        self._subscribed.pop(key, None)
        self._ends_to_report.pop(key, None)
        self._net.loop.call_later(delay, self._resubscribe_if, key, partition_log.replica.epoch)

    def _resubscribe_if(self, key: LogKey, epoch: int) -> None:
        partition_log = self._wanted.get(key)
        if (
            partition_log is not None
            and partition_log.replica.epoch == epoch
            and key not in self._to_subscribe
        ):
            self._resubscribe(key)


class LeaderFetchers:
    """All fetchers of a node. `spawn` gives their tasks to their owner."""

    def __init__(self, net: Net, spawn: Spawn, on_fatal: Callable[[BaseException], None]) -> None:
        self._net = net
        self._spawn = spawn
        self._on_fatal = on_fatal
        self._fetchers: dict[int, LeaderFetcher] = {}

    def follow(self, partition_log: PartitionLog, leader: int | None) -> None:
        """Follow this leader, and no other, in the present epoch of the partition. None: no
        leader."""
        before, partition_log.fetcher = partition_log.fetcher, None
        if before is not None and before.leader != leader:
            before.drop(partition_log.key)
        if leader is None:
            return
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = LeaderFetcher(self._net, leader, self._on_fatal)
            self._spawn(fetcher.run())
        partition_log.fetcher = fetcher
        fetcher.want(partition_log)

    def stop(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.stop()

    def describe(self) -> dict[str, Any]:
        return {str(leader): len(fetcher._wanted) for leader, fetcher in self._fetchers.items()}
