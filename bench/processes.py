"""Shell: processor time and memory of the descendants of a process, by kind.

Spark runs a JVM, and below it Python processes: some plan, and workers read and write.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

TICKS_S = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Seen:
    """One process, as in /proc/PID/stat."""

    pid: int
    parent: int
    name: str
    cpu_s: float
    """User and system time, its threads included."""
    waited_s: float = 0.0
    """The same for children that have ended."""


def parse_stat(text: str) -> Seen:
    """Parses a line. A name may contain brackets and spaces, so it ends at the last bracket."""
    pid, rest = text.split(" (", 1)
    name, rest = rest.rsplit(")", 1)
    fields = rest.split()
    own, waited = (sum(map(int, fields[at : at + 2])) / TICKS_S for at in (11, 13))
    return Seen(int(pid), int(fields[1]), name, own, waited)


def all_processes() -> list[Seen]:
    found = []
    for path in PROC.iterdir():
        if path.name.isdecimal():
            try:
                found.append(parse_stat((path / "stat").read_text()))
            except OSError:
                continue  # it has ended meanwhile
    return found


def below(root: int, every: Iterable[Seen]) -> list[Seen]:
    """The children of a process, their children, and so on."""
    children: dict[int, list[Seen]] = {}
    for one in every:
        children.setdefault(one.parent, []).append(one)
    found: list[Seen] = []
    waiting = [root]
    while waiting:
        some = children.get(waiting.pop(), [])
        found += some
        waiting += [one.pid for one in some]
    return found


def peak_mb(pid: int) -> float:
    """The most memory that a process ever had in RAM; 0 if it is gone."""
    try:
        text = (PROC / str(pid) / "status").read_text()
    except OSError:
        return 0.0
    return next(
        (int(line.split()[1]) * 1024 / 1e6 for line in text.splitlines() if line[:6] == "VmHWM:"),
        0.0,
    )
