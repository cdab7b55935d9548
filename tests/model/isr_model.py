"""A model of how a partition is replicated, small enough to visit every state of it. (Core.)

What docs/PROTOCOL.md says in words, as a state and the steps that lead out of it. Each rule has
the same name there, in the code and here, and can be taken out: then explorer.py finds the shortest
way to what it prevents. One record is acknowledged at the beginning; what else may happen, and how
often, is bounded by a Scope.

    metadata   a list of what was decided; each node acts on an entry of its own and goes on to a
               later one when it likes, also past several at once
    leader     what its followers told it, the high watermark, the change it has proposed
    follower   the last thing it told; that arrives at any time or never, also when the process
               that said it is gone, or its files are
    command    a proposed change of the isr, decided at any time or never

Acknowledged is what a high watermark has passed. A machine that went down may have lost any part of
its log that was not counted as synced.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

RULES = (
    "epoch", "version", "proposed", "assignment", "resubscribe", "promised", "longest",
    "confirmed", "incarnation",
)  # fmt: skip
NODES = (0, 1, 2)
NOBODY = -1
NONE = (None, None, None)
FALSE = (False, False, False)
Log = tuple[tuple[int, int], ...]  # of (epoch, record)
Members = tuple[int, ...]
Step = tuple[tuple[Any, ...], bool, "State"]
"""What happens, whether it does by itself (no fault, operator or client), and what comes of it."""


class Decided(NamedTuple):
    """One entry of the metadata: the partition and the nodes after a command."""

    epoch: int
    version: int
    leader: int
    replicas: Members
    isr: Members
    target: Members | None
    assignments: tuple[int, ...]  # by node: the version at which it was made a replica, or 0
    incarnations: tuple[int, ...]
    alive: Members
    always: bool  # the topic's fsync setting
    promised: tuple[bool, ...]  # by node: whether it was `always` since that node registered
    told: tuple[tuple[int, int] | None, ...] = NONE  # by node, while no copy is in sync

    def __str__(self) -> str:
        leader = "nobody" if self.leader == NOBODY else self.leader
        return (
            f"epoch={self.epoch} version={self.version} leader={leader} isr={self.isr} "
            f"replicas={self.replicas} assignments={self.assignments}"
        )


class Change(NamedTuple):
    leader: int
    epoch: int
    version: int
    members: tuple[tuple[int, int], ...]  # (node, incarnation)

    def __str__(self) -> str:
        members = tuple(node for node, _ in self.members)
        return f"isr {members} that node {self.leader} made of version {self.version}"


class Said(NamedTuple):
    """A subscription, or the progress since: what a follower has, as which replica."""

    leader: int
    epoch: int
    assignment: int
    incarnation: int
    log: Log

    def __str__(self) -> str:
        place = f"epoch {self.epoch}, assignment {self.assignment}, incarnation {self.incarnation}"
        return f"end {len(self.log)} ({place})"


class Node(NamedTuple):
    up: bool
    incarnation: int
    applied: int  # the entry of the metadata that it acts on
    log: Log
    synced: int  # the part of its log that it has counted as synced
    said: Said | None = None
    high_watermark: int = 0  # this and the rest: of a leader
    epoch_start: int = 0
    followers: tuple[tuple[int, int, int] | None, ...] = NONE  # (assignment, incarnation, end)
    proposed: Change | None = None

    def idle(self) -> "Node":
        return Node(*self[:6])


class Left(NamedTuple):
    """How often each of these may still happen."""

    records: int = 0
    proposals: int = 0
    moves: int = 0
    fences: int = 0
    returns: int = 0
    elections: int = 0
    crashes: int = 0
    tails: int = 0
    wipes: int = 0
    alters: int = 0


class State(NamedTuple):
    metadata: tuple[Decided, ...]
    nodes: tuple[Node, ...]
    commands: frozenset[Change]
    acknowledged: Log
    excused: frozenset[tuple[int, int]]  # records lost with the last copy in sync
    left: Left
    broken: str = ""

    def describe(self) -> str:
        logs = ["".join(f"{'abcdefgh'[one]}{epoch} " for epoch, one in n.log) for n in self.nodes]
        return f"{self.metadata[-1]} logs={logs} acknowledged={len(self.acknowledged)}"


class Scope(NamedTuple):
    left: Left
    min_insync: int = 1
    isr: Members = NODES
    vouches_late: bool = True
    """A process vouches for the log it found (`remember`) only when that is synced."""
    moves_wait: bool = True
    """Moves are refused while no copy is in sync."""


def put(values: tuple[Any, ...], at: int, value: object) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def common_end(one: Log, other: Log) -> int:
    """Up to where two logs have the same epochs."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a[0] != b[0]), min(len(one), len(other)))


