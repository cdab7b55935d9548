"""The groups of a coordinator, without a coordinator: requests and time in, records out."""

from random import Random
from typing import Any

import pytest

from raftq.client.common.errors import (
    ConfigError,
    FencedGeneration,
    GroupNotEmpty,
    InvalidArgument,
    Throttled,
    UnknownGroup,
)
from raftq.client.wire.group_messages import GroupHeartbeat, Owned
from raftq.cluster.groups.groups import Groups, GroupsConfig
from raftq.cluster.groups.records import (
    Beat,
    MemberGone,
    Retargeted,
    SnapshotBegun,
    SnapshotEnded,
    pack,
    unpack,
)

TOPICS = {"t": 4, "u": 2, "t.dlq": 1, "__groups": 8}


class Bench:
    """A coordinator's groups, and the members of `g`."""

    def __init__(self, **config: int) -> None:
        self.config = GroupsConfig(**config)
        self.core = Groups(self.config, Random(1))
        self.core.start(TOPICS, 0.0)
        self.now = 100.0
        self.written: list[bytes] = []
        self.epochs: dict[str, int] = {}
        self.generations: dict[str, int] = {}
        self.owned: dict[str, tuple[int, ...]] = {}

    def beat(self, name: str, **fields: Any) -> dict[tuple[str, int], int]:
        """A heartbeat of a member that then does what it is told."""
        facts: dict[str, Any] = {
            "member_id": name,
            "member_epoch": self.epochs.get(name, 0),
            "generation": self.generations.get(name, 0),
            "topics": ("t",),
            "owned": tuple(Owned("t", number) for number in self.owned.get(name, ())),
            **fields,
        }
        member_id = self.core.heartbeat(GroupHeartbeat("g", **facts), "host", self.now)
        self.write()
        view = self.core.view("g", member_id)
        assert view is not None
        self.epochs[name], self.generations[name] = view.member_epoch, view.generation
        self.owned[name] = tuple(number for topic, number, _ in view.assigned if topic == "t")
        return {(topic, number): epoch for topic, number, epoch in view.assigned}

    def write(self) -> list[Any]:
        records, _ = self.core.take()
        self.written += [pack(record) for record in records]
        return records

    def later(self, seconds: float) -> list[Any]:
        """Time passes, with every tick that is due."""
        until = self.now + seconds
        found = []
        while (deadline := self.core.next_deadline()) is not None and deadline <= until:
            self.now = max(self.now, deadline)
            self.core.tick(self.now)
            found += self.write()
        self.now = until
        return found

    def successor(self) -> Groups:
        core = Groups(self.config, Random(2))
        for record in self.written:
            core.restore(unpack(record))
        return core

    @property
    def group(self) -> Any:
        return self.core.groups["g"]


def test_one_member_gets_everything_at_once() -> None:
    bench = Bench()
    assert bench.beat("a") == {("t", number): 1 for number in range(4)}
    assert bench.group.phase == "stable"


def test_a_second_member_gets_its_share_when_the_first_has_let_go() -> None:
    bench = Bench()
    bench.beat("a")
    bench.later(1)
    assert bench.beat("b") == {}
    view = bench.core.view("g", "b")
    assert view is not None
    assert view.pending
    assert bench.group.phase == "rebalancing"
    kept = bench.beat("a")
    assert list(kept.values()) == [1, 1]
    assert bench.beat("b") == {}
    assert bench.beat("a") == kept
    given = bench.beat("b")
    assert list(given.values()) == [2, 2]
    assert not {*given} & {*kept}
    assert bench.group.phase == "stable"


def test_generations_that_went_back_are_recognised_and_everything_is_given_anew() -> None:
    """
    1. Two members share; a partition refuses one of them because of an epoch that is known to it.
    2. Epochs of this group's own generations are the ordinary fate of who lost a partition.
    3. A higher one means that generations were lost: all that is owned gets an epoch above it.
    """
    bench = Bench()
    for _ in range(3):
        bench.beat("a")
        bench.beat("b")
        bench.later(1)
    mine, others = bench.beat("a"), bench.beat("b")
    generation = bench.group.generation
    assert bench.beat("a", fenced_by=generation) == mine
    given = bench.beat("a", fenced_by=90)
    assert given == dict.fromkeys(mine, 91)
    assert bench.beat("b") == dict.fromkeys(others, 91)
    assert bench.beat("b", fenced_by=90) == dict.fromkeys(others, 91)
    bench.group.ownership.check()
    successor = bench.successor()
    assert successor.groups["g"].kept() == bench.group.kept()
    bench.later(1)
    bench.core.leave("g", "b", 0, bench.now)
    bench.later(1)
    assert sorted(bench.beat("a").values()) == [91, 91, 92, 92]
    assert bench.beat("a", fenced_by=(1 << 62)) == bench.beat("a")


