"""Faults against a world that only notes what is done to it: whom they hit and what they undo."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from random import Random

import pytest
from fake_operator import FakeOperator

from raftq.chaos.faults import expansion
from raftq.chaos.faults.changes import (
    AlterTopics,
    GrowTopics,
    MoveAway,
    MoveToAndFro,
    OtherTopics,
)
from raftq.chaos.faults.clock import ClockBump, ClockStrobe
from raftq.chaos.faults.disk import BadDisk, PowerCut
from raftq.chaos.faults.expansion import SplitAtExpansion
from raftq.chaos.faults.files import BitFlip, OldCopy, Remove, Truncate, find
from raftq.chaos.faults.network import (
    Bridge,
    BridgeBesideCopies,
    Isolate,
    MajoritiesRing,
    OneWay,
    Split,
    Swizzle,
)
from raftq.chaos.faults.processes import Kill, KillMany, Pause, RollingRestart, Wipe
from raftq.chaos.faults.streams import (
    Bandwidth,
    BlackHole,
    Latency,
    LimitData,
    Refuse,
    ResetStorm,
    Slicer,
)
from raftq.chaos.faults.targets import choose
from raftq.chaos.toxiproxy import NoLinks
from raftq.chaos.world import (
    CLOCK,
    TOXIPROXY,
    DisturbedDisk,
    Fault,
    Links,
    Pair,
    PartitionView,
    World,
)
from raftq.client.common.errors import ConfigError, InternalError

LEADERS = {("jobs", 0): 2, ("orders", 0): 3, ("orders", 1): 3}
CONTROLLER = 1


class NotedLinks:
    """Links as they are: what disturbs each of them."""

    def __init__(self) -> None:
        self.now: dict[Pair, list[str]] = {}

    def cut(self, pairs: Iterable[Pair]) -> None:
        self._add(pairs, "cut")

    def refuse(self, pairs: Iterable[Pair]) -> None:
        self._add(pairs, "refuse")

    def toxic(
        self, pairs: Iterable[Pair], kind: str, upstream: bool = False, **attributes: int
    ) -> None:
        self._add(pairs, f"{kind} {'up' if upstream else 'down'}")

    def heal(self, pairs: Iterable[Pair] | None = None) -> None:
        for pair in list(self.now) if pairs is None else pairs:
            self.now.pop(pair, None)

    def _add(self, pairs: Iterable[Pair], what: str) -> None:
        for pair in pairs:
            assert pair[0] != pair[1]
            self.now.setdefault(pair, []).append(what)


class NotedDisk:
    def __init__(self, world: "NotedWorld", node_id: int) -> None:
        self.world = world
        self.node_id = node_id
        self.now: list[str] = []

    def slow_sync(self, seconds: float) -> None:
        self.now.append("slow syncs")

    def fail_writes(self) -> None:
        self.now.append("failing writes")

    def fail_syncs(self) -> None:
        self.now.append("failing syncs")

    def fill(self) -> None:
        self.now.append("full")

    def free(self) -> None:
        self.now.remove("full")

    def lose_unsynced(self) -> None:
        assert not self.world.is_running(self.node_id), "a power cut ends the node first"
        self.world.story.append(f"lose {self.node_id}")

    def tear_unsynced(self) -> None:
        self.lose_unsynced()

    def heal(self) -> None:
        self.now.clear()


class NotedWorld:
    """A world of five nodes in which node 1 controls."""

    def __init__(self, directory: Path, nodes: int = 5, seed: int = 0) -> None:
        self.ids = tuple(range(1, nodes + 1))
        self.rng = Random(seed)
        self.noted = NotedLinks()
        self.abilities = frozenset({TOXIPROXY, CLOCK})
        self.bootstrap = ""
        self.down: set[int] = set()
        self.paused: set[int] = set()
        self.clocks: dict[int, float] = {}
        self.disks = {one: NotedDisk(self, one) for one in self.ids}
        self.story: list[str] = []
        self.refuses: set[int] = set()
        """Nodes that end at their start until they are wiped."""
        self._directory = directory
        places = {
            key: PartitionView(leader, self.copies()[key], self.copies()[key])
            for key, leader in LEADERS.items()
        }
        self.operated = FakeOperator(places, lambda: self.down | self.paused)

    @property
    def operator(self) -> FakeOperator:
        return self.operated

    @property
    def links(self) -> Links:
        return self.noted

    def direct(self, node_id: int) -> str:
        return f"127.0.0.1:{node_id}"

    def http(self, node_id: int) -> str:
        return f"127.0.0.1:{node_id}"

    def kill(self, node_id: int) -> None:
        self._do("kill", node_id)
        self.down.add(node_id)

    def stop(self, node_id: int) -> None:
        self._do("stop", node_id)
        self.down.add(node_id)

    def pause(self, node_id: int) -> None:
        self._do("pause", node_id)
        self.paused.add(node_id)

    def resume(self, node_id: int) -> None:
        self.paused.discard(node_id)

    def restart(self, node_id: int) -> None:
        if node_id in self.refuses:
            raise InternalError("ended at its start")
        if node_id in self.down:
            self._do("restart", node_id)
            self.down.discard(node_id)

    def wipe(self, node_id: int) -> None:
        assert node_id in self.down
        self._do("wipe", node_id)
        self.refuses.discard(node_id)

    def is_running(self, node_id: int) -> bool:
        return node_id not in self.down

    def directory(self, node_id: int) -> Path:
        return self._directory / f"node-{node_id}"

    def disk(self, node_id: int) -> DisturbedDisk:
        return self.disks[node_id]

    def shift_clock(self, node_id: int, seconds: float) -> None:
        self.clocks[node_id] = seconds

    def leader(self, topic: str, partition: int) -> int | None:
        return LEADERS.get((topic, partition))

    def leaders(self) -> Mapping[tuple[str, int], int]:
        return LEADERS

    def copies(self) -> Mapping[tuple[str, int], tuple[int, ...]]:
        count = len(self.ids)
        return {
            place: tuple(sorted((leader + more - 1) % count + 1 for more in range(3)))
            for place, leader in LEADERS.items()
        }

    def controller(self) -> int | None:
        return CONTROLLER

    def _do(self, what: str, node_id: int) -> None:
        self.story.append(f"{what} {node_id}")

    @property
    def is_whole(self) -> bool:
        wrong = (self.down, self.paused, self.noted.now, *(one.now for one in self.disks.values()))
        return not any(wrong) and not any(self.clocks.values())


@pytest.fixture(autouse=True)
def _short_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is at the end of these links, so nobody has to be told slowly."""
    monkeypatch.setattr(expansion, "DELAY_MS", 1)


