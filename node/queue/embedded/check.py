"""Checks of what callers pass in: a plain value, or an InvalidArgument that names it. (Shell.)"""

from math import isfinite
from pathlib import PurePath
from typing import Any

from raftq.client.common.errors import InvalidArgument

# A century: longer is a mistake, and must not get into a ledger that has to be replayed.
SECONDS_MAX = 100 * 366 * 86400.0
NAME_CHARS_MAX = 249


def check_number(value: Any, what: str) -> float:
    """A finite number; True and False are none."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = float("inf")
        if isfinite(number):
            return number
    raise InvalidArgument(f"{what} must be a number of seconds, not {value!r:.40}")


def check_seconds(value: Any, what: str, least: float = 0.0) -> float:
    """A duration of at most a century."""
    number = check_number(value, what)
    if not least <= number <= SECONDS_MAX:
        raise InvalidArgument(
            f"{what} must be between {least:g} and {SECONDS_MAX:.0f} seconds, not {value!r:.40}"
        )
    return number


def check_count(value: Any, what: str, most: int) -> int:
    if type(value) is not int or not 0 < value <= most:
        raise InvalidArgument(f"{what} must be between 1 and {most}, not {value!r:.40}")
    return value


def check_limit(value: Any) -> None:
    """How many at most; None for all."""
    if value is not None and (type(value) is not int or value < 0):
        raise InvalidArgument(f"limit must be 0 or more, or None for all, not {value!r:.40}")


def check_offset(value: Any) -> None:
    if type(value) is not int:
        raise InvalidArgument(f"offset must be a whole number, not {value!r:.40}")


def check_text(value: Any, what: str, chars_max: int = NAME_CHARS_MAX) -> None:
    """A text that can be stored."""
    if not isinstance(value, str) or not 0 < len(value) <= chars_max:
        raise InvalidArgument(f"{what} is a text of 1 to {chars_max} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"{what} is not valid text: {error}") from error


def check_path(path: Any) -> str:
    """The path of a directory as text."""
    if isinstance(path, str | PurePath):
        text = str(path)
        if text and "\0" not in text:
            return text
    raise InvalidArgument(f"{path!r:.40} is not the path of a queue directory")
