"""Shell: the background thread whose event loop serves all blocking clients of the process.

It starts with the first client and ends with the last; at the interpreter's exit it is stopped, so
that a client that was never closed cannot keep the process alive. A forked child has no such
thread: clients that come from the parent refuse to work there instead of waiting for ever, and
clients made in the child start a thread of their own.
"""

import asyncio
import atexit
import os
import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from typing import Any, Protocol, TypeVar

from raftq.client.common.errors import InvalidArgument, QueueClosed
from raftq.client.net.transport import new_event_loop

T = TypeVar("T")
EXIT_S_MAX = 2.0


class User(Protocol):
    """A blocking client, as far as this module knows it."""

    def forbid(self, reason: str) -> None: ...


class LoopThread:
    """An event loop that runs in a thread of its own."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self.users = 0
        self._thread = threading.Thread(target=self._run, name="raftq-client", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            left = asyncio.all_tasks(self.loop)
            for task in left:
                task.cancel()
            if left:
                self.loop.run_until_complete(asyncio.wait(left, timeout=EXIT_S_MAX / 2))
        finally:
            asyncio.set_event_loop(None)
            self.loop.close()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the loop and wait for the result; an interrupt here cancels it there."""
        if threading.current_thread() is self._thread:
            work.close()
            raise InvalidArgument("a delivery callback must not call what blocks its own thread")
        try:
            future = asyncio.run_coroutine_threadsafe(work, self.loop)
        except RuntimeError as error:
            work.close()
            raise QueueClosed("the interpreter is ending") from error
        try:
            return future.result()
        except CancelledError:
            raise QueueClosed("the client was closed meanwhile") from None
        except BaseException:
            future.cancel()
            raise

    def spawn(
        self, work: Coroutine[Any, Any, None], done: Callable[[BaseException | None], None]
    ) -> None:
        """Run on the loop without waiting; `done` is called there with what ended it."""

        async def run() -> None:
            try:
                await work
            except asyncio.CancelledError:
                done(QueueClosed("the interpreter is ending"))
                raise
            except BaseException as error:
                done(error)
            else:
                done(None)

        asyncio.run_coroutine_threadsafe(run(), self.loop)

    def post(self, call: Callable[[], object]) -> None:
        """Call this on the loop soon; from any thread, or a signal handler."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(call)

    def await_end(self) -> None:
        """Wait for the thread's end if its last client has left."""
        if not self.users and threading.current_thread() is not self._thread:
            self._thread.join(EXIT_S_MAX)

    def stop(self, timeout_s: float | None = None) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)


_guard = threading.Lock()
_shared: LoopThread | None = None
_users: "weakref.WeakSet[User]" = weakref.WeakSet()


def join(user: User) -> LoopThread:
    """The thread for one more client."""
    global _shared
    with _guard:
        if _shared is None:
            _shared = LoopThread()
        _shared.users += 1
        _users.add(user)
        return _shared


def leave(user: User, thread: LoopThread) -> None:
    """A client ends; the last one stops the thread."""
    global _shared
    with _guard:
        _users.discard(user)
        thread.users -= 1
        if thread.users:
            return
        if _shared is thread:
            _shared = None
    thread.stop()


def _in_child() -> None:
    global _guard, _shared
    _guard = threading.Lock()
    _shared = None
    for user in list(_users):
        user.forbid("it was opened before a fork; a child process needs clients of its own")
    _users.clear()


def _at_exit() -> None:
    thread = _shared
    if thread is not None:
        thread.stop(EXIT_S_MAX)


os.register_at_fork(after_in_child=_in_child)
atexit.register(_at_exit)
