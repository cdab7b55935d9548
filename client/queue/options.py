"""Pure: settings of queue clients and workers.

Durations in names that end in `_ms` are milliseconds. Those that all queue APIs share
(`visibility_timeout`, `grace`) are seconds.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from raftq.client.common.times import SECONDS_MAX
from raftq.client.options import ClientOptions, ClientSettings, at_least, group_problems

Start = Literal["earliest", "latest"]
Handler = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueOptions(ClientOptions):
    """Settings of a queue client."""

    group: str = ""
    """The group whose records this client leases; required."""
    topics: Sequence[str] = ()
    """The topics to lease from; required unless there is a pattern."""
    pattern: str = ""
    """A regular expression. Topics whose whole name matches are leased from, too, as soon as the
    group's coordinator finds them."""
    visibility_timeout: float | None = None
    """How many seconds a leased record belongs to this client; None means as its topic says. Too
    short: others get records that are still being handled. Too long: the records of a dead
    client wait."""
    start: Start = "earliest"
    """Where a new group begins."""
    lease_bytes: int = 4 * 1024 * 1024
    """The size of one answer. A bigger record still comes."""
    settle_ms: int = 15_000
    """The time for an ack, nack or the like with all its attempts."""
    instance_id: str | None = None
    """As for a consumer: a name that stays the same over restarts."""
    session_ms: int = 30_000
    """A client without a heartbeat for so long leaves the group."""
    heartbeat_ms: int = 3_000
    """Between two heartbeats; at most half of `session_ms`."""

    def problems(self) -> Iterable[str]:
        yield from ClientOptions.problems(self)
        yield from at_least(self, 1, "lease_bytes", "settle_ms")
        yield from group_problems(self)
        if not self.group:
            yield "a queue client needs a group"
        if not self.topics and not self.pattern:
            yield "a queue client needs topics or a pattern"
        if self.start not in ("earliest", "latest"):
            yield f"start is 'earliest' or 'latest', not {self.start!r}"
        if self.visibility_timeout is not None:
            yield from seconds(self, 0.1, "visibility_timeout")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions(QueueOptions):
    """Settings of a worker."""

    handler: Handler
    """Called with each record: a plain function in a thread, a coroutine function on the loop.
    When it returns, the record is acked. When it raises, the record is delivered again. When it
    raises Reject, it becomes a dead letter."""
    visibility_timeout: float | None = 30.0
    """The length of the lease, which the worker renews while it has the record. So this is how
    long the records of a dead worker wait."""
    concurrency: int = 1
    """How many handlers run at a time."""
    prefetch: int | None = None
    """How many records are leased in advance; None means as many as handlers do in a twentieth
    of a second, but at least `concurrency`. Too many: they wait here while other workers are
    idle."""
    grace: float = 30.0
    """How many seconds running handlers may go on when the worker is stopped."""
    handle_signals: bool = True
    """Whether `run`, in the main thread, stops on SIGINT and SIGTERM."""

    def problems(self) -> Iterable[str]:
        yield from QueueOptions.problems(self)
        yield from at_least(self, 1, "concurrency")
        yield from seconds(self, 0, "grace")
        if self.prefetch is not None:
            yield from at_least(self, 0, "prefetch")
        if self.visibility_timeout is None:
            yield "a worker needs a visibility_timeout, to renew its leases in time"
        if not callable(getattr(self, "handler", None)):
            yield f"handler must be a function, not {self.handler!r:.40}"

    @property
    def lease_s(self) -> float:
        assert self.visibility_timeout is not None
        return self.visibility_timeout


def seconds(options: object, least: float, *names: str) -> Iterable[str]:
    for name in names:
        value = getattr(options, name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield f"{name} must be a number of seconds, not {value!r}"
        elif not least <= value <= SECONDS_MAX:
            yield f"{name} must be at least {least} s, not {value}"


class QueueSettings(ClientSettings, total=False):
    """The fields of QueueOptions, as keywords."""

    group: str
    topics: Sequence[str]
    pattern: str
    visibility_timeout: float | None
    start: Start
    lease_bytes: int
    settle_ms: int
    instance_id: str | None
    session_ms: int
    heartbeat_ms: int


class WorkerSettings(QueueSettings, total=False):
    """The fields of WorkerOptions, as keywords."""

    handler: Handler
    concurrency: int
    prefetch: int | None
    grace: float
    handle_signals: bool
