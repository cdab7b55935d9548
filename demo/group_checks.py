"""Pure: what must hold after the third part of the demo: a group of workers, one killed, one
joining.

A handling is one call of a handler. It ends when the handler returns; then the record is
acknowledged. A record may be handled to the end twice only if the first time was in the worker that
was killed: it died before it could acknowledge.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from raftq.node.queue.core.lanes import LANES
from raftq_demo.checks import Check, judge_shares

ATTEMPTS = 3
LATE_S_MAX = 1.0
# A lane counts as busy until this share of its records was begun.
BUSY_PART = 0.95


@dataclass(slots=True)
class Handling:
    """One call of a handler."""

    number: int
    attempt: int
    lane: int
    partition: int
    worker: int
    began: float
    """By the wall clock."""
    ended: float | None = None
    """None if the handler raised, or its worker died."""


@dataclass(frozen=True, slots=True)
class Letter:
    """The fields of a dead letter that are checked."""

    number: int
    reason: str
    attempts: int


@dataclass(slots=True)
class GroupStory:
    """What happened: records [0, ordinary) are normal ones."""

    ordinary: int
    poison: int
    delayed: int
    killed: int
    """The worker that was killed, and the one that replaced it."""
    joined: int
    due: float = 0.0
    """The time at which the delayed record was due, by the wall clock."""
    members: list[int] = field(default_factory=list)
    """The number of members of the group: before the kill, and at the end."""
    handled: list[Handling] = field(default_factory=list)
    letters: list[Letter] = field(default_factory=list)
    letters_left: int = 0
    """After the redrive."""
    redriven: int = 0
    redriven_at: float = 0.0
    exits: list[int] = field(default_factory=list)
    """Exit codes of the workers that were not killed."""
    seconds: float = 0.0

    def ended(self) -> dict[int, list[Handling]]:
        """By number: the successful handlings of a record, in order."""
        found: dict[int, list[Handling]] = defaultdict(list)
        for one in sorted(self.handled, key=lambda one: one.began):
            if one.ended is not None:
                found[one.number].append(one)
        return found

    def late_s(self) -> list[float]:
        """How late the delayed record came, each time."""
        return [one.began - self.due for one in self.handled if one.number == self.delayed]

    def lanes(self) -> list[int]:
        """Records by lane in the order in which they were begun, while all lanes had more of them.

        Only whole rounds count, which end with the last lane: an incomplete round would count for
        the lanes that are served first."""
        counts = [0] * LANES
        for first in self._first_by_partition():
            busy = BUSY_PART * len(first) / LANES
            seen = [0] * LANES
            rounds = [0] * LANES
            for one in first:
                seen[one.lane] += 1
                if seen[one.lane] >= busy:
                    break
                if one.lane == LANES - 1:
                    rounds = list(seen)
            counts = [a + b for a, b in zip(counts, rounds, strict=True)]
        return counts

    def _first_by_partition(self) -> list[list[Handling]]:
        """The first handling of each ordinary record, in order."""
        first: dict[int, Handling] = {}
        for one in sorted(self.handled, key=lambda one: one.began):
            if one.number < self.ordinary:
                first.setdefault(one.number, one)
        found: dict[int, list[Handling]] = defaultdict(list)
        for one in first.values():
            found[one.partition].append(one)
        return list(found.values())

    def workers(self) -> dict[int, int]:
        """The number of successful handlings, by worker."""
        counts = Counter(one.worker for one in self.handled if one.ended is not None)
        return dict(sorted(counts.items()))


def judge_group(story: GroupStory) -> list[Check]:
    ended = story.ended()
    never = sum(number not in ended for number in range(story.ordinary))
    again = [some for some in ended.values() if len(some) > 1]
    wrong = sum(any(one.worker != story.killed for one in some[:-1]) for some in again)
    taken_over = sum(
        some[-1].attempt > 1 and number < story.ordinary for number, some in ended.items()
    )
    by_joined = story.workers().get(story.joined, 0)
    return [
        _count("group: records that were never handled", 0, never),
        _count("group: acknowledged records that were handled again", 0, wrong),
        Check("group: records taken over from the killed worker", "some", str(taken_over),
              taken_over > 0),
        Check("group: records handled by the worker that joined", "some", str(by_joined),
              by_joined > 0),
        Check("group: members before the kill and at the end", "[3, 3]", str(story.members),
              story.members == [3, 3]),
        *_judge_poison(story),
        *_judge_delayed(story),
        _lanes_check(story),
        Check("group: exit codes of the workers that were stopped", str([0] * len(story.exits)),
              str(story.exits), not any(story.exits)),
    ]  # fmt: skip


def _judge_poison(story: GroupStory) -> list[Check]:
    poisoned = sorted(
        (one for one in story.handled if one.number == story.poison), key=lambda one: one.began
    )
    before = [one.attempt for one in poisoned if one.began < story.redriven_at]
    after = [one for one in poisoned if one.began >= story.redriven_at]
    wanted = [Letter(story.poison, "max_deliveries", ATTEMPTS)]
    attempts = list(range(1, ATTEMPTS + 1))
    ended = sum(one.ended is not None for one in after)
    return [
        Check("group: attempts at the poisoned record", str(attempts), str(before),
              before == attempts),
        Check("group: dead letters", "the poisoned record",
              ", ".join(f"{dead.reason} after {dead.attempts}" for dead in story.letters) or "none",
              story.letters == wanted),
        Check("group: redriven, then handled to the end", "1, 1", f"{story.redriven}, {ended}",
              (story.redriven, ended) == (1, 1)),
        _count("group: dead letters after the redrive", 0, story.letters_left),
    ]  # fmt: skip


def _judge_delayed(story: GroupStory) -> list[Check]:
    late = story.late_s()
    shown = ", ".join(f"{1000 * one:.0f} ms after" for one in late) or "never"
    return [
        Check("group: the delayed record came when due", f"once, under {LATE_S_MAX:g} s late",
              shown, len(late) == 1 and 0 <= late[0] <= LATE_S_MAX),
    ]  # fmt: skip


def _lanes_check(story: GroupStory) -> Check:
    check = judge_shares(story.lanes())
    return Check(f"group: {check.claim}", check.expected, check.found, check.ok)


def _count(claim: str, expected: int, found: int) -> Check:
    return Check(claim, str(expected), str(found), found == expected)
