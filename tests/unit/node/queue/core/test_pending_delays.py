"""The book of pending records: due once, at its time, wherever its bytes are."""

import random
import tracemalloc

import pytest

from raftq.node.queue.core.pending_delays import PendingDelays

NOW_MS = 1_700_000_000_000


def loaded(now_ms: int = NOW_MS) -> PendingDelays:
    pending_delays = PendingDelays()
    for _ in pending_delays.load(now_ms):
        pass
    return pending_delays


def all_due(pending_delays: PendingDelays, now_ms: int, records_max: int = 100) -> list[int]:
    found, more = pending_delays.due(now_ms, records_max)
    while more:
        some, more = pending_delays.due(now_ms, records_max)
        found += some
    return found


def page(pending_delays: PendingDelays, skip: int, limit: int) -> list[tuple[int, int]]:
    return next(part for part in pending_delays.page(skip, limit) if part is not None)


def test_record_is_due_at_its_tick_and_handed_out_once() -> None:
    pending_delays = loaded()
    pending_delays.scheduled(0, [NOW_MS + 25, NOW_MS + 5], 100)
    assert all_due(pending_delays, NOW_MS + 4) == []
    assert all_due(pending_delays, NOW_MS + 10) == [1]
    assert all_due(pending_delays, NOW_MS + 30) == [0]
    assert all_due(pending_delays, NOW_MS + 99) == []
    pending_delays.again([0, 1], NOW_MS + 200)
    assert all_due(pending_delays, NOW_MS + 199) == []
    assert all_due(pending_delays, NOW_MS + 200) == [0, 1]
    assert pending_delays.fired([1, 0, 7]) == [1, 0]
    assert len(pending_delays) == 0


def test_cancelled_record_never_comes_and_its_place_is_free() -> None:
    pending_delays = loaded()
    pending_delays.scheduled(0, [NOW_MS + 50] * 600, 60_000)
    assert pending_delays.first_held(600) == 0
    pending_delays.cancelled(range(300))
    assert all_due(pending_delays, NOW_MS + 50) == list(range(300, 600))
    assert pending_delays.first_held(600) == 256
    pending_delays.fired(range(300, 600))
    assert pending_delays.first_held(600) == 256
    pending_delays.released(range(300, 600))
    assert pending_delays.first_held(600) == 600


def test_moved_record_keeps_its_id_and_frees_its_place() -> None:
    pending_delays = loaded()
    pending_delays.scheduled(0, [NOW_MS + 50] * 300, 30_000)
    pending_delays.fired(range(1, 300))
    pending_delays.released(range(1, 300))
    assert pending_delays.held_below(300, 10) == [0]
    pending_delays.moved([0], [NOW_MS + 50], 1_000, 100)
    assert (
        pending_delays.offset_of(0),
        pending_delays.held_below(1_000, 10),
        pending_delays.held_below(2_000, 10),
    ) == (
        1_000,
        [],
        [0],
    )
    assert pending_delays.first_held(1_001) == 1_000 >> 8 << 8
    assert all_due(pending_delays, NOW_MS + 50) == [0]
    pending_delays.moved([0], [NOW_MS + 50], 2_000, 100)
    pending_delays.cancelled([0])
    assert pending_delays.first_held(2_001) == 2_001


def test_record_whose_first_place_is_gone_is_known_by_its_id() -> None:
    pending_delays = PendingDelays()
    pending_delays.moved([3, 9], [NOW_MS + 50, NOW_MS - 70], 5_000, 300)
    for _ in pending_delays.load(NOW_MS):
        pass
    assert all_due(pending_delays, NOW_MS) == [9]
    assert page(pending_delays, 0, 9) == [(3, NOW_MS + 50)]


def test_page_is_in_order_of_time_and_leaves_out_what_is_done() -> None:
    rng = random.Random(5)
    pending_delays = loaded()
    times = [NOW_MS + rng.randrange(10_000_000) for _ in range(20_000)]
    pending_delays.scheduled(0, times, 1)
    gone = rng.sample(range(20_000), 5_000)
    pending_delays.cancelled(gone)
    kept = dict(enumerate(times))
    for one in gone:
        del kept[one]
    expected = sorted(((one, at) for one, at in kept.items()), key=lambda pair: (pair[1], pair[0]))
    for skip, limit in ((0, 10), (0, 20_000), (14_990, 100), (7_000, 5_000), (20_000, 5)):
        assert page(pending_delays, skip, limit) == expected[skip : skip + limit]


def test_clock_that_goes_back_makes_nothing_early() -> None:
    pending_delays = loaded()
    pending_delays.scheduled(0, [NOW_MS + 1_000] * 500, 1)
    some, more = pending_delays.due(NOW_MS + 1_000, 10)
    assert more
    assert len(some) == 10
    assert all_due(pending_delays, NOW_MS + 900, 10) == []
    assert sorted(some + all_due(pending_delays, NOW_MS + 1_000, 10)) == list(range(500))


@pytest.mark.parametrize("seed", range(40))
def test_random_life_of_a_book_agrees_with_a_list(seed: int) -> None:
    rng = random.Random(seed)
    now, end = NOW_MS, 0
    pending_delays = PendingDelays()
    pending: dict[int, int] = {}
    place: dict[int, int] = {}
    out: list[int] = []
    ready = False
    for step in range(200):
        if step == 20:
            for _ in pending_delays.load(now):
                pass
            ready = True
        count = rng.choice((0, 1, 40, 400))
        times = [now + rng.randrange(-30, rng.choice((100, 5_000, 400_000))) for _ in range(count)]
        pending_delays.scheduled(end, times, 10 * count)
        pending.update(zip(range(end, end + count), times, strict=True))
        place.update({one: one for one in range(end, end + count)})
        end += count + rng.randrange(3)
        if pending and rng.random() < 0.3:
            some = rng.sample(sorted(pending), min(len(pending), 100))
            pending_delays.cancelled(some)
            for one in some:
                del pending[one], place[one]
        if pending and rng.random() < 0.3:
            limit = rng.randrange(end + 1)
            some = pending_delays.held_below(limit, 150)
            below = sorted((place[one], one) for one in pending if place[one] < limit)
            assert some == [one for _, one in below][:150]
            pending_delays.moved(some, [pending[one] for one in some], end, 1)
            place.update(zip(some, range(end, end + len(some)), strict=True))
            end += len(some)
        if out and rng.random() < 0.5:
            pending_delays.released(out)
            for one in out:
                del place[one]
            out = []
        held = min(place.values(), default=end)
        assert pending_delays.first_held(end) == min(held >> 8 << 8 if place else end, end)
        if not ready:
            continue
        now += rng.choice((0, 7, 10, 300, 5_000, 100_000))
        pending_delays.work()
        expected = sorted(one for one, at in pending.items() if at <= now // 10 * 10)
        found = all_due(pending_delays, now, rng.choice((10, 1_000)))
        assert sorted(found) == expected
        back = rng.sample(found, len(found) // 4)
        pending_delays.again(back, 0)
        done = [one for one in found if one not in back]
        assert pending_delays.fired(done) == done
        out += done
        for one in done:
            del pending[one]
        assert len(pending_delays) == len(pending)
        assert all(pending_delays.offset_of(one) == place[one] for one in pending)


def test_memory_of_pending_records_is_bounded() -> None:
    tracemalloc.start()
    pending_delays = loaded()
    for base in range(0, 200_000, 500):
        pending_delays.scheduled(base, [NOW_MS + 60_000 + base] * 500, 500 * 1024)
    each = tracemalloc.get_traced_memory()[0] / 200_000
    tracemalloc.stop()
    assert each < 200, each
