"""Durations, times and bytes as text. (Pure.)

Durations are strings such as "30s", "5m", "1h30m", "250ms"; times are RFC 3339 in UTC. Bytes that
are valid UTF-8 go as text, others as base64.
"""

import binascii
import re
from base64 import b64encode
from datetime import UTC, datetime, timedelta
from functools import lru_cache

UNITS_MS = {"ms": 1, "s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
DURATION_CHARACTERS_MAX = 64
DURATION_MS_MAX = 100 * 365 * UNITS_MS["d"]
TIME_CHARACTERS_MAX = 40

DURATION_PATTERN = r"(?:[0-9]{1,15}(?:\.[0-9]{1,9})?(?:ms|s|m|h|d))+"

_PART = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,9})?)(ms|s|m|h|d)")
_DURATION = re.compile(DURATION_PATTERN)
_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[Tt ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:[Zz]|[+-]\d\d:\d\d)", re.ASCII
)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MS = timedelta(milliseconds=1)
TIME_MS_MIN = (datetime.min.replace(tzinfo=UTC) - _EPOCH) // _MS
TIME_MS_MAX = (datetime.max.replace(tzinfo=UTC) - _EPOCH) // _MS


def parse_duration(text: str) -> int:
    """Milliseconds, rounded up: a delay never ends early. Raises ValueError."""
    if text == "0":
        return 0
    if len(text) > DURATION_CHARACTERS_MAX or not _DURATION.fullmatch(text):
        raise ValueError('is no duration such as "30s", "5m", "1h30m" or "250ms"')
    total = sum(float(number) * UNITS_MS[unit] for number, unit in _PART.findall(text))
    if total > DURATION_MS_MAX:
        raise ValueError("is longer than 100 years")
    # The detour over microseconds takes back what binary fractions add ("0.1s" is 100 ms).
    return -(-round(total * 1000) // 1000)


def format_duration(seconds: float) -> str:
    """The way durations are read: "250ms", "12.3s", "1h30m5s"."""
    if seconds < 1:
        return f"{max(0.0, seconds) * 1000:.3f}".rstrip("0").rstrip(".") + "ms"
    if seconds < 60:
        return f"{int(seconds * 1000) / 1000:g}s"
    whole = int(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    parts = [f"{hours}h" if hours else "", f"{minutes}m" if minutes else ""]
    return "".join(parts) + (f"{rest}s" if rest else "")


def parse_time(text: str) -> int:
    """Milliseconds since 1970. Raises ValueError."""
    if len(text) > TIME_CHARACTERS_MAX or not _TIME.fullmatch(text):
        raise ValueError('is no time such as "2026-01-31T09:30:00Z"')
    try:
        moment = datetime.fromisoformat(text.upper())
        return (moment - _EPOCH) // _MS
    except (ValueError, OverflowError):
        raise ValueError("is no time of the calendar") from None


def format_time(ms: int) -> str:
    """RFC 3339 with milliseconds; what lies outside the years 1 to 9999 becomes their bound."""
    second, rest = divmod(min(max(ms, TIME_MS_MIN), TIME_MS_MAX), 1000)
    return f"{_second(second)}.{rest:03d}Z"


@lru_cache(maxsize=1024)
def _second(second: int) -> str:
    """Records of one page are mostly of few seconds."""
    return (_EPOCH + timedelta(seconds=second)).isoformat()[:19]


def parse_base64(text: str) -> bytes:
    """Raises ValueError on anything but padded base64."""
    try:
        return binascii.a2b_base64(text.encode("ascii"), strict_mode=True)
    except (binascii.Error, UnicodeEncodeError):
        raise ValueError("is not valid base64") from None


def format_base64(data: bytes) -> str:
    return b64encode(data).decode("ascii")
