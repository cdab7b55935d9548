"""What a log knows of a part of itself that cannot be read. (Pure.)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DamagedRange:
    """Offsets [start, end) that cannot be read, and the bytes [position, end_position) they held.

    Offsets whose file is missing have no bytes. Bytes that never held a batch have no offsets.
    """

    start: int
    end: int
    path: str
    position: int
    end_position: int
    reason: str
