"""The delay schedule: its rules one by one, and its snapshot under damage."""

import random
import struct
import time
import tracemalloc

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from raftq.client.common.errors import CorruptFile, UnknownFormat
from raftq.node.queue.core.delay_schedule import DelaySchedule

NOW_MS = 1_700_000_000_000
DAY_MS = 86_400_000


def offsets_due(schedule: DelaySchedule, now_ms: int, records_max: int = 10_000) -> list[int]:
    return [offset for _, offset in schedule.due(now_ms, records_max)]


def busy_schedule() -> DelaySchedule:
    """Pending, cancelled, fired and flushed, fired and unflushed records."""
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10 * index for index in range(20)])
    schedule.control(20)
    schedule.apply_cancelled(3)
    schedule.apply_fired([0, 1], data_end=102)
    schedule.fired_flushed(102)
    schedule.apply_fired([2, 5], data_end=104)
    schedule.apply_fired([4], data_end=110)
    schedule.control(21)
    return schedule


def test_records_become_due_in_order_of_time_then_offset_and_never_early() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 300, NOW_MS + 100, NOW_MS + 100, NOW_MS + 101])
    assert schedule.due(NOW_MS + 99, 10) == []
    assert schedule.due(NOW_MS + 109, 10) == [(NOW_MS + 100, 1), (NOW_MS + 100, 2)]
    assert offsets_due(schedule, NOW_MS + 110) == [1, 2, 3]
    assert offsets_due(schedule, NOW_MS + 300) == [1, 2, 3, 0]


def test_mistake_07_record_that_was_returned_but_not_fired_comes_again() -> None:
    """1. due() hands out the first two. 2. The append fails: nothing is told. 3. The same two come
    again, also with a larger maximum. 4. One is fired: the other one still comes."""
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10, NOW_MS + 20, NOW_MS + 30])
    for _ in range(3):
        assert offsets_due(schedule, NOW_MS + 100, 2) == [0, 1]
    assert offsets_due(schedule, NOW_MS + 100, 9) == [0, 1, 2]
    schedule.apply_fired([1], data_end=1)
    assert offsets_due(schedule, NOW_MS + 100, 1) == [0]
    assert offsets_due(schedule, NOW_MS + 100, 9) == [0, 2]
    assert schedule.pending_count == 2
    schedule.apply_fired([0, 2], data_end=3)
    assert offsets_due(schedule, NOW_MS + 10 * DAY_MS) == []
    assert (schedule.pending_count, schedule.next_due_ms()) == (0, None)


def test_mistake_08_cancelled_record_never_becomes_visible() -> None:
    """Cancelled before it is due, while it is ready, after it was returned, or told twice."""
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 50] * 6)
    assert schedule.cancel(1)
    assert schedule.is_pending(1), "cancel only decides"
    schedule.apply_cancelled(1)
    assert not schedule.cancel(1)
    assert offsets_due(schedule, NOW_MS + 50, 3) == [0, 2, 3]
    schedule.apply_cancelled(2)
    schedule.apply_cancelled(5)
    schedule.apply_cancelled(5)
    assert offsets_due(schedule, NOW_MS + 60) == [0, 3, 4]
    assert not schedule.recovered(0)
    restored = DelaySchedule.restore(schedule.snapshot(), NOW_MS)
    assert offsets_due(restored, NOW_MS + DAY_MS) == [0, 3, 4]
    assert [offset for offset, _ in restored.pending(10)] == [0, 3, 4]


def test_mistake_08_record_put_back_and_then_cancelled_stays_cancelled_at_the_next_open() -> None:
    """1. Fired, but the data log lost it. 2. Put back, then cancelled. 3. The replay at the next
    open tells the void mark and the cancel: it must not come back."""
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS])
    schedule.apply_fired([0], data_end=500)
    schedule.apply_cancelled(0)
    assert schedule.recovered(data_end=400), "the mark is void all the same"
    assert offsets_due(schedule, NOW_MS + DAY_MS) == []


def test_mistake_14_cancel_of_one_returned_record_keeps_the_others_of_its_tick() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 7] * 100)
    returned = offsets_due(schedule, NOW_MS + 10, 10)
    schedule.apply_cancelled(returned[0])
    schedule.apply_fired(returned[1:], data_end=9)
    assert offsets_due(schedule, NOW_MS + 10) == list(range(10, 100))


def test_records_max_is_filled_although_many_cancelled_ones_are_in_the_way() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10 + index for index in range(1000)])
    assert len(schedule.due(NOW_MS + 2000, 300)) == 300
    for offset in range(900):
        schedule.apply_cancelled(offset)
    assert offsets_due(schedule, NOW_MS + 2000, 50) == list(range(900, 950))
    assert offsets_due(schedule, NOW_MS + 2000, 500) == list(range(900, 1000))


