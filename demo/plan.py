"""Pure: what the demo sends: every process knows each message from its number alone."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from raftq.client.common.names import LANE_NAMES

BLOCK = random.Random(7).randbytes(1000)
BATCH, DELAYED_BATCH = 100, 20
DELAY_S = (1.0, 5.0)
KINDS = ("batch", "single", "delayed", "poison")
REJECTED, NACKED = "unreadable order", "max_deliveries"


@dataclass(frozen=True, slots=True)
class Job:
    """One call of the writer: messages [start, end) of one lane."""

    index: int
    kind: str
    start: int
    end: int
    lane: int
    delay: float

    @property
    def numbers(self) -> range:
        return range(self.start, self.end)


def plan(messages: int, seed: int) -> list[Job]:
    """All calls of the writers, in order. Each lane gets the same number of messages."""
    rng = random.Random(seed)
    delayed, poisoned, single = messages // 50, messages // 500, messages // 5
    sizes = [("delayed", size) for size in _cut(delayed, DELAYED_BATCH)]
    sizes += [("poison", 1)] * poisoned + [("single", 1)] * single
    sizes += [("batch", size) for size in _cut(messages - delayed - poisoned - single, BATCH)]
    rng.shuffle(sizes)
    jobs: list[Job] = []
    filled = {kind: [0] * len(LANE_NAMES) for kind in KINDS}
    start = 0
    for kind, size in sizes:
        lanes = filled[kind]
        lane = lanes.index(min(lanes))
        lanes[lane] += size
        jobs.append(Job(len(jobs), kind, start, start + size, lane, rng.uniform(*DELAY_S)))
        start += size
    return jobs


def payload(number: int) -> bytes:
    """The content of message `number`: 200 to 1000 bytes."""
    return b"%d:%s" % (number, BLOCK[: 200 + number * 7919 % 790])


def number_of(value: bytes) -> int:
    """The number of a message, or -1 if its bytes are not what was sent."""
    digits = value[: value.find(b":")]
    number = int(digits) if digits.isdigit() else -1
    return number if number >= 0 and value == payload(number) else -1


def is_rejected(number: int) -> bool:
    """One half of the poisoned messages is rejected at once, the other nacked to the end."""
    return number % 2 == 1


def _cut(total: int, size: int) -> Iterator[int]:
    """Splits `total` into portions of at most `size`."""
    for start in range(0, total, size):
        yield min(size, total - start)
