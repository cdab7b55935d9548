"""What one seed of a cluster simulation does: its topics, its clients, its world and its faults.

`make_plan` is a gentle world: voters only, metadata that comes at once, faults of a few seconds.
`swarm` makes it nasty: it draws a profile, and with it a subset of the features of the world and of
the kinds of faults. A subset, because with everything at once the common faults hide the rare
ones; a profile leans towards one story that takes several things to come together.

    mixed      any features, any faults
    moves      partitions go away and come back while metadata lags and nodes pause
    splits     long splits, often just when somebody is let into an in-sync set
    alter      settings change while syncs are slow
    topics     topics are deleted, created anew, grow and become queues
    drains     nodes are drained, decommissioned and taken back
    disks      rot, failing and slow syncs, full disks
    retention  logs lose their beginnings all the time
    raft       the real Raft decides, on disks and links that fail
    forgets    partitions remember very few producers, and not for long; by name only, since a part
               of all seeds does so whatever its profile is
"""

from dataclasses import dataclass, field, replace
from random import Random

from simnet import NetworkShape

from raftq.node.storage.producers import IDLE_MS_MAX, PRODUCERS_MAX

PORT = 7_000
LAGS_S = (0.0, 0.02, 0.15, 0.5)


@dataclass(frozen=True, slots=True)
class TopicPlan:
    name: str
    partitions: int
    fsync: str
    segment_bytes: int
    min_insync: int = 2
    retention_bytes: int = -1


@dataclass(frozen=True, slots=True)
class World:
    """The features of a simulated world that are not faults."""

    profile: str = "gentle"
    observers: int = 0
    """How many of the nodes are no voters; they have the greatest ids."""
    lags_s: dict[int, float] = field(default_factory=dict)
    """Nodes that apply metadata entry by entry, and how late; the others apply all at once."""
    long: bool = False
    """Faults may last up to 30 s."""
    skew_ms: int = 2_000
    """How far clocks are off at most."""
    overlapping_syncs: bool = False
    """A sync begins at one time and ends at another, and other things happen in between."""
    scratch: bool = False
    """There is a topic that operators delete and create anew."""
    copies_on_write: bool = False
    """On a full disk nothing can be overwritten either."""
    raft: bool = False
    """The real Raft decides."""
    idle_share: float = 0.0
    """How many of the partitions nobody writes to."""
    producers_max: int = PRODUCERS_MAX
    """How many producers a partition remembers."""
    producer_idle_ms: int = IDLE_MS_MAX
    """For how long it remembers one that sends nothing."""

    @property
    def forgets(self) -> bool:
        """Whether producers are forgotten in the time that a simulation has."""
        return self.producers_max < PRODUCERS_MAX or self.producer_idle_ms < IDLE_MS_MAX


@dataclass(frozen=True, slots=True)
class Plan:
    """What one seed does, apart from when."""

    seed: int
    nodes: int
    topics: tuple[TopicPlan, ...]
    producers: int
    records: int
    """Per producer."""
    faults_s: float
    """For how long faults happen."""
    fault_every_s: float
    always: bool
    """Every topic syncs before it acknowledges, so machines may lose power at will."""
    churn: float
    sync_s: float
    """How long a sync takes at most."""
    decide_s: float
    """How long the metadata takes to decide something at most."""
    shape: NetworkShape
    world: World = field(default_factory=World)
    kinds: tuple[str, ...] = ()
    """The faults of this seed, those that are there twice twice as often; none: drawn by them."""

    @property
    def voters(self) -> tuple[int, ...]:
        return tuple(range(1, self.nodes - self.world.observers + 1))

    @property
    def bootstrap(self) -> list[str]:
        return [f"node-{node}:{PORT + node}" for node in range(1, self.nodes + 1)]


