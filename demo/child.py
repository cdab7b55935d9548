"""Shell: a process of the demo, and a thread of the parent that reads its output."""

import subprocess
import sys
import threading
from collections.abc import Iterable


class DemoProcess:
    """`python -m raftq_demo` with these arguments. Subclasses read its output in `_read`."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "raftq_demo", *arguments]
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._child.stdout is not None
        self._thread = threading.Thread(target=self._read, args=(self._child.stdout,), daemon=True)
        self._thread.start()

    def _read(self, lines: Iterable[str]) -> None:
        """Reads lines until the process ends."""
        raise NotImplementedError

    def finish(self, timeout_s: float) -> int:
        """Lets it finish what it has begun. Returns its exit code."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            return self._child.wait(timeout_s)
        finally:
            self.end()

    def end(self) -> None:
        self._child.kill()
        self._child.wait()
        self._thread.join()
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
