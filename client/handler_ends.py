"""What the end of a handler means for its record. (Pure.)"""

import logging
from asyncio import CancelledError

from raftq.client.leased import LeasedRecord
from raftq.client.settling import Said

logger = logging.getLogger(__name__)

ERROR_CHARACTERS_MAX = 1_000


class Reject(Exception):
    """Raised by a handler: the record will never work, so it becomes a dead letter at once."""

    def __init__(self, reason: str = "rejected", error: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


def said_of(record: LeasedRecord, error: BaseException) -> Said:
    """What to say of a record whose handler failed."""
    if isinstance(error, CancelledError):
        return Said("release")
    if isinstance(error, Reject):
        return Said("reject", None, _short(error.reason), _short(error.error or str(error)))
    logger.warning("the handler failed with %r", record, exc_info=error)
    return Said("nack", None, "", _short(f"{type(error).__name__}: {error}"))


def _short(text: str) -> str:
    return text[:ERROR_CHARACTERS_MAX]
