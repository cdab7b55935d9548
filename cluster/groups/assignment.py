"""Which member of a group should have which partition. (Pure.)

    complete       every partition of a topic that some member wants has a member that wants it
    balanced       no chain of moves between members that want them would bring the counts of two
                   members nearer together; so with equal subscriptions they differ by at most 1
    sticky         a partition moves only when its member is gone or no longer wants it, or for
                   balance; a balanced assignment stays exactly as it is
    deterministic  the same arguments in any order give the same result

It works in four steps: keep what may be kept, up to a fair share; give the rest to the members with
the fewest; repair what differing subscriptions left uneven, along the shortest chains; undo moves
that turned out to be useless. All loops are bounded by the counts that they lower.
"""

from collections import deque
from collections.abc import Collection, Mapping
from heapq import heapify, heapreplace
from itertools import pairwise

Slot = tuple[str, int]
"""A partition: topic and number."""


def assign(
    wanted: Mapping[str, Collection[str]],
    partitions: Mapping[str, int],
    current: Mapping[Slot, str],
) -> dict[Slot, str]:
    """Return the member of every partition.

    `wanted` has the topics of each member, `partitions` how many partitions each topic has, and
    `current` who has them now, where that is known.
    """
    table = _Table(wanted, partitions)
    rest = table.keep(current)
    table.place(rest, current)
    table.mend()
    table.take_back(current)
    return {slot: table.owner[slot] for slot in sorted(table.owner)}


