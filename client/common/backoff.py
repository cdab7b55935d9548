"""How long to wait before the next attempt, and errors that several callers get. (Pure.)"""

import random
from typing import TypeVar

from raftq.client.common.errors import RaftqError, RequestTimeout

E = TypeVar("E", bound=RaftqError)


class Backoff:
    """Waits that double from `first_s` up to `most_s`, each between half and all of itself.

    The chance keeps clients that failed together from coming back together.
    """

    __slots__ = ("_first_s", "_most_s", "_rng", "attempts")

    def __init__(self, first_ms: int, most_ms: int, rng: random.Random) -> None:
        self._first_s = first_ms / 1000
        self._most_s = most_ms / 1000
        self._rng = rng
        self.attempts = 0

    def next_s(self) -> float:
        wait = min(self._first_s * (1 << min(self.attempts, 30)), self._most_s)
        self.attempts += 1
        return wait * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.attempts = 0


def copy_error(error: E) -> E:
    """A copy to raise: an error that many callers raise would collect all their tracebacks."""
    copy = type(error)(*error.args)
    copy.outcome = error.outcome
    copy.retriable = error.retriable
    copy.refresh_route = error.refresh_route
    copy.details = error.details
    copy.__cause__ = error.__cause__
    return copy


def out_of_time(what: str, last: RaftqError | None) -> RequestTimeout:
    """The end of an operation whose time is spent; it names the last problem, if there was one."""
    problem = f"; the last problem: {last.code}: {last}" if last is not None else ""
    error = RequestTimeout(f"{what}{problem}")
    error.__cause__ = last
    return error
