"""Shell: streams: a group whose members join, leave and die while they read and store positions.

Members that fail are replaced, as a supervisor would do it. At the end the remaining members read
everything and store the ends of all partitions.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from random import Random

from raftq.chaos.history import Final
from raftq.chaos.members import StreamMember
from raftq.chaos.readback import deadline_of, read_back, until
from raftq.chaos.recorder import Recorder
from raftq.chaos.scene import Scene
from raftq.chaos.workloads.base import TopicWorkload
from raftq.chaos.workloads.reading import run_all
from raftq.client.admin.admin import Admin
from raftq.client.common.errors import Detail, RaftqError
from raftq.client.common.tasks import Tasks, sleep

SESSION_MS = 3_000
HEARTBEAT_MS = 500
LEAVE_S = 15.0
MEMBERS_LEAST = 2


class GroupMembers:
    """The members of one group."""

    def __init__(self, scene: Scene, group: str, topic: str) -> None:
        self._scene = scene
        self._group = group
        self._topic = topic
        self._joined = 0
        self._tasks = Tasks(group)
        self._rng = Random(scene.rng.random())
        self._here: dict[str, tuple[StreamMember, asyncio.Task[None]]] = {}

    def __len__(self) -> int:
        return len(self._here)

    def join(self) -> None:
        self._joined += 1
        name = f"{self._group} m{self._joined}"
        member = StreamMember(
            self._scene.bootstrap,
            self._scene.history,
            self._scene.clock,
            Random(self._rng.random()),
            name=name,
            group=self._group,
            topics=[self._topic],
            session_ms=SESSION_MS,
            heartbeat_ms=HEARTBEAT_MS,
            fetch_wait_ms=300,
        )
        self._here[name] = (member, self._tasks.spawn(self._live(name, member)))

    async def _live(self, name: str, member: StreamMember) -> None:
        """Runs the member. One that fails ends like one that was killed."""
        try:
            await member.run()
        except RaftqError:
            await sleep(0.3)
        finally:
            self._here.pop(name, None)
            with suppress(RaftqError):
                await member.kill()

    async def kill_one(self) -> None:
        if self._here:
            _, task = self._here[self._rng.choice(list(self._here))]
            task.cancel()
            await asyncio.wait([task])

    def leave_one(self) -> None:
        """Asks one member to give up its partitions and to leave; does not wait for it."""
        if self._here:
            name = self._rng.choice(list(self._here))
            self._here[name][0].stopping = True

    async def leave_all(self) -> None:
        tasks = [task for _, task in self._here.values()]
        for member, _ in self._here.values():
            member.stopping = True
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def close(self) -> None:
        await self._tasks.close()


class StreamWorkload(TopicWorkload):
    """Producers fill a topic, and the members of a group share it."""

    def __init__(  # noqa: PLR0913 - what may be varied
        self,
        name: str = "streams",
        *,
        partitions: int = 4,
        producers: int = 2,
        members: int = 3,
        per_second: float = 25.0,
        turnover_s: float = 3.0,
        config: Mapping[str, Detail] | None = None,
    ) -> None:
        """About every `turnover_s` seconds a member joins, leaves or dies."""
        super().__init__(
            name, partitions=partitions, producers=producers, per_second=per_second, config=config
        )
        self.group = ""
        self._count = members
        self._turnover_s = turnover_s
        self._members: GroupMembers

    async def prepare(self, scene: Scene) -> None:
        await super().prepare(scene)
        self.group = f"{self.topic}-readers"
        self._members = GroupMembers(scene, self.group, self.topic)

    async def run(self, scene: Scene) -> None:
        await run_all(self._come_and_go(scene), self._run_senders())

    async def _come_and_go(self, scene: Scene) -> None:
        loop = asyncio.get_running_loop()
        next_at = loop.time() + 2 * self._turnover_s
        while not scene.stopping.is_set():
            while len(self._members) < MEMBERS_LEAST:
                self._members.join()
            if loop.time() >= next_at:
                next_at = loop.time() + self._turnover_s * scene.rng.uniform(0.5, 1.5)
                await self._turn_over(scene.rng)
            await sleep(0.1)

    async def _turn_over(self, rng: Random) -> None:
        if len(self._members) < self._count or rng.random() < 0.2:
            self._members.join()
        elif rng.random() < 0.5:
            self._members.leave_one()
        else:
            await self._members.kill_one()

    async def finish(self, scene: Scene, final: Final) -> None:
        deadline = deadline_of(scene)
        admin = Admin(scene.bootstrap)
        overseer = Recorder(
            scene.bootstrap, scene.history, self.group, scene.clock, name=f"{self.group} overseer"
        )

        async def has_stored_all() -> str:
            while len(self._members) < MEMBERS_LEAST:
                self._members.join()
            described = await admin.describe_topic(self.topic)
            for key in self._partition_keys:
                end = described.partitions[key[1]].high_watermark
                stored = await overseer.recall(key)
                if end is None or (end and (stored.status != "ok" or stored.offset != end)):
                    return f"{key} ends at {end}: {stored}"
            return ""

        try:
            await self._close_senders()
            await until(has_stored_all, deadline, f"group {self.group}")
            await self._members.leave_all()
            final.read[self.group] = [self.topic]
            await read_back(scene, self.topic, final, deadline)
        finally:
            await run_all(
                self._members.close(), admin.close(), overseer.close(), self._close_senders()
            )
