"""Raft nodes on a virtual clock, a network of lists and simulated disks, all from one seed.

`Sim` runs whole clusters under faults and checks the invariants after every event. `Bench` is one
node driven by hand: messages go in one by one, and what it sends is collected.
"""

import heapq
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack
from simdisk import SimCrash, SimDisk

from raftq.client.common.errors import RaftqError
from raftq.cluster.raft import messages as raft_messages
from raftq.cluster.raft.applied import REGULAR, Applied, Applier, envelope
from raftq.cluster.raft.config import RaftLimits, RaftTimes
from raftq.cluster.raft.journal import RaftJournal
from raftq.cluster.raft.library import LEADER, Node, Transport
from raftq.cluster.raft.node import RaftNode, RaftSetup
from raftq.cluster.raft.proposals import Proposal
from raftq.cluster.raft.snapshot import Snapshots

DIRECTORY = "/raft"
SMALL = RaftLimits(
    compact_entries=40, keep_entries=5, recent_ids=5000, batch_bytes=2000, chunk_bytes=30_000
)


class Machine:
    """The replicated state: the commands themselves, in order."""

    def __init__(self) -> None:
        self.commands: list[bytes] = []

    def apply(self, command: bytes, index: int) -> Any:
        self.commands.append(command)
        return len(self.commands)

    def snapshot(self) -> bytes:
        packed: bytes = msgpack.packb(self.commands)
        return packed

    def restore(self, data: bytes) -> None:
        self.commands = msgpack.unpackb(data)


class FakeTransport(Transport):  # type: ignore[misc]
    unsettled = False

    def __init__(self, owner: Any, me: Node, others: Any, sink: Callable[..., None]) -> None:
        super().__init__(owner, me, others)
        self._me = me.id
        self._sink = sink

    def send(self, node: Node, message: raft_messages.RaftMessage) -> bool:
        self._sink(self._me, node.id, raft_messages.encode(message))
        return True

    def backlog(self, node: Node) -> int:
        return 0

    def tick(self, now: float) -> None:
        pass


def build(
    node_id: str,
    others: list[str],
    disk: SimDisk,
    machine: Any,
    sink: Callable[..., None],
    clock: Callable[[], float],
    rng: Random,
    limits: RaftLimits = SMALL,
    **hooks: Any,
) -> RaftNode:
    return RaftNode(
        RaftSetup(
            node_id=node_id,
            others=others,
            times=RaftTimes(),
            limits=limits,
            journal=RaftJournal.open(disk, DIRECTORY),
            snapshots=Snapshots(disk, DIRECTORY),
            applier=Applier(machine, limits.recent_ids, limits.recent_result_bytes),
            transport=lambda owner, me, nodes: FakeTransport(owner, me, nodes, sink),
            clock=clock,
            rng=rng,
            **hooks,
        )
    )


def command(number: int, floor: int = 0) -> tuple[bytes, bytes]:
    """(id, entry) of a command that is its own number."""
    name = number.to_bytes(16, "big")
    return name, envelope(REGULAR, name, floor, b"%d" % number)


class Bench:
    """One node by hand; `sent` collects (target, message) of everything it sends."""

    def __init__(
        self,
        node_id: str = "a",
        others: tuple[str, ...] = ("b", "c"),
        disk: SimDisk | None = None,
        limits: RaftLimits = SMALL,
        machine: Any = None,
        ready: bool = True,
    ) -> None:
        self.now = 100.0
        self.disk = disk or SimDisk()
        self.machine = machine or Machine()
        self.sent: list[tuple[str, raft_messages.RaftMessage]] = []
        self.answers: dict[int, tuple[Any, RaftqError | None]] = {}
        self.changes: list[Applied] = []
        self.node = build(
            node_id,
            list(others),
            self.disk,
            self.machine,
            lambda source, target, data: self.sent.append((target, raft_messages.decode(data))),
            lambda: self.now,
            Random(1),
            limits,
            on_applied=self.changes.append,
        )
        if ready and not self.node.journal.may_vote:
            self.node.journal.set_may_vote()
        for peer in self.node.peers.values():
            self.node.transport._onNodeConnected(peer)

    def give(self, source: str, kind: str, **fields: Any) -> None:
        data = msgpack.packb({"type": kind, **fields})
        self.node.transport._onMessageReceived(Node(source), raft_messages.decode(data))

    def append(
        self, source: str, term: int, prev: tuple[int, int], entries: list[Any], commit: int = 1
    ) -> None:
        self.give(
            source,
            "append_entries",
            term=term,
            prev_index=prev[0],
            prev_term=prev[1],
            commit_index=commit,
            entries=entries,
        )

    def step(self, seconds: float = 0.0) -> list[tuple[str, dict[str, Any]]]:
        """Run one round; what it sent."""
        self.now += seconds
        self.sent.clear()
        self.node.step()
        return list(self.sent)

    def pass_time(self, seconds: float) -> list[tuple[str, dict[str, Any]]]:
        """Rounds of 20 ms; everything sent in them."""
        found = []
        for _ in range(round(seconds / 0.02)):
            found += self.step(0.02)
        return found

    def lead(self) -> int:
        """Win an election with the vote of b; the term."""
        for _ in range(200):
            if self.step(0.02) and self.node._pre_votes:
                break
        term = self.node.term_now + 1
        self.give("b", "pre_vote_reply", term=term - 1, for_term=term, granted=True)
        self.step()
        self.give("b", "response_vote", term=term, granted=True)
        self.step()
        assert self.node.state == LEADER
        return term

    def ack(self, source: str, term: int, index: int, success: bool = True) -> None:
        self.give(source, "next_node_idx", term=term, success=success, index=index)

    def propose(self, number: int, timeout: float = 5.0, entry: bytes | None = None) -> None:
        name, made = command(number, self.node.commit)

        def answer(result: Any, error: RaftqError | None) -> None:
            assert number not in self.answers or number < 0
            self.answers[number] = (result, error)

        self.node.inbox.append(Proposal(name, entry or made, self.now + timeout, answer))

    def restart(self, disk: SimDisk | None = None, **settings: Any) -> "Bench":
        self.disk.locked.clear()
        return Bench(
            self.node.setup.node_id,
            tuple(self.node.setup.others),
            disk or self.disk.kill(),
            ready=False,
            **settings,
        )


