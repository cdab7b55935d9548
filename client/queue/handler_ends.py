"""Shell: what the end of a handler means for its record."""

import logging
from asyncio import CancelledError

from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.settling import Settlement

logger = logging.getLogger(__name__)

ERROR_CHARACTERS_MAX = 1_000


class Reject(Exception):
    """Raised by a handler: the record will never work, so it becomes a dead letter at once."""

    def __init__(self, reason: str = "rejected", error: str = "") -> None:
        super().__init__(reason)
        self.reason = reason
        self.error = error


def settlement_of(record: LeasedRecord, error: BaseException) -> Settlement:
    """The settlement of a record whose handler failed."""
    if isinstance(error, CancelledError):
        return Settlement("release")
    if isinstance(error, Reject):
        return Settlement("reject", None, _short(error.reason), _short(error.error or str(error)))
    logger.warning("the handler failed with %r", record, exc_info=error)
    return Settlement("nack", None, "", _short(f"{type(error).__name__}: {error}"))


def _short(text: str) -> str:
    return text[:ERROR_CHARACTERS_MAX]
