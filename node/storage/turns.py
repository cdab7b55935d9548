"""Threads that arrive together are served together, by one of them. (Shell.)

The first thread serves itself and all that arrived before it began. Of the threads that arrive
meanwhile, the first serves the next group. So one system call serves many threads, and no thread
waits for another that only passes a message on.
"""

import threading
from collections.abc import Callable
from time import sleep
from typing import Generic, TypeVar

T = TypeVar("T")

# How often a leader lets other threads run before it stops waiting for them.
_YIELDS_MAX = 50


class Turns(Generic[T]):
    """Groups items of threads. `serve` gets the items of one group at a time and should not
    raise."""

    __slots__ = ("_leadership", "_lock", "_places", "_serve", "_size")

    def __init__(self, serve: Callable[[list[T]], None]) -> None:
        self._serve = serve
        self._lock = threading.Lock()
        self._leadership = False
        self._size = 1
        self._places: list[_Place[T]] = []

    def take(self, item: T) -> None:
        """Return once a group that holds the item was served."""
        own = _Place(item)
        with self._lock:
            if self._leadership:
                own.woken.acquire()
                self._places.append(own)
            else:
                self._leadership = own.leads = True
        if not own.leads:
            own.woken.acquire()
        if own.leads:
            self._lead(own)

    def _lead(self, own: "_Place[T]") -> None:
        # The threads of the last group are on their way back. With them this group is twice as
        # large.
        for _ in range(_YIELDS_MAX):
            if len(self._places) + 1 >= self._size:
                break
            sleep(0)
        with self._lock:
            others, self._places = self._places, []
        self._size = max(len(others) + 1, self._size - 1)
        try:
            self._serve([own.item, *(place.item for place in others)])
        finally:
            with self._lock:
                following = self._places.pop(0) if self._places else None
                self._leadership = following is not None
            if following is not None:
                # Start the next group first, so that it is under way while this one returns.
                following.leads = True
                following.woken.release()
            for place in others:
                place.woken.release()


class _Place(Generic[T]):
    """One thread in `take`: its item, and whether it is its turn to serve."""

    __slots__ = ("item", "leads", "woken")

    def __init__(self, item: T) -> None:
        self.item = item
        self.leads = False
        self.woken = threading.Lock()
