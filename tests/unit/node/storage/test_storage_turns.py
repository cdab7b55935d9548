"""Threads that share one action: each is served once, none is forgotten."""

import threading
from collections.abc import Callable

import pytest

from raftq.node.storage.turns import Turns


def run_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads), "a thread was never served"


def test_every_item_is_served_exactly_once_and_before_take_returns() -> None:
    served: list[tuple[int, int]] = []
    groups: list[int] = []
    inside = threading.Lock()

    def serve(items: list[tuple[int, int]]) -> None:
        assert inside.acquire(blocking=False), "two groups were served at the same time"
        served.extend(items)
        groups.append(len(items))
        inside.release()

    turns = Turns(serve)
    missing: list[tuple[int, int]] = []

    def work(number: int) -> None:
        for step in range(500):
            turns.take((number, step))
            if (number, step) not in served[-200:] and (number, step) not in served:
                missing.append((number, step))

    run_threads(8, work)
    assert not missing
    assert sorted(served) == [(number, step) for number in range(8) for step in range(500)]
    assert sum(groups) == 4000


def test_threads_that_wait_while_one_is_served_share_the_next_group() -> None:
    entered, go_on = threading.Event(), threading.Event()
    groups: list[list[int]] = []

    def serve(items: list[int]) -> None:
        groups.append(sorted(items))
        entered.set()
        assert go_on.wait(30)

    turns = Turns(serve)
    first = threading.Thread(target=turns.take, args=(0,))
    first.start()
    assert entered.wait(30)
    others = [threading.Thread(target=turns.take, args=(number,)) for number in (1, 2, 3)]
    for thread in others:
        thread.start()
    waiting = threading.Event()
    while len(turns._places) < 3:
        waiting.wait(0.001)
    go_on.set()
    for thread in [first, *others]:
        thread.join(timeout=30)
    assert groups == [[0], [1, 2, 3]]


def test_an_error_in_serve_reaches_its_thread_and_frees_the_others() -> None:
    calls: list[int] = []

    def serve(items: list[int]) -> None:
        calls.append(len(items))
        if 0 in items:
            raise RuntimeError("broken")

    turns = Turns(serve)
    with pytest.raises(RuntimeError, match="broken"):
        turns.take(0)
    turns.take(1)
    assert calls == [1, 1]


def test_a_leader_does_not_wait_long_for_threads_that_stay_away() -> None:
    groups: list[int] = []
    turns = Turns(lambda items: groups.append(len(items)))
    run_threads(6, lambda number: turns.take(number))
    for number in range(20):
        turns.take(number)
    assert groups[-20:] == [1] * 20