class Model:
    """All steps that the rules allow."""

    def __init__(self, scope: Scope, rules: frozenset[str] = frozenset(RULES)) -> None:
        self.scope = scope
        self.tails = scope.left.tails > 0
        self.epoch, self.version, self.proposed = (one in rules for one in RULES[:3])
        self.assignment, self.resubscribe, self.promised = (one in rules for one in RULES[3:6])
        self.longest, self.confirmed, self.incarnation = (one in rules for one in RULES[6:])

    def first(self) -> State:
        isr = self.scope.isr
        d = Decided(1, 1, 0, NODES, isr, None, (1, 1, 1), (1, 1, 1), NODES, False, FALSE)
        logs: list[Log] = [((1, 0),) if n in isr else () for n in NODES]
        nodes = [self.take_up(n, Node(True, 1, 0, logs[n], len(logs[n])), None, d) for n in NODES]
        s = State((d,), tuple(nodes), frozenset(), (), frozenset(), self.scope.left)
        for n in NODES:
            s = self.deliver(s, n) or s
        return self.tidy(s)

    # Parts of a state

    def changed(self, s: State, n: int, node: Node) -> State:
        return s._replace(nodes=put(s.nodes, n, node))

    def leads(self, s: State, n: int) -> bool:
        node = s.nodes[n]
        d = s.metadata[node.applied]
        known = d.incarnations[n] == node.incarnation or not self.incarnation
        return node.up and d.leader == n and known

    def spend(self, s: State, what: str) -> State:
        return s._replace(left=s.left._replace(**{what: getattr(s.left, what) - 1}))

    def floor(self, d: Decided) -> int:
        return min(self.scope.min_insync, len(d.replicas))

    # Metadata

    def decided(self, s: State, after: Decided) -> Iterator[State]:
        """`after` with its move finished if it can be, a leader, the next epoch and version."""
        before = s.metadata[-1]
        replicas, isr, target = after.replicas, after.isr, after.target
        if target and set(target) <= set(isr) and not set(target).isdisjoint(after.alive):
            replicas, isr, target = target, target, None
        candidates = [n for n in isr if n in after.alive] or [NOBODY]
        for leader in [after.leader] if after.leader in candidates else candidates:
            led = leader != before.leader or after.leader != before.leader
            d = after._replace(
                epoch=before.epoch + led, leader=leader, replicas=replicas, isr=isr, target=target,
                told=NONE if isr else after.told,
            )  # fmt: skip
            if d == before:
                continue
            version = before.version + (d[2:6] != before[2:6] or led or d.told != before.told)
            assignments = [(before.assignments[n] or version) * (n in replicas) for n in NODES]
            d = d._replace(version=version, assignments=tuple(assignments))
            yield s._replace(metadata=(*s.metadata, d))

    def decide(self, s: State, command: Change) -> Iterator[State]:
        """A change of the isr: applied, or refused and its proposer told so."""
        d = s.metadata[-1]
        s = s._replace(commands=s.commands - {command})
        members = dict(command.members)
        isr = tuple(n for n in d.replicas if n in members)
        fits = (command.leader, command.epoch) == (d.leader, d.epoch) and len(isr) == len(members)
        fits = fits and (command.version == d.version or not self.version)
        fits = fits and (len(isr) >= self.floor(d) or set(d.isr) <= set(isr))
        for n in set(isr) - set(d.isr):
            known = members[n] == d.incarnations[n] or not self.incarnation
            fits = fits and n in d.alive and known
        if fits:
            yield from self.decided(s, d._replace(isr=isr))
            return
        node = s.nodes[command.leader]
        if node.proposed == command:
            s = self.changed(s, command.leader, node._replace(proposed=None))
            s = self.advance(s, command.leader)
        yield s

    def move(self, s: State, wanted: Members) -> Iterator[State]:
        d = s.metadata[-1]
        if wanted == (d.target or d.replicas) or set(wanted) - set(d.replicas) - set(d.alive):
            return
        if not d.isr and self.scope.moves_wait:
            return  # whoever is put out now may be the longest
        useless = set(d.target or ()) - set(d.isr) - set(wanted)
        replicas = tuple(sorted((set(d.replicas) - useless) | set(wanted)))
        yield from self.decided(s, d._replace(replicas=replicas, target=wanted))

    # What a node does with an entry

    def take_up(self, n: int, node: Node, old: Decided | None, d: Decided) -> Node:
        if n not in d.replicas:
            return node.idle()
        if old is None or n not in old.replicas or d.epoch != old.epoch:
            node = node.idle()
            if d.leader in (n, NOBODY):
                return node._replace(said=None, epoch_start=len(node.log) * (d.leader == n))
            return self.subscribed(n, node, d)
        if d.leader == n:
            known = [
                one and m in d.replicas and (one[0] == d.assignments[m] or not self.assignment)
                for m, one in enumerate(node.followers)
            ]
            followers = tuple(one if known[m] else None for m, one in enumerate(node.followers))
            ended = node.proposed is not None and d.version > node.proposed.version
            proposed = None if ended else node.proposed
            return node._replace(followers=followers, proposed=proposed)
        if d.leader != NOBODY and self.resubscribe and d.assignments[n] != old.assignments[n]:
            return self.subscribed(n, node, d)
        return node

    def subscribed(self, n: int, node: Node, d: Decided) -> Node:
        said = Said(d.leader, d.epoch, d.assignments[n], node.incarnation, node.log)
        return node._replace(said=said, synced=len(node.log) if d.always else node.synced)

    def apply(self, s: State, n: int, index: int) -> State:
        node = s.nodes[n]
        node = self.take_up(n, node, s.metadata[node.applied], s.metadata[index])
        return self.advance(self.changed(s, n, node._replace(applied=index)), n)

    # Leader and followers

    def advance(self, s: State, n: int) -> State:
        """Move the high watermark as far as the rules allow; what it passes is acknowledged."""
        node = s.nodes[n]
        d = s.metadata[node.applied]
        if not self.leads(s, n) or len(d.isr) < self.floor(d):
            return s
        members = [m for m, _ in node.proposed.members] if node.proposed else []
        ends = [one[2] if (one := node.followers[m]) else 0 for m in {*d.isr, *members} - {n}]
        end = min([node.synced if d.always else len(node.log), *ends])
        if end <= node.high_watermark:
            return s
        s = self.changed(s, n, node._replace(high_watermark=end))
        lost = [at for at, record in enumerate(node.log[:end]) if record in s.excused]
        readable, known = node.log[: min([end, *lost])], s.acknowledged
        both = min(len(known), len(readable))
        if known[:both] != readable[:both]:
            return s._replace(broken="two records at an offset below a high watermark")
        return s._replace(acknowledged=max(known, readable, key=len))

    def hears(self, s: State, f: int) -> int | None:
        """The leader that listens to what this follower said last."""
        said = s.nodes[f].said
        if said is None or not self.leads(s, n := said.leader):
            return None
        d = s.metadata[s.nodes[n].applied]
        fits = f in d.replicas and (said.epoch == d.epoch or not self.epoch)
        known = f in d.alive and said.incarnation == d.incarnations[f]
        fits = fits and (known or not self.incarnation)
        fits = fits and (said.assignment == d.assignments[f] or not self.assignment)
        return n if fits else None

    def deliver(self, s: State, f: int) -> State | None:
        """What a follower said arrives: it counts, or the follower is told where to cut."""
        if (n := self.hears(s, f)) is None or (said := s.nodes[f].said) is None:
            return None
        node, follower = s.nodes[n], s.nodes[f]
        point = common_end(node.log, said.log)
        if point == len(said.log):
            one = (said.assignment, said.incarnation, point)
            if node.followers[f] == one:
                return None
            node = node._replace(followers=put(node.followers, f, one))
            return self.advance(self.changed(s, n, node), n)
        d = s.metadata[follower.applied]
        if not follower.up or follower.incarnation != said.incarnation or f not in d.replicas:
            return None
        cut = follower._replace(log=follower.log[:point], synced=min(follower.synced, point))
        return self.changed(s, f, self.subscribed(f, cut, d))

    def fetch(self, s: State, f: int) -> State | None:
        """A follower appends the next record, and tells."""
        node = s.nodes[f]
        if (n := self.hears(s, f)) is None or (said := node.said) is None:
            return None
        d, log, end = s.metadata[node.applied], s.nodes[n].log, len(node.log)
        if said.incarnation != node.incarnation or f not in d.replicas or end >= len(log):
            return None
        if common_end(node.log, log) < end:
            return None
        synced, log = end + 1 if d.always else node.synced, log[: end + 1]
        node = node._replace(log=log, synced=synced, said=said._replace(log=log))
        return self.changed(s, f, node)

    def produce(self, s: State, n: int) -> State:
        node = s.nodes[n]
        epoch, at = s.metadata[node.applied].epoch, len(node.log)
        if any(len(other.log) > at and other.log[at][0] == epoch for other in s.nodes):
            s = s._replace(broken="an offset was given out twice in an epoch")
        node = node._replace(log=(*node.log, (epoch, s.left.records)))
        return self.advance(self.changed(s, n, node), n)

    def propose(self, s: State, n: int) -> Iterator[tuple[Members, State]]:
        node = s.nodes[n]
        d = s.metadata[node.applied]
        least = max(node.high_watermark, node.epoch_start)
        ready = [(m, one) for m, one in enumerate(node.followers) if one and m in d.alive]
        joins = {m for m, one in ready if one[1] == d.incarnations[m] and one[2] >= least}
        others = [m for m in d.isr if m != n]
        for some in range(1 << len(others)):
            stay = {m for at, m in enumerate(others) if some >> at & 1}
            members = tuple(sorted({n} | stay | (joins - set(others))))
            small = len(members) < self.floor(d) and len(stay) < len(others)
            if members == tuple(sorted(d.isr)) or small:
                continue
            change = Change(n, d.epoch, d.version, tuple((m, d.incarnations[m]) for m in members))
            after = self.changed(s, n, node._replace(proposed=change))
            yield members, after._replace(commands=s.commands | {change})

    # Nodes that come back

    def restart(self, s: State, n: int, lost: str, end: int) -> Iterator[State]:
        """The process comes back, says what it lost, and begins with that entry."""
        node, d = s.nodes[n], s.metadata[-1]
        always = d.promised[n] if self.promised else d.always
        others, isr = tuple(m for m in d.isr if m != n), d.isr
        if n in isr and lost != "nothing" and not (lost == "tail" and always):
            isr = others or isr
            if not others and lost == "everything":
                isr = () if self.longest else tuple(m for m in d.replicas if m != n)
        after = d._replace(
            leader=NOBODY if d.leader == n else d.leader,
            isr=isr,
            told=put(d.told, n, (0, 0) if lost == "everything" and not isr else None),
            incarnations=put(d.incarnations, n, d.incarnations[n] + 1),
            alive=tuple(sorted({*d.alive, n})),
            promised=put(d.promised, n, d.always),
        )
        for s1 in self.decided(s, after):
            synced = end if self.scope.vouches_late else min(end, node.synced)
            back = Node(True, node.incarnation + 1, len(s1.metadata) - 1, node.log[:end], synced)
            back = self.take_up(n, back._replace(said=node.said), None, s1.metadata[-1])
            s2 = self.changed(s1, n, back)
            if not others and lost != "nothing" and not (lost == "tail" and always):
                s2 = self.excuse(s2, node.log)
            yield self.advance(s2, n)

    def excuse(self, s: State, old: Log) -> State:
        """What the last copy in sync lost, and none of those left has, was not promised."""
        d, known = s.metadata[-1], s.acknowledged
        held = {record for n in d.isr or d.replicas for record in s.nodes[n].log}
        excused = s.excused | (set(old) - held)
        end = next((at for at, one in enumerate(known) if one in excused), len(known))
        return s._replace(excused=excused, acknowledged=known[:end])

    def tell(self, s: State, n: int) -> Iterator[State]:
        """While no copy is in sync. When all have told, the longest is elected."""
        d, log = s.metadata[-1], s.nodes[n].log
        told = put(d.told, n, (log[-1][0] if log else 0, len(log)))
        if all(told[m] for m in d.replicas):
            d = d._replace(isr=(max(d.replicas, key=lambda m: told[m]),))
        yield from self.decided(s, d._replace(told=told))

    def resume(self, s: State, n: int, end: int) -> State:
        """Against `incarnation`: a process goes on as what the one before it was."""
        node, last = s.nodes[n], len(s.metadata) - 1
        back = Node(True, node.incarnation + 1, last, node.log[:end], end, node.said)
        s = self.changed(s, n, self.take_up(n, back, None, s.metadata[last]))
        return self.advance(s, n)

    # All steps

    def steps(self, s: State) -> Iterator[Step]:
        for command in s.commands:
            for after in self.decide(s, command):
                yield ("{} is decided", command), True, self.tidy(after)
        for n in NODES:
            for what, plain, after in self.steps_of(s, n, s.nodes[n]):
                yield what, plain, self.tidy(after)
        for what, budget, afters in self.faults(s):
            if getattr(s.left, budget):
                for after in afters:
                    yield what, False, self.tidy(self.spend(after, budget))

    def steps_of(self, s: State, n: int, node: Node) -> Iterator[Step]:
        if (after := self.deliver(s, n)) is not None:
            yield ("what node {} said arrives at its leader: {}", n, node.said), True, after
        if not node.up:
            for after in self.restart(s, n, "nothing", len(node.log)):
                yield ("node {} restarts with everything", n), False, after
            return
        d, last = s.metadata[node.applied], len(s.metadata) - 1
        for index in range(node.applied + 1, last + 1):
            yield ("node {} applies {}", n, s.metadata[index]), True, self.apply(s, n, index)
        if (after := self.fetch(s, n)) is not None:
            yield ("node {} fetches a record", n), True, after
        if d.always and node.synced < len(node.log):
            after = self.changed(s, n, node._replace(synced=len(node.log)))
            yield ("node {} syncs", n), True, self.advance(after, n)
        gone = n not in s.metadata[-1].replicas or not self.confirmed
        if node.log and n not in d.replicas and gone:
            after = self.changed(s, n, node._replace(log=(), synced=0))
            yield ("node {} deletes its files", n), False, after
        if not d.isr and node.applied == last and n in d.replicas and not d.told[n]:
            for after in self.tell(s, n):
                yield ("node {} tells the end of its log", n), True, after
        if node.proposed and not self.proposed:
            after = self.advance(self.changed(s, n, node._replace(proposed=None)), n)
            yield ("node {} takes a try that failed for the end of its change", n), False, after

    def faults(self, s: State) -> Iterator[tuple[tuple[Any, ...], str, Any]]:
        """Also what clients, operators and leaders do: each as often as its budget says."""
        d = s.metadata[-1]
        for n, node in enumerate(s.nodes):
            without = tuple(m for m in d.alive if m != n)
            if n in d.alive:
                yield ("node {} is fenced", n), "fences", self.decided(s, d._replace(alive=without))
                if n in d.isr and d.leader not in (n, NOBODY):
                    new = d._replace(leader=n, epoch=d.epoch + 1, version=d.version + 1)
                    after = s._replace(metadata=(*s.metadata, new))
                    yield ("node {} is elected", n), "elections", [after]
            elif node.up and d.incarnations[n] == node.incarnation:
                after = self.decided(s, d._replace(alive=tuple(sorted((*without, n)))))
                yield ("node {} is alive again", n), "returns", after
            if node.up:
                after = self.changed(s, n, node.idle()._replace(up=False, applied=0))
                yield ("node {} crashes", n), "crashes", [after]
                if self.leads(s, n):
                    yield ("node {} appends a record", n), "records", [self.produce(s, n)]
                    for members, after in () if node.proposed else self.propose(s, n):
                        yield ("node {} proposes isr {}", n, members), "proposals", [after]
                continue
            if len(d.replicas) > 1:
                after = self.restart(s, n, "everything", 0)
                yield ("node {} restarts with nothing", n), "wipes", after
            for end in range(node.synced, len(node.log) or 1):
                after = self.restart(s, n, "tail", end)
                yield ("node {} restarts with its log cut to {}", n, end), "tails", after
                if not self.incarnation:
                    after = [self.resume(s, n, end)]
                    yield (
                        ("node {} goes on, cut to {}, without registering", n, end),
                        "tails",
                        after,
                    )
        for wanted in ((0, 1), (0, 2), (1, 2), NODES):
            yield ("an operator moves it to {}", wanted), "moves", self.move(s, wanted)
        promised = tuple(one and not d.always for one in d.promised)
        after = self.decided(s, d._replace(always=not d.always, promised=promised))
        yield ("fsync always is set to {}", not d.always), "alters", after

    # Fewer states

    def tidy(self, s: State) -> State:
        """Forget what makes no difference any more, and let a node pass entries that say nothing
        to it: states that differ in nothing else are one."""
        metadata, nodes, commands, left = s.metadata, list(s.nodes), s.commands, s.left
        for one in commands:
            waits = s.nodes[one.leader].proposed == one
            if self.version and not waits and one.version != metadata[-1].version:
                commands = commands - {one}
        if not left.crashes and (left.tails or left.wipes) and all(one.up for one in nodes):
            left = left._replace(tails=0, wipes=0)
        if not left.tails:
            left = left._replace(alters=0)
            if metadata[-1].always or any(metadata[-1].promised):
                metadata = tuple(d._replace(always=False, promised=FALSE) for d in metadata)
        last = first = len(metadata) - 1
        for n, node in enumerate(nodes):
            if (said := node.said) is not None and self.epoch and self.incarnation:
                to = s.nodes[said.leader]
                if not to.up or metadata[to.applied].epoch > said.epoch:
                    node = node._replace(said=None)
            if not left.tails and node.synced != len(node.log):
                node = node._replace(synced=len(node.log))
            if 0 < node.epoch_start <= node.high_watermark:
                node = node._replace(epoch_start=0)
            if node.up:
                at = node.applied
                while at < last and concerns(n, metadata[at]) == concerns(n, metadata[at + 1]):
                    at += 1
                if at != node.applied:
                    node = node._replace(applied=at)
                first = min(first, at)
            nodes[n] = node
        if first:
            nodes = [one._replace(applied=one.applied - first) if one.up else one for one in nodes]
        past = [without_idle_facts(d, nodes, at) for at, d in enumerate(metadata[first:last])]
        metadata = (*past, metadata[last])
        return State(metadata, tuple(nodes), commands, s.acknowledged, s.excused, left, s.broken)

    # Properties

    def violation(self, s: State) -> str:
        known = s.acknowledged
        for n in s.metadata[-1].isr:
            if s.nodes[n].log[: len(known)] != known:
                return f"node {n} is in the isr without everything that was acknowledged"
        return s.broken

    def unrest(self, s: State) -> str:
        """What is wrong in a state in which nothing happens by itself any more."""
        d = s.metadata[-1]
        if d.leader == NOBODY or not self.leads(s, d.leader):
            return ""
        leader = s.nodes[d.leader]
        for n in set(d.replicas) & set(d.alive) - {d.leader}:
            node = s.nodes[n]
            due = (d.assignments[n], node.incarnation, len(leader.log))
            known = d.incarnations[n] == node.incarnation
            if node.up and known and leader.followers[n] != due:
                return f"the leader never hears that node {n} has everything"
        return "a proposal never ends" if leader.proposed else ""


def concerns(n: int, d: Decided) -> object:
    """What of an entry a node acts on."""
    if n not in d.replicas:
        return None
    if d.leader == n or not d.isr:
        return d[:5], d[6:10], d.told
    return d.epoch, d.leader, d.assignments[n], d.always


def without_idle_facts(d: Decided, nodes: list[Node], at: int) -> Decided:
    """An entry that is not the newest, without what none of those who come to it acts on."""
    leader = nodes[d.leader]
    if not d.isr:
        return d
    if d.leader != NOBODY and leader.up and leader.applied <= at:
        return d._replace(target=None, promised=FALSE)
    return d._replace(
        version=0, isr=(NOBODY,), target=None, incarnations=(0, 0, 0), alive=(), promised=FALSE
    )
