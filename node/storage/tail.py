"""Whether a log that is closed still has the end that it was known to have. (Shell.)

No crash takes bytes that were durable. Where they are gone all the same, a file was cut, emptied
or removed, and what was appended after them is gone as well: nobody can tell how much that was.
"""

from raftq.client.common.disk import Disk
from raftq.node.storage.checkpoint import newest_slot


def has_lost_its_end(disk: Disk, directory: str) -> bool:
    """Without opening the log, so that it can be asked of a thousand."""
    slot = newest_slot(disk, directory)
    if slot is None or slot.cutting or not slot.position:
        return False
    path = f"{directory}/{slot.segment_base:020d}.log"
    return not disk.exists(path) or disk.size(path) < slot.position
