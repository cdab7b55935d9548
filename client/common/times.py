"""When a record is due and when it ends, from what callers say. (Pure.)

Callers give seconds for what is relative and ms (or a datetime) for what is absolute; the wire has
ms. A time to live counts from when the record is due. Whatever is rounded is rounded up: a
millisecond late is allowed, a millisecond early is not.
"""

from datetime import datetime
from math import ceil, isfinite

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import Times

SECONDS_MAX = 100 * 366 * 86_400.0


def record_times(
    delay: float | None, deliver_at: float | datetime | None, ttl: float | None, now_ms: int
) -> Times:
    """(due, end) in ms; a due of 0 is at once, an end of 0 is never."""
    due = _due_ms(delay, deliver_at, now_ms)
    if ttl is None:
        return due, 0
    life = milliseconds(ttl, "ttl")
    if not life:
        raise InvalidArgument(f"a ttl must be above 0 seconds, not {ttl!r}")
    return due, (due or now_ms) + life


def _due_ms(delay: float | None, deliver_at: float | datetime | None, now_ms: int) -> int:
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("give either delay or deliver_at, not both")
    if delay is not None:
        if _number(delay, "delay") <= 0:
            return 0
        # The clock was rounded down to whole ms.
        return now_ms + 1 + milliseconds(delay, "delay")
    if deliver_at is None:
        return 0
    if isinstance(deliver_at, datetime):
        due = ceil(deliver_at.timestamp() * 1000)
    else:
        due = ceil(_number(deliver_at, "deliver_at"))
    if due - now_ms > SECONDS_MAX * 1000:
        raise InvalidArgument(f"deliver_at {deliver_at!r} is more than a hundred years away")
    return due if due > now_ms else 0


def milliseconds(seconds: float, what: str) -> int:
    """A duration that callers give in seconds."""
    number = _number(seconds, what)
    if not 0 <= number <= SECONDS_MAX:
        raise InvalidArgument(f"{what} must be from 0 to {SECONDS_MAX:.0f} s, not {seconds!r}")
    return ceil(number * 1000)


def _number(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise InvalidArgument(f"{what} must be a number, not {value!r:.40}")
    return value
