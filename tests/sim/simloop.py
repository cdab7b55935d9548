"""A virtual-time event loop on which simulated processes live, stop and die. (Test fake.)

Time moves only when nobody has anything to do, and then straight to the next timer. So a day costs
nothing, everything happens in a fixed order, and a program in which everybody waits for ever is
an error instead of a hang. `create_connection` and `create_server` go to a simulated network.

A `Process` is what `kill -9` and SIGSTOP act on. Code belongs to the process whose context it runs
in: a context variable names it, and every task, timer and callback inherits the context of whoever
made it. The loop looks at that name before it runs anything:

    running   it runs
    paused    it is put aside and runs, in order, once the process is resumed; timers that ran out
              meanwhile ring then, as after SIGSTOP
    dead      it is dropped: nothing of the process ever runs again

A killed process's coroutines are closed on the spot, so that what they hold is let go at a fixed
time and not when the garbage collector comes by. The `finally` blocks this runs find their disk and
sockets dead. Everything scheduled by them is dropped.
"""

import asyncio
import selectors
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from hashlib import blake2b
from inspect import CORO_CLOSED, getcoroutinestate
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

START_S = 1_000.0
TURN_S = 1e-10
_TASKS_PRUNE = 256
_CLOSES_MAX = 20
_unclosed: list[Any] = []  # kept for ever: the garbage collector would run them on and complain


class SimStuck(AssertionError):
    """Everybody waits for ever, or the simulation went on for longer than it may."""


class _Clock(selectors.SelectSelector):
    """The selector: asked to wait, it moves the clock. No socket is ever looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START_S
        self.turns = 0
        self.turns_max: int | None = None
        self.end: float | None = None
        self.after_turn: Callable[[], None] | None = None

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.turns += 1
        if timeout is None:
            raise SimStuck("no task is ready and no timer is set")
        if self.turns_max is not None and self.turns > self.turns_max:
            raise SimStuck(f"more than {self.turns_max} turns of the loop")
        if self.after_turn is not None:
            self.after_turn()
        # A timer may ring a little early, by rounding or the clock's resolution, and whoever set it
        # may look at the clock and set it again: so each turn takes some time, as it does anywhere.
        self.now += TURN_S
        if timeout > 0:
            self.now += timeout
            if self.end is not None and self.now > self.end:
                raise SimStuck(f"not done after {self.end - START_S:.1f} s of virtual time")
        return []


class Machine:
    """Where processes run. Its name is what links, cuts and traces speak of."""

    __slots__ = ("name", "powered")

    def __init__(self, name: str) -> None:
        self.name = name
        self.powered = True


class Process:
    """One run of a program: everything that happens in its context, from start to kill."""

    def __init__(self, loop: "VirtualTimeLoop", machine: Machine, name: str) -> None:
        self.loop = loop
        self.machine = machine
        self.name = name
        self.paused = False
        self.dead = False
        self.failures: list[BaseException] = []  # what callbacks let out: always a bug
        self.on_death: list[Callable[[], None]] = []  # what the machine takes back, before all else
        self._deferred: deque[_Gate] = deque()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._created = 0
        self.context = Context()
        self.context.run(PROCESS.set, self)

    def spawn(self, work: Coroutine[Any, Any, T], name: str | None = None) -> "asyncio.Task[T]":
        """Run a coroutine as part of this process."""
        return self.loop.create_task(work, name=name or self.name, context=self.context.copy())

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function as this process would."""
        return self.context.copy().run(function, *args)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True

    def resume(self) -> None:
        """SIGCONT: what came up meanwhile happens now, in its order."""
        self.paused = False
        deferred, self._deferred = self._deferred, deque()
        for gate in deferred:
            self.loop.pass_gate(gate)

    def kill(self) -> None:
        """kill -9. Must not be called by the process itself."""
        assert PROCESS.get() is not self, "a process cannot kill itself here"
        if self.dead:
            return
        self.dead = True
        self._deferred.clear()
        for release in self.on_death:
            release()
        while self._tasks:
            task, _ = self._tasks.popitem()
            if not task.done():
                self.loop.bury(task)
                self.context.copy().run(_close, task.get_coro())

    def took(self, task: "asyncio.Task[Any]") -> None:
        self._tasks[task] = None
        self._created += 1
        if self._created % _TASKS_PRUNE == 0:
            self._tasks = {one: None for one in self._tasks if not one.done()}

    def open_tasks(self) -> list[str]:
        """What its tasks that are not done run."""
        return [
            getattr(one.get_coro(), "__qualname__", "?") for one in self._tasks if not one.done()
        ]

    def defer(self, gate: "_Gate") -> None:
        self._deferred.append(gate)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


def _close(coroutine: Any) -> None:
    """End a coroutine where it stands. The dead have no say: neither errors count, nor that a
    `finally` block would like to wait for something."""
    for _ in range(_CLOSES_MAX):
        with suppress(BaseException):
            coroutine.close()
        if getcoroutinestate(coroutine) == CORO_CLOSED:
            return
    _unclosed.append(coroutine)


