"""Shell: runs one scenario against a world and judges it.

    prepare ──> warm up ──> faults by plan ──> quiet ──> stop ──> finish ──> judge

Workloads and the watcher run on the event loop. Calls to the world block, so one thread makes them
all, one after the other, and a world need not be thread-safe. After the plan everything is healed,
whatever has happened. The runner itself adds anomalies, too: a node that is down at the end, a
workload that does not stop or cannot read back, a fault that could not be injected.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, TypeVar

from raftq.chaos.checkers import Anomaly, Rules, judge
from raftq.chaos.history import Final, History, Publish
from raftq.chaos.outages import Cost, costs
from raftq.chaos.recorder import Clock
from raftq.chaos.scenario import Action, Scenario, Step, actions
from raftq.chaos.scene import Scene, Workload
from raftq.chaos.timeline import Span, Timeline, without, worst_gap
from raftq.chaos.watcher import Watcher
from raftq.chaos.world import Parting, World
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey

logger = logging.getLogger(__name__)

PREPARE_S = 30.0
WARM_S = 10.0
STOP_S = 30.0
FINISH_S_MORE = 10.0
POLL_S = 0.05
BEHIND_S = 1.0
"""How late a plan may be. Some faults take their time, as a restart does."""
REST_TRIES = 6
"""Leaders may still move back to their preferred nodes."""
GRACE_S = 5.0
"""Time for elections after a majority is healthy again."""

R = TypeVar("R")
Say = Callable[[str], None]


@dataclass(slots=True)
class RunOutcome:
    """The result of a run."""

    scenario: Scenario
    seed: int
    history: History
    final: Final = field(default_factory=Final)
    timeline: Timeline = field(default_factory=Timeline)
    anomalies: list[Anomaly] = field(default_factory=list)
    leader_changes: int = 0
    gap_s: float = 0.0
    """The longest time without an acknowledged record, from the first fault to the end."""
    costs: list[Cost] = field(default_factory=list)
    """How long single faults kept partitions from accepting records."""

    @property
    def passed(self) -> bool:
        return not self.anomalies


def _log(text: str) -> None:
    logger.info("%s", text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """What a runner needs besides the world."""

    clock: Clock
    """The wall clock, which nodes use for deadlines."""
    secret: bytes = b""
    """The cluster's secret. It is needed to read the copies of single nodes."""
    say: Say = _log