@pytest.fixture
def world(tmp_path: Path) -> NotedWorld:
    made = NotedWorld(tmp_path)
    for node_id in made.ids:
        fill(made.directory(node_id))
    return made


def fill(directory: Path) -> None:
    """What the directory of a node has."""
    data = directory / "logs" / "orders-1" / "0" / "data"
    data.mkdir(parents=True)
    for first in (0, 100, 200):
        (data / f"{first:020}.log").write_bytes(bytes(1000))
        (data / f"{first:020}.index").write_bytes(bytes(50))
    (data.parent / "producers-200.snapshot").write_bytes(bytes(40))
    (directory / "raft").mkdir()
    (directory / "raft" / "journal").write_bytes(bytes(500))


def files(directory: Path) -> dict[str, bytes]:
    return {str(one): one.read_bytes() for one in directory.rglob("*") if one.is_file()}


EVERY: list[Fault] = [
    Kill(), Kill("controller"), KillMany(), KillMany(2), RollingRestart(gap_s=0), Pause(), Wipe(),
    RollingRestart(hard=True, gap_s=0), Isolate(), Isolate(clients=True), OneWay(),
    OneWay(mute=True), Split(), MajoritiesRing(), Bridge(), Swizzle(gap_s=0), Latency(),
    BridgeBesideCopies(), Bandwidth(), ResetStorm(gap_s=0), Slicer(), LimitData(), BlackHole(),
    BlackHole(None), Refuse(), Refuse(silent=True),
    PowerCut(), PowerCut(None), PowerCut(torn=True), BadDisk(trouble="full"),
    BadDisk(trouble="failing writes"), BadDisk(trouble="failing syncs"),
    BadDisk(trouble="slow syncs"), BadDisk(None, trouble="slow syncs"), ClockBump(),
    ClockBump(None),
    ClockStrobe(gap_s=0), BitFlip(), BitFlip(kind="metadata"), BitFlip(live=True), Truncate(),
    Remove(), OldCopy(), SplitAtExpansion(), MoveAway(), MoveAway(count=2), MoveAway(back=False),
    MoveToAndFro(), MoveToAndFro(slow_s=0.01, kills=True), AlterTopics(gap_s=0), GrowTopics(),
    OtherTopics(),
]  # fmt: skip