class _Table:
    """An assignment in the making. `held` is `owner` by member and topic."""

    def __init__(
        self, wanted: Mapping[str, Collection[str]], partitions: Mapping[str, int]
    ) -> None:
        self.owner: dict[Slot, str] = {}
        self.members = sorted(wanted)
        self.load = dict.fromkeys(self.members, 0)
        self.held: dict[str, dict[str, dict[int, None]]] = {member: {} for member in self.members}
        takers: dict[str, list[str]] = {}
        for member in self.members:
            for topic in wanted[member]:
                takers.setdefault(topic, []).append(member)
        # Topics with few takers come first: they leave the least choice.
        order = sorted(takers, key=lambda topic: (len(takers[topic]), topic))
        self.counts = {topic: partitions[topic] for topic in order if partitions.get(topic, 0) > 0}
        # One tuple for all topics with the same takers, so that a search looks at them once.
        same: dict[tuple[str, ...], tuple[str, ...]] = {}
        found = {topic: tuple(dict.fromkeys(takers[topic])) for topic in self.counts}
        self.takers = {topic: same.setdefault(members, members) for topic, members in found.items()}
        self._wants = {topic: frozenset(members) for topic, members in self.takers.items()}

    def give(self, slot: Slot, member: str) -> None:
        self.owner[slot] = member
        self.load[member] += 1
        self.held[member].setdefault(slot[0], {})[slot[1]] = None

    def take(self, slot: Slot) -> None:
        member = self.owner.pop(slot)
        self.load[member] -= 1
        held = self.held[member]
        del held[slot[0]][slot[1]]
        if not held[slot[0]]:
            del held[slot[0]]

    def may(self, slot: Slot, member: str | None) -> bool:
        return member in self._wants[slot[0]]

    # 1. Keep.

    def keep(self, current: Mapping[Slot, str]) -> dict[str, list[int]]:
        """Leave each member its partitions, up to a fair share. Returns the rest, by topic."""
        rest: dict[str, list[int]] = {topic: [] for topic in self.counts}
        for topic, count in self.counts.items():
            for number in range(count):
                slot = (topic, number)
                member = current.get(slot)
                if member is not None and self.may(slot, member):
                    self.give(slot, member)
                else:
                    rest[topic].append(number)
        # A member whose topics no other member wants gets the surplus back when the rest is placed.
        share = -(-sum(self.counts.values()) // len(self.members)) if self.members else 0
        for member in self.members:
            held = self.held[member]
            heap = [(-len(numbers), topic) for topic, numbers in held.items()]
            heapify(heap)
            while self.load[member] > share:
                count, topic = heap[0]
                number = next(reversed(held[topic]))
                self.take((topic, number))
                rest[topic].append(number)
                heapreplace(heap, (count + 1, topic))
        return rest

    # 2. Place.

    def place(self, rest: dict[str, list[int]], current: Mapping[Slot, str]) -> None:
        """Give each partition to the member with the fewest, then the fewest of its topic. In a
        tie the member that had it gets it."""
        for topic, numbers in rest.items():
            if not numbers:
                continue
            places = {member: at for at, member in enumerate(self.takers[topic])}
            heap = [self._row(topic, at, member) for member, at in places.items()]
            heapify(heap)
            # Partitions without a member come first: then some of the others can stay where they
            # were.
            slots = [(topic, number) for number in sorted(numbers)]
            slots.sort(key=lambda slot: self.may(slot, current.get(slot)))
            for slot in slots:
                load, of_topic, at, member = heap[0]
                before = current.get(slot)
                if before in places and self.load[before] <= load:
                    self.give(slot, before)
                    heap = [row for row in heap if row[2] != places[before]]
                    heap.append(self._row(topic, places[before], before))
                    heapify(heap)
                else:
                    self.give(slot, member)
                    heapreplace(heap, (load + 1, of_topic + 1, at, member))

    def _row(self, topic: str, at: int, member: str) -> tuple[int, int, int, str]:
        return self.load[member], len(self.held[member].get(topic, ())), at, member

    # 3. Mend.

    def mend(self) -> None:
        """Shift partitions along chains of members until no chain makes the counts more even.

        When no member that the fullest member can reach has two fewer, none of them can take part
        in a useful chain again: a chain that leads into this set stays in it, and ends with a
        member that has too much already.
        """
        open_members = dict.fromkeys(self.members)
        while open_members:
            first = max(open_members, key=lambda member: (self.load[member], member))
            came_from, last = self._search(first, open_members)
            if last is None:
                for member in came_from:
                    del open_members[member]
                continue
            chain = [last]
            while chain[-1] != first:
                chain.append(came_from[chain[-1]][0])
            for member in chain[:-1]:
                giver, topic = came_from[member]
                number = next(reversed(self.held[giver][topic]))
                self.take((topic, number))
                self.give((topic, number), member)

    def _search(
        self, first: str, open_members: Mapping[str, None]
    ) -> tuple[dict[str, tuple[str, str]], str | None]:
        """Search breadth first. Returns who gets a partition from whom, of which topic, and the
        nearest member with at least two fewer than the first, if there is one."""
        enough = self.load[first] - 2
        came_from = {first: ("", "")}
        seen: dict[int, None] = {}
        edge = [first]
        while edge:
            found: list[str] = []
            for giver in edge:
                for topic in sorted(self.held[giver]):
                    takers = self.takers[topic]
                    if id(takers) in seen:
                        continue
                    seen[id(takers)] = None
                    for taker in takers:
                        if taker not in came_from and taker in open_members:
                            came_from[taker] = (giver, topic)
                            found.append(taker)
            least = min(found, key=lambda member: (self.load[member], member), default=None)
            if least is not None and self.load[least] <= enough:
                return came_from, least
            edge = found
        return came_from, None

    # 4. Take back.

    def take_back(self, current: Mapping[Slot, str]) -> None:
        """Undo rings of moves, which change no count, and chains of moves whose ends only swap
        their counts."""
        moved: dict[str, dict[str, list[Slot]]] = {}
        for slot, member in self.owner.items():
            before = current.get(slot)
            if before != member and before is not None and self.may(slot, before):
                moved.setdefault(before, {}).setdefault(member, []).append(slot)
        # Undoing the moves of one member can make those of another useless, so all are checked
        # until nothing changes. Every round has fewer moves left.
        while any(self._take_back_from(first, moved) for first in sorted(moved)):
            pass

    def _take_back_from(self, first: str, moved: dict[str, dict[str, list[Slot]]]) -> bool:
        """Undo moves of this member, and report whether there were any."""
        changed = False
        while chain := self._useless(first, moved):
            changed = True
            for before, after in pairwise(chain):
                slots = moved[before][after]
                slot = slots.pop()
                if not slots:
                    del moved[before][after]
                self.take(slot)
                self.give(slot, before)
        return changed

    def _useless(self, first: str, moved: dict[str, dict[str, list[Slot]]]) -> list[str]:
        """Return a chain of moves that begins here and ends here, or at a member that has more
        now."""
        came_from: dict[str, str] = {}
        edge = deque([first])
        while edge:
            giver = edge.popleft()
            for taker in moved.get(giver, ()):
                if taker in came_from:
                    continue
                came_from[taker] = giver
                if taker == first or self.load[taker] > self.load[first]:
                    chain = [taker, giver]
                    while chain[-1] != first:
                        chain.append(came_from[chain[-1]])
                    return chain[::-1]
                edge.append(taker)
        return []