class Runner:
    """One run of one scenario."""

    def __init__(
        self, world: World, scenario: Scenario, seed: int, tools: Tools, history: History
    ) -> None:
        self._world = world
        self._scenario = scenario
        self._clock = clock = tools.clock
        self._tools = tools
        self._outcome = RunOutcome(scenario, seed, history)
        self._timeline = self._outcome.timeline
        self._watcher = Watcher(
            {node_id: world.direct(node_id) for node_id in world.ids}, self._timeline, clock
        )
        self._world_thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-chaos")
        self._injected: list[Step] = []
        self._spans: dict[int, tuple[float, str, frozenset[PartitionKey]]] = {}

    async def run(self) -> RunOutcome:
        """Runs everything from the first topic to the verdict."""
        outcome = self._outcome
        scene = Scene(
            bootstrap=self._world.bootstrap,
            direct={node_id: self._world.direct(node_id) for node_id in self._world.ids},
            history=outcome.history,
            clock=self._clock,
            rng=Random(f"workloads {outcome.seed}"),
            secret=self._tools.secret,
            drain_s=self._scenario.finish_s,
        )
        workloads = self._scenario.workloads()
        self._timeline.began = self._clock()
        watching = asyncio.ensure_future(self._watcher.run())
        try:
            await self._load(scene, workloads)
            await self._finish(scene, workloads)
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._guarded("healing", self._do(self._heal_all))
            self._world_thread.shutdown()
        await self._judge()
        return outcome

    # Under load.

    async def _load(self, scene: Scene, workloads: list[Workload]) -> None:
        self._phase("prepare")
        async with asyncio.timeout(PREPARE_S):
            for workload in workloads:
                await workload.prepare(scene)
        tasks = [asyncio.ensure_future(workload.run(scene)) for workload in workloads]
        try:
            await self._warm_up()
            self._phase("faults")
            await self._follow_plan()
            self._phase("quiet")
            await self._guarded("healing", self._do(self._heal_all))
            await sleep(self._scenario.quiet_s)
        finally:
            scene.stopping.set()
            self._phase("stop")
            await self._stop(workloads, tasks)

    async def _warm_up(self) -> None:
        """Waits until records are acknowledged, so that a fault hits a working cluster."""
        ends_at = self._clock() + WARM_S
        while self._clock() < ends_at:
            if sum(sent.status == "ok" for sent in self._outcome.history.of(Publish)) >= 10:
                break
            await sleep(POLL_S)
        await sleep(1.0)

    async def _follow_plan(self) -> None:
        started = self._clock()
        ends_at = started + self._scenario.lasts_s + self._scenario.overtime_s
        for action in actions([step.copy() for step in self._scenario.plan]):
            await sleep(max(0.0, started + action.at - self._clock()))
            if action.injects and self._clock() > ends_at:
                self._timeline.mark(self._clock(), "phase", "out of time: no more faults")
                return  # an injected fault is healed later
            what = f"{'injecting' if action.injects else 'healing'} {action.step.fault.name}"
            await self._guarded(what, self._do(partial(self._act, action)))
            behind = self._clock() - (started + action.at)
            if behind > BEHIND_S:
                started += behind  # later steps keep their distance, so that quiet times stay quiet

    def _act(self, action: Action) -> None:
        """Injects or heals, in the thread of the world."""
        step, name = action.step, action.step.fault.name
        if not action.injects:
            self._heal(step)
            return
        self._injected.append(step)
        began = self._clock()
        text = step.fault.inject(self._world)
        self._spans[id(step)] = (began, text, self._excused(step))
        self._timeline.mark(began, "fault", f"{name}: {text}")
        self._tools.say(f"  {began - self._timeline.began:6.1f} s  {name}: {text}")

    def _excused(self, step: Step) -> frozenset[PartitionKey]:
        """The partitions that cannot be written until this fault is healed: most copies are cut
        off."""
        fault = step.fault
        if not isinstance(fault, Parting) or not fault.apart:
            return frozenset()
        copies = self._world.copies()
        return frozenset(
            partition_key
            for partition_key, nodes in copies.items()
            if 2 * sum(node in fault.apart for node in nodes) > len(nodes)
        )

    def _heal(self, step: Step) -> None:
        if not any(injected is step for injected in self._injected):
            return
        self._injected = [injected for injected in self._injected if injected is not step]
        step.fault.heal(self._world)
        ended = self._clock()
        began, text, excused = self._spans.pop(id(step), (ended, "not injected", frozenset()))
        self._timeline.faults.append(
            Span(began, ended, step.fault.name, text, step.majority, excused)
        )
        self._timeline.mark(ended, "heal", step.fault.name)
        self._tools.say(f"  {ended - self._timeline.began:6.1f} s  healed {step.fault.name}")

    def _heal_all(self) -> None:
        """Heals what the plan left broken, newest first, and starts nodes that are down.

        Runs in the thread of the world."""
        for step in reversed(self._injected[:]):
            self._heal(step)
        self._world.links.heal()
        for node_id in self._world.ids:
            if not self._world.is_running(node_id):
                self._trouble("node died", f"node {node_id} is down after everything was healed")
                self._world.restart(node_id)

    # The end.

    async def _stop(self, workloads: list[Workload], tasks: "list[asyncio.Task[None]]") -> None:
        await asyncio.wait(tasks, timeout=STOP_S)
        for workload, task in zip(workloads, tasks, strict=True):
            if not task.done():
                self._trouble("stuck", f"workload {workload.name} does not stop in {STOP_S:.0f} s")
                task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for workload, error in zip(workloads, ended, strict=True):
            if isinstance(error, Exception):
                logger.error("workload %s failed", workload.name, exc_info=error)
                self._trouble("workload failed", f"{workload.name}: {error!r}")

    async def _finish(self, scene: Scene, workloads: list[Workload]) -> None:
        self._phase("finish")
        outcome = self._outcome
        for workload in workloads:
            await self._guarded(
                f"reading back {workload.name}",
                workload.finish(scene, outcome.final),
                self._scenario.finish_s + FINISH_S_MORE,
            )
        for node_id in self._world.ids:
            if not self._world.is_running(node_id):
                self._trouble("node died", f"node {node_id} is down at the end")
        if self._scenario.rest_s:
            await self._guarded("looking for rest", self._rest(self._scenario.rest_s))
        self._phase("end")
        self._timeline.ended = self._clock()

    async def _rest(self, rest_s: float) -> None:
        """Waits for a time of this length in which the metadata log does not grow."""
        grew = 0
        for _ in range(REST_TRIES):
            before = await self._do(self._world.operator.metadata_index)
            await sleep(rest_s)
            grew = await self._do(self._world.operator.metadata_index) - before
            if not grew:
                return
        text = f"the metadata log grew by {grew} entries in {rest_s:g} s without clients"
        self._trouble("restless", text)

    async def _judge(self) -> None:
        outcome = self._outcome
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            None, judge, outcome.history, outcome.final, self._rules()
        )
        outcome.anomalies += [*self._watcher.anomalies, *found]
        outcome.leader_changes = self._watcher.changes
        first = min((span.began for span in self._timeline.faults), default=self._timeline.began)
        stopped = next((mark.at for mark in self._timeline.marks if mark.text == "stop"), first)
        outcome.gap_s = worst_gap(outcome.history, first, stopped)
        if outcome.gap_s > self._scenario.gap_s_max:
            text = f"{outcome.gap_s:.1f} s without an acknowledged record, "
            outcome.anomalies.append(
                Anomaly("unavailable", text + f"at most {self._scenario.gap_s_max:.1f} s are right")
            )

        outcome.costs = costs(self._timeline.faults, outcome.history, stopped)
        for cost in outcome.costs:
            if cost.outage_s > self._scenario.outage_s_max:
                text = f"{cost.fault.text}: {cost.partition_key} took nothing "
                text += f"for {cost.outage_s:.1f} s, "
                text += f"at most {self._scenario.outage_s_max:.1f} s are right"
                outcome.anomalies.append(Anomaly("outage", text))
        most = self._scenario.leader_changes_max
        if most is not None and outcome.leader_changes > most:
            text = f"{outcome.leader_changes} leader changes, at most {most} are right"
            outcome.anomalies.append(Anomaly("election storm", text))

    def _rules(self) -> Rules:
        """The rules of the scenario, with the times at which there must be progress."""
        phases = {one.text: one.at for one in self._timeline.of("phase")}
        began, ended = phases.get("faults"), phases.get("stop")
        if began is None or ended is None:
            return self._scenario.rules
        faults = self._timeline.faults
        return replace(
            self._scenario.rules,
            healthy=without(
                (began, ended),
                [(span.began, span.ended + GRACE_S) for span in faults if not span.majority],
            ),
            faults=tuple(span.began for span in faults if span.majority),
        )

    # Helpers.

    async def _do(self, action: Callable[[], R]) -> R:
        """Makes a call to the world, in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._world_thread, action)

    async def _guarded(
        self, what: str, work: Coroutine[Any, Any, object], timeout_s: float | None = None
    ) -> None:
        """Runs a part of the run. An error becomes an anomaly, and the run goes on."""
        try:
            async with asyncio.timeout(timeout_s):
                await work
        except TimeoutError as error:
            self._trouble("stuck", f"{what}: {error!r} after {timeout_s} s")
        except Exception as error:
            logger.exception("%s failed", what)
            self._trouble("broken", f"{what}: {error!r}")

    def _trouble(self, kind: str, text: str) -> None:
        self._outcome.anomalies.append(Anomaly(kind, text))
        self._timeline.mark(self._clock(), "trouble", f"{kind}: {text}")
        self._tools.say(f"  {kind}: {text}")

    def _phase(self, name: str) -> None:
        self._timeline.mark(self._clock(), "phase", name)
