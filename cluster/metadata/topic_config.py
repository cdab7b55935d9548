"""The settings of one topic: the overrides, and the values that follow from them. (Pure.)

    name                   default             meaning
    min_insync             2 when replication  writes with acks=all need this many replicas in sync
                           is 3 or more, else 1
    retention_ms           168 h               records older than this may go; -1: never
    retention_bytes        -1                  the oldest segments go above this size; -1: never
    segment_bytes          64 MiB              size at which a log begins a new file
    fsync                  "interval"          "none", "interval" or "always": when a write is
                                               durable
    cleanup                "delete"            by retention; compaction by key is not offered here
                                               yet
    value_bytes_max        1 MiB               largest value of a record, at most 16 MiB
    visibility_timeout_ms  30 s                how long a queue worker has a record before others
                                               get it
    max_deliveries         3                   attempts before a record is a dead letter
    backoff_ms             1 s                 wait before the second attempt; doubles each time
    backoff_max_ms         60 s                the longest such wait
    backoff_jitter         0                   percent by which a wait is shorter or longer, by
                                               chance
    in_flight_max          1000                records one holder may have leased at a time
    dead_letter_expired    "false"             "true": records that outlive their time to live are
                                               dead letters, too

Overrides are plain values by name, as in commands and on the wire. None means the default. One
InvalidArgument reports every problem of a set of overrides.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from raftq.client.common.errors import Detail, InvalidArgument
from raftq.client.common.names import DLQ_SUFFIX

HOUR_MS = 3_600_000
MIB = 1024 * 1024
UNLIMITED = -1
NUMBER_MAX = (1 << 63) - 1
REPLICATION_MAX = 16

NAME_CHARACTERS_MAX = 245
"""The longest name of a topic: the name of its dead-letter topic then has at most 249
characters, which fits a file name."""
_TOPIC_NAME = re.compile(r"[A-Za-z0-9._-]{1,249}", re.ASCII)

# name: (default, smallest, largest, whether -1 stands for no limit)
NUMBERS: dict[str, tuple[int, int, int, bool]] = {
    "min_insync": (0, 1, REPLICATION_MAX, False),
    "retention_ms": (168 * HOUR_MS, 1, NUMBER_MAX, True),
    "retention_bytes": (UNLIMITED, 1, NUMBER_MAX, True),
    "segment_bytes": (64 * MIB, 4096, 1 << 31, False),
    "value_bytes_max": (MIB, 1, 16 * MIB, False),
    "visibility_timeout_ms": (30_000, 1, 7 * 24 * HOUR_MS, False),
    "max_deliveries": (3, 1, 1_000_000, False),
    "backoff_ms": (1_000, 0, 7 * 24 * HOUR_MS, False),
    "backoff_max_ms": (60_000, 0, 7 * 24 * HOUR_MS, False),
    "backoff_jitter": (0, 0, 100, False),
    "in_flight_max": (1_000, 1, 1 << 24, False),
}
CHOICES: dict[str, tuple[str, ...]] = {  # the first is the default
    "fsync": ("interval", "none", "always"),
    "cleanup": ("delete",),
    "dead_letter_expired": ("false", "true"),
}
SETTINGS = (*NUMBERS, *CHOICES)


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The settings of a topic. None means no limit. Made by `topic_config`."""

    min_insync: int
    retention_ms: int | None
    retention_bytes: int | None
    segment_bytes: int
    fsync: str
    cleanup: str
    value_bytes_max: int
    visibility_timeout_ms: int
    max_deliveries: int
    backoff_ms: int
    backoff_max_ms: int
    backoff_jitter: int
    in_flight_max: int
    dead_letter_expired: str
    overrides: Mapping[str, Detail] = field(default_factory=dict, hash=False)

    def settings(self) -> dict[str, Detail]:
        """Return all settings in the form of overrides (-1: no limit)."""
        return {
            name: UNLIMITED if (value := getattr(self, name)) is None else value
            for name in SETTINGS
        }


def check_topic_name(name: str) -> None:
    """Raise InvalidArgument unless it can name a new topic. "." and ".." have a meaning in
    paths."""
    length = len(name.removesuffix(DLQ_SUFFIX))
    if not is_topic_name(name) or length > NAME_CHARACTERS_MAX:
        raise InvalidArgument(
            f"topic name {name[:300]!r}: use 1 to {NAME_CHARACTERS_MAX} of the characters A-Z a-z "
            f"0-9 . _ - (its dead letters are in NAME{DLQ_SUFFIX})"
        )


def is_topic_name(name: str) -> bool:
    """Report whether a topic may have this name: an older topic, or dead letters."""
    return _TOPIC_NAME.fullmatch(name) is not None and name not in (".", "..")


def topic_config(
    overrides: Mapping[str, Detail], replication: int, min_insync: int = 0
) -> TopicConfig:
    """Return the settings of a topic with that many replicas. InvalidArgument names every problem.

    A topic that has not set `min_insync` keeps the given one when its replication changes.
    """
    given = {name: overrides[name] for name in sorted(overrides) if overrides[name] is not None}
    values: dict[str, int | None] = {}
    choices: dict[str, str] = {}
    problems = [f"unknown setting {name[:64]!r}" for name in given if name not in SETTINGS]
    for name, (default, low, high, may_be_unlimited) in NUMBERS.items():
        value = given.get(name, default)
        if type(value) is not int:
            problems.append(f"{name} must be an integer, not {_shown(value)}")
        elif value == UNLIMITED and may_be_unlimited:
            values[name] = None
        elif name in given and not low <= value <= high:
            also = " or -1 for no limit" if may_be_unlimited else ""
            problems.append(f"{name} must be {low} to {high}{also}, not {value}")
        else:
            values[name] = value
    for name, allowed in CHOICES.items():
        text = given.get(name, allowed[0])
        if isinstance(text, str) and text in allowed:
            choices[name] = text
        else:
            problems.append(f"{name} must be one of {', '.join(allowed)}, not {_shown(text)}")
    if values.get("min_insync") == 0:
        values["min_insync"] = min_insync or (2 if replication >= 3 else 1)
    if (least := values.get("min_insync") or 0) > replication:
        problems.append(f"min_insync {least} is more than the replication of {replication}")
    if problems:
        raise InvalidArgument("topic settings: " + "; ".join(problems))
    return _built(values, choices, given)


def _built(
    values: dict[str, int | None], choices: dict[str, str], given: dict[str, Detail]
) -> TopicConfig:
    unlimited = {name: values.pop(name) for name in ("retention_ms", "retention_bytes")}
    numbers = {name: value for name, value in values.items() if value is not None}
    return TopicConfig(**unlimited, **numbers, **choices, overrides=given)  # type: ignore[arg-type]


def _shown(value: Detail) -> str:
    return repr(value)[:60]
