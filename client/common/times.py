"""When a record is due and when it ends, from what callers say. (Pure.)

Callers give durations in seconds, and points in time as a datetime or in seconds since 1970; the
wire has ms. A time to live counts from when the record is due. Times are rounded up: a millisecond
late is allowed, a millisecond early is not.
"""

from datetime import datetime
from math import ceil, isfinite

from raftq.client.common.errors import InvalidArgument
from raftq.client.common.types import Times

SECONDS_MAX = 100 * 366 * 86_400.0


def record_times(
    delay: float | None, deliver_at: float | datetime | None, ttl: float | None, now_ms: int
) -> Times:
    """(due, end) in ms. A due of 0 means at once, an end of 0 means never."""
    due = due_ms(delay, deliver_at, now_ms)
    return due, expiry_ms(ttl, due, now_ms)


def due_ms(delay: float | None, deliver_at: float | datetime | None, now_ms: int) -> int:
    """When a record is due: `delay` seconds from now, or at `deliver_at`. 0 means at once.

    `now_ms` is the clock, rounded down to whole ms.
    """
    if delay is not None and deliver_at is not None:
        raise InvalidArgument("give either delay or deliver_at, not both")
    if delay is not None:
        if _number(delay, "delay") <= 0:
            return 0
        return now_ms + 1 + milliseconds(delay, "delay")
    if deliver_at is None:
        return 0
    due = epoch_ms(deliver_at, "deliver_at")
    if due - now_ms > SECONDS_MAX * 1000:
        raise InvalidArgument(
            f"deliver_at {deliver_at!r:.40} is more than a hundred years away; a number is in "
            "seconds since 1970"
        )
    return due if due > now_ms else 0


def expiry_ms(ttl: float | None, due: int, now_ms: int) -> int:
    """When the time to live ends that begins when the record is due. 0 means never."""
    if ttl is None:
        return 0
    life = milliseconds(ttl, "ttl")
    if not life:
        raise InvalidArgument(f"a ttl must be above 0 seconds, not {ttl!r}")
    return (due or now_ms) + life


def epoch_ms(moment: float | datetime, what: str) -> int:
    """A point in time that callers give as a datetime or in seconds since 1970."""
    if isinstance(moment, datetime):
        return _ms(moment.timestamp())
    return _ms(_number(moment, what))


def milliseconds(seconds: float, what: str) -> int:
    """A duration that callers give in seconds."""
    number = _number(seconds, what)
    if not 0 <= number <= SECONDS_MAX:
        raise InvalidArgument(f"{what} must be from 0 to {SECONDS_MAX:.0f} s, not {seconds!r}")
    return ceil(number * 1000)


def _ms(seconds: float) -> int:
    # Seconds since 1970 as a float are exact to a quarter of a microsecond: what is less than that
    # above a whole millisecond is not there.
    return ceil(round(seconds * 1000, 3))


def _number(value: float, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidArgument(f"{what} must be a number, not {value!r:.40}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not isfinite(number):
        raise InvalidArgument(f"{what} must be a number, not {value!r:.40}")
    return number
