"""What operators do, as faults: copies moved away, and to and fro; topics changed. (Shell.)

Nothing of this may cost more than a change of leaders does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.processes import NOTHING
from raftq.chaos.world import PartitionView, World
from raftq.client.common.errors import Detail, RequestTimeout
from raftq.client.common.types import PartitionKey

LETTERS = ".dlq"
LOOK_S = 0.01
LOOKS_MAX, LOOKS_FEW = 2_000, 200
PARTITIONS_MAX = 8
HOUR_MS = 3_600_000


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits, but not for ever."""
    if not soon(condition, LOOKS_MAX):
        raise RequestTimeout(f"{what}: not in time")


def soon(condition: Callable[[], bool], looks: int) -> bool:
    """Looks often: what happens next has to happen at once."""
    for _ in range(looks):
        if condition():
            return True
        Event().wait(LOOK_S)
    return False


def movable(world: World, topic: str) -> dict[PartitionKey, PartitionView]:
    """Partitions that somebody leads, all their copies in sync, of topics whose names begin so."""
    return {
        key: partition_key
        for key, partition_key in sorted(world.operator.partition_keys().items())
        if key[0].startswith(topic) and not key[0].endswith(LETTERS)
        if partition_key.leader is not None
        and not partition_key.moves
        and set(partition_key.isr) == set(partition_key.replicas)
    }


def without(world: World, partition_key: PartitionView, node_id: int) -> tuple[int, ...]:
    """Where the copies go so that a node has none: to one that has none yet, if there is one."""
    rest = tuple(one for one in partition_key.replicas if one != node_id)
    spare = [
        one for one in world.ids if one not in partition_key.replicas and world.is_running(one)
    ]
    return (*rest, world.rng.choice(spare)) if spare else rest


@dataclass(slots=True)
class MoveAway:
    """Partitions are moved away from their leaders. It is over when all of them have arrived;
    healed, they go back, if `back`."""

    topic: str = ""
    count: int | None = None
    """None: all of them."""
    back: bool = True
    needs: ClassVar[frozenset[str]] = NOTHING
    _before: dict[PartitionKey, tuple[int, ...]] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        many = "all" if self.count is None else str(self.count)
        return f"move {many} away" + ("" if self.back else " for good")

    def inject(self, world: World) -> str:
        found = movable(world, self.topic)
        count = len(found) if self.count is None else min(self.count, len(found))
        for key in world.rng.sample(sorted(found), count):
            partition_key = found[key]
            assert partition_key.leader is not None
            if self.back:
                self._before[key] = partition_key.replicas
            world.operator.move(*key, without(world, partition_key, partition_key.leader))
        until(lambda: _at_rest(world), "moves away from leaders")
        return f"{count} partitions moved away from their leaders"

    def heal(self, world: World) -> None:
        there = world.operator.partition_keys() if self._before else {}
        for key, replicas in self._before.items():
            if key in there:
                world.operator.move(*key, replicas)
        if self._before:
            until(lambda: _at_rest(world), "moves back to former leaders")
        self._before = {}


def _at_rest(world: World) -> bool:
    return not any(one.moves for one in world.operator.partition_keys().values())


@dataclass(slots=True)
class MoveToAndFro:
    """The copy of a follower is moved away, and back soon after, again and again with another one.

    Meanwhile the node learns of both late, if `slow_s`: so much longer every sync of it takes, and
    it syncs what it hears of the metadata before it acts on it. Is it back in sync, the leader is
    killed, if `kills`, and started again when there is another one. A leader's copy would prove
    less: with it the epoch changes, and what is said of an older epoch counts for nothing."""

    topic: str = ""
    rounds: int = 4
    slow_s: float = 0.0
    kills: bool = False
    needs: ClassVar[frozenset[str]] = NOTHING
    _slow: int | None = field(default=None, init=False)
    _killed: int | None = field(default=None, init=False)

    @property
    def name(self) -> str:
        how = " of a slow node" if self.slow_s else ""
        return f"moves to and fro{how}" + (" and kills" if self.kills else "")

    def inject(self, world: World) -> str:
        told = []
        for _ in range(self.rounds):
            until(lambda: bool(movable(world, self.topic)), f"{self.topic!r} can be moved")
            key, node_id = self._choose(world)
            told.append(f"{key[0]}/{key[1]} of node {node_id}")
            if self.slow_s:
                self._slow = node_id
                world.disk(node_id).slow_sync(self.slow_s)
            self._once(world, key, node_id)
            self._heal_disk(world)
        return f"away and back: {', '.join(told)}"

    def _choose(self, world: World) -> tuple[PartitionKey, int]:
        """A partition and a follower of it, which does not control the metadata if possible."""
        controller = world.controller()
        every = [
            (key, node_id)
            for key, partition_key in movable(world, self.topic).items()
            for node_id in partition_key.replicas
            if node_id != partition_key.leader
        ]
        beside = [one for one in every if one[1] != controller]
        if not every:
            raise RequestTimeout(f"no partition of {self.topic!r} has a follower to be moved")
        return world.rng.choice(beside or every)

    def _once(self, world: World, key: PartitionKey, node_id: int) -> None:
        operator = world.operator
        partition_key = operator.partition_keys()[key]
        others = [one for one in partition_key.replicas if one != node_id]
        operator.move(*key, without(world, partition_key, node_id))
        until(
            lambda: node_id not in operator.partition_keys()[key].replicas,
            f"{key} leaves {node_id}",
        )
        # Soon, but not always at once: a node that hears of both together sees neither.
        Event().wait(world.rng.uniform(0.0, self.slow_s))
        operator.move(*key, (node_id, *others))
        if not soon(lambda: node_id in operator.partition_keys()[key].isr, LOOKS_FEW):
            # One that has to sync first may never come up with the others under load.
            self._heal_disk(world)
            until(
                lambda: node_id in operator.partition_keys()[key].isr, f"{key} is back at {node_id}"
            )
        if self.kills:
            self._kill_leader(world, key, node_id)

    def _kill_leader(self, world: World, key: PartitionKey, node_id: int) -> None:
        leader = world.operator.partition_keys()[key].leader
        if leader is None or leader == node_id:
            return
        self._killed = leader
        world.kill(leader)
        until(
            lambda: world.operator.partition_keys()[key].leader not in (None, leader),
            f"somebody leads {key} after {leader}",
        )
        world.restart(leader)
        self._killed = None

    def _heal_disk(self, world: World) -> None:
        if self._slow is not None:
            world.disk(self._slow).heal()
            self._slow = None

    def heal(self, world: World) -> None:
        self._heal_disk(world)
        if self._killed is not None:
            world.restart(self._killed)
            self._killed = None


