"""One group under faults: the real coordinator, members that behave, a network that does not.

Members keep to the rules of the protocol: they hold a partition from the answer that gives it until
they let go of it, and never beyond a session after they *sent* the last heartbeat that was
answered. They crash, stop for a while, leave, come back, and change their wishes; messages are
lost, repeated and overtaken; coordinators are replaced, and some go on for a while without knowing
it. After every event holds:

    at most one member holds a partition, of those whose session lives by their own clock; of
    processes that share an instance only the last counts, the others are fenced by owner epochs
    every claim of a partition has a higher owner epoch than the one before by another process
    the generations that members are told never go back
"""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

from fake_leadership import FakeLed
from simloop import VirtualTimeLoop

from raftq.client.common.errors import FencedGeneration, NotLeader, RaftqError
from raftq.client.wire.group_messages import (
    GroupHeartbeat,
    GroupHeartbeatReply,
    LeaveGroup,
    Owned,
)
from raftq.cluster.groups.assignment import Slot
from raftq.cluster.groups.group import Group
from raftq.cluster.groups.groups import GroupsConfig
from raftq.node.groups.coordinator import Coordinator

SESSION_S = 2.0
PERIOD_S = 0.4
GROUP = "g"
Answer = Callable[[GroupHeartbeatReply | RaftqError], None]


class Anomaly(AssertionError):
    """The protocol was broken."""


class SimMember:
    """One process that consumes."""

    def __init__(self, world: "GroupWorld", name: str, instance: str = "") -> None:
        self.world = world
        self.loop = world.loop
        self.name = name
        self.instance = instance
        self.rng = Random(f"{world.seed} member {name}")
        self.state = "alive"
        self.paused_until = 0.0
        self.wishes = world.some_wishes(self.rng)
        self.held: dict[Slot, int] = {}
        self.lease_until = 0.0
        self.lives = 0
        self._begin()
        self.loop.call_soon(self.beat)

    @property
    def believes(self) -> bool:
        """Whether it may act on what it holds."""
        return self.state == "alive" and self.loop.time() < self.lease_until

    def _begin(self) -> None:
        """It is no member, and holds nothing."""
        self.lives += 1
        self.member_id = f"{self.name}.{self.lives}"
        self.epoch = 0
        self.generation = 0
        self.assigned: dict[Slot, int] = {}
        self.held.clear()
        self.replaced = False
        """Another process goes on as this member, and it may not know it yet."""

    # What it does.

    def beat(self) -> None:
        if self.state != "alive":
            return
        self.loop.call_later(PERIOD_S * self.rng.uniform(0.7, 1.2), self.beat)
        self.send()

    def send(self) -> None:
        if self.state != "alive" or self.is_paused():
            return
        self.look_at_the_clock()
        topics, pattern = self.wishes
        message = GroupHeartbeat(
            GROUP,
            self.member_id,
            self.epoch,
            self.generation,
            topics=topics,
            pattern=pattern,
            owned=tuple(Owned(*slot) for slot in self.held),
            session_ms=int(SESSION_S * 1000),
            instance_id=self.instance,
            wait_ms=self.rng.choice((0, 0, 300, 2000)),
        )
        life, sent_at = self.lives, self.loop.time()
        self.world.ask(
            lambda found: found.heartbeat(message, self.name),
            lambda answer: self.hear(answer, life, sent_at),
        )

    def is_paused(self) -> bool:
        return self.loop.time() < self.paused_until

    def look_at_the_clock(self) -> None:
        if self.held and not self.believes:
            self.world.trace(f"{self.name} lets go of all: its session is over")
            self.held.clear()

    def hear(self, answer: GroupHeartbeatReply | RaftqError, life: int, sent_at: float) -> None:
        if self.state != "alive" or life != self.lives:
            return
        if self.is_paused():
            self.loop.call_at(self.paused_until, self.hear, answer, life, sent_at)
            return
        self.look_at_the_clock()
        if isinstance(answer, FencedGeneration):
            self.world.trace(f"{self.name} is fenced")
            self._begin()
            self.send()
            return
        now = self.loop.time()
        if isinstance(answer, RaftqError) or now >= sent_at + SESSION_S:
            return
        if answer.member_epoch < self.epoch:
            return
        if answer.member_epoch > self.epoch:
            self.held.clear()  # another process was this member meanwhile
            self.replaced = self.world.epochs.get(self.instance, 0) > answer.member_epoch
        self.lease_until = max(self.lease_until, sent_at + SESSION_S)
        self.epoch, self.member_id = answer.member_epoch, answer.member_id
        if answer.generation < self.generation:
            return
        self.generation = answer.generation
        self.assigned = {(one.topic, one.partition): one.owner_epoch for one in answer.assigned}
        self._do()

    def _do(self) -> None:
        for slot in [slot for slot in self.held if slot not in self.assigned]:
            # A callback, a last store; it may take a while, and the slot may come back meanwhile.
            stubborn = self.rng.random() < 0.5
            self.loop.call_later(
                self.rng.choice((0.0, 0.05, 0.7)), self._let_go, slot, self.lives, stubborn
            )
        for slot, epoch in self.assigned.items():
            if self.held.get(slot) != epoch and self.world.claim(self, slot, epoch):
                self.held[slot] = epoch

    def _let_go(self, slot: Slot, life: int, stubborn: bool) -> None:
        if life != self.lives or slot not in self.held or self.is_paused():
            return
        if slot not in self.assigned or stubborn:
            del self.held[slot]
            self.send()

    # What happens to it.

    def kill(self) -> None:
        self.state = "dead"

    def leave(self) -> None:
        self.held.clear()
        self.state = "left"
        message = LeaveGroup(GROUP, self.member_id, self.epoch)
        self.world.ask(lambda found: found.leave(message), lambda answer: None)


