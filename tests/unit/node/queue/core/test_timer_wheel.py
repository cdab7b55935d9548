"""The timer wheel: every boundary on a fake clock, and random runs against a sorted list."""

import random
import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.node.queue.core.timer_wheel import TICK_MS, TimerWheel

REVOLUTIONS = (256, 256 * 64, 256 * 64**2, 256 * 64**3)
BOUNDARY_TICKS = sorted(
    {0, 1, 2, 255, 257}
    | {revolution + step for revolution in REVOLUTIONS for step in (-1, 0, 1)}
    | {2 * REVOLUTIONS[3] - 1, 2 * REVOLUTIONS[3], 64 * REVOLUTIONS[3] + 1, 10**11, 10**17}
)
START_TICKS = sorted(
    {0, 1, 100, 170_000_000_000}
    | {revolution + step for revolution in REVOLUTIONS for step in (-2, -1, 0, 1)}
)
DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_003
END_MS = 2**62


class ListModel:
    """What a wheel must do, with the cost left out."""

    def __init__(self) -> None:
        self.timers: list[tuple[int, int]] = []

    def advance(self, now_ms: int) -> list[tuple[int, int]]:
        reached_ms = now_ms // TICK_MS * TICK_MS
        due = sorted(timer for timer in self.timers if timer[0] <= reached_ms)
        self.timers = [timer for timer in self.timers if timer[0] > reached_ms]
        return due


def run_to_end(wheel: TimerWheel, calls_max: int) -> list[tuple[int, tuple[int, int]]]:
    """Call advance only when the wheel asks for it; gives (time, timer)."""
    handed_out = []
    for _ in range(calls_max):
        now_ms = wheel.next_due_ms()
        if now_ms is None:
            return handed_out
        handed_out += [(now_ms, timer) for timer in wheel.advance(now_ms)]
    raise AssertionError(f"still not empty after {calls_max} calls: {wheel.describe()}")


@pytest.mark.parametrize("start_tick", START_TICKS)
@pytest.mark.parametrize("ticks", BOUNDARY_TICKS)
def test_timer_at_a_wheel_boundary_fires_at_its_tick_and_not_before(
    ticks: int, start_tick: int
) -> None:
    start_ms = start_tick * TICK_MS
    due_ms = start_ms + ticks * TICK_MS
    wheel = TimerWheel(start_ms)
    wheel.add(7, due_ms)
    if ticks:
        assert wheel.advance(due_ms - 1) == []
    assert wheel.advance(due_ms) == [(due_ms, 7)]
    assert len(wheel) == 0


@pytest.mark.parametrize("start_tick", START_TICKS)
def test_timers_of_all_boundaries_together_fire_in_order_when_the_wheel_asks(
    start_tick: int,
) -> None:
    start_ms = start_tick * TICK_MS
    wheel = TimerWheel(start_ms)
    expected = [(start_ms + ticks * TICK_MS, ticks) for ticks in BOUNDARY_TICKS]
    for due_ms, timer_id in reversed(expected):
        wheel.add(timer_id, due_ms)
    # At most one call per level and timer: nothing is visited tick by tick.
    handed_out = run_to_end(wheel, calls_max=10 * len(expected))
    assert [timer for _, timer in handed_out] == expected
    assert all(now_ms == max(due_ms, start_ms) for now_ms, (due_ms, _) in handed_out)


