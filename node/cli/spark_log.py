"""Shell: what Spark itself writes to stderr, in a file.

A Spark that starts, and a task that fails, write pages which are for those who look for a fault in
Spark. The Java process takes the stderr that this one has when it is started; so it is another one
for that moment.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


class SparkLog:
    """The file; there is none while nothing was put aside."""

    def __init__(self) -> None:
        self._path = ""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A process that is started meanwhile writes its stderr to the file."""
        handle, self._path = tempfile.mkstemp(prefix="raftq-spark-", suffix=".log")
        sys.stderr.flush()
        kept = os.dup(STDERR)
        try:
            os.dup2(handle, STDERR)
            yield
        finally:
            os.dup2(kept, STDERR)
            os.close(kept)
            os.close(handle)

    def where(self) -> str:
        """What to add to an error."""
        if not self._path or not os.path.getsize(self._path):
            self.drop()
            return ""
        return f" (Spark's own log: {self._path})"

    def drop(self) -> None:
        if self._path:
            os.unlink(self._path)
            self._path = ""
