"""What a scenario is: workloads, faults at given times, and what it may cost. (Pure.)

A scenario is data and may be run any number of times: faults are copied before they are injected,
since they remember their target, and workloads are made anew by `workloads`.
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
"""The bar: so soon after a single fault every partition takes records again."""

Setting = str | int | bool


@dataclass(frozen=True, slots=True)
class Step:
    """A fault from `at` seconds after the start on, for `lasts` seconds; None: until the end."""

    at: float
    fault: Fault
    lasts: float | None = None
    majority: bool = True
    """Whether a majority stays whole and in touch, so that there must be progress meanwhile."""

    @property
    def ends_at(self) -> float:
        return inf if self.lasts is None else self.at + self.lasts

    def copy(self) -> "Step":
        return replace(self, fault=deepcopy(self.fault))


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One experiment: what is done to a cluster under which load, and what must hold then."""

    name: str
    rows: tuple[int, ...]
    """Numbers in the list of faults that this project works through."""
    promise: str
    """What must hold, as a sentence for reports."""
    workloads: Callable[[], list[Workload]]
    plan: tuple[Step, ...]
    quiet_s: float = 5.0
    """How long everything runs on after the last fault is healed."""
    nodes: int = 3
    settings: Mapping[str, Setting] = field(default_factory=dict)
    """Of every node, beside the defaults."""
    rules: Rules = field(default_factory=Rules)
    gap_s_max: float = inf
    """The longest time without an acknowledged record that the promise allows."""
    outage_s_max: float = OUTAGE_S_MAX
    """The longest time for which a single fault may keep any partition from taking records."""
    leader_changes_max: int | None = None
    """More would be a storm of elections."""
    overtime_s: float = inf
    """On a slow machine a plan takes longer; after so much more no further fault is injected."""
    finish_s: float = 60.0
    """For draining and reading back."""
    rest_s: float = 0.0
    """In the end, when nobody does anything any more, the log of the metadata must come to rest for
    so long; 0: that is not asked."""
    proxied: bool = False
    """Whether all links go through proxies though no fault needs them. Behind a proxy a killed node
    looks as if it only stood still: its address still takes connections."""

    @property
    def needs(self) -> frozenset[str]:
        """Abilities that the world must have."""
        return frozenset().union(*(step.fault.needs for step in self.plan))

    @property
    def through_proxies(self) -> bool:
        return self.proxied or TOXIPROXY in self.needs

    @property
    def lasts_s(self) -> float:
        """Until the last fault is healed and the quiet phase is over, by plan."""
        ends = [step.at if step.lasts is None else step.ends_at for step in self.plan]
        return max(ends, default=0.0) + self.quiet_s


@dataclass(frozen=True, slots=True)
class Action:
    """One end of a step."""

    at: float
    step: Step
    injects: bool


def actions(steps: list[Step]) -> list[Action]:
    """Injections and heals in the order of their times; a heal before an injection at one time.

    Steps without an end are left to the end of the run, newest first."""
    found = [Action(step.at, step, True) for step in steps]
    found += [Action(step.ends_at, step, False) for step in steps if step.lasts is not None]
    found.sort(key=lambda one: (one.at, one.injects))
    return found