@dataclass(slots=True)
class AlterTopics:
    """When to sync and what to keep is changed to and fro; healed, it is as before.

    What is acknowledged meanwhile may not be synced yet, so no power cut goes with this."""

    topic: str = ""
    times: int = 4
    gap_s: float = 0.3
    needs: ClassVar[frozenset[str]] = NOTHING
    _before: dict[str, dict[str, Detail]] = field(default_factory=dict, init=False)

    @property
    def name(self) -> str:
        return "alter topics"

    def inject(self, world: World) -> str:
        topics = _topics(world, self.topic)
        for topic in topics:
            known = world.operator.settings(topic)
            self._before[topic] = {one: known[one] for one in ("fsync", "retention_ms")}
        for number in range(self.times):
            fsync = ("interval", "always")[number % 2]
            change: Mapping[str, Detail] = {
                "fsync": fsync, "retention_ms": HOUR_MS * (1 + number % 3)
            }  # fmt: skip
            for topic in topics:
                world.operator.alter(topic, change)
            Event().wait(self.gap_s)
        return f"fsync and retention of {len(topics)} topics changed {self.times} times"

    def heal(self, world: World) -> None:
        there = _topics(world, self.topic) if self._before else []
        for topic, settings in self._before.items():
            if topic in there:
                world.operator.alter(topic, settings)
        self._before = {}


@dataclass(slots=True)
class GrowTopics:
    """Every topic gets a partition more, up to a number; they keep it."""

    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING

    @property
    def name(self) -> str:
        return "grow topics"

    def inject(self, world: World) -> str:
        partition_keys = world.operator.partition_keys()
        grown = []
        for topic in _topics(world, self.topic):
            total = 1 + sum(name == topic for name, _ in partition_keys)
            if total <= PARTITIONS_MAX:
                world.operator.grow(topic, total)
                grown.append(topic)
        return f"{len(grown)} topics have one partition more"

    def heal(self, world: World) -> None:
        """A topic never shrinks."""


@dataclass(slots=True)
class OtherTopics:
    """Topics that nobody uses are created, grow, and are deleted, some of them when healed."""

    count: int = 4
    needs: ClassVar[frozenset[str]] = NOTHING
    _made: list[str] = field(default_factory=list, init=False)

    @property
    def name(self) -> str:
        return "other topics"

    def inject(self, world: World) -> str:
        operator, rng = world.operator, world.rng
        for _ in range(self.count):
            topic, total = f"other-{rng.randrange(1 << 40):010x}", rng.randint(1, 4)
            operator.create(topic, total, min(3, len(world.ids)))
            self._made.append(topic)
            operator.grow(topic, total + 1)
        for topic in self._made[: self.count // 2]:
            operator.delete(topic)
        self._made = self._made[self.count // 2 :]
        return f"{self.count} topics created, {self.count // 2} deleted"

    def heal(self, world: World) -> None:
        while self._made:
            world.operator.delete(self._made.pop())


def _topics(world: World, topic: str) -> list[str]:
    """Those whose names begin so, without dead letters and what is made here."""
    names = {name for name, _ in world.operator.partition_keys() if name.startswith(topic)}
    return sorted(one for one in names if not one.endswith(LETTERS) and one[:6] != "other-")