def test_cancelled_rest_of_a_crowded_tick_does_not_hide_the_records_behind_it() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10] * 1000 + [NOW_MS + 50, NOW_MS + 60])
    assert offsets_due(schedule, NOW_MS + 100, 10) == list(range(10))
    for offset in range(1000):
        schedule.apply_cancelled(offset)
    assert offsets_due(schedule, NOW_MS + 100, 10) == [1000, 1001]


def test_record_of_the_past_goes_before_a_backlog_that_is_waiting() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10] * 5)
    assert offsets_due(schedule, NOW_MS + 10, 2) == [0, 1]
    schedule.scheduled(5, [-5, NOW_MS])
    assert schedule.deliver_at(5) == 0
    assert offsets_due(schedule, NOW_MS + 10, 3) == [5, 6, 0]


def test_clock_that_goes_back_makes_nothing_due_early_and_loses_nothing() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10, NOW_MS + 500])
    assert offsets_due(schedule, NOW_MS + 1000) == [0, 1]
    assert offsets_due(schedule, NOW_MS + 490) == [0]
    assert offsets_due(schedule, NOW_MS) == []
    schedule.scheduled(2, [NOW_MS + 20])
    assert offsets_due(schedule, NOW_MS + 30) == [0, 2]
    assert offsets_due(schedule, NOW_MS + 1000) == [0, 2, 1]


def test_next_due_is_never_later_than_the_first_pending_record() -> None:
    schedule = DelaySchedule(NOW_MS)
    assert schedule.next_due_ms() is None
    schedule.scheduled(0, [NOW_MS + 60_000, NOW_MS + 3 * DAY_MS])
    now_ms, calls = NOW_MS, 0
    while not (returned := offsets_due(schedule, now_ms)):
        now_ms = schedule.next_due_ms() or 0
        calls += 1
    assert (returned, now_ms) == ([0], NOW_MS + 60_000)
    assert calls < 10
    assert schedule.next_due_ms() == NOW_MS + 60_000, "not fired yet: due again at once"
    schedule.apply_fired([0], data_end=1)
    next_due_ms = schedule.next_due_ms()
    assert next_due_ms is not None
    assert NOW_MS + 60_000 < next_due_ms <= NOW_MS + 3 * DAY_MS


def test_pending_is_listed_in_pages_by_time_then_offset() -> None:
    schedule = DelaySchedule(NOW_MS)
    times = [NOW_MS + (7 * index) % 5 for index in range(12)]
    schedule.scheduled(0, times)
    schedule.apply_cancelled(4)
    expected = sorted(
        ((offset, at) for offset, at in enumerate(times) if offset != 4),
        key=lambda pair: (pair[1], pair[0]),
    )
    listed: list[tuple[int, int]] = []
    while page := schedule.pending(4, after=listed[-1] if listed else None):
        assert len(page) <= 4
        listed += page
    assert listed == expected


def test_done_below_is_held_back_by_pending_and_by_unflushed_records() -> None:
    schedule = DelaySchedule(NOW_MS)
    assert (schedule.done_below, schedule.end_offset) == (0, 0)
    schedule.scheduled(10, [NOW_MS + 10] * 4)
    schedule.control(14)
    assert (schedule.done_below, schedule.end_offset) == (10, 15)
    schedule.apply_cancelled(11)
    schedule.apply_fired([10], data_end=1)
    assert schedule.done_below == 10, "its record is needed again if the data log loses it"
    schedule.fired_flushed(0)
    assert schedule.done_below == 10
    schedule.fired_flushed(1)
    assert schedule.done_below == 12
    schedule.apply_fired([13, 12], data_end=3)
    schedule.fired_flushed(3)
    assert schedule.done_below == 15
    schedule.scheduled(15, [NOW_MS])
    assert schedule.done_below == 15


def test_recovered_puts_back_only_what_was_fired_beyond_the_end_of_data() -> None:
    schedule = busy_schedule()
    assert schedule.unflushed_count == 3
    assert not schedule.recovered(data_end=110)
    assert schedule.recovered(data_end=104)
    assert [schedule.is_pending(offset) for offset in range(7)] == [False] * 4 + [True, False, True]
    assert schedule.deliver_at(4) == NOW_MS + 40
    assert schedule.fired_end == 104
    assert (schedule.done_below, schedule.unflushed_count) == (2, 2)
    assert schedule.recovered(data_end=103)
    assert offsets_due(schedule, NOW_MS + 50) == [2, 4, 5]


