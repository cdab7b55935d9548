"""Shell: members of stream groups that note what they own, get and store.

A member is a real consumer. It notes a record before it stores a position after it, and stores its
positions when partitions are revoked. `kill` ends it as SIGKILL does: it sends nothing.
"""

from random import Random
from typing import Unpack

from raftq.chaos.history import History, OwnedSpan, Recall, Receive, Store
from raftq.chaos.recorder import Clock
from raftq.client.common.errors import RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey
from raftq.client.consumer.consumer import Consumer
from raftq.client.options import Bootstrap, ConsumerSettings


class StreamMember:
    """One consumer of a group. `run` ends when `stopping` is set."""

    def __init__(
        self,
        bootstrap: Bootstrap,
        history: History,
        clock: Clock,
        chance: Random,
        **settings: Unpack[ConsumerSettings],
    ) -> None:
        self.name = settings["name"]
        self.history = history
        self.clock = clock
        self.stopping = False
        self.work_s = 0.01
        self.revoke_s = 0.0
        """How long it takes to give up partitions, after it has stored their positions."""
        self.positions: dict[PartitionKey, int] = {}
        """The offset after the last received record, for each partition that it owns."""
        self._group = settings["group"]
        self._chance = chance
        self._owned: dict[PartitionKey, OwnedSpan] = {}
        self._looked_at = clock()
        self._not_held_at: dict[PartitionKey, float] = {}
        """For each assigned partition: the last time at which the member did not have it yet."""
        self._stored: dict[PartitionKey, int] = {}
        settings["auto_commit"] = False
        settings["on_assigned"] = self._assigned
        settings["on_revoked"] = self._revoked
        self.consumer = Consumer(bootstrap, **settings)

    async def run(self) -> None:
        await self.consumer.start()
        while not self.stopping:
            await self.step()
        await self.consumer.close()

    async def kill(self) -> None:
        """Ends the member as SIGKILL does: its connections end and it sends nothing."""
        self.died()
        await self.consumer._end()

    def died(self) -> None:
        """Notes that the process of the member was killed."""
        for owned in self._owned.values():
            owned.ended, owned.how = self.clock(), "died"

    async def step(self) -> None:
        """Polls once, and commits the received records most of the time."""
        self._look()
        records = await self.consumer.poll(max_records=50, timeout=0.5)
        for record in records:
            partition_key = (record.topic, record.partition)
            self.history.add(
                Receive(
                    client=self.name,
                    topic=record.topic,
                    partition=record.partition,
                    at=self.clock(),
                    group=self._group,
                    offset=record.offset,
                    value=record.value.decode(),
                )
            )
            self.positions[partition_key] = record.offset + 1
        if records:
            await sleep(self._chance.uniform(0, 2 * self.work_s))
        if self._chance.random() < 0.7:
            for partition_key in list(self.positions):
                await self._store(partition_key)

    def _look(self) -> None:
        """Notes the partitions that were assigned since the last call."""
        assert self.consumer._group is not None
        held = self.consumer._group.holdings
        before = self._not_held_at
        self._not_held_at = {
            partition_key: before.get(partition_key, self._looked_at) for partition_key in held
        }
        self._looked_at = self.clock()

    async def _store(self, partition_key: PartitionKey) -> None:
        offset = self.positions.get(partition_key)
        owned = self._owned.get(partition_key)
        if offset is None or owned is None or self._stored.get(partition_key) == offset:
            return
        noted = self.history.add(
            Store(
                client=self.name,
                topic=partition_key[0],
                partition=partition_key[1],
                at=self.clock(),
                group=self._group,
                offset=offset,
                owner_epoch=owned.owner_epoch,
            )
        )
        try:
            await self.consumer.commit({partition_key: offset})
        except RaftqError as error:
            noted.end(error.outcome, self.clock(), repr(error))
        else:
            noted.end("ok", self.clock())
            self._stored[partition_key] = offset
        self.history.note(noted)

    def _assigned(self, partition_keys: list[PartitionKey]) -> None:
        assert self.consumer._group is not None
        for partition_key in partition_keys:
            holding = self.consumer._group.holdings[partition_key]
            self.positions.pop(partition_key, None)
            self._stored.pop(partition_key, None)
            claim = Recall(
                client=self.name,
                topic=partition_key[0],
                partition=partition_key[1],
                at=self._not_held_at.get(partition_key, self._looked_at),
                group=self._group,
                offset=holding.stored,
                owner_epoch=holding.owner_epoch,
            )
            claim.end("ok", self.clock())
            self.history.add(claim)
            self._owned[partition_key] = self.history.add(
                OwnedSpan(
                    client=self.name,
                    topic=partition_key[0],
                    partition=partition_key[1],
                    at=self.clock(),
                    group=self._group,
                    owner_epoch=holding.owner_epoch,
                )
            )

    async def _revoked(self, partition_keys: list[PartitionKey]) -> None:
        for partition_key in partition_keys:
            await self._store(partition_key)
            self.positions.pop(partition_key, None)
            owned = self._owned.pop(partition_key, None)
            if owned is None:
                continue
            group = self.consumer._group
            holding = None if group is None else group.holdings.get(partition_key)
            is_mine = holding is not None and not holding.lost
            owned.ended, owned.how = self.clock(), "revoked" if is_mine else "lost"
            self.history.note(owned)
        if self.revoke_s:
            await sleep(self.revoke_s)
