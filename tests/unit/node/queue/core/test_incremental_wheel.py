"""The gentle wheel: the same timers as any wheel, whatever is prepared, swept or taken when."""

import random
import time
from itertools import pairwise

import pytest

from raftq.node.queue.core.incremental_wheel import IncrementalTimerWheel
from raftq.node.queue.core.timer_wheel import TICK_MS

START_MS = 1_700_000_000_000
REACH_MS = (15, 300, 2_560, 3_000, 170_000, 12_000_000, 900_000_000)


def drain(
    wheel: IncrementalTimerWheel, now_ms: int, limit: int, moves: int
) -> list[tuple[int, int]]:
    found = []
    for _ in range(100_000):
        part, more = wheel.take(now_ms, limit, moves)
        found += part
        if not more and len(part) < limit:
            return found
    raise AssertionError(wheel.describe())


@pytest.mark.parametrize("seed", range(60))
def test_every_timer_comes_out_once_at_its_tick_however_the_work_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    now = START_MS + rng.randrange(10**7)
    wheel = IncrementalTimerWheel(now)
    waiting: dict[int, int] = {}
    unwanted: dict[int, None] = {}
    next_id = 0
    for _ in range(150):
        for _ in range(rng.choice((0, 1, 3, 800))):
            due = now + rng.randrange(-50, rng.choice(REACH_MS))
            wheel.add(next_id, due)
            waiting[next_id] = due
            next_id += 1
        if rng.random() < 0.6:
            wheel.work(rng.choice((1, 50, 5_000)))
        if waiting and rng.random() < 0.1:
            for one in rng.sample(sorted(waiting), len(waiting) // 2):
                del waiting[one]
                unwanted[one] = None
        if rng.random() < 0.4:
            wheel.sweep(waiting.__contains__)
        now += rng.choice((0, 3, 10, 400, 2_560, 40_000, rng.randrange(20_000_000)))
        limit, moves = rng.choice(((10, 7), (1_000, 100), (5, 100_000)))
        came = [pair for pair in drain(wheel, now, limit, moves) if pair[1] not in unwanted]
        reached = now // TICK_MS * TICK_MS
        expected = sorted((due, one) for one, due in waiting.items() if due <= reached)
        assert sorted(came) == expected
        ticks = [-(-due // TICK_MS) for due, _ in came if due > START_MS]
        assert ticks == sorted(ticks) or limit < len(came)
        for _, one in came:
            del waiting[one]
        listed = [pair[1] for part in wheel.in_order() for pair in _pairs(part)]
        assert sorted(one for one in listed if one in waiting) == sorted(waiting)
        parts = [sorted(_pairs(part)) for part in wheel.in_order()]
        assert all(a[-1][0] <= b[0][0] for a, b in pairwise(parts) if a and b)
    while wheel.sweep(waiting.__contains__):
        pass
    wheel.rebuild(waiting.__contains__)
    assert len(wheel) == len(waiting)


def _pairs(part: "list[int]") -> list[tuple[int, int]]:
    return list(zip(part[0::2], part[1::2], strict=True))


def test_clock_that_goes_back_keeps_what_is_no_longer_due() -> None:
    wheel = IncrementalTimerWheel(START_MS)
    wheel.add_many(range(9_000), [START_MS + 50_000] * 9_000)
    found, more = wheel.take(START_MS + 60_000, 100, 100_000)
    assert len(found) == 100
    assert more
    assert len(wheel) == 8_900


@pytest.mark.full
def test_a_million_timers_never_keep_anybody_waiting() -> None:
    """1. A million timers over 50 s, added far ahead. 2. Ticks of 10 ms with a little work each.
    3. No call takes long, though all of them pass through the levels."""
    wheel = IncrementalTimerWheel(START_MS)
    count, first = 1_000_000, START_MS + 400_000
    for start in range(0, count, 1_000):
        ids = range(start, start + 1_000)
        wheel.add_many(ids, [first + one // 20 for one in ids])
    longest, came = 0.0, 0
    now = START_MS
    while came < count:
        now += TICK_MS
        began = time.process_time()
        wheel.work(2_000)
        while True:
            found, more = wheel.take(now, 1_000, 2_000)
            came += len(found)
            assert all(due <= now for due, _ in found)
            if not more and len(found) < 1_000:
                break
        longest = max(longest, time.process_time() - began)
    assert longest < 0.2  # about 3 ms, where an ordinary wheel takes 500
    assert len(wheel) == 0