class GroupWorld:
    """The coordinator of one group, its members, and the way between them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.loop = VirtualTimeLoop()
        self.net = Random(f"{seed} net")
        self.chance = Random(f"{seed} faults")
        self.counts = {"a": 4, "b.1": 3, "b.2": 2, "__own": 5}
        self.loss = 0.0
        self.healed = False
        self.members: list[SimMember] = []
        self.claims: dict[Slot, tuple[int, SimMember]] = {}
        self.epochs: dict[str, int] = {}
        self.shared: dict[str, None] = {}
        """Instances that two processes were at the same time: one may leave for the other."""
        self.generation = 0
        self.coordinator: Coordinator | None = None
        self.leadership: FakeLed
        self.zombies: list[Coordinator] = []
        self.takeovers = 0
        self.moves = 0

    def trace(self, text: str) -> None:
        self.loop.trace(text)

    def some_wishes(self, rng: Random) -> tuple[tuple[str, ...], str]:
        return rng.choice(
            [(("a",), ""), (("a", "b.1"), ""), ((), "b.*"), (("a",), "b[.].+"), (("c",), ".*")]
        )

    # Invariants.

    def claim(self, member: SimMember, slot: Slot, epoch: int) -> bool:
        """As the leader of the partition takes a claim, or fences it."""
        known, before = self.claims.get(slot, (0, member))
        if epoch < known or (epoch == known and before is not member):
            if member.replaced or member.instance in self.shared:
                return False
            raise Anomaly(f"{member.name} got {slot} with epoch {epoch}, {before.name} had {known}")
        self.trace(f"{member.name} takes {slot} epoch {epoch}")
        self.moves += before is not member
        self.claims[slot] = (epoch, member)
        return True

    def check(self) -> None:
        if (group := self.group()) is not None:
            group.ownership.check()
            self.epochs = {one.instance_id: one.epoch for one in group.members.values()}
        holders: dict[Slot, SimMember] = {}
        for member in self.members:
            # One that joins does not know yet whether it is replaced.
            if self.epochs.get(member.instance or "-", 0) > member.epoch:
                member.replaced = True
            if member.held and member.believes and not member.replaced:
                for slot in member.held:
                    other = holders.setdefault(slot, member)
                    if other is not member:
                        raise Anomaly(f"{slot} is held by {other.name} and {member.name}")

    def group(self) -> Group | None:
        return None if self.coordinator is None else self.coordinator.core.groups.get(GROUP)

    # The network.

    def delay(self) -> float:
        slow = 0.02 if self.healed else self.net.choice((0.1, self.net.uniform(0, 1.5)))
        return self.net.choice((0.001, 0.003, 0.02, slow))

    def ask(self, request: Callable[[Coordinator], Any], answer: Answer) -> None:
        """Perhaps never, perhaps twice, and perhaps to one that was replaced."""
        found = self.coordinator
        if self.zombies and self.net.random() < 0.4:
            found = self.net.choice(self.zombies)
        times = 0 if self.net.random() < self.loss else 1 + (self.net.random() < self.loss)
        for _ in range(times):
            self.loop.call_later(self.delay(), self._arrive, found, request, answer)

    def _arrive(
        self, found: Coordinator | None, request: Callable[[Coordinator], Any], answer: Answer
    ) -> None:
        if found is None or not found.ready.done():
            return
        try:
            future = request(found)
        except RaftqError as error:
            self._answer(error, answer)
        else:
            future.add_done_callback(lambda future: self._answered(future, answer))

    def _answered(self, future: "asyncio.Future[Any]", answer: Answer) -> None:
        error = future.exception()
        if error is not None:
            assert isinstance(error, RaftqError), error
            self._answer(error, answer)
            return
        reply = future.result()
        if isinstance(reply, GroupHeartbeatReply):
            if reply.generation < self.generation:
                raise Anomaly(f"generation {reply.generation} told after {self.generation}")
            self.generation = reply.generation
        self._answer(reply, answer)

    def _answer(self, reply: Any, answer: Answer) -> None:
        if self.net.random() >= self.loss:
            self.loop.call_later(self.delay(), answer, reply)

    # The coordinator.

    def lead(self, leadership: FakeLed) -> None:
        self.leadership = leadership
        self.takeovers += 1
        self.coordinator = Coordinator(
            leadership,
            GroupsConfig(),
            Random(f"{self.seed} coordinator {self.takeovers}"),
            lambda: 0,
            lambda: dict(self.counts),
            lambda: NotLeader("another node leads"),
            lambda stopped: None,
        )
        self.coordinator.snapshot_bytes_min = self.chance.choice((2_000, 20_000))
        leadership.old_epochs_replicated.set_result(None)

    def replicas_delay(self) -> float:
        return self.net.choice((0.0005, 0.002, 0.03))

    def fail_over(self) -> None:
        """Another node takes over after a moment; this one hears of it sooner or later."""
        before, leadership = self.coordinator, self.leadership
        if before is None:
            return
        self.coordinator = None
        leadership.cut_off = True
        self.zombies.append(before)
        known = leadership.data.high_watermark
        kept = self.chance.randint(known, leadership.data.log.end_offset)
        successor = leadership.successor(kept)
        self.trace(
            f"fails over with {kept} of {leadership.data.log.end_offset}, replicated {known}"
        )
        self.loop.call_later(self.chance.uniform(0.0, 1.0), self.lead, successor)
        self.loop.call_later(self.chance.choice((0.0, 0.5, 5.0)), self._retire, before, leadership)

    def _retire(self, coordinator: Coordinator, leadership: FakeLed) -> None:
        self.zombies.remove(coordinator)
        leadership.end()
        coordinator.stop()

    def change_topics(self) -> None:
        name = self.chance.choice(("a", "b.1", "b.2", "c", "b.3", "b.3.dlq"))
        if self.chance.random() < 0.3 and name in self.counts:
            del self.counts[name]
        else:
            self.counts[name] = self.counts.get(name, 0) + self.chance.randint(1, 3)
        self.trace(f"topics {self.counts}")
        for one in (self.coordinator, *self.zombies):
            if one is not None:
                one.topics_changed()

    # The members.

    def alive(self) -> list[SimMember]:
        return [one for one in self.members if one.state == "alive"]

    def add(self, instance: str = "") -> None:
        self.trace(f"m{len(self.members)} starts {instance}")
        self.members.append(SimMember(self, f"m{len(self.members)}", instance))

    def something_happens(self) -> None:
        chance = self.chance
        one = chance.choice(self.alive()) if self.alive() else None
        what = chance.choice(
            ("join", "join", "kill", "leave", "pause", "wish", "restart", "fail over", "topics",
             "loss", "calm", "twin")
        )  # fmt: skip
        self.trace(f"event {what} {one.name if one else ''}")
        if what == "fail over":
            self.fail_over()
        elif what == "topics":
            self.change_topics()
        elif what in ("loss", "calm"):
            self.loss = chance.choice((0.05, 0.3, 0.8)) if what == "loss" else 0.0
        elif what == "join":
            if len(self.alive()) < 10:
                self.add(chance.choice(("", "", f"i{len(self.members)}")))
        elif one is not None:
            self._happens_to(one, what)

    def _happens_to(self, one: SimMember, what: str) -> None:
        chance = self.chance
        if what == "kill":
            one.kill()
        elif what == "leave":
            one.leave()
        elif what == "pause":
            one.paused_until = self.loop.time() + chance.uniform(0.1, 3 * SESSION_S)
        elif what == "wish":
            one.wishes = self.some_wishes(chance)
        elif one.instance and not (what == "twin" and self._has_twin(one)):
            # Another process goes on as this member; a twin while the one before still runs.
            if what == "restart":
                one.kill()
            else:
                self.shared[one.instance] = None
            wishes = one.wishes
            delay = chance.choice((0.01, SESSION_S / 2, 2 * SESSION_S))
            self.loop.call_later(delay, self._restart, one.instance, wishes)

    def _has_twin(self, one: SimMember) -> bool:
        return sum(other.instance == one.instance for other in self.alive()) > 1

    def _restart(self, instance: str, wishes: tuple[tuple[str, ...], str]) -> None:
        self.add(instance)
        self.members[-1].wishes = wishes

    # From beginning to end.

    async def run(self) -> None:
        self.lead(FakeLed(delay=self.replicas_delay))
        for _ in range(self.chance.randint(1, 6)):
            self.add(self.chance.choice(("", f"i{len(self.members)}")))
        for _ in range(self.chance.randint(10, 30)):
            await asyncio.sleep(self.chance.choice((0.02, 0.3, 1.0, 2.5)))
            self.something_happens()
        self.trace("heals")
        self.loss = 0.0
        self.healed = True
        await asyncio.sleep(5.5)  # until what was begun has happened
        instances = set()
        for one in self.alive()[::-1]:
            one.paused_until = 0.0
            if one.instance and one.instance in instances:
                one.kill()  # of twins, both never come to rest
            instances.add(one.instance)
        if not self.alive():
            self.add()
        await asyncio.sleep(4 * SESSION_S + 3.0)
        self.check_convergence()

    def check_convergence(self) -> None:
        group = self.group()
        assert group is not None
        assert group.phase == "stable", group.ownership.revoked
        alive = {one.member_id: one for one in self.alive()}
        assert sorted(group.members) == sorted(alive), "members are those that live"
        assert self.coordinator is not None
        topics = self.coordinator.core.topics
        wanted = group.wanted(topics)
        found = {slot: one.member_id for one in self.alive() for slot in one.held}
        assert len(found) == sum(len(one.held) for one in self.alive())
        expected = {topic for one in wanted.values() for topic in one}
        assert set(found) == {
            (topic, number) for topic in expected for number in range(self.counts[topic])
        }
        assert all(slot[0] in wanted[member] for slot, member in found.items())
        assert not group.changes(topics), "what is held is the best there is"


def simulate(seed: int, story: bool = False) -> GroupWorld:
    world = GroupWorld(seed)
    if story:
        world.loop.story = []
    asyncio.set_event_loop(world.loop)
    try:
        world.loop.run(world.run(), seconds_max=300.0, after_turn=world.check)
    finally:
        asyncio.set_event_loop(None)
        if world.loop.story is not None:
            print("\n".join(world.loop.story))
        world.loop.end()
    for context in world.loop.unhandled:
        raise context.get("exception") or AssertionError(context["message"])
    return world