def make_plan(seed: int) -> Plan:
    rng = Random(f"plan {seed}")
    always = rng.random() < 0.3
    topics = tuple(
        TopicPlan(
            f"t{at}",
            rng.randint(1, 3),
            "always" if always else rng.choice(("interval", "interval", "always", "none")),
            rng.choice((4096, 1 << 26)),
        )
        for at in range(rng.randint(1, 2))
    )
    return Plan(
        seed=seed,
        nodes=rng.choice((3, 3, 3, 5)),
        topics=topics,
        producers=rng.randint(1, 3),
        records=rng.randint(20, 60),
        faults_s=rng.uniform(2, 9),
        fault_every_s=rng.choice((0.15, 0.3, 0.8, 1.5)),
        always=always,
        churn=rng.choice((0.0, 0.0, 0.01)),
        sync_s=rng.choice((0.001, 0.01, 0.2)),
        decide_s=rng.choice((0.005, 0.05, 0.5)),
        shape=NetworkShape(
            latency_max_s=rng.choice((0.000_5, 0.002, 0.02)),
            jitter_share=rng.choice((0.0, 0.05, 0.2)),
            split_share=rng.choice((0.0, 0.1, 0.3)),
        ),
    )


# Faults of machines, links and disks, and what operators do. The names are those of `Faults`.
PROCESSES = ("kill", "kill_many", "power_cut", "wipe", "pause", "restart")
LINKS = ("isolate", "split", "one_way", "shut", "slow", "slow_metadata")
DISKS = ("full_disk", "fail_syncs", "rot", "clock_jump")
OPERATORS = (
    "move", "move_and_back", "move_and_pause", "alter", "recreate", "add_partitions", "drain",
    "decommission", "enable_queues", "elect_preferred",
)  # fmt: skip
ALL = (*PROCESSES, *LINKS, *DISKS, *OPERATORS, "split_joiner")

PROFILES = {
    "mixed": 6, "moves": 3, "splits": 3, "alter": 2, "topics": 2, "drains": 2, "raft": 2,
    "disks": 1, "retention": 1, "forgets": 0,
}  # fmt: skip
FORGETFUL_SHARE = 0.12


