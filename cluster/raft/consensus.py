"""Consensus for the rest of the system: propose a command, hear of every applied one. (Shell.)

Raft runs in a thread of its own with its own poller, so that its syncs do not stall the event loop
and a busy loop does not starve its heartbeats. Proposals go in through a queue and a pipe; answers
and changes come back in batches with `call_soon_threadsafe`, in the order in which they applied.

    new --start--> running --stop--> stopped
    running --failed sync, damaged file, broken invariant, failing apply--> failed

What fails stops: every open proposal is answered, the sockets and files are closed, `on_fatal` is
called with the error, and nothing is written any more. The way back is to restart the process; if
its files are damaged, to move the directory away while a majority is healthy.

The state machine belongs to the Raft thread. The event loop learns what happened from `on_change`,
whose events are immutable. `is_leader`, `leader_id` and `term` may be out of date when they are
read: what must be current goes through `propose` or waits for `read_barrier` first.
"""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from posixpath import join
from random import Random, SystemRandom
from typing import Any, Literal

from raftq.client.common.disk import Disk, Lock, RealDisk
from raftq.client.common.errors import (
    ConfigError,
    ConsensusStopped,
    OutcomeUnknown,
    RaftqError,
    Throttled,
    TooLarge,
)
from raftq.cluster.raft.applied import (
    BARRIER,
    ID_BYTES,
    REGULAR,
    Applied,
    Applier,
    StateMachine,
    envelope,
    make_command_id,
    split_command_id,
)
from raftq.cluster.raft.config import ConsensusConfig
from raftq.cluster.raft.journal import RaftJournal
from raftq.cluster.raft.library import POLL_EVENT_TYPE, Node
from raftq.cluster.raft.node import RaftNode, RaftSetup
from raftq.cluster.raft.proposals import Proposal
from raftq.cluster.raft.snapshot import Snapshots
from raftq.cluster.raft.transport import RaftTransport, listen
from raftq.cluster.raft.voters_file import keep_to_voters

logger = logging.getLogger(__name__)

_GRACE = 0.5
"""Seconds after its deadline in which the Raft thread may still answer a proposal itself."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A snapshot took the place of the state; what was applied up to `index` is in it.

    Given once for every call of the state machine's `restore`: at the start if this node has a
    snapshot, and later when it gets one from another node because it was too far behind.
    """

    index: int


Change = Applied | Restored
_Answer = tuple[int, Any, RaftqError | None]


