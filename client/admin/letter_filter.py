"""Which dead letters a verb means. (Pure.)"""

from dataclasses import dataclass
from datetime import datetime

from raftq.client.common.errors import InvalidArgument

TIME_MS_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects dead letters. A field that is left out selects all of them.

    `since` and `until` are compared with the time at which a record became a dead letter.
    """

    group: str = ""
    """The group that gave the record up."""
    reason: str = ""
    key: bytes | None = None
    since: int | datetime | None = None
    """A datetime, or ms since 1970 as in `DeadLetter.timestamp`; so is `until`."""
    until: int | datetime | None = None
    partition: int | None = None
    """A partition of the dead-letter topic."""

    def __post_init__(self) -> None:
        for name, moment in (("since", self.since), ("until", self.until)):
            if type(moment) is not int and not isinstance(moment, datetime | None):
                raise InvalidArgument(f"{name} is a datetime or ms since 1970, not {moment!r:.40}")

    @property
    def since_ms(self) -> int:
        return 0 if self.since is None else _ms(self.since)

    @property
    def until_ms(self) -> int:
        return TIME_MS_MAX if self.until is None else _ms(self.until)


def _ms(moment: int | datetime) -> int:
    return int(moment.timestamp() * 1000) if isinstance(moment, datetime) else moment
