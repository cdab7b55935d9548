"""The runner on a world that only notes: faults in order, all healed, nothing passed over."""

import asyncio
import time
from dataclasses import dataclass, field
from random import Random

import pytest

from raftq.chaos.history import Final, History, Publish
from raftq.chaos.runner import Runner, RunOutcome, Tools
from raftq.chaos.scenario import Scenario, Step
from raftq.chaos.scene import Scene
from raftq.client.common.tasks import sleep


class NotedLinks:
    def __init__(self, notes: list[str]) -> None:
        self._notes = notes

    def heal(self, pairs: object = None) -> None:
        self._notes.append("links healed")


class FakeOperator:
    """The log of the metadata takes `grows` more entries, one at a look."""

    def __init__(self) -> None:
        self.grows = 0
        self._index = 10

    def metadata_index(self) -> int:
        if self.grows:
            self.grows -= 1
            self._index += 1
        return self._index


class NotedWorld:
    """Nodes that are down are those in `down`; nobody listens at their addresses."""

    ids = (1, 2, 3)
    bootstrap = "127.0.0.1:1"
    abilities: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.down: set[int] = set()
        self.rng = Random(1)
        self.links = NotedLinks(self.notes)
        self.operator = FakeOperator()

    def direct(self, node_id: int) -> str:
        return "127.0.0.1:1"

    def is_running(self, node_id: int) -> bool:
        return node_id not in self.down

    def restart(self, node_id: int) -> None:
        self.notes.append(f"restart {node_id}")
        self.down.discard(node_id)


@dataclass
class Noted:
    name: str
    fails: bool = False
    leaves_down: int = 0
    needs: frozenset[str] = frozenset()

    def inject(self, world: NotedWorld) -> str:
        if self.fails:
            raise OSError("no such node")
        world.notes.append(f"inject {self.name}")
        if self.leaves_down:
            world.down.add(self.leaves_down)
        return "done"

    def heal(self, world: NotedWorld) -> None:
        world.notes.append(f"heal {self.name}")


@dataclass
class Load:
    """Publishes all the time, and reads back what it published, but for what it `loses`."""

    name: str = "load"
    loses: int = -1
    fails: bool = False
    sent: list[str] = field(default_factory=list)

    async def prepare(self, scene: Scene) -> None:
        assert not self.sent

    async def run(self, scene: Scene) -> None:
        while not scene.stopping.is_set():
            number = len(self.sent)
            one = Publish(
                client="c", topic="t", partition=0, at=scene.clock(), value=f"{number}",
                number=number, offset=number,
            )  # fmt: skip
            self.sent.append(scene.history.add(one).value)
            one.end("ok", scene.clock())
            await sleep(0.01)
        if self.fails:
            raise ValueError("a mistake in the workload")

    async def finish(self, scene: Scene, final: Final) -> None:
        rows = [(number, value) for number, value in enumerate(self.sent)]
        final.logs["t", 0] = [row for row in rows if row[0] != self.loses]


def run(world: NotedWorld, load: Load, *plan: Step, **options: object) -> RunOutcome:
    scenario = Scenario(
        name="s", rows=(), promise="It holds.", workloads=lambda: [load], plan=plan, quiet_s=0.1,
        **options,
    )  # fmt: skip
    tools = Tools(clock=time.time, say=lambda text: None)
    return asyncio.run(Runner(world, scenario, 1, tools, History()).run())


def test_faults_come_by_plan_and_all_are_healed_in_the_end() -> None:
    world = NotedWorld()
    outcome = run(
        world,
        Load(),
        Step(0.0, Noted("a"), 0.2),
        Step(0.1, Noted("b"), 0.05),
        Step(0.1, Noted("c")),
    )
    assert outcome.passed, outcome.anomalies
    assert world.notes[:6] == [
        "inject a", "inject b", "inject c", "heal b", "heal a", "heal c",
    ]  # fmt: skip
    assert world.notes[6] == "links healed"
    assert [one.name for one in outcome.timeline.faults] == ["b", "a", "c"]
    phases = [one.text for one in outcome.timeline.of("phase")]
    assert phases == ["prepare", "faults", "quiet", "stop", "finish", "end"]


def test_a_plan_that_takes_far_longer_than_it_should_is_cut_short_and_healed() -> None:
    world = NotedWorld()
    plan = [Step(0.1 * number, Noted(f"f{number}"), 0.05) for number in range(8)]
    assert run(world, Load(), *plan, overtime_s=-0.5).passed
    injected = [note for note in world.notes if note.startswith("inject")]
    assert 1 <= len(injected) < 8
    assert len([note for note in world.notes if note.startswith("heal f")]) == len(injected)


def test_what_is_lost_fails_the_run() -> None:
    outcome = run(NotedWorld(), Load(loses=3), Step(0.0, Noted("a"), 0.1))
    assert {one.kind for one in outcome.anomalies} == {"lost"}


def test_a_fault_that_cannot_be_injected_and_a_node_that_stays_down_fail_the_run() -> None:
    world = NotedWorld()
    plan = (Step(0.0, Noted("a", fails=True), 0.1), Step(0.1, Noted("b", leaves_down=2), 0.1))
    outcome = run(world, Load(), *plan)
    assert [one.kind for one in outcome.anomalies] == ["broken", "node died"]
    assert "restart 2" in world.notes


def test_a_workload_that_fails_and_a_gap_that_is_too_long_fail_the_run() -> None:
    outcome = run(NotedWorld(), Load(fails=True), Step(0.0, Noted("a"), 0.1), gap_s_max=0.001)
    assert [one.kind for one in outcome.anomalies] == ["workload failed", "unavailable"]


@pytest.mark.parametrize(("grows", "kinds"), [(0, []), (3, []), (1000, ["restless"])])
def test_metadata_has_to_come_to_rest_when_nobody_does_anything(
    grows: int, kinds: list[str]
) -> None:
    world = NotedWorld()
    world.operator.grows = grows
    outcome = run(world, Load(), rest_s=0.01)
    assert [one.kind for one in outcome.anomalies] == kinds