@pytest.mark.parametrize("fault", EVERY, ids=lambda one: one.name)
def test_a_healed_fault_leaves_a_whole_world_and_can_be_healed_twice(
    world: NotedWorld, fault: Fault
) -> None:
    played: World = world
    mine = deepcopy(fault)
    mine.heal(played)
    assert mine.inject(played)
    mine.heal(played)
    mine.heal(played)
    assert world.is_whole
    assert mine.name == fault.name
    assert mine.needs <= world.abilities


@pytest.mark.parametrize("fault", EVERY, ids=lambda one: one.name)
def test_the_same_seed_gives_the_same_fault(tmp_path: Path, fault: Fault) -> None:
    told = []
    for number in range(2):
        world = NotedWorld(tmp_path / str(number), seed=5)
        for node_id in world.ids:
            fill(world.directory(node_id))
        mine = deepcopy(fault)
        told.append((mine.inject(world), dict(world.noted.now), list(world.story)))
    assert told[0] == told[1]


def test_names_of_faults_tell_them_apart() -> None:
    names = [one.name for one in EVERY if one.name != "bit flip in old segment of follower"]
    assert len(set(names)) == len(names)


def test_roles_are_those_of_the_moment(world: NotedWorld) -> None:
    assert choose(world, "controller") == CONTROLLER
    assert {choose(world, "leader") for _ in range(50)} == {2, 3}
    assert {choose(world, "leader", "orders") for _ in range(20)} == {3}
    assert {choose(world, "follower", "orders") for _ in range(50)} == {1, 2, 4, 5}
    assert choose(world, 4) == 4
    world.down = {1, 2, 3}
    assert {choose(world, "leader") for _ in range(50)} == {4, 5}
    assert {choose(world, "controller") for _ in range(50)} == {4, 5}


def test_an_isolated_node_is_cut_off_from_all_peers_and_clients_reach_it(
    world: NotedWorld,
) -> None:
    Isolate(3).inject(world)
    peers = [1, 2, 4, 5]
    assert set(world.noted.now) == {(3, one) for one in peers} | {(one, 3) for one in peers}
    Isolate(3, clients=True).inject(world)
    assert (0, 3) in world.noted.now


def test_a_deaf_node_is_heard_and_a_mute_one_hears(world: NotedWorld) -> None:
    OneWay(3).inject(world)
    assert world.noted.now[3, 1] == ["timeout down"]
    assert world.noted.now[1, 3] == ["timeout up"]
    world.noted.heal()
    OneWay(3, mute=True).inject(world)
    assert world.noted.now[3, 1] == ["timeout up"]
    assert world.noted.now[1, 3] == ["timeout down"]


@pytest.mark.parametrize(("silent", "what"), [(False, "refuse"), (True, "cut")])
def test_a_node_that_nobody_connects_to_reaches_all_itself(
    world: NotedWorld, silent: bool, what: str
) -> None:
    Refuse(3, silent=silent).inject(world)
    assert world.noted.now == {(one, 3): [what] for one in (1, 2, 4, 5, 0)}


