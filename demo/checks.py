"""Pure: the claims of the demo, each with the expected and the found value."""

import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raftq.client.common.names import LANE_NAMES
from raftq.node.queue.core.lanes import WEIGHTS
from raftq.node.queue.embedded.message import DeadMessage, QueueStats
from raftq_demo.plan import NACKED, REJECTED, Job, is_rejected, number_of

SHARE_POINTS_MAX = 2.0


@dataclass(frozen=True, slots=True)
class Check:
    """One claim."""

    claim: str
    expected: str
    found: str
    ok: bool


@dataclass(slots=True)
class WriterRun:
    """What a writer process printed before it ended."""

    acked: dict[int, tuple[str, str]] = field(default_factory=dict)
    """Job index -> ids of its first and last message."""
    exit_code: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Found:
    """What the queue holds after the kill."""

    ids: dict[int, str] = field(default_factory=dict)
    """Message number -> its id."""
    duplicates: int = 0
    damaged: int = 0
    """Messages whose bytes are not those that were sent."""

    def add(self, value: bytes, message_id: str) -> None:
        """Adds a message. One that is seen twice under one id, because it became due, counts
        once."""
        number = number_of(value)
        if number < 0:
            self.damaged += 1
        elif self.ids.setdefault(number, message_id) != message_id:
            self.duplicates += 1


@dataclass(slots=True)
class Deliveries:
    """What the consumers saw."""

    settled: Counter[int] = field(default_factory=Counter)
    """Message number -> how often it was settled; -1 for bytes that were never sent."""
    lateness: list[float] = field(default_factory=list)
    """Seconds from due to received, for every delayed message."""
    firing: list[float] = field(default_factory=list)
    """Seconds from due to ready, for messages that became due while the queue was open."""
    lanes: list[int] = field(default_factory=lambda: [0] * len(LANE_NAMES))
    """Messages received by lane while all lanes were busy."""


def judge_survival(jobs: Sequence[Job], run: WriterRun, found: Found) -> list[Check]:
    """Compares what was acknowledged before the kill with the content of the queue after it."""
    acked = {number for index in run.acked for number in jobs[index].numbers}
    # The call in progress when the writer died may have been stored or not: both are right.
    sent = acked.union(*(job.numbers for job in jobs[len(run.acked) :][:1]))
    moved = [i for i, ids in run.acked.items() if _ends(jobs[i], found) not in (ids, _NOWHERE)]
    stored = [sum(number in found.ids for number in job.numbers) for job in jobs]
    halves = [n for n, job in zip(stored, jobs, strict=True) if 0 < n < len(job.numbers)]
    return [
        Check(
            "the writer was killed in the middle",
            f"SIGKILL before call {len(jobs)}",
            f"exit code {run.exit_code} after call {len(run.acked)}",
            run.exit_code == -signal.SIGKILL and 0 < len(run.acked) < len(jobs),
        ),
        _none("acknowledged before the kill, missing after it", len(acked - found.ids.keys())),
        _none("found under another id than acknowledged", len(moved)),
        _none("found but never sent", len(found.ids.keys() - sent)),
        _none("found twice", found.duplicates),
        _none("found with other bytes than sent", found.damaged),
        _none("batches stored only in part", len(halves)),
    ]


def judge_writers(jobs: Sequence[Job], found: Found, second: WriterRun) -> list[Check]:
    """Both writers together did every job."""
    done = {job.index for job in jobs if job.start in found.ids} | second.acked.keys()
    return [
        Check("calls made by both writers", str(len(jobs)), str(len(done)), len(done) == len(jobs)),
        Check(
            "exit code of the second writer", "0", str(second.exit_code), second.exit_code == 0
        ),
    ]  # fmt: skip


def judge_delivery(
    jobs: Sequence[Job], seen: Deliveries, letters: Sequence[DeadMessage], deliveries_max: int
) -> list[Check]:
    """Everything was settled once. All poisoned messages are dead letters, and no others are."""
    settled = seen.settled
    again = sum(count - 1 for number, count in settled.items() if number >= 0 and count > 1)
    poison = sorted(job.start for job in jobs if job.kind == "poison")
    dead = sorted(number_of(letter.value) for letter in letters)
    wrong = [
        letter
        for letter in letters
        if (letter.reason, letter.attempts) != _fate(number_of(letter.value), deliveries_max)
    ]
    delayed = sum(len(job.numbers) for job in jobs if job.kind == "delayed")
    came = len(seen.lateness)
    return [
        _none("never delivered", sum(number not in settled for number in range(jobs[-1].end))),
        _none("settled more than once", again),
        _none("delivered with other bytes than sent", settled[-1]),
        Check("delayed messages delivered", str(delayed), str(came), came == delayed),
        _none("delayed messages that came early", sum(late < 0 for late in seen.lateness)),
        Check("dead letters, one for each poisoned", str(len(poison)), str(len(dead)),
              dead == poison),
        _none("dead letters with a wrong reason or attempt", len(wrong)),
        judge_shares(seen.lanes),
    ]  # fmt: skip


def judge_shares(lanes: Sequence[int]) -> Check:
    """The shares of the lanes are right while all lanes are busy."""
    worst = max(abs(a - b) for a, b in zip(shares(lanes), WEIGHTS, strict=True))
    return Check(
        "shares of the lanes while all are busy",
        f"within {SHARE_POINTS_MAX:g} points",
        f"{worst:.2f} points off",
        worst <= SHARE_POINTS_MAX,
    )


def judge_end(stats: QueueStats, problems: Sequence[str]) -> list[Check]:
    """The queue is empty and its files are sound."""
    left = stats.pending + stats.in_flight + stats.delayed
    return [
        _none("left in the queue", left),
        _none("damaged ranges in its files", len(problems)),
    ]


def shares(lanes: Sequence[int]) -> list[float]:
    """The percentage of each lane."""
    total = sum(lanes) or 1
    return [100 * count / total for count in lanes]


def verdict(checks: Sequence[Check]) -> tuple[bool, str]:
    """Whether every claim held, and the sentence that says so."""
    failed = [check for check in checks if not check.ok]
    if not checks:
        return False, "FAILED: nothing was checked"
    if failed:
        claims = "; ".join(f"{check.claim}: {check.found}" for check in failed)
        return False, f"FAILED: {len(failed)} of {len(checks)} checks ({claims})"
    return True, f"PASSED: all {len(checks)} checks held; nothing acknowledged was lost"


_NOWHERE = (None, None)


def _ends(job: Job, found: Found) -> tuple[str | None, str | None]:
    """The ids of a job's first and last message."""
    return found.ids.get(job.start), found.ids.get(job.end - 1)


def _fate(number: int, deliveries_max: int) -> tuple[str, int]:
    """The reason and the attempts of a poisoned message's dead letter."""
    return (REJECTED, 1) if is_rejected(number) else (NACKED, deliveries_max)


def _none(claim: str, count: int) -> Check:
    return Check(claim, "0", str(count), count == 0)