@pytest.mark.parametrize("start_ms", [0, 5, 2559, 2560, NOW_MS])
def test_timer_between_ticks_fires_at_the_next_tick(start_ms: int) -> None:
    for delay_ms in range(31):
        wheel = TimerWheel(start_ms)
        due_ms = start_ms + delay_ms
        wheel.add(1, due_ms)
        for now_ms in range(start_ms, due_ms):
            assert wheel.advance(now_ms) == []
        fires_ms = -(-due_ms // TICK_MS) * TICK_MS
        for now_ms in range(due_ms, fires_ms):
            assert wheel.advance(now_ms) == []
        assert wheel.advance(fires_ms) == [(due_ms, 1)]


def test_mistake_14_delay_under_one_tick_does_not_wait_for_a_revolution() -> None:
    for start_ms in range(0, 2 * 2560, 7):
        for delay_ms in range(TICK_MS):
            wheel = TimerWheel(start_ms)
            wheel.add(1, start_ms + delay_ms)
            assert wheel.advance(start_ms + delay_ms + TICK_MS) == [(start_ms + delay_ms, 1)]


def test_mistake_14_cancel_between_drain_and_delivery_keeps_the_rest_of_the_bucket() -> None:
    """1. Ten timers share a slot. 2. The slot is drained. 3. While its timers are handled, one is
    cancelled (rebuild) and another is added to the same slot. 4. All others come out once."""
    wheel = TimerWheel(0)
    wanted = dict.fromkeys(range(20))
    for timer_id in range(10):
        wheel.add(timer_id, 100)
        wheel.add(10 + timer_id, 100 + 2560)
    seen = []
    for due_ms, timer_id in wheel.advance(100):
        if timer_id == 3:
            wanted.pop(4)
            wanted.pop(14)
            wheel.rebuild(wanted.__contains__)
            wheel.add(20, due_ms)
            wheel.add(21, due_ms + 2560)
        if timer_id in wanted:
            seen.append(timer_id)
    assert seen == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert wheel.advance(100) == [(100, 20)]
    rest = [timer_id for _, timer_id in wheel.advance(100 + 2560)]
    assert rest == [10, 11, 12, 13, 15, 16, 17, 18, 19, 21]
    assert len(wheel) == 0


@pytest.mark.parametrize("due_ms", [-(2**63), -1, 0, NOW_MS - DAY_MS, NOW_MS - 4, NOW_MS - 3])
def test_timer_in_the_past_comes_at_the_next_advance_even_without_time_passing(due_ms: int) -> None:
    wheel = TimerWheel(NOW_MS)
    wheel.advance(NOW_MS)
    wheel.add(1, due_ms)
    next_due_ms = wheel.next_due_ms()
    assert next_due_ms is not None
    assert next_due_ms <= NOW_MS
    assert wheel.advance(NOW_MS) == [(due_ms, 1)]
    assert wheel.next_due_ms() is None


def test_same_due_time_comes_out_by_id_and_equal_timers_both_come() -> None:
    wheel = TimerWheel(0)
    wheel.add_many([9, 2, 5, 2], [40, 40, 33, 40])
    assert wheel.advance(40) == [(33, 5), (40, 2), (40, 2), (40, 9)]


def test_clock_that_goes_back_hands_out_nothing_and_breaks_nothing() -> None:
    wheel = TimerWheel(NOW_MS)
    wheel.add_many([1, 2, 3], [NOW_MS + 50, NOW_MS + 5000, NOW_MS + 10 * DAY_MS])
    assert [timer_id for _, timer_id in wheel.advance(NOW_MS + 100)] == [1]
    assert wheel.advance(NOW_MS - DAY_MS) == []
    assert wheel.advance(0) == []
    assert len(wheel) == 2
    assert wheel.advance(NOW_MS + 4999) == []
    assert [timer_id for _, timer_id in wheel.advance(NOW_MS + 5010)] == [2]
    assert [timer_id for _, timer_id in wheel.advance(NOW_MS + 11 * DAY_MS)] == [3]


@pytest.mark.parametrize("count", [10, 10_000])
def test_timers_added_while_the_clock_is_behind_fire_by_that_clock(count: int) -> None:
    """Few of them are looked through, many make the wheel start again: no difference outside."""
    wheel = TimerWheel(NOW_MS)
    wheel.add(count, NOW_MS + DAY_MS)
    wheel.advance(NOW_MS)
    back_ms = (NOW_MS - 3_600_000) // TICK_MS * TICK_MS
    dues = [back_ms + 10 * index for index in range(count)]
    wheel.add_many(range(count), dues)
    for step in (0, 1, 5):
        assert wheel.next_due_ms() is not None
        due = wheel.advance(back_ms + 10 * step)
        assert due == [
            (at, index)
            for index, at in enumerate(dues)
            if at == back_ms + 10 * step or (step == 5 and back_ms + 10 < at <= back_ms + 50)
        ]
    assert len(wheel) == count + 1 - 6
    rest = wheel.advance(NOW_MS + DAY_MS + TICK_MS)
    assert [timer_id for _, timer_id in rest] == list(range(6, count + 1))


def test_limit_gives_the_earliest_timers_first_and_all_of_them_in_the_end() -> None:
    rng = random.Random(3)
    dues = [NOW_MS + rng.randrange(DAY_MS) for _ in range(5000)]
    wheel = TimerWheel(NOW_MS)
    wheel.add_many(range(5000), dues)
    now_ms = NOW_MS + DAY_MS // 2
    portions = []
    while portions == [] or portions[-1]:
        portions.append(wheel.advance(now_ms, limit=100))
    assert all(100 <= len(portion) < 120 for portion in portions[:-2])
    expected = sorted((at, index) for index, at in enumerate(dues) if at <= now_ms // 10 * 10)
    assert [timer for portion in portions for timer in portion] == expected
    assert len(wheel) == 5000 - len(expected)


def test_limit_reached_leaves_a_due_time_in_the_past_as_the_next() -> None:
    wheel = TimerWheel(0)
    wheel.add_many([1, 2], [100, 200])
    assert wheel.advance(1000, limit=1) == [(100, 1)]
    assert wheel.next_due_ms() == 200
    assert wheel.advance(1000, limit=0) == []
    assert wheel.advance(1000, limit=1) == [(200, 2)]


def test_rebuild_drops_unwanted_timers_and_keeps_the_others_at_their_time() -> None:
    wheel = TimerWheel(NOW_MS)
    rng = random.Random(5)
    dues = [NOW_MS - 100 + rng.randrange(10 ** rng.randrange(2, 13)) for _ in range(3000)]
    wheel.add_many(range(3000), dues)
    wheel.rebuild(lambda timer_id: timer_id % 3 == 0)
    assert len(wheel) == 1000
    expected = sorted((dues[index], index) for index in range(0, 3000, 3))
    assert [timer for _, timer in run_to_end(wheel, 20_000)] == expected
    wheel.add(1, NOW_MS + 10**15)
    wheel.rebuild(lambda _: False)
    assert (len(wheel), wheel.next_due_ms()) == (0, None)


def test_jump_of_years_over_empty_slots_is_fast() -> None:
    wheel = TimerWheel(NOW_MS)
    years_ms = 20 * 365 * DAY_MS
    wheel.add_many(range(100), [NOW_MS + index * years_ms // 100 for index in range(100)])
    wheel.add(100, NOW_MS + 2 * years_ms)
    started = time.process_time()
    due = wheel.advance(NOW_MS + years_ms)
    assert time.process_time() - started < 0.05
    assert [timer_id for _, timer_id in due] == list(range(100))
    assert [timer_id for _, timer_id in wheel.advance(NOW_MS + 3 * years_ms)] == [100]


def test_hundred_thousand_timers_take_less_than_24_bytes_each() -> None:
    rng = random.Random(1)
    count = 100_000
    dues = [NOW_MS + rng.randrange(10 * DAY_MS) for _ in range(count)]
    tracemalloc.start()
    wheel = TimerWheel(NOW_MS)
    wheel.add_many(range(count), dues)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(wheel) == count
    assert used < 24 * count


STEPS_MS = st.one_of(
    st.integers(0, 25),
    st.integers(0, 3000),
    st.integers(0, 400_000),
    st.integers(0, 30 * DAY_MS),
    st.sampled_from([tick * TICK_MS for tick in BOUNDARY_TICKS]),
)
ACTIONS = st.one_of(
    st.tuples(st.just("add"), STEPS_MS),
    st.tuples(st.just("add"), STEPS_MS),
    st.tuples(st.just("past"), STEPS_MS),
    st.tuples(st.just("advance"), STEPS_MS),
    st.tuples(st.just("portion"), STEPS_MS),
    st.tuples(st.just("ask"), st.just(0)),
    st.tuples(st.just("back"), STEPS_MS),
    st.tuples(st.just("drop"), st.integers(2, 5)),
)


def advance_in_portions(wheel: TimerWheel, now_ms: int) -> list[tuple[int, int]]:
    handed_out: list[tuple[int, int]] = []
    while True:
        portion = wheel.advance(now_ms, limit=2)
        if not portion:
            return handed_out
        handed_out += portion


@settings(deadline=None, max_examples=400)
@given(start_ms=st.integers(0, 2**41), actions=st.lists(ACTIONS, max_size=60))
def test_wheel_agrees_with_a_sorted_list(start_ms: int, actions: list[tuple[str, int]]) -> None:
    wheel, model, now_ms = TimerWheel(start_ms), ListModel(), start_ms
    for number, (action, value) in enumerate(actions):
        if action in ("add", "past"):
            due_ms = min(now_ms + value, END_MS) if action == "add" else now_ms - value
            wheel.add(number, due_ms)
            model.timers.append((due_ms, number))
        elif action == "drop":
            wheel.rebuild(lambda timer_id, value=value: timer_id % value != 0)
            model.timers = [timer for timer in model.timers if timer[1] % value != 0]
        else:
            if action == "back":
                now_ms = max(now_ms - value, 0)
            elif action == "ask":
                now_ms = max(now_ms, wheel.next_due_ms() or 0)
            else:
                now_ms = min(now_ms + value, END_MS)
            due = (advance_in_portions if action == "portion" else TimerWheel.advance)(
                wheel, now_ms
            )
            assert due == model.advance(now_ms)
        assert len(wheel) == len(model.timers)
        first_ms = min(
            (-(-due_ms // TICK_MS) * TICK_MS for due_ms, _ in model.timers), default=None
        )
        next_due_ms = wheel.next_due_ms()
        assert (next_due_ms is None) == (first_ms is None)
        assert next_due_ms is None or first_ms is None or next_due_ms <= first_ms
    assert wheel.advance(2**63 - 1) == model.advance(2**63 - 1)
    assert model.timers == []
