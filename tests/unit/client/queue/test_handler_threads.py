"""Threads that call handlers: every item once, told of on the loop, none begun after the end."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from raftq.client.queue.handler_threads import Ended, HandlerThreads


class Calls:
    """Items are functions; what came of them."""

    def __init__(self, count: int) -> None:
        self.ended: list[Ended[Callable[[], Any]]] = []
        self.looks = 0
        self.threads: HandlerThreads[Callable[[], Any]] = HandlerThreads(
            asyncio.get_running_loop(), count, lambda item: item, self._note
        )

    def _note(self, some: list[Ended[Callable[[], Any]]]) -> None:
        self.looks += 1
        self.ended += some

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.ended) < count:  # noqa: ASYNC110 - threads set no asyncio.Event
                await asyncio.sleep(0.005)


def test_one_thread_calls_in_order_and_errors_are_results() -> None:
    async def main() -> None:
        calls = Calls(1)
        order: list[int] = []

        def fail() -> None:
            raise SystemExit(3)

        for number in range(500):
            calls.threads.give(lambda number=number: order.append(number))  # type: ignore[misc]
        calls.threads.give(fail)
        await calls.until(501)
        assert order == list(range(500))
        assert [one.error for one in calls.ended[:500]] == [None] * 500
        assert isinstance(calls.ended[500].error, SystemExit)
        assert calls.looks < 400, "the loop is told of many at once"
        calls.threads.close()

    asyncio.run(main())


def test_no_more_threads_than_allowed_and_none_without_work() -> None:
    async def main() -> None:
        calls = Calls(3)
        lock = threading.Lock()
        running = most = 0
        names: set[str] = set()
        together = threading.Barrier(3)

        def work() -> None:
            nonlocal running, most
            with lock:
                running += 1
                most = max(most, running)
                names.add(threading.current_thread().name)
            together.wait(20)
            with lock:
                running -= 1

        for _ in range(30):
            calls.threads.give(work)
        await calls.until(30)
        assert most == 3
        assert len(names) == 3
        calls.threads.close()

    asyncio.run(main())


def test_what_is_taken_back_or_comes_after_the_end_is_never_begun() -> None:
    async def main() -> None:
        calls = Calls(1)
        begun: list[int] = []
        go, busy = threading.Event(), threading.Event()

        def wait() -> bool:
            busy.set()
            return go.wait(20)

        calls.threads.give(wait)
        for number in range(5):
            calls.threads.give(lambda number=number: begun.append(number))  # type: ignore[misc]
        await asyncio.to_thread(busy.wait, 20)
        assert len(calls.threads.take_back()) == 5
        calls.threads.give(lambda: begun.append(99))
        calls.threads.close()
        go.set()
        await calls.until(1)
        assert calls.ended[0].result is True
        await asyncio.sleep(0.05)
        assert begun == []
        assert len(calls.ended) == 1

    asyncio.run(main())


@pytest.mark.filterwarnings("error")
def test_a_call_that_outlives_the_loop_troubles_nobody() -> None:
    go, over = threading.Event(), threading.Event()

    def wait() -> None:
        go.wait(20)

    async def main() -> None:
        calls = Calls(1)
        calls.threads.give(wait)
        calls.threads.close()
        thread = calls.threads._threads[0]
        threading.Thread(target=lambda: (thread.join(20), over.set())).start()

    asyncio.run(main())
    go.set()
    assert over.wait(20), "the thread ends though there is no loop to tell"
