"""Shell: the partitions of a group that a consumer owns. On the loop only.

    given ──claim──> claimed ──poll──> active ──no longer given──> revoking ──poll──> leaving
      │                 │                ^                            │                  │
      └──no longer given┴──> dropped     └────────given again─────────┘       given up <─┘

Claiming fences the previous owner and reads its stored position. Only then are records fetched. The
application learns of changes in its own polls. Between two polls it may still work on records, so a
partition that is to be given up stays owned until the next poll, or for `max_poll_ms`; no more of
its records are returned. The next poll tells the application, which may take its time (leaving);
then the position is stored and the partition given up. If it is given again meanwhile, it is
claimed anew: the application takes it for lost.

When the membership is lost, all its partitions are lost at once: others may own them already.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import FencedGeneration, OffsetOutOfRange, RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.fetcher import Fetcher
from raftq.client.consumer.member import GroupMember
from raftq.client.consumer.positions import REVOKED, Positions
from raftq.client.consumer.records import Fetched
from raftq.client.consumer.stored_offsets import Offsets, first_error
from raftq.client.net.routes import Routes
from raftq.client.options import ConsumerOptions
from raftq.client.results import Record
from raftq.client.wire.group_messages import GroupHeartbeatReply, Owned
from raftq.client.wire.queue_messages import StoredOffset

logger = logging.getLogger(__name__)

COMMIT_S = 10.0
CLAIM_S = 5.0
REVOKE_COMMIT_S = 5.0

State = Literal["given", "claimed", "active", "revoking", "leaving"]
KNOWN = ("active", "revoking", "leaving")
"""The states of partitions that the application knows of."""


class Holding:
    """One partition that the coordinator has given to this member."""

    __slots__ = ("key", "lost", "owner_epoch", "state", "stored", "turn")

    def __init__(self, key: PartitionKey, owner_epoch: int) -> None:
        self.key = key
        self.owner_epoch = owner_epoch
        self.state: State = "given"
        self.stored = -1
        self.turn = 0  # of the newest positions to store
        self.lost = False  # others may own it: its position cannot be stored any more


class OwnedPartitions:
    """The partitions that a consumer owns in its group. It acts on its member's answers."""

    def __init__(
        self,
        options: ConsumerOptions,
        positions: Positions,
        fetcher: Fetcher,
        routes: Routes,
        offsets: Offsets,
        tasks: Tasks,
    ) -> None:
        self._options = options
        self._positions = positions
        self._fetcher = fetcher
        self._routes = routes
        self._offsets = offsets
        self._tasks = tasks
        self._loop = asyncio.get_running_loop()
        self.member: GroupMember
        self.holdings: dict[PartitionKey, Holding] = {}
        self._given: dict[PartitionKey, int] = {}  # by the last answer
        self._refused: dict[PartitionKey, int] = {}  # claims that were fenced, by owner epoch
        self._problem: RaftqError | None = None
        self._storing = asyncio.Lock()
        self._turn = 0
        self._commit_due = False
        self._unpolled: list[PartitionKey] = []  # given up without a poll, still unknown to it
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # State of the polls, from any thread.
        self.is_polling = False
        self.polled_at = self._loop.time()
        self.last: Sequence[Record | Fetched] = ()  # what the application may still work on
        self.unseen: Sequence[Record] = ()  # taken from the positions and not yet returned

    def start(self) -> None:
        self.member.start(self._tasks)
        if self._options.auto_commit:
            self._arm_commit()

    def stop(self) -> None:
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    # Answers of the coordinator.

    def owned(self) -> tuple[Owned, ...]:
        return tuple(Owned(*key) for key in self.holdings)

    def on_reply(self, reply: GroupHeartbeatReply) -> None:
        self._problem = None
        given = {(row.topic, row.partition): row.owner_epoch for row in reply.assigned}
        self._given = given
        for key, holding in list(self.holdings.items()):
            epoch = given.get(key)
            if epoch != holding.owner_epoch:
                self._take_back(holding, lost=epoch is not None)
            elif holding.state == "revoking" and not holding.lost:
                holding.state = "active"
                self._go_on(key)
        self._accept()

    def _accept(self) -> None:
        """Begins with partitions that were given and are not held."""
        new = [key for key in self._given if key not in self.holdings]
        new = [key for key in new if self._refused.get(key) != self._given[key]]
        for key in new:
            self.holdings[key] = Holding(key, self._given[key])
        if new:
            self._routes.want({topic: None for topic, _ in new})
            self._claim(new)

    def _take_back(self, holding: Holding, lost: bool) -> None:
        holding.lost = holding.lost or lost
        if holding.state in ("given", "claimed"):
            del self.holdings[holding.key]
            self.member.poke()
            return
        assigned = self._positions.partitions.get(holding.key)
        if holding.state == "active":
            holding.state = "revoking"
            if assigned is not None:
                self._positions.hold(assigned, REVOKED)
            self._arm_patience()
        self._positions.call()

    def _go_on(self, key: PartitionKey) -> None:
        assigned = self._positions.partitions.get(key)
        if assigned is not None:
            self._positions.let_go_on(assigned, REVOKED)
            self._fetcher.wake()

    def lost(self, error: RaftqError | None) -> None:
        """The session is over: others may own everything by now."""
        self._given = {}
        for holding in list(self.holdings.values()):
            self._take_back(holding, lost=True)
        self._refused.clear()

    def refused(self, error: RaftqError) -> None:
        """Membership is refused for good: polls raise the error."""
        self._problem = error
        self._positions.call()

    # Claiming.

    def _claim(self, keys: Sequence[PartitionKey]) -> None:
        """Starts one task for each leader, so that a leader without an answer delays no other."""
        groups: dict[object, list[Holding]] = {}
        for key in keys:
            groups.setdefault(self._routes.leader(*key), []).append(self.holdings[key])
        for holdings in groups.values():
            self._tasks.spawn(self._claim_some(holdings))

    async def _claim_some(self, claims: list[Holding]) -> None:
        backoff = self._options.backoff()
        while True:
            epochs = {holding.key: holding.owner_epoch for holding in claims}
            found = await self._offsets.claim(epochs, self.member.member_id, CLAIM_S)
            for holding in claims:
                answer = found.get(holding.key)
                if answer is not None and self._is_claiming(holding):
                    self._claim_answered(holding, answer)
            claims = [holding for holding in claims if self._is_claiming(holding)]
            if not claims:
                return
            await sleep(backoff.next_s())

    def _is_claiming(self, holding: Holding) -> bool:
        """Whether this holding still waits for its claim.

        A partition that is lost and given again may have the same owner epoch, so key and epoch do
        not tell two holdings apart. Each has its own claim: an answer to the claim of an older one
        may be late, and says nothing about the state of this one."""
        return self.holdings.get(holding.key) is holding and holding.state == "given"

    def _claim_answered(self, holding: Holding, answer: StoredOffset | RaftqError) -> None:
        if isinstance(answer, StoredOffset):
            holding.stored = answer.offset
            holding.state = "claimed"
            self._positions.call()
        else:
            self._claim_failed(holding, answer)

    def _claim_failed(self, holding: Holding, error: RaftqError) -> None:
        if isinstance(error, FencedGeneration):
            # A member owns it in a later generation; this member will learn of it, too. If the
            # coordinator does not know such a generation, it has to learn of it.
            known = error.details.get("owner_epoch")
            if isinstance(known, int) and known > self.member.generation:
                logger.warning(
                    "%s/%d knows owner epoch %d, above generation %d of group %s: has the cluster "
                    "lost its groups?", *holding.key, known, self.member.generation,
                    self._options.group,
                )  # fmt: skip
                self.member.fenced_by = max(self.member.fenced_by, known)
            self._refused[holding.key] = holding.owner_epoch
            del self.holdings[holding.key]
            self.member.poke()
        elif not error.retriable:
            logger.warning("%s/%d cannot be claimed: %s", *holding.key, error)

    # What the polls do, only while no records are taken.

    def begin_poll(self) -> None:
        self.is_polling = True
        self.last = ()

    def end_poll(self, found: Sequence[Any]) -> None:
        self.last = found
        self.polled_at = self._loop.time()
        self.is_polling = False

    @property
    def is_wanted(self) -> bool:
        """Whether a poll must call this object first."""
        return (
            self._positions.called
            or self._problem is not None
            or self._loop.time() >= self.member.session_end
        )

    async def come_back(self) -> list[PartitionKey]:
        """The application has finished its records. Returns the partitions that it has to give
        up."""
        self._positions.called = False
        if self._loop.time() >= self.member.session_end:
            self.lost(None)
            self._positions.called = False
        unpolled, self._unpolled = self._unpolled, []
        leaving = [one for one in self.holdings.values() if one.state in ("revoking", "leaving")]
        keys = [holding.key for holding in leaving]
        if self._commit_due:
            self._commit_due = False
            self._arm_commit()
            offsets = self.handed_out(set(keys))
            self._tasks.spawn(self._commit_quietly(offsets, self._next_turn()))
        if self._problem is not None:
            raise copy_error(self._problem)
        for holding in leaving:
            holding.state = "leaving"
        return unpolled + keys

    async def give_up(self, keys: Sequence[PartitionKey]) -> None:
        """The application knows that it loses these: stores their positions and gives them up."""
        if self._options.auto_commit:
            wanted = set(keys)
            positions = {key: at for key, at in self.handed_out().items() if key in wanted}
            await self._commit_quietly(positions, self._next_turn(), REVOKE_COMMIT_S)
        for key in keys:
            if self._is_in(key, "leaving"):
                del self.holdings[key]
        self._drop([key for key in keys if not self._is_held(key)])
        self.member.poke()
        self._accept()

    def _is_in(self, key: PartitionKey, state: State) -> bool:
        holding = self.holdings.get(key)
        return holding is not None and holding.state == state

    def _drop(self, gone: Sequence[PartitionKey]) -> None:
        if gone:
            left = [key for key in self._positions.partitions if key not in set(gone)]
            self._positions.assign(left, self._options.fetch_bytes)

    async def activate(self) -> list[PartitionKey]:
        """Makes claimed partitions readable. Returns them, so that the application can be told."""
        claimed = [holding for holding in self.holdings.values() if holding.state == "claimed"]
        if not claimed:
            return []
        keys = [holding.key for holding in claimed]
        self._positions.assign([*self._positions.partitions, *keys], self._options.fetch_bytes)
        for holding in claimed:
            holding.state = "active"
            self._begin(holding)
        if any(topic not in self._routes.topics for topic, _ in keys):
            self._routes.request_refresh()
        self._fetcher.wake()
        return keys

    def _begin(self, holding: Holding) -> None:
        assigned = self._positions.partitions[holding.key]
        reset = self._options.reset
        if holding.stored >= 0:
            self._positions.move(assigned, holding.stored, None)
        elif reset != "none":
            self._positions.move(assigned, None, (reset, 0))
        else:
            self._positions.move(assigned, None, None)
            assigned.error = OffsetOutOfRange(
                f"group {self._options.group!r} has no position in {assigned.describe()}; seek one"
            )

    async def every(self) -> list[PartitionKey]:
        """The partitions that the application knows it has."""
        return [key for key, one in self.holdings.items() if one.state in KNOWN]

    async def leave(self, is_done: bool) -> None:
        """The end: stores the application's positions, before the records that it has not
        finished."""
        self.stop()
        self.member.stop()
        try:
            if self._options.auto_commit:
                done = self.handed_out() if is_done else self.worked_off()
                await self._commit_quietly(done, self._next_turn(), REVOKE_COMMIT_S)
        finally:
            await self.member.leave()

    # Storing.

    def handed_out(
        self, but: "set[PartitionKey] | frozenset[PartitionKey]" = frozenset()
    ) -> dict[PartitionKey, int]:
        """The position of the application in each partition that it knows of."""
        found = {}
        for key, holding in self.holdings.items():
            assigned = self._positions.partitions.get(key)
            if assigned is None or assigned.position is None or key in but:
                continue
            if holding.state in KNOWN and not holding.lost:
                found[key] = assigned.position
        for key, offset in first_offsets(self.unseen).items():
            if key in found:
                found[key] = offset
        return found

    def worked_off(self) -> dict[PartitionKey, int]:
        """As `handed_out`, without the records that the application may still work on."""
        found = self.handed_out()
        return {
            **found,
            **{key: at for key, at in first_offsets(self.last).items() if key in found},
        }

    async def commit(
        self, offsets: Mapping[PartitionKey, int] | None = None, timeout_s: float = COMMIT_S
    ) -> None:
        """Stores these positions, or those after all returned records.

        Raises FencedGeneration if a partition does not belong to this member any more; the
        positions of the others are stored."""
        wanted = dict(self.handed_out() if offsets is None else offsets)
        foreign = [key for key in wanted if not self._is_held(key)]
        for key in foreign:
            del wanted[key]
        error = await self._store(wanted, self._next_turn(), timeout_s)
        if offsets is None and error is None:
            foreign = [key for key, one in self.holdings.items() if one.lost]
        if foreign:
            partition_keys = ", ".join(f"{topic}/{partition}" for topic, partition in foreign[:10])
            error = FencedGeneration(
                f"{partition_keys} of group {self._options.group!r}: not this member's (any more)"
            )
        if error is not None:
            raise copy_error(error)

    def _is_held(self, key: PartitionKey) -> bool:
        holding = self.holdings.get(key)
        return holding is not None and holding.state in KNOWN and not holding.lost

    def _next_turn(self) -> int:
        """The number of this set of positions; called at the moment at which they are read."""
        self._turn += 1
        return self._turn

    async def _store(
        self, offsets: Mapping[PartitionKey, int], turn: int, timeout_s: float
    ) -> RaftqError | None:
        # One at a time, in the order in which they were read: an older position must not be stored
        # after a newer one.
        async with self._storing:
            held = self.holdings
            epochs = {key: held[key].owner_epoch for key in offsets if key in held}
            epochs = {key: epoch for key, epoch in epochs.items() if held[key].turn <= turn}
            new = {key: offsets[key] for key in epochs if held[key].stored != offsets[key]}
            for key in epochs:
                held[key].turn = turn
            if not new:
                return None
            member_id = self.member.member_id
            stored = await self._offsets.store(new, epochs, member_id, timeout_s, turn)
            for key, answer in stored.items():
                holding = self.holdings.get(key)
                if holding is None or holding.owner_epoch != epochs[key]:
                    continue
                if isinstance(answer, StoredOffset):
                    holding.stored = new[key]
                elif isinstance(answer, FencedGeneration):
                    self._take_back(holding, lost=True)
                    self.member.poke()
            return first_error(stored)

    async def _commit_quietly(
        self, offsets: Mapping[PartitionKey, int], turn: int, timeout_s: float = COMMIT_S
    ) -> None:
        error = await self._store(offsets, turn, timeout_s)
        if error is not None:
            group = self._options.group
            logger.warning("positions of group %s were not all stored: %s", group, error)

    # Time.

    def _arm_commit(self) -> None:
        after_s = self._options.auto_commit_ms / 1000
        self._timers["commit"] = self._loop.call_later(after_s, self._ring_commit)

    def _ring_commit(self) -> None:
        # Only a poll shows that the application has finished its records.
        self._commit_due = True
        self._positions.call()

    def _arm_patience(self) -> None:
        if "patience" not in self._timers:
            patience_s = self._options.max_poll_ms / 1000
            left_s = patience_s
            if not self.is_polling:
                left_s = max(self.polled_at + patience_s - self._loop.time(), 0.001)
            self._timers["patience"] = self._loop.call_later(left_s, self._ring_patience)

    def _ring_patience(self) -> None:
        """The application does not poll: others must not wait for it any longer."""
        del self._timers["patience"]
        keys = [key for key, one in self.holdings.items() if one.state == "revoking"]
        if not keys:
            return
        patience_s = self._options.max_poll_ms / 1000
        if self.is_polling or self._loop.time() < self.polled_at + patience_s:
            self._arm_patience()
        else:
            logger.warning("no poll for %g s: %d partitions are given up", patience_s, len(keys))
            self._tasks.spawn(self._abandon(keys))

    async def _abandon(self, keys: list[PartitionKey]) -> None:
        if self._options.auto_commit:
            done = self.worked_off()
            done = {key: done[key] for key in keys if key in done}
            await self._commit_quietly(done, self._next_turn())
        gone = [key for key in keys if self._is_in(key, "revoking")]
        for key in gone:
            # It stays among the positions, returning no records, until the next poll.
            del self.holdings[key]
        self._unpolled += gone
        self.member.poke()
        self._positions.call()


def first_offsets(records: Sequence[Record | Fetched]) -> dict[PartitionKey, int]:
    """The lowest offset of each partition among these records, which are in order."""
    found: dict[PartitionKey, int] = {}
    for record in reversed(records):
        found[(record.topic, record.partition)] = (
            record.offset if isinstance(record, Record) else record.position
        )
    return found
