"""Shell: how the C library keeps memory that is freed and soon needed again.

Frames of a quarter of a megabyte come and go thousands of times a second. glibc gives the end of
the heap back to the kernel each time and gets it again, every page of it as a fault. For the whole
process, so called once by whoever starts a node, never by a library; elsewhere it does nothing.
"""

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
KEEP_BYTES = 64 * 1024 * 1024
STEP_BYTES = 16 * 1024 * 1024
MMAP_BYTES_MIN = 32 * 1024 * 1024


def keep_heap() -> bool:
    """Let up to 64 MiB of freed memory stay with the process; whether the C library agreed."""
    if sys.platform != "linux":
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    wanted = {_TRIM_THRESHOLD: KEEP_BYTES, _TOP_PAD: STEP_BYTES, _MMAP_THRESHOLD: MMAP_BYTES_MIN}
    return all(mallopt(name, value) == 1 for name, value in wanted.items())
