"""Shell: threads that call a function with one item after the other, and report in bulk.

A thread pool passes each call from the loop to a thread and back, and both wait for the interpreter
each time: for short functions that costs ten times as much as the work. Here a thread takes the
next item by itself, and the loop is woken once for all calls that have ended.

The threads are daemons: a function that never ends does not keep the process alive.
"""

import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from time import perf_counter
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Ended(Generic[T]):
    """One call: its result and its duration."""

    __slots__ = ("error", "item", "result", "seconds")

    def __init__(self, item: T, result: Any, error: BaseException | None, seconds: float) -> None:
        self.item = item
        self.result = result
        self.error = error
        self.seconds = seconds


class HandlerThreads(Generic[T]):
    """At most `count` threads, each started when there is something for it.

    `begin` is called in the thread before each call; if it returns False, the item is dropped.
    `ended` is called on the loop."""

    def __init__(
        self,
        loop: AbstractEventLoop,
        count: int,
        begin: Callable[[T], Callable[[], Any] | None],
        ended: Callable[[list[Ended[T]]], None],
    ) -> None:
        self._loop = loop
        self._count = count
        self._begin = begin
        self._tell = ended
        self._waiting: SimpleQueue[T | None] = SimpleQueue()
        self._lock = threading.Lock()
        self._over: deque[Ended[T]] = deque()
        self._told = False  # the loop will look at `_over`
        self._threads: list[threading.Thread] = []
        self._unended = 0  # given and not reported; on the loop only

    def give(self, item: T) -> None:
        """Calls the function with this item when a thread is free."""
        self._unended += 1
        self._waiting.put(item)
        if len(self._threads) < min(self._count, self._unended):
            name = f"raftq-worker_{len(self._threads)}"
            thread = threading.Thread(target=self._run, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def take_back(self) -> list[T]:
        """Takes back the items that no thread has taken."""
        found: list[T] = []
        while True:
            try:
                item = self._waiting.get_nowait()
            except Empty:
                self._unended -= len(found)
                return found
            if item is not None:
                found.append(item)

    def close(self) -> None:
        """Begins nothing more. Running calls go on, and their ends are not reported."""
        self.take_back()
        for _ in self._threads:
            self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            result: Any = None
            error: BaseException | None = None
            began = perf_counter()
            try:
                call = self._begin(item)
                if call is not None:
                    result = call()
            except BaseException as raised:
                error = raised
            self._note(Ended(item, result, error, perf_counter() - began))

    def _note(self, one: Ended[T]) -> None:
        with self._lock:
            self._over.append(one)
            if self._told:
                return
            self._told = True
        try:
            self._loop.call_soon_threadsafe(self._look)
        except RuntimeError:
            return  # the loop is closed: nothing waits for it any more

    def _look(self) -> None:
        with self._lock:
            self._told = False
            over = list(self._over)
            self._over.clear()
        self._unended -= len(over)
        self._tell(over)