class _Gate:
    """A callback of a process, which runs only when the process does."""

    __slots__ = ("args", "callback", "context", "handle", "process")

    def __init__(
        self,
        process: Process,
        callback: Callable[..., Any],
        args: tuple[Any, ...],
        context: Context,
    ) -> None:
        self.process = process
        self.callback = callback
        self.args = args
        self.context = context
        self.handle: asyncio.Handle | None = None

    def __call__(self) -> None:
        process = self.process
        if process.dead:
            self._look_at_results()
            return
        if process.paused:
            process.defer(self)
            return
        handle = self.handle
        if handle is not None and handle.cancelled():
            return  # cancelled between the pause and the end of it
        try:
            self.callback(*self.args)
        except BaseException as error:
            process.failures.append(error)
            raise

    def _look_at_results(self) -> None:
        """Whoever wanted to know what a future ended with is dead, and no fault of the living."""
        for one in self.args:
            if isinstance(one, asyncio.Future) and one.done() and not one.cancelled():
                one.exception()


class Network(Protocol):
    """What the loop asks of a network; simnet.py has one."""

    async def connect(self, process: Process | None, address: tuple[str, int]) -> Any: ...

    def listen(
        self, process: Process | None, factory: Callable[[], Any], address: tuple[str, int]
    ) -> Any: ...


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop with virtual time. `neutral` is the context of what belongs to no process."""

    def __init__(self) -> None:
        self._clock = _Clock()
        super().__init__(self._clock)
        self.network: Network | None = None
        self.neutral = Context()
        self.unhandled: list[dict[str, Any]] = []
        self.story: list[str] | None = None  # set to [] to keep the trace as text
        self._hash = blake2b(digest_size=16)
        self._graveyard: list[asyncio.Task[Any]] = []
        self.set_exception_handler(self._take_unhandled)

    def time(self) -> float:
        return self._clock.now

    # The trace.

    @property
    def turns(self) -> int:
        return self._clock.turns

    def trace(self, text: str) -> None:
        """Add an event to the trace, whose hash is the same for the same seed."""
        line = f"{self._clock.now:.6f} {text}"
        self._hash.update(line.encode())
        if self.story is not None:
            self.story.append(line)

    def trace_hash(self) -> str:
        return self._hash.hexdigest()

    # Running.

    def run(
        self,
        main: Coroutine[Any, Any, T],
        *,
        seconds_max: float | None = None,
        turns_max: int | None = None,
        after_turn: Callable[[], None] | None = None,
    ) -> T:
        """Run until `main` is done, within these bounds of virtual time and turns of the loop."""
        clock = self._clock
        clock.end = None if seconds_max is None else clock.now + seconds_max
        clock.turns_max = None if turns_max is None else clock.turns + turns_max
        clock.after_turn = after_turn
        task = self.create_task(main)
        try:
            return self.run_until_complete(task)
        except BaseException:
            if not task.done():
                self.bury(task)
                _close(main)
            raise

    def end(self) -> None:
        """Close the loop; whatever still lives must have been killed."""
        self.set_exception_handler(lambda loop, context: None)
        self._graveyard.clear()
        self.close()

    def bury(self, task: "asyncio.Task[Any]") -> None:
        """Keep a task that will never run again, so that nobody complains about it before `end`."""
        self._graveyard.append(task)

    def _take_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.unhandled.append(context)

    # Whose callback it is.

    def pass_gate(self, gate: _Gate) -> None:
        super().call_soon(gate, context=gate.context)

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        gate = _Gate(process, callback, args, copy_context() if context is None else context)
        gate.handle = super().call_soon(gate, context=gate.context)
        return gate.handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        # There are no other threads in a simulation.
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        gate = _Gate(process, callback, args, copy_context() if context is None else context)
        handle = super().call_at(when, gate, context=gate.context)
        gate.handle = handle
        return handle

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_task(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> "asyncio.Task[T]":
        task = super().create_task(coro, name=name, context=context)
        process = PROCESS.get() if context is None else context.get(PROCESS)
        if process is not None:
            process.took(task)
        return task

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., T], *args: Any
    ) -> "asyncio.Future[T]":
        """At once and on this thread: a simulation has no other."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    # The network.

    async def create_connection(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> tuple[Any, Any]:
        assert self.network is not None
        assert host is not None
        assert port is not None
        assert options.get("ssl") is None, "TLS is not simulated"
        side = await self.network.connect(PROCESS.get(), (host, port))
        protocol = protocol_factory()
        side.attach(protocol)
        return side, protocol

    async def create_server(  # type: ignore[override]
        self,
        protocol_factory: Callable[[], Any],
        host: str | None = None,
        port: int | None = None,
        **options: Any,
    ) -> Any:
        assert self.network is not None
        assert port is not None
        assert options.get("ssl") is None, "TLS is not simulated"
        return self.network.listen(PROCESS.get(), protocol_factory, (host or "127.0.0.1", port))