def test_many_joins_share_a_target() -> None:
    bench = Bench(target_ms=300)
    retargeted = 0
    for at in range(200):
        bench.beat(f"m{at}")
        bench.later(0.05)
    bench.later(1)
    retargeted = sum(isinstance(unpack(one), Retargeted) for one in bench.written)
    assert 30 <= retargeted <= 36
    assert bench.group.generation == retargeted


def test_a_session_that_ends_frees_what_the_member_had() -> None:
    bench = Bench()
    bench.beat("a", session_ms=5_000)
    bench.later(1)
    bench.beat("b", session_ms=30_000)
    assert bench.later(3.9) == []
    gone, retargeted = bench.later(0.2)
    assert isinstance(gone, MemberGone)
    assert isinstance(retargeted, Retargeted)
    assert len(bench.beat("b")) == 4
    with pytest.raises(FencedGeneration):
        bench.beat("a")
    bench.epochs.pop("a")
    bench.generations.pop("a")
    bench.later(1)
    assert bench.beat("a") == {}


def test_a_static_member_that_restarts_keeps_its_partitions_and_nobody_else_notices() -> None:
    bench = Bench()
    bench.beat("a", instance_id="one")
    bench.beat("b", instance_id="two")
    bench.later(1)
    for _ in range(3):
        before = bench.beat("a", instance_id="one"), bench.beat("b", instance_id="two")
    bench.later(5)
    records_before = len(bench.written)
    found = bench.beat("b2", instance_id="two")
    assert set(found) == set(before[1])
    assert min(found.values()) > max(before[1].values())
    assert bench.core.view("g", "b").member_epoch == 2  # type: ignore[union-attr]
    assert len(bench.written) == records_before + 1
    assert bench.beat("a", instance_id="one") == before[0]
    with pytest.raises(FencedGeneration):
        bench.beat("b", instance_id="two")
    # Its join asked again, because the answer was lost, is the same process.
    bench.epochs.pop("b2")
    assert bench.beat("b2", instance_id="two") == found
    assert bench.beat("b2", member_id="b", instance_id="two") == found


def test_a_join_that_is_repeated_is_the_same_member() -> None:
    bench = Bench()
    first = bench.beat("a")
    bench.epochs.clear()
    assert bench.beat("a") == first
    assert list(bench.group.members) == ["a"]
    for _ in range(2):
        bench.beat("", client_id="app")
    assert len([one for one in bench.group.members if one.startswith("app-")]) == 2


def test_a_member_may_leave_and_an_older_process_may_not_leave_for_it() -> None:
    bench = Bench()
    bench.beat("a", instance_id="one")
    bench.beat("a2", instance_id="one")
    assert not bench.core.leave("g", "a", 1, bench.now)
    assert not bench.core.leave("g", "b", 0, bench.now)
    assert not bench.core.leave("h", "a", 0, bench.now)
    assert bench.core.leave("g", "a", 2, bench.now)
    assert bench.group.phase == "empty"


def test_topics_patterns_and_partitions_that_come_later() -> None:
    bench = Bench()
    bench.beat("a", topics=("later",), pattern="[tu]|x.*")
    bench.later(1)
    assert {topic for topic, _ in bench.beat("a", topics=(), pattern="")} == {"t", "u"}
    bench.core.set_topics({**TOPICS, "t": 6, "xyz": 1, "later": 1, "xyz.dlq": 3}, bench.now)
    bench.later(1)
    found = bench.beat("a", topics=(), pattern="")
    assert {topic for topic, _ in found} == {"t", "u", "xyz", "later"}
    assert found["t", 0] == 1
    assert found["t", 5] == 2
    generation = bench.group.generation
    bench.core.set_topics({**TOPICS, "t": 6, "xyz": 1, "later": 1, "other": 3}, bench.now)
    bench.later(1)
    assert bench.group.generation == generation, "what nobody wants is no news"
    bench.core.set_topics({"u": 2, "t": 6}, bench.now)
    bench.later(1)
    assert {topic for topic, _ in bench.beat("a", topics=(), pattern="")} == {"t", "u"}
    # Named outright, dead letters are a topic like any other; the cluster's own never are.
    bench.core.set_topics(TOPICS, bench.now)
    found = bench.beat("b", topics=("t.dlq", "__groups"))
    bench.later(1)
    assert set(bench.beat("b", topics=("t.dlq", "__groups"))) == {("t.dlq", 0)}