def swarm(plan: Plan, profile: str | None = None) -> Plan:
    """The same seed in a nasty world."""
    rng = Random(f"swarm {plan.seed}")
    drawn = rng.choices(list(PROFILES), list(PROFILES.values()))[0]
    profile = profile or drawn
    world = _world(plan, rng, profile)
    kinds = [*rng.sample(ALL, rng.randint(2, len(ALL) * 2 // 3)), *_leaning(profile, rng)]
    # Voters are odd in number; a partition that moves needs a node to go to.
    voters = plan.nodes
    if profile in ("moves", "drains", "splits") and not world.observers:
        voters = 5
    elif world.observers:
        voters = rng.choice((3, 3, 5)) if world.observers == 1 else 3
    nodes = voters + world.observers
    # Whoever alters a topic may take back that it syncs, and with it what a power cut costs.
    always = plan.always and not {"alter", "recreate"} & set(kinds)
    faults_s = rng.uniform(20, 45) if world.long else plan.faults_s + rng.uniform(0, 4)
    topics = plan.topics
    if profile == "alter":
        topics = tuple(replace(one, fsync="always") for one in topics)
    if profile == "retention":
        topics = tuple(
            replace(one, segment_bytes=4096, retention_bytes=rng.choice((6_000, 12_000)))
            for one in topics[:1]
        )
    if world.scratch:
        fsync = "always" if always else "interval"
        topics = (*topics, TopicPlan("scratch", rng.randint(1, 2), fsync, 1 << 26))
    return replace(
        plan,
        nodes=nodes,
        topics=topics,
        producers=max(plan.producers, 2) if world.forgets else plan.producers,
        always=always,
        records=plan.records * (3 if world.long or profile == "retention" else 1),
        faults_s=faults_s,
        fault_every_s=rng.choice((2.0, 4.0, 8.0)) if world.long else plan.fault_every_s,
        sync_s=rng.choice((0.05, 0.2)) if profile == "alter" else plan.sync_s,
        decide_s=_decide_s(plan, rng, profile),
        world=replace(world, lags_s=_lags(nodes, rng, profile)),
        kinds=tuple(kinds),
    )


def unsettled(plan: Plan) -> Plan:
    """Every second seed with copies that move while nodes hear late of it, and the rest as it is.

    For simulations whose subject is not replication: queues, groups and the other logs have
    to bear what replication bears, but not all of it at once.
    """
    if plan.seed % 2 == 0:
        return plan
    rng = Random(f"unsettled {plan.seed}")
    nodes = 5
    lags = {node: rng.choice(LAGS_S) for node in range(1, nodes + 1) if rng.random() < 0.7}
    others = ("kill", "kill_many", "pause", "isolate", "split", "one_way", "slow", "restart",
              "slow_metadata", "elect_preferred")  # fmt: skip
    kinds = (*rng.sample(others, 4), "move", "move_and_back", "move_and_pause")
    return replace(plan, nodes=nodes, world=replace(plan.world, lags_s=lags), kinds=kinds)


def _world(plan: Plan, rng: Random, profile: str) -> World:
    long = rng.random() < (0.9 if profile == "splits" else 0.1)
    observers = (
        rng.choice((1, 1, 2)) if rng.random() < (0.1 if profile == "splits" else 0.25) else 0
    )
    far = rng.random() < 0.25
    producers_max, producer_idle_ms = _memory(plan, profile)
    return World(
        profile=profile,
        observers=observers,
        long=long,
        skew_ms=60_000 if far else 2_000,
        overlapping_syncs=rng.random() < (0.9 if profile in ("disks", "alter") else 0.3),
        copies_on_write=rng.random() < 0.2,
        raft=profile == "raft" or rng.random() < 0.1,
        scratch=rng.random() < (0.9 if profile == "topics" else 0.15),
        idle_share=rng.choice((0.0, 0.3, 0.6)),
        producers_max=producers_max,
        producer_idle_ms=producer_idle_ms,
    )


def _memory(plan: Plan, profile: str) -> tuple[int, int]:
    """How many producers a partition remembers, and for how long. Drawn apart, so that seeds do
    what they did before there was such a choice."""
    rng = Random(f"memory {plan.seed}")
    if profile != "forgets" and rng.random() >= FORGETFUL_SHARE:
        return PRODUCERS_MAX, IDLE_MS_MAX
    few = (rng.choice((1, 1, 2)), IDLE_MS_MAX)
    short = (PRODUCERS_MAX, rng.choice((500, 2_000)))
    return rng.choice((few, short, (few[0], short[1])))


def _decide_s(plan: Plan, rng: Random, profile: str) -> float:
    if profile == "splits":
        return rng.choice((0.05, 0.5))  # otherwise it is decided before anything can happen
    return rng.choice((0.005, 0.05)) if profile in ("moves", "alter") else plan.decide_s


def _leaning(profile: str, rng: Random) -> list[str]:
    """What a profile has more of."""
    many = {
        "moves": ("move_and_back", "move_and_back", "move_and_pause", "move", "slow_metadata"),
        "splits": ("split_joiner", "split_joiner", "split_joiner", "kill", "split"),
        "alter": ("alter", "alter", "alter", "slow"),
        "topics": ("recreate", "recreate", "add_partitions", "enable_queues", "alter"),
        "disks": ("rot", "rot", "fail_syncs", "fail_read", "full_disk", "power_cut"),
        "drains": ("drain", "decommission", "decommission", "elect_preferred", "move"),
    }.get(profile, ())
    return [one for one in many for _ in range(rng.randint(1, 4))]


def _lags(nodes: int, rng: Random, profile: str) -> dict[int, float]:
    share = rng.choice((0.3, 0.6, 1.0))
    if profile != "moves" and rng.random() < 0.4:
        return {}
    return {
        node: rng.choice((0.0, 0.02, 0.15, 0.15, 0.5, 1.0))
        for node in range(1, nodes + 1)
        if rng.random() < share
    }
