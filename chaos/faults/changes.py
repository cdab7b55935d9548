"""Shell: what operators do, as faults: they move copies and change topics.

None of this may cost more than a change of leaders does.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from threading import Event
from typing import ClassVar

from raftq.chaos.faults.base import NOTHING
from raftq.chaos.world import PartitionView, World
from raftq.client.common.errors import Detail, RequestTimeout
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.common.types import PartitionKey

LOOK_S = 0.01
LOOKS_MAX, LOOKS_FEW = 2_000, 200
PARTITIONS_MAX = 8
HOUR_MS = 3_600_000


def until(condition: Callable[[], bool], what: str) -> None:
    """Waits until `condition` is true. Raises RequestTimeout after LOOKS_MAX looks."""
    if not soon(condition, LOOKS_MAX):
        raise RequestTimeout(f"{what}: not in time")


def soon(condition: Callable[[], bool], looks: int) -> bool:
    """Says whether `condition` becomes true within `looks` looks.

    It looks often, because the caller has to act at once."""
    for _ in range(looks):
        if condition():
            return True
        Event().wait(LOOK_S)
    return False


def movable(world: World, topic: str) -> dict[PartitionKey, PartitionView]:
    """Partitions that have a leader and all copies in sync, of topics that begin with `topic`."""
    return {
        key: view
        for key, view in sorted(world.operator.partitions().items())
        if key[0].startswith(topic) and not key[0].endswith(DLQ_SUFFIX)
        if view.leader is not None and not view.moves and set(view.isr) == set(view.replicas)
    }


def without(world: World, view: PartitionView, node_id: int) -> tuple[int, ...]:
    """The replicas without `node_id`, and a running node without a copy in its place, if any."""
    rest = tuple(replica for replica in view.replicas if replica != node_id)
    spare = [peer for peer in world.ids if peer not in view.replicas and world.is_running(peer)]
    return (*rest, world.rng.choice(spare)) if spare else rest


@dataclass(slots=True)
class MoveAway:
    """Moves partitions away from their leaders, and waits until all of them have arrived.

    With `back`, healing moves them back."""

    topic: str = ""
    count: int | None = None
    """How many partitions; None means all."""
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
            view = found[key]
            assert view.leader is not None
            if self.back:
                self._before[key] = view.replicas
            world.operator.move(*key, without(world, view, view.leader))
        until(lambda: _at_rest(world), "moves away from leaders")
        return f"{count} partitions moved away from their leaders"

    def heal(self, world: World) -> None:
        existing = world.operator.partitions() if self._before else {}
        for key, replicas in self._before.items():
            if key in existing:
                world.operator.move(*key, replicas)
        if self._before:
            until(lambda: _at_rest(world), "moves back to former leaders")
        self._before = {}


def _at_rest(world: World) -> bool:
    return not any(view.moves for view in world.operator.partitions().values())


@dataclass(slots=True)
class MoveToAndFro:
    """Moves the copy of a follower away and soon back, `rounds` times with different copies.

    With `slow_s` every sync of that node takes longer. A node syncs metadata before it acts on it,
    so it learns of both moves late. With `kills` the leader is killed when the copy is in sync
    again, and started again when there is another leader. Copies of leaders are not moved: that
    changes the epoch, and requests of an older epoch are refused, so it would prove less."""

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
        moved = []
        for _ in range(self.rounds):
            until(lambda: bool(movable(world, self.topic)), f"{self.topic!r} can be moved")
            key, node_id = self._choose(world)
            moved.append(f"{key[0]}/{key[1]} of node {node_id}")
            if self.slow_s:
                self._slow = node_id
                world.disk(node_id).slow_sync(self.slow_s)
            self._once(world, key, node_id)
            self._heal_disk(world)
        return f"away and back: {', '.join(moved)}"

    def _choose(self, world: World) -> tuple[PartitionKey, int]:
        """Chooses a partition and one of its followers; not the controller, if possible."""
        controller = world.controller()
        every = [
            (key, node_id)
            for key, view in movable(world, self.topic).items()
            for node_id in view.replicas
            if node_id != view.leader
        ]
        beside = [choice for choice in every if choice[1] != controller]
        if not every:
            raise RequestTimeout(f"no partition of {self.topic!r} has a follower to be moved")
        return world.rng.choice(beside or every)

    def _once(self, world: World, key: PartitionKey, node_id: int) -> None:
        operator = world.operator
        view = operator.partitions()[key]
        others = [replica for replica in view.replicas if replica != node_id]
        operator.move(*key, without(world, view, node_id))
        until(
            lambda: node_id not in operator.partitions()[key].replicas,
            f"{key} leaves {node_id}",
        )
        # Soon, but not always at once: a node that learns of both together acts on neither.
        Event().wait(world.rng.uniform(0.0, self.slow_s))
        operator.move(*key, (node_id, *others))
        if not soon(lambda: node_id in operator.partitions()[key].isr, LOOKS_FEW):
            # Under load a node with slow syncs may never catch up with the others.
            self._heal_disk(world)
            until(lambda: node_id in operator.partitions()[key].isr, f"{key} is back at {node_id}")
        if self.kills:
            self._kill_leader(world, key, node_id)

    def _kill_leader(self, world: World, key: PartitionKey, node_id: int) -> None:
        leader = world.operator.partitions()[key].leader
        if leader is None or leader == node_id:
            return
        self._killed = leader
        world.kill(leader)
        until(
            lambda: world.operator.partitions()[key].leader not in (None, leader),
            f"{key} has another leader than {leader}",
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
    """Changes the fsync policy and the retention of topics `times` times. Healing restores both.

    Records that are acknowledged meanwhile may be unsynced, so power cuts must not join it."""

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
            self._before[topic] = {name: known[name] for name in ("fsync", "retention_ms")}
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
        existing = _topics(world, self.topic) if self._before else []
        for topic, settings in self._before.items():
            if topic in existing:
                world.operator.alter(topic, settings)
        self._before = {}


@dataclass(slots=True)
class GrowTopics:
    """Adds a partition to every topic, up to PARTITIONS_MAX. Topics keep them after healing."""

    topic: str = ""
    needs: ClassVar[frozenset[str]] = NOTHING

    @property
    def name(self) -> str:
        return "grow topics"

    def inject(self, world: World) -> str:
        partitions = world.operator.partitions()
        grown = []
        for topic in _topics(world, self.topic):
            total = 1 + sum(name == topic for name, _ in partitions)
            if total <= PARTITIONS_MAX:
                world.operator.grow(topic, total)
                grown.append(topic)
        return f"{len(grown)} topics have one partition more"

    def heal(self, world: World) -> None:
        """A topic never shrinks."""


@dataclass(slots=True)
class OtherTopics:
    """Creates, grows and deletes topics that no client uses. Healing deletes the rest of them."""

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
    """Topics whose names begin with `topic`, without dead letters and those of OtherTopics."""
    names = {name for name, _ in world.operator.partitions() if name.startswith(topic)}
    return sorted(
        name for name in names if not name.endswith(DLQ_SUFFIX) and not name.startswith("other-")
    )