def test_fired_end_above_a_shorter_data_log_must_be_made_durable_without_any_void_mark() -> None:
    """Otherwise a batch fired below it, without a mark, is missed by the scan at the next open."""
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS])
    schedule.apply_fired([0], data_end=9)
    assert schedule.recovered(data_end=7)
    assert schedule.recovered(data_end=3)
    assert schedule.fired_end == 3
    assert not schedule.recovered(data_end=3)


def test_put_back_record_comes_out_once_although_its_first_timer_was_still_in_the_wheel() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 1000, NOW_MS + 1000])
    schedule.apply_fired([0], data_end=5)
    assert schedule.recovered(data_end=4)
    assert offsets_due(schedule, NOW_MS + 1000) == [0, 1]


def test_put_back_record_comes_out_once_although_due_had_returned_it_before() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + 10, NOW_MS + 10])
    assert offsets_due(schedule, NOW_MS + 10) == [0, 1]
    schedule.apply_fired([0], data_end=5)
    assert schedule.done_below == 0
    assert schedule.recovered(data_end=4)
    assert schedule.done_below == 0
    assert offsets_due(schedule, NOW_MS + 10) == [0, 1]


def test_marks_told_out_of_order_are_forgotten_by_their_place_in_the_data_log() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS] * 3)
    for offset, data_end in ((0, 104), (1, 101), (2, 103)):
        schedule.apply_fired([offset], data_end)
    assert not schedule.recovered(data_end=110)
    schedule.fired_flushed(102)
    assert schedule.unflushed_count == 2
    assert schedule.recovered(data_end=103)
    assert [offset for offset, _ in schedule.pending(9)] == [0]


def test_batch_found_in_the_data_log_outweighs_a_void_mark_of_the_same_record() -> None:
    """1. Fired at 500, data cut to 400, put back. 2. Fired again at 400. 3. Crash before the mark.
    4. The replay tells the mark at 500, the data log the batch that ends at 401."""
    for batch_first in (False, True):
        schedule = DelaySchedule(NOW_MS)
        schedule.scheduled(0, [NOW_MS])
        told = [500, 401]
        for data_end in reversed(told) if batch_first else told:
            schedule.apply_fired([0], data_end)
        assert schedule.recovered(data_end=401)
        assert offsets_due(schedule, NOW_MS + DAY_MS) == []


def test_facts_told_twice_change_nothing() -> None:
    schedule = busy_schedule()
    before = (schedule.pending(100), schedule.end_offset)
    schedule.apply_fired([2, 5], data_end=104)
    schedule.apply_fired([0], data_end=101)
    schedule.apply_fired([], data_end=105)
    schedule.apply_cancelled(3)
    assert (schedule.pending(100), schedule.end_offset) == before
    assert not schedule.recovered(data_end=110)
    assert (schedule.pending(100), schedule.end_offset) == before


def test_fired_offset_that_the_delays_log_lost_is_not_used_again() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS])
    schedule.apply_fired([4], data_end=9)
    assert schedule.end_offset == 5
    with pytest.raises(AssertionError):
        schedule.scheduled(4, [NOW_MS])
    with pytest.raises(AssertionError):
        schedule.control(4)
    assert schedule.recovered(data_end=0)
    assert not schedule.is_pending(4)


def test_scheduled_refuses_a_time_over_64_bits_and_changes_nothing() -> None:
    schedule = DelaySchedule(NOW_MS)
    with pytest.raises(OverflowError):
        schedule.scheduled(0, [NOW_MS, 2**63])
    assert (schedule.pending_count, schedule.end_offset, schedule.next_due_ms()) == (0, 0, None)
    schedule.scheduled(0, [2**63 - 1])
    assert offsets_due(schedule, NOW_MS + 10_000 * DAY_MS) == []


def test_many_cancels_far_ahead_do_not_stay_in_memory() -> None:
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + DAY_MS] * 50_000)
    for offset in range(49_990):
        schedule.apply_cancelled(offset)
    timers = int(schedule.describe().split("timers=")[1].split()[0])
    assert timers <= 2 * 10 + 4096
    assert offsets_due(schedule, NOW_MS + DAY_MS) == list(range(49_990, 50_000))


def test_restored_schedule_goes_on_like_the_first() -> None:
    first = busy_schedule()
    restored = DelaySchedule.restore(first.snapshot(), NOW_MS + 10)
    assert restored.snapshot() == first.snapshot()
    for schedule in (first, restored):
        assert (schedule.end_offset, schedule.fired_end, schedule.done_below) == (22, 110, 2)
        assert schedule.recovered(data_end=105)
        assert offsets_due(schedule, NOW_MS + 80) == [4, 6, 7, 8]
    assert restored.pending(100) == first.pending(100)
    assert restored.snapshot() == first.snapshot()