class Consensus:
    """The Raft thread as the event loop sees it. Belongs to the event loop that called `start`."""

    def __init__(  # noqa: PLR0913 - its parts, and one callback for each kind of event
        self,
        config: ConsensusConfig,
        state_machine: StateMachine,
        *,
        on_change: Callable[[Change], None] | None = None,
        on_leader: Callable[[str | None, int], None] | None = None,
        on_fatal: Callable[[BaseException], None] | None = None,
        on_stuck: Callable[[float], None] | None = None,
        disk: Disk | None = None,
    ) -> None:
        if sys.flags.optimize:
            raise ConfigError("consensus relies on its assertions: run without -O")
        self.config = config
        self.state: Literal["new", "running", "stopped", "failed"] = "new"
        self.fatal_error: BaseException | None = None
        self._machine = state_machine
        self._disk: Disk = disk if disk is not None else RealDisk()
        self._on_change = on_change
        self._on_leader = on_leader
        self._on_fatal = on_fatal
        self._on_stuck = on_stuck
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._node: RaftNode | None = None
        self._rng = SystemRandom()
        # Event loop: proposals without an answer.
        self._waiting: dict[int, tuple[asyncio.Future[Any], asyncio.TimerHandle, int]] = {}
        self._waiting_bytes = 0
        self._number = 0
        self._watchdog: asyncio.TimerHandle | None = None
        self._watched_at = 0.0
        self._stuck = False
        # Raft thread: what has not been handed to the event loop yet.
        self._answers: list[_Answer] = []
        self._changes: list[Change] = []
        self._led: tuple[Node | None, int] = (None, 0)
        self._stopping = False
        self._beat = 0.0
        self._wake_read = self._wake_write = -1
        self._woken = False

    # What the rest of the system uses.

    async def start(self) -> None:
        """Return when the node takes part; raise what keeps it from it."""
        assert self.state == "new", f"consensus is {self.state}"
        self._loop = loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = loop.create_future()
        self._beat = loop.time()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        name = f"raft-{self.config.node_id}"
        self._thread = threading.Thread(target=self._run, args=(started,), name=name, daemon=True)
        self._thread.start()
        try:
            await started
        except BaseException:
            await self.stop()
            raise
        self.state = "running"
        self._watched_at = loop.time()
        self._watch()

    async def stop(self) -> None:
        """End the thread and close everything; open proposals are answered."""
        self._stopping = True
        if self._watchdog is not None:
            self._watchdog.cancel()
        if self._thread is not None:
            self._wake()
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
            self._thread = None
        if self.state != "failed":
            self.state = "stopped"
        self._fail_waiting(ConsensusStopped("this node stops"))
        if self._wake_read >= 0:
            os.close(self._wake_read)
            os.close(self._wake_write)
            self._wake_read = self._wake_write = -1

    def new_command_id(self) -> bytes:
        """A name for one command, for `propose` to be called again with after an unknown outcome.

        It carries how far the log was, which tells a retry from a first try for ever.
        """
        floor = self._node.commit if self._node is not None else 0
        return make_command_id(self._rng.randbytes(ID_BYTES), floor)

    async def propose(
        self,
        command: bytes,
        timeout: float = 5.0,  # noqa: ASYNC109 (kept by the Raft thread, which knows the outcome)
        command_id: bytes | None = None,
    ) -> Any:
        """The result of applying the command, which has then been applied on this node too.

        Raises what the state machine refused it with; NoLeader, Throttled or ConsensusStopped when
        it was not applied; OutcomeUnknown when it may have been, or may yet be. Calling again with
        the same `command_id` never applies it twice, and answers with the first result.
        """
        if len(command) > self.config.limits.command_bytes:
            raise TooLarge(
                f"a command of {len(command)} bytes; {self.config.limits.command_bytes} allowed"
            )
        return await self._submit(REGULAR, command, timeout, command_id or self.new_command_id())

    async def read_barrier(self, timeout: float = 5.0) -> None:  # noqa: ASYNC109
        """Return when this node has applied everything that was committed before the call."""
        await self._submit(BARRIER, b"", timeout, self.new_command_id())

    def abdicate(self) -> None:
        """Stop to lead, if this node does, and let others stand for `abdicate_ms`."""
        if self._node is not None:
            self._node.abdication_asked = True
            self._wake()

    @property
    def is_leader(self) -> bool:
        return self._node is not None and bool(self._node._isLeader())

    @property
    def leader_id(self) -> str | None:
        leader = None if self._node is None else self._node.leader
        return None if leader is None else str(leader.id)

    @property
    def term(self) -> int:
        return 0 if self._node is None else self._node.term_now

    @property
    def applied_index(self) -> int:
        return 0 if self._node is None else self._node.applied

    @property
    def stuck(self) -> bool:
        """Whether the Raft thread has not come round for too long."""
        return self._stuck

    # The event loop's side.

    def _submit(
        self, kind: int, command: bytes, timeout: float, command_id: bytes
    ) -> asyncio.Future[Any]:
        name, floor = split_command_id(command_id)
        if self.state != "running" or self._node is None or self._loop is None:
            raise ConsensusStopped(
                f"consensus is {self.state}: {self.fatal_error or 'not running'}"
            )
        limits = self.config.limits
        size = len(command)
        if (
            len(self._waiting) >= limits.in_flight
            or self._waiting_bytes + size > limits.in_flight_bytes
        ):
            raise Throttled(f"{len(self._waiting)} proposals are in flight")
        loop = self._loop
        self._number = number = self._number + 1
        deadline = loop.time() + timeout
        future: asyncio.Future[Any] = loop.create_future()
        guard = loop.call_at(deadline + _GRACE, self._resolve, number, None, _no_answer())
        self._waiting[number] = (future, guard, size)
        self._waiting_bytes += size
        entry = envelope(kind, name, floor, command)
        self._node.inbox.append(
            Proposal(
                name,
                entry,
                deadline,
                lambda result, error: self._answers.append((number, result, error)),
            )
        )
        self._wake()
        return future

    def _resolve(self, number: int, result: Any, error: RaftqError | None) -> None:
        found = self._waiting.pop(number, None)
        if found is None:
            return
        future, guard, size = found
        guard.cancel()
        self._waiting_bytes -= size
        if not future.done():
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

    def _fail_waiting(self, error: RaftqError) -> None:
        for number in list(self._waiting):
            self._resolve(number, None, error)

    def _take(self, answers: list[_Answer], changes: list[Change]) -> None:
        """Changes first: a caller that gets its answer finds that its change was announced."""
        for change in changes:
            if self._on_change is not None:
                try:
                    self._on_change(change)
                except Exception:
                    logger.exception("raft on_change failed for %r", change)
        for answer in answers:
            self._resolve(*answer)

    def _failed(self, error: BaseException) -> None:
        self.state = "failed"
        self.fatal_error = error
        if self._watchdog is not None:
            self._watchdog.cancel()
        self._fail_waiting(ConsensusStopped(f"this node has failed: {error}"))
        if self._on_fatal is not None:
            self._on_fatal(error)

    def _watch(self) -> None:
        assert self._loop is not None
        limit = self.config.times.stuck_ms / 1000
        now = self._loop.time()
        # After a pause of the whole process the thread gets its chance to come round first.
        paused = now - self._watched_at > limit / 2
        self._watched_at = now
        silence = 0.0 if paused else now - self._beat
        if silence > limit and not self._stuck:
            logger.error("raft node=%s stuck for %.1f s", self.config.node_id, silence)
            if self._on_stuck is not None:
                self._on_stuck(silence)
        self._stuck = silence > limit
        self._watchdog = self._loop.call_later(limit / 4, self._watch)

    def _wake(self) -> None:
        if not self._woken and self._wake_write >= 0:
            self._woken = True
            try:
                os.write(self._wake_write, b"w")
            except BlockingIOError:
                logger.debug("raft the wake pipe is full, so the thread will wake")

    # The Raft thread.

    def _run(self, started: "asyncio.Future[None]") -> None:
        assert self._loop is not None
        lock: Lock | None = None
        try:
            self._disk.make_directory(self.config.directory)
            lock = self._disk.lock(join(self.config.directory, "lock"))
            self._node = node = self._open(self._loop.time)
        except BaseException as error:
            if lock is not None:
                lock.release()
            self._in_loop(_fail_start, started, error)
            return
        self._in_loop(_set, started)
        failure: BaseException | None = None
        try:
            self._work(node, self._loop.time)
        except BaseException as error:
            failure = error
            logger.critical("raft node=%s stops: %r", self.config.node_id, error, exc_info=error)
        self._close(node, failure)
        lock.release()
        if failure is not None:
            self._in_loop(self._failed, failure)

    def _open(self, clock: Callable[[], float]) -> RaftNode:
        config, limits = self.config, self.config.limits
        snapshots = Snapshots(self._disk, config.directory)
        if snapshots.exists() and not self._disk.exists(join(config.directory, "journal")):
            raise ConfigError(f"{config.directory} has a snapshot, but its journal is missing")
        journal = RaftJournal.open(self._disk, config.directory)
        try:
            keep_to_voters(self._disk, config.directory, config.voters, journal)
            listener = listen(config)
        except BaseException:
            journal.close()
            raise
        try:
            node = RaftNode(
                RaftSetup(
                    node_id=config.node_id,
                    others=[voter for voter in config.voters if voter != config.node_id],
                    times=config.times,
                    limits=limits,
                    journal=journal,
                    snapshots=snapshots,
                    applier=Applier(self._machine, limits.recent_ids, limits.recent_result_bytes),
                    transport=lambda owner, me, others: RaftTransport(
                        owner, config, listener, clock
                    ),
                    clock=clock,
                    rng=Random(self._rng.getrandbits(64)),
                    on_applied=self._changes.append,
                    on_restored=lambda index: self._changes.append(Restored(index)),
                )
            )
        except BaseException:
            listener.close()
            journal.close()
            raise
        if node.restored:
            self._changes.append(Restored(node.applied))
        node._poller.subscribe(self._wake_read, self._on_wake, POLL_EVENT_TYPE.READ)
        return node

    def _work(self, node: RaftNode, clock: Callable[[], float]) -> None:
        busy = False
        while not self._stopping:
            self._beat = clock()
            node._poller.poll(0 if busy or node.inbox else node.wait_s())
            busy = node.step()
            self._hand_over()
        node.journal.flush()

    def _on_wake(self, descr: int, events: int) -> None:
        # Cleared before the inbox is read: a later proposal writes again.
        os.read(self._wake_read, 4096)
        self._woken = False

    def _hand_over(self) -> None:
        if self._answers or self._changes:
            answers, self._answers = self._answers, []
            changes = self._changes[:]
            self._changes.clear()
            self._in_loop(self._take, answers, changes)
        node = self._node
        assert node is not None
        led = node.leader, node.term_now
        if led != self._led:
            self._led = led
            if self._on_leader is not None:
                name = None if led[0] is None else str(led[0].id)
                self._in_loop(self._on_leader, name, led[1])

    def _close(self, node: RaftNode, failure: BaseException | None) -> None:
        reason = "this node stops" if failure is None else f"this node has failed: {failure}"
        while node.inbox:
            node.proposals.add(node.inbox.popleft())
        node.proposals.stop(ConsensusStopped(reason))
        self._hand_over()
        node._poller.unsubscribe(self._wake_read)
        node.destroy()

    def _in_loop(self, call: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:
            # The loop is closed, so there is no receiver any more: the thread ends.
            self._stopping = True


def _set(started: "asyncio.Future[None]") -> None:
    if not started.done():
        started.set_result(None)


def _fail_start(started: "asyncio.Future[None]", error: BaseException) -> None:
    if not started.done():
        started.set_exception(error)


def _no_answer() -> RaftqError:
    return OutcomeUnknown("the Raft thread has not answered in time; it may yet be applied")