class Sim:
    """A cluster under random faults. Every draw comes from the seed."""

    def __init__(self, seed: int, size: int = 3) -> None:
        self.seed = seed
        self.rng_network = Random(f"network {seed}")
        self.rng_faults = Random(f"faults {seed}")
        self.rng_work = Random(f"work {seed}")
        self.now = 1.0
        self.ids = [chr(ord("a") + one) for one in range(size)]
        self.disks = {one: SimDisk(seed * 7 + place) for place, one in enumerate(self.ids)}
        self.nodes: dict[str, RaftNode] = {}
        self.machines: dict[str, Machine] = {}
        self.up: set[str] = set()
        self.links: dict[tuple[str, str], int] = {}
        self.cut: set[tuple[str, str]] = set()
        self.wires: list[tuple[float, int, str, str, bytes, int]] = []
        self.fifo: dict[tuple[str, str], float] = {}
        self.count = 0
        self.loss = 0.0
        self.duplicates = 0.0
        self.reorder = 0.0
        self.next_command = 0
        self.acknowledged: dict[int, Any] = {}
        self.outcomes: dict[int, RaftqError | None] = {}
        self.leaders: dict[int, str] = {}
        self.order: dict[int, bytes] = {}
        self.terms: dict[str, int] = dict.fromkeys(self.ids, 0)
        self.commits: dict[str, int] = {}
        self.crashes = 0
        self.trace: list[str] = []
        for one in self.ids:
            self.start(one)

    # Nodes.

    def start(self, one: str) -> None:
        machine = self.machines[one] = Machine()
        self.disks[one].locked.clear()
        try:
            self.nodes[one] = build(
                one,
                [other for other in self.ids if other != one],
                self.disks[one],
                machine,
                self.send,
                lambda: self.now,
                Random(f"{one} {self.seed} {self.crashes}"),
                on_applied=lambda applied: self.on_applied(one, applied),
            )
        except SimCrash:
            self.crash(one)
            return
        self.up.add(one)
        self.commits[one] = 0
        for other in self.ids:
            if other in self.up and other != one:
                self.reconnect(one, other)

    def crash(self, one: str, power: bool = True) -> None:
        self.crashes += 1
        self.up.discard(one)
        old = self.disks[one]
        self.disks[one] = old.crash(self.rng_faults) if power else old.kill()
        if one in self.nodes:
            self.nodes[one].proposals.stop(RaftqError("crashed"))
        self.trace.append(f"{self.now:.3f} crash {one}")
        for other in self.ids:
            self.disconnect(one, other)

    def guarded(self, one: str, call: Callable[[], Any]) -> None:
        try:
            call()
        except SimCrash:
            self.crash(one)

    # Network.

    def disconnect(self, one: str, other: str) -> None:
        pair = (min(one, other), max(one, other))
        if self.links.pop(pair, None) is not None:
            for me, peer in ((one, other), (other, one)):
                if me in self.up:
                    node = self.nodes[me]
                    self.guarded(
                        me, lambda n=node, p=peer: n.transport._onNodeDisconnected(n.peers[p])
                    )

    def reconnect(self, one: str, other: str) -> None:
        pair = (min(one, other), max(one, other))
        if pair in self.links or pair in self.cut or one not in self.up or other not in self.up:
            return
        self.count += 1
        self.links[pair] = self.count
        for me, peer in (pair, pair[::-1]):
            node = self.nodes[me]
            node.transport._onNodeConnected(node.peers[peer])

    def send(self, source: str, target: str, data: bytes) -> None:
        pair = (min(source, target), max(source, target))
        link = self.links.get(pair)
        if link is None or self.rng_network.random() < self.loss:
            return
        copies = 2 if self.rng_network.random() < self.duplicates else 1
        for _ in range(copies):
            at = self.now + self.rng_network.uniform(0.0005, 0.02)
            if self.rng_network.random() < self.reorder:
                at += self.rng_network.uniform(0, 0.3)
            else:
                at = max(at, self.fifo.get((source, target), 0.0))
                self.fifo[(source, target)] = at
            self.count += 1
            heapq.heappush(self.wires, (at, self.count, source, target, data, link))

    # Events.

    def run(self, seconds: float, work: float = 0.0) -> None:
        """Let time pass; `work` is the number of proposals per second."""
        end = self.now + seconds
        while self.now < end:
            until = self.now + 0.02
            while self.wires and self.wires[0][0] <= until:
                at, _, source, target, data, link = heapq.heappop(self.wires)
                self.now = max(self.now, at)
                pair = (min(source, target), max(source, target))
                if target in self.up and self.links.get(pair) == link:
                    self.deliver(source, target, data)
            self.now = until
            for one in self.ids:
                if one in self.up:
                    self.step(one)
            if self.rng_work.random() < work * 0.02:
                self.propose()

    def deliver(self, source: str, target: str, data: bytes) -> None:
        node = self.nodes[target]
        message = raft_messages.decode(data)
        self.trace.append(f"{self.now:.3f} {source}>{target} {message.__struct_config__.tag}")
        self.guarded(target, lambda: node.transport._onMessageReceived(Node(source), message))
        # Several messages may share one round and one sync, as they do on a real poller.
        if target in self.up and self.rng_network.random() < 0.7:
            self.step(target)

    def step(self, one: str) -> None:
        self.guarded(one, self.nodes[one].step)
        self.check(one)

    def propose(self) -> None:
        up = sorted(self.up)
        if not up:
            return
        self.next_command += 1
        number = self.next_command
        name, entry = command(number)
        for one in self.rng_work.sample(up, 1 if self.rng_work.random() < 0.8 else len(up)):
            # The same command through several nodes is a client that retries too early.
            self.nodes[one].inbox.append(
                Proposal(
                    name,
                    entry + b"x" * self.rng_work.choice((0, 0, 10, 300)),
                    self.now + 2.0,
                    lambda result, error: self.on_answer(number, result, error),
                )
            )

    # Invariants.

    def on_answer(self, number: int, result: Any, error: RaftqError | None) -> None:
        self.outcomes[number] = error
        if error is None:
            assert self.acknowledged.setdefault(number, result) == result, f"two results: {number}"

    def on_applied(self, one: str, applied: Applied) -> None:
        known = self.order.setdefault(applied.index, applied.command_id)
        assert known == applied.command_id, f"{one} applied something else at {applied.index}"

    def check(self, one: str) -> None:
        if one not in self.up:
            return
        node = self.nodes[one]
        if node.state == LEADER:
            assert self.leaders.setdefault(node.term_now, one) == one, f"two in {node.term_now}"
        assert node.term_now >= self.terms[one] or node.journal.dirty, "the term went back"
        if not node.journal.dirty:
            self.terms[one] = node.term_now
        assert node.commit >= self.commits[one], "the commit index went back"
        self.commits[one] = node.commit
        assert node.applied <= node.commit <= node.journal.last_index

    def leader(self) -> str | None:
        found = [one for one in self.up if self.nodes[one].state == LEADER]
        return max(found, key=lambda one: self.nodes[one].term_now) if found else None

    def heal(self) -> None:
        self.loss = self.duplicates = self.reorder = 0.0
        self.cut.clear()
        for one in self.ids:
            self.disks[one].crash_at = None
            if one not in self.up:
                self.start(one)
        for one in self.ids:
            for other in self.ids:
                if one < other:
                    self.reconnect(one, other)

    def verdict(self) -> None:
        """After heal: progress, the same sequence everywhere, nothing lost, nothing twice."""
        self.heal()
        self.run(6.0)
        before = self.next_command
        for _ in range(5):
            self.propose()
        self.run(4.0)
        for number in range(before + 1, self.next_command + 1):
            assert self.outcomes.get(number, "none") is None, f"no progress: {number}"
        states = [self.machines[one].commands for one in self.ids]
        assert all(state == states[0] for state in states), "the replicas differ"
        numbers = [int(one.rstrip(b"x")) for one in states[0]]
        assert len(set(numbers)) == len(numbers), "applied twice"
        for number, place in self.acknowledged.items():
            assert numbers[place - 1] == number, f"acknowledged and lost: {number}"
