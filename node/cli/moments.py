"""Shell: durations and times as arguments, in the format of REST."""

from raftq.client.common.errors import InvalidArgument
from raftq.node.http.values import parse_duration, parse_time


def duration_s(option: str, text: str | None) -> float | None:
    """Seconds of "1h30m"."""
    if text is None:
        return None
    try:
        return parse_duration(text) / 1000
    except ValueError as error:
        raise InvalidArgument(f"{option} {text!r:.40} {error}") from None


def time_s(option: str, text: str | None) -> float | None:
    """Seconds since 1970 of "2026-01-31T12:00:00Z"."""
    ms = time_ms(option, text)
    return None if ms is None else ms / 1000


def time_ms(option: str, text: str | None) -> int | None:
    """Milliseconds since 1970 of "2026-01-31T12:00:00Z"."""
    if text is None:
        return None
    try:
        return parse_time(text)
    except ValueError as error:
        raise InvalidArgument(f"{option} {text!r:.40} {error}") from None