def test_empty_schedule_survives_a_snapshot() -> None:
    restored = DelaySchedule.restore(DelaySchedule(NOW_MS).snapshot(), NOW_MS)
    assert (restored.pending_count, restored.end_offset, restored.next_due_ms()) == (0, 0, None)


def test_every_flipped_bit_and_every_cut_of_a_snapshot_is_noticed() -> None:
    data = busy_schedule().snapshot()
    for position in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptFile):
                DelaySchedule.restore(bytes(damaged), NOW_MS)
        with pytest.raises(CorruptFile):
            DelaySchedule.restore(data[:position], NOW_MS)
    with pytest.raises(CorruptFile):
        DelaySchedule.restore(data + b"\0", NOW_MS)


def sealed(body: bytes) -> bytes:
    return body + struct.pack("<I", crc32c(body))


def crafted(numbers: list[int], columns: list[int], version: int = 1) -> bytes:
    return sealed(
        struct.pack("<4sI5q", b"RQDS", version, *numbers)
        + struct.pack(f"<{len(columns)}q", *columns)
    )


@pytest.mark.parametrize(
    ("numbers", "columns"),
    [
        ([9, 9, 2**40, 0, 0], []),
        ([9, 9, 2**62, 0, 0], []),
        ([9, 9, -1, 1, 0], []),
        ([-1, 0, 0, 0, 0], []),
        ([0, -1, 0, 0, 0], []),
        ([9, 9, 1, 0, 0], [9, 5]),
        ([9, 9, 1, 0, 0], [-1, 5]),
        ([9, 9, 1, 0, 0], [3, -5]),
        ([9, 9, 2, 0, 0], [3, 3, 5, 5]),
        ([9, 9, 0, 1, 1], [10, 1, 3, 5]),
        ([9, 9, 0, 1, 1], [-1, 1, 3, 5]),
        ([9, 9, 0, 1, 1], [8, 2, 3, 5]),
        ([9, 9, 0, 2, 1], [8, 8, 1, 0, 3, 5]),
        ([9, 9, 0, 1, 1], [8, 1, 3, -2]),
        ([9, 9, 0, 1, 1], [8, 1, 9, 5]),
    ],
)
def test_snapshot_with_impossible_numbers_and_a_right_checksum_is_refused(
    numbers: list[int], columns: list[int]
) -> None:
    with pytest.raises(CorruptFile):
        DelaySchedule.restore(crafted(numbers, columns), NOW_MS)


def test_snapshot_of_a_newer_version_is_told_apart_from_damage() -> None:
    good = crafted([9, 9, 1, 1, 1], [2, 5, 8, 1, 3, 5])
    assert DelaySchedule.restore(good, NOW_MS).pending(9) == [(2, 5)]
    with pytest.raises(UnknownFormat):
        DelaySchedule.restore(crafted([9, 9, 0, 0, 0], [], version=2), NOW_MS)


@settings(deadline=None, max_examples=300)
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=300).map(lambda tail: sealed(b"RQDS\1\0\0\0" + tail)),
        st.tuples(
            st.lists(st.integers(-1, 12), min_size=5, max_size=5),
            st.lists(st.integers(-3, 12), max_size=24),
        ).map(lambda parts: crafted(*parts)),
    )
)
def test_any_bytes_are_either_a_sound_snapshot_or_refused(data: bytes) -> None:
    try:
        schedule = DelaySchedule.restore(data, NOW_MS)
    except CorruptFile:
        return
    assert schedule.snapshot() == data
    assert 0 <= schedule.done_below <= schedule.end_offset
    schedule.recovered(0)
    due = offsets_due(schedule, NOW_MS + DAY_MS)
    assert len(due) == len(set(due)) == schedule.pending_count


def test_pending_record_takes_less_than_150_bytes_and_restores_in_microseconds() -> None:
    rng = random.Random(1)
    count = 100_000
    schedule = DelaySchedule(NOW_MS)
    schedule.scheduled(0, [NOW_MS + rng.randrange(10 * DAY_MS) for _ in range(count)])
    data = schedule.snapshot()
    assert len(data) < 17 * count
    started = time.process_time()
    DelaySchedule.restore(data, NOW_MS)
    assert time.process_time() - started < 5e-6 * count
    tracemalloc.start()
    restored = DelaySchedule.restore(data, NOW_MS)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert restored.pending_count == count
    assert used < 150 * count
