"""Small helpers for processes on one machine. (Shell.)

A process can be tied to its parent: the kernel ends it when the thread that started it ends. A test
run or `raftq cluster up` that is killed can no longer do that itself.
"""

import ctypes
import os
import signal
import sys

from raftq.client.common.errors import ConfigError

PR_SET_PDEATHSIG = 1


def write_atomically(path: str, content: str, mode: int = 0o644) -> None:
    """Write a file so that readers see the old file or the whole new one."""
    draft = f"{path}.{os.getpid()}.new"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(draft, path)


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent, with this pid, ends. Linux only."""
    if sys.platform != "linux":
        raise ConfigError("tying a process to its parent needs Linux")
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent:
        raise ConfigError(f"process {parent}, which started this one, is gone")
