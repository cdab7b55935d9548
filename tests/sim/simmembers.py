"""Stream groups of the simulated cluster: real consumers that join, die, and note what they get."""

import asyncio
from random import Random

from simcluster import SimCluster
from simloop import Process
from simqueues import QueueWorkload

from raftq.chaos.history import Final
from raftq.chaos.members import StreamMember
from raftq.chaos.recorder import Recorder
from raftq.client.common.types import PartitionKey

GROUP = "readers"


class GroupWorkload(QueueWorkload):
    """The clients of one simulation of a stream group. Producers are those of queues."""

    skews_s = (2.0,)

    def __init__(self, cluster: SimCluster) -> None:
        super().__init__(cluster)
        self._members: list[tuple[Process, StreamMember, asyncio.Task[None]]] = []

    def _hire(self) -> None:
        self._born += 1
        name = f"member-{self._born}"
        process = self._cluster.client(name)
        member = StreamMember(
            self._plan.bootstrap,
            self.history,
            self.clock,
            Random(f"{name} {self._plan.seed} chance"),
            **self._settings(name),
            group=GROUP,
            topics=[topic.name for topic in self._plan.topics],
            session_ms=2_000,
            heartbeat_ms=400,
            fetch_wait_ms=300,
        )
        # Some take long: what they give up may be given back to them meanwhile.
        member.revoke_s = Random(f"{name} {self._plan.seed} revokes").choice((0.0, 0.0, 0.5, 2.0))
        self._members.append((process, member, process.spawn(member.run())))

    def replace_one(self) -> None:
        """Kills, adds or removes a member, or pauses one for a while."""
        if self.rng.random() < 0.4:
            self._stop_for_a_while(self.rng.choice(self._members)[0])
            return
        if self.rng.random() < 0.3 and len(self._members) < 5:
            self._hire()
            return
        process, member, _ = self._members.pop(self.rng.randrange(len(self._members)))
        self._loop.trace(f"kill {process.name}")
        process.kill()
        member.died()
        if not self._members or self.rng.random() < 0.7:
            self._hire()

    def _stop_for_a_while(self, process: Process) -> None:
        """Pauses it, often for longer than its session: others have its partitions by then."""
        if not process.paused:
            process.pause()
            self._loop.trace(f"pause {process.name}")
            until = self._loop.time() + self.rng.uniform(0.5, 6.0)
            self._loop.call_at(until, self._go_on, process, context=self._loop.neutral)

    def _go_on(self, process: Process) -> None:
        if not process.dead:
            process.resume()

    def check_alive(self) -> None:
        for _, _, task in self._members:
            if task.done():
                task.result()

    async def _left(self, overseer: Recorder, key: PartitionKey) -> str:
        """Whether the group has stored the end of the partition."""
        overseer.group = GROUP
        recalled = await overseer.recall(key)
        records = self._records(*key)
        end = records[-1][0] + 1 if records else 0
        if recalled.status != "ok":
            return recalled.error
        # Without records no position is stored.
        return "empty" if max(recalled.offset, 0) == end else f"{recalled.offset} of {end}"

    def is_settled(self) -> bool:
        """Whether every partition has one owner, and no member has more than a fair share."""
        self.check_alive()
        shares = [member.consumer.assignment() for _, member, _ in self._members]
        fair = -(-len(self.places) // len(shares))
        owned = [key for share in shares for key in share]
        return sorted(owned) == sorted(self.places) and max(map(len, shares)) <= fair

    async def drain(self, seconds: float) -> None:
        await self._cluster.until("the group is settled", self.is_settled, seconds)
        await self.until_drained(seconds)

    async def stop(self) -> None:
        for _, member, _ in self._members:
            member.stopping = True
        await asyncio.wait([task for _, _, task in self._members], timeout=60.0)
        self.check_alive()

    def final(self) -> Final:
        made = super().final()
        made.drained = {}
        made.read = {GROUP: [topic.name for topic in self._plan.topics]}
        return made
