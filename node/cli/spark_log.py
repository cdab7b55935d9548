"""Shell: sends Spark's own stderr to a file.

When Spark starts, and when a task fails, it writes pages that only help to find faults in Spark.
The Java process inherits the stderr that this process has when it starts; so stderr is replaced for
that moment.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


class SparkLog:
    """The file. It exists only after something was redirected."""

    def __init__(self) -> None:
        self._path = ""

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A process that starts meanwhile writes its stderr to the file."""
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