def test_queue_members_share_all_partitions() -> None:
    bench = Bench()
    everything = {("t", number): 0 for number in range(4)}
    assert bench.beat("a", mode="queue") == everything
    assert bench.beat("b", mode="queue") == everything
    with pytest.raises(InvalidArgument, match="queue mode"):
        bench.beat("c", mode="stream")
    bench.core.leave("g", "a", 0, bench.now)
    bench.core.leave("g", "b", 0, bench.now)
    bench.later(1)
    assert bench.beat("c", mode="stream")
    assert bench.group.mode == "stream"


def test_a_deleted_group_that_comes_back_begins_above_its_old_generation() -> None:
    bench = Bench()
    with pytest.raises(UnknownGroup):
        bench.core.delete("g", bench.now)
    bench.beat("a")
    with pytest.raises(GroupNotEmpty):
        bench.core.delete("g", bench.now)
    bench.core.leave("g", "a", 0, bench.now)
    bench.later(1)
    generation = bench.group.generation
    bench.core.delete("g", bench.now)
    bench.write()
    assert "g" not in bench.core.groups
    bench.core = bench.successor()
    bench.core.start(TOPICS, bench.now)
    bench.epochs.clear()
    assert min(bench.beat("a").values()) > generation


def test_a_successor_knows_everything_and_gives_everybody_a_whole_session() -> None:
    bench = Bench()
    for name in ("a", "b", "c"):
        bench.beat(name, session_ms=10_000)
        bench.later(1)
    bench.beat("a", session_ms=10_000)
    for snapshot in (False, True):
        if snapshot:
            bench.written += [pack(record) for record in bench.core.snapshot()]
        core = bench.successor()
        assert core.snapshot() == bench.core.snapshot()
        core.start(TOPICS, 500.0)
        assert core.take()[0] == []
        core.tick(509.9)
        assert len(core.groups["g"].members) == 3
        core.groups["g"].ownership.check()
    bench.written = bench.written[-3:]
    assert isinstance(unpack(bench.written[0]), SnapshotBegun)
    assert bench.successor().snapshot() == bench.core.snapshot()


def test_half_a_snapshot_is_worth_nothing() -> None:
    bench = Bench()
    bench.beat("a")
    bench.written += [pack(SnapshotBegun(0)), pack(Beat())]
    assert bench.successor().snapshot() == bench.core.snapshot()
    bench.beat("b")
    assert bench.successor().snapshot() == bench.core.snapshot()
    bench.written.append(pack(SnapshotEnded()))
    assert bench.successor().snapshot() == bench.core.snapshot()


def test_a_coordinator_that_was_stopped_does_not_end_the_sessions_it_slept_through() -> None:
    bench = Bench()
    bench.beat("a", session_ms=5_000)
    bench.later(1)
    bench.now += 60
    bench.core.tick(bench.now)
    assert list(bench.group.members) == ["a"]
    bench.later(6)
    assert list(bench.group.members) == []


def test_bounds() -> None:
    bench = Bench(members_max=2, groups_max=2)
    bench.beat("a")
    bench.beat("b")
    with pytest.raises(Throttled):
        bench.beat("c")
    bench.core.heartbeat(GroupHeartbeat("h", "a", topics=("t",)), "", bench.now)
    with pytest.raises(Throttled):
        bench.core.heartbeat(GroupHeartbeat("i", "a", topics=("t",)), "", bench.now)
    for fields in ({"session_ms": 1}, {"pattern": "("}, {"topics": ()}):
        with pytest.raises(InvalidArgument):
            bench.core.heartbeat(
                GroupHeartbeat("h", "b", **{"topics": ("t",), **fields}),  # type: ignore[arg-type]
                "",
                bench.now,
            )
    with pytest.raises(FencedGeneration):
        bench.beat("a", generation=99)
    with pytest.raises(InvalidArgument):
        bench.beat("z", member_id="a", instance_id="x")
    with pytest.raises(ConfigError):
        GroupsConfig(target_ms=0, session_ms_min=10, session_ms_max=5)
