"""Threads of which one runs at a time; a seed says which one goes on at each switch. (Test tool.)

They are real threads that hand a baton to each other, so product code that holds a lock or is in
the middle of a write can be interrupted there and goes on later. Whoever has the baton calls
`switch` where others may come in between: a simulated disk does so before each operation, a `Lock`
made here before it is taken. Between two switches nothing else runs, so the same seed gives the
same schedule.
"""

import sys
import threading
from collections.abc import Callable
from random import Random
from types import FrameType
from typing import Any

from simdisk import SimCrash

Tracer = Callable[[FrameType, str, Any], Any]


class _Thread:
    def __init__(self, name: str) -> None:
        self.name = name
        self.baton = threading.Semaphore(0)
        self.waits_for: Lock | None = None


class Threads:
    """The thread that makes it is the first one, `main`; it must `finish` the others."""

    def __init__(self, rng: Random, stay: float = 0.5) -> None:
        """`stay` is how often a switch leaves the baton where it is, though others could go on."""
        self._rng = rng
        self._stay = stay
        self._main = _Thread("main")
        self._running = self._main
        self._all: list[_Thread] = [self._main]
        self._error: BaseException | None = None
        self._watched: tuple[str, ...] = ()
        self._before: Tracer | None = None
        self.trace: list[str] = []

    @property
    def others(self) -> int:
        """How many threads besides the main one have not ended."""
        return len(self._all) - 1

    @property
    def in_main(self) -> bool:
        return self._running is self._main

    def switch_at_lines(self, *files: str) -> None:
        """Switch before each line of the source files whose path ends like that, too, in threads
        that begin from now on, and in the main one until `finish`."""
        self._watched = files
        self._before = sys.gettrace()
        sys.settrace(self._enter)

    def _enter(self, frame: FrameType, event: str, _: object) -> Tracer | None:
        return self._step if frame.f_code.co_filename.endswith(self._watched) else None

    def _step(self, frame: FrameType, event: str, _: object) -> Tracer:
        if event == "line":
            self.switch()
        return self._step

    def spawn(self, name: str, call: Callable[[], None]) -> None:
        """Begin a thread; it runs when a switch comes to it. A crash of the machine ends it."""
        thread = _Thread(name)
        self._all.append(thread)

        def body() -> None:
            thread.baton.acquire()
            if self._watched:
                sys.settrace(self._enter)
            try:
                call()
            except SimCrash:
                self.trace.append(f"{name} crashed")
            except BaseException as error:  # told to the main thread
                self._error = self._error or error
            sys.settrace(None)
            self._all.remove(thread)
            self._pass_on(self._draw())

        threading.Thread(target=body, name=name, daemon=True).start()

    def switch(self) -> None:
        """Others may run now."""
        me = self._running
        if len(self._all) > 1 and not (me.waits_for is None and self._rng.random() < self._stay):
            target = self._draw()
            if target is not me:
                self._pass_on(target)
                me.baton.acquire()
        if me is self._main and self._error is not None:
            error, self._error = self._error, None
            raise error

    def _draw(self) -> _Thread:
        ready = [one for one in self._all if one.waits_for is None]
        assert ready, f"all wait: {[one.name for one in self._all]}"
        return self._rng.choice(ready)

    def _pass_on(self, target: _Thread) -> None:
        self.trace.append(target.name)
        self._running = target
        target.baton.release()

    def finish(self) -> None:
        """Return when all others have ended."""
        if sys.gettrace() == self._enter:
            sys.settrace(self._before)
        stay, self._stay = self._stay, 0.0
        while self.others:
            self.switch()
        self._stay = stay
        self.switch()

    def lock(self) -> "Lock":
        return Lock(self)

    def wait(self, lock: "Lock") -> None:
        me = self._running
        while lock.held:
            me.waits_for = lock
            self.switch()

    def wake(self, lock: "Lock") -> None:
        for one in self._all:
            if one.waits_for is lock:
                one.waits_for = None


class Lock:
    """Takes the place of a `threading.Lock`."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.held = False

    def __enter__(self) -> None:
        self._threads.switch()
        self._threads.wait(self)
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False
        self._threads.wake(self)