@pytest.mark.parametrize("nodes", [4, 5, 6, 7, 9])
def test_in_a_ring_every_node_sees_a_majority_and_no_two_see_the_same(
    tmp_path: Path, nodes: int
) -> None:
    world = NotedWorld(tmp_path, nodes)
    MajoritiesRing().inject(world)
    seen = [
        frozenset(b for b in world.ids if a == b or (a, b) not in world.noted.now)
        for a in world.ids
    ]
    assert all(len(one) > nodes // 2 for one in seen)
    assert len(set(seen)) == nodes


def test_in_a_ring_of_three_each_hears_one_other(tmp_path: Path) -> None:
    world = NotedWorld(tmp_path, 3)
    MajoritiesRing().inject(world)
    for node_id in world.ids:
        others = [one for one in world.ids if one != node_id]
        heard = [one for one in others if "timeout down" not in world.noted.now[node_id, one]]
        assert len(heard) == 1


@pytest.mark.parametrize("nodes", [3, 5])
def test_a_split_leaves_its_target_in_a_minority(tmp_path: Path, nodes: int) -> None:
    world = NotedWorld(tmp_path, nodes)
    Split(2).inject(world)
    seen = [one for one in world.ids if one == 2 or (2, one) not in world.noted.now]
    assert len(seen) <= nodes // 2


def test_over_a_bridge_all_see_one_node_and_each_half_itself(world: NotedWorld) -> None:
    Bridge(4).inject(world)
    assert not any(4 in pair for pair in world.noted.now)
    assert len(world.noted.now) == 8


@pytest.mark.parametrize("seed", range(10))
def test_a_bridge_beside_copies_parts_a_leader_from_all_its_followers(
    tmp_path: Path, seed: int
) -> None:
    world = NotedWorld(tmp_path, seed=seed)
    fault = BridgeBesideCopies()
    fault.inject(world)
    cut = world.noted.now
    lonely = [
        leader
        for place, leader in LEADERS.items()
        if all(one == leader or (leader, one) in cut for one in world.copies()[place])
    ]
    assert lonely
    assert len(cut) == 8


@pytest.mark.parametrize("seed", range(10))
def test_a_split_at_an_expansion_parts_all_other_copies_from_controller_and_follower(
    tmp_path: Path, seed: int
) -> None:
    world = NotedWorld(tmp_path, seed=seed)
    SplitAtExpansion("orders").inject(world)
    # orders is on 3, 4 and 5, and led by 3: one of the two others was let in again.
    (follower,) = [one for one in (4, 5) if (one, 3) in world.noted.now]
    small = {3, 4, 5} - {follower}
    assert set(world.noted.now) == {
        pair for a in small for b in {1, 2, follower} for pair in ((a, b), (b, a))
    }
    late = [pair for pair, how in world.noted.now.items() if how[0].startswith("latency")]
    assert set(late) == {pair for a in small for pair in ((a, CONTROLLER), (CONTROLLER, a))}
    assert all("cut" in how for how in world.noted.now.values())
    assert not world.paused


def test_partitions_are_moved_away_from_their_leaders_and_back(world: NotedWorld) -> None:
    before = world.operator.partitions()
    fault = MoveAway("orders")
    fault.inject(world)
    for key, place in world.operator.partitions().items():
        if key[0] == "orders":
            assert 3 not in place.replicas
            assert len(place.replicas) == 3
    fault.heal(world)
    assert {key: one.replicas for key, one in world.operator.partitions().items()} == {
        key: one.replicas for key, one in before.items()
    }


def test_where_no_node_is_to_spare_a_copy_is_given_up_for_a_while(tmp_path: Path) -> None:
    world = NotedWorld(tmp_path, 3)
    fault = MoveAway("jobs")
    fault.inject(world)
    assert len(world.operator.partitions()["jobs", 0].replicas) == 2
    fault.heal(world)
    assert len(world.operator.partitions()["jobs", 0].replicas) == 3


def test_a_copy_goes_away_and_comes_back_first_and_the_leader_dies_then(world: NotedWorld) -> None:
    """1. A follower that is not the controller is slow and loses its copy.
    2. It gets it back, as the preferred leader.
    3. When it is in sync the leader is killed, and comes back when another leads.
    """
    fault = MoveToAndFro("orders", rounds=1, slow_s=0.01, kills=True)
    fault.inject(world)
    away, back = (one.split(" to ")[1] for one in world.operator.story)
    (moved,) = [one for one in (4, 5) if str(one) not in away]
    assert back.startswith(f"({moved}, ")
    assert not world.disks[moved].now
    assert world.story == ["kill 3", "restart 3"]


def test_settings_are_as_before_when_a_change_of_topics_is_healed(world: NotedWorld) -> None:
    fault = AlterTopics(times=3, gap_s=0)
    fault.inject(world)
    assert world.operator.config["orders"]["fsync"] == "interval"
    fault.heal(world)
    assert world.operator.config["orders"] == {"fsync": "always", "retention_ms": 7}


def test_topics_of_nobody_are_gone_when_healed_and_others_keep_what_they_got(
    world: NotedWorld,
) -> None:
    other = OtherTopics()
    other.inject(world)
    assert len(world.operator.config) == 4
    GrowTopics().inject(world)
    other.heal(world)
    assert set(world.operator.config) == {"jobs", "orders"}
    grown = {name: sum(key[0] == name for key in world.operator.partitions()) for name in ("jobs",)}
    assert grown == {"jobs": 2}


def test_damage_goes_to_the_right_files_of_one_node(world: NotedWorld) -> None:
    before = files(world.directory(1))
    told = BitFlip(kind="old segment", who=1).inject(world)
    after = files(world.directory(1))
    changed = [one for one in before if before[one] != after[one]]
    assert len(changed) == 2, told
    assert all(one.endswith((f"{0:020}.log", f"{100:020}.log")) for one in changed)
    assert all(len(after[one]) == 1000 for one in changed)
    assert world.story == ["kill 1", "restart 1"]
    assert files(world.directory(2)) != {}


def test_damage_of_a_running_node_does_not_stop_it(world: NotedWorld) -> None:
    Truncate(kind="index", who=1, live=True).inject(world)
    assert world.story == []
    sizes = [one.stat().st_size for one in find(world.directory(1), "index")]
    assert any(size < 50 for size in sizes) or len(sizes) < 3


def test_only_a_node_with_damaged_metadata_is_replaced(world: NotedWorld) -> None:
    """A node that refuses to start with damaged metadata says what to do, and that is done."""
    fault = BitFlip(kind="metadata", who=1)
    fault.inject(world)
    world.refuses = {1}
    fault.heal(world)
    assert world.story == ["kill 1", "wipe 1", "restart 1"]

    other = BitFlip(kind="index", who=2)
    other.inject(world)
    world.kill(2)
    world.refuses = {2}
    with pytest.raises(InternalError):
        other.heal(world)


def test_an_old_copy_takes_the_place_of_what_was_written_since(world: NotedWorld) -> None:
    logs = world.directory(1) / "logs"
    before = files(logs)
    fault = OldCopy(1)
    fault.inject(world)
    (logs / "orders-1" / "0" / "data" / f"{300:020}.log").write_bytes(b"new")
    (logs / "orders-1" / "0" / "data" / f"{200:020}.log").write_bytes(b"more")
    fault.heal(world)
    assert files(logs) == before
    assert world.story == ["kill 1", "restart 1", "kill 1", "restart 1"]


def test_without_toxiproxy_links_say_what_is_missing() -> None:
    links = NoLinks()
    with pytest.raises(ConfigError, match="make tools"):
        links.cut([(1, 2)])
    with pytest.raises(ConfigError, match="make tools"):
        links.refuse([(1, 2)])
    with pytest.raises(ConfigError, match="make tools"):
        links.toxic([(1, 2)], "latency")
    links.heal()
