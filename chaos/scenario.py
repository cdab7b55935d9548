"""Pure: what a scenario is: workloads, faults at given times, and what they may cost.

A scenario is data and can be run any number of times: faults remember their target, so they are
copied before they are injected, and `workloads` makes new workloads for each run.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from math import inf

from raftq.chaos.checkers import Rules
from raftq.chaos.scene import Workload
from raftq.chaos.world import TOXIPROXY, Fault

SCENARIO_S_MAX = 120.0
OUTAGE_S_MAX = 5.0
"""The limit: this soon after a single fault every partition accepts records again."""

Setting = str | int | bool


@dataclass(frozen=True, slots=True)
class Step:
    """A fault from `at` seconds after the start, for `lasts` seconds; None means until the end."""

    at: float
    fault: Fault
    lasts: float | None = None
    majority: bool = True
    """Whether a majority stays healthy and connected, so that there must be progress meanwhile."""

    @property
    def ends_at(self) -> float:
        return inf if self.lasts is None else self.at + self.lasts

    def copy(self) -> "Step":
        return replace(self, fault=deepcopy(self.fault))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One experiment: what happens to a cluster under which load, and what must hold then."""

    name: str
    rows: tuple[int, ...]
    """Numbers in docs/FAULTS.md."""
    promise: str
    """What must hold, as a sentence for reports."""
    workloads: Callable[[], list[Workload]]
    plan: tuple[Step, ...]
    quiet_s: float = 5.0
    """How long everything goes on after the last fault is healed."""
    nodes: int = 3
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Settings of every node that differ from the defaults."""
    rules: Rules = field(default_factory=Rules)
    gap_s_max: float = inf
    """The longest time without an acknowledged record that the promise allows."""
    outage_s_max: float = OUTAGE_S_MAX
    """The longest time for which a single fault may keep any partition from accepting records."""
    leader_changes_max: int | None = None
    """More changes would be a storm of elections."""
    overtime_s: float = inf
    """How much longer a plan may take on a slow machine. After that no more faults are injected."""
    finish_s: float = 60.0
    """The time for draining and reading back."""
    rest_s: float = 0.0
    """At the end, when all clients have stopped, the metadata log must not grow for this long; 0
    switches the check off."""
    proxied: bool = False
    """Whether all links go through proxies even if no fault needs them.

    Behind a proxy a killed node looks like a paused one: its address still accepts connections."""

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that the world must have."""
        return frozenset().union(*(step.fault.needs for step in self.plan))

    @property
    def through_proxies(self) -> bool:
        return self.proxied or TOXIPROXY in self.needs

    @property
    def lasts_s(self) -> float:
        """The planned time until the last fault is healed and the quiet phase is over."""
        ends = [step.at if step.lasts is None else step.ends_at for step in self.plan]
        return max(ends, default=0.0) + self.quiet_s


@dataclass(frozen=True, slots=True)
class Action:
    """The beginning or the end of a step."""

    at: float
    step: Step
    injects: bool


def actions(steps: list[Step]) -> list[Action]:
    """Injections and heals in the order of their times; at the same time, heals come first.

    Steps without an end are healed at the end of the run, newest first."""
    found = [Action(step.at, step, True) for step in steps]
    found += [Action(step.ends_at, step, False) for step in steps if step.lasts is not None]
    found.sort(key=lambda one: (one.at, one.injects))
    return found
