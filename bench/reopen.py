"""Shell: how long a queue takes to open after its process was killed, and in how much memory.

The crashed directory is kept as it was. Each open works on a copy in which sealed files, which
never change, are hard links and all others are real copies. So every open finds the same crash.
"""

import os
import shutil
import time
from pathlib import Path
from typing import Any

from raftq_bench.child import run_child
from raftq_bench.report import Bar, Result
from raftq_bench.runner import BATCH_RECORDS, GIB, MIB, Settings

OPEN_S_MAX = 2.0
RSS_MB_MAX = 300.0
OPENS_MIN = 3
FSYNC = "interval (1 s)"


def measure(settings: Settings) -> list[Result]:
    size = settings.size(4 * GIB, 32 * MIB)
    small = settings.size(512 * MIB, 16 * MIB)
    opens, empty, measured_s = _crash_and_open(settings, size, BATCH_RECORDS)
    singles, _, singles_s = _crash_and_open(settings, small, 1)
    seconds = max(each["seconds"] for each in opens["warm"])
    memory = max(each["rss_peak_mb"] for each in [*opens["warm"], *opens["cold"]])
    single_s = max(each["seconds"] for each in singles["warm"])
    name = f"{size / GIB:g} GiB queue with 1 % unsettled, after kill -9"
    return [
        Result(
            figure="reopen",
            fsync=FSYNC,
            title=f"open of a {name}: time",
            unit="s",
            value=seconds,
            measured_s=measured_s,
            baseline_name="Queue.open of an empty queue",
            baseline=empty["seconds"],
            bar=Bar("value", OPEN_S_MAX, at_most=True),
            notes=[
                f"slowest of {len(opens['warm'])} processes; "
                f"{opens['warm'][0]['unsettled']:,} messages unsettled; "
                f"{_slowest(opens['cold']):.2f} s when nothing of it is in the page cache; "
                f"first message {max(o['first_message_s'] for o in opens['warm']):.2f} s after; "
                f"{max(o['cpu_s'] for o in opens['warm']):.2f} s of processor time"
            ],
            detail=opens,
        ).judge(settings),
        Result(
            figure="reopen",
            fsync=FSYNC,
            title=f"open of a {name}: peak memory",
            unit="MB",
            value=memory,
            measured_s=measured_s,
            baseline_name="Queue.open of an empty queue",
            baseline=empty["rss_peak_mb"],
            bar=Bar("value", RSS_MB_MAX, at_most=True),
            notes=["VmHWM right after open; the largest of all processes"],
        ).judge(settings),
        Result(
            figure="reopen",
            fsync=FSYNC,
            title=f"open of {small // MIB} MiB enqueued one by one, 1 % unsettled: time",
            unit="s",
            value=single_s,
            measured_s=singles_s,
            notes=[f"peak memory {max(o['rss_peak_mb'] for o in singles['warm']):.0f} MB"],
            detail=singles,
        ).judge(settings),
    ]


def _slowest(opens: list[dict[str, Any]]) -> float:
    return max(float(each["seconds"]) for each in opens)


def _crash_and_open(
    settings: Settings, size: int, batch: int
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any], float]:
    """The answers of the opening processes by state of the page cache, that of an empty queue,
    and the time."""
    opens: dict[str, list[dict[str, Any]]] = {"warm": [], "cold": []}
    with settings.scratch() as path:
        crashed, copy = path / "crashed", path / "copy"
        run_child("crash", str(crashed), size, batch)
        start = time.perf_counter()
        while time.perf_counter() - start < settings.seconds or len(opens["cold"]) < OPENS_MIN:
            for state, answers in opens.items():
                copy_crashed(crashed, copy)
                (warm_up if state == "warm" else cool_down)(copy)
                answers.append(run_child("open", str(copy)))
                shutil.rmtree(copy)
        seconds = time.perf_counter() - start
        empty = run_child("open", str(path / "empty"))
    return opens, empty, seconds


def copy_crashed(source: Path, target: Path) -> None:
    sealed = {path.with_suffix(".log") for path in source.glob("*/*.index")}
    sealed |= set(source.glob("*/*.index"))
    for path in sorted(source.rglob("*")):
        to = target / path.relative_to(source)
        if path.is_dir():
            to.mkdir(parents=True)
        elif path in sealed:
            to.parent.mkdir(parents=True, exist_ok=True)
            os.link(path, to)
        else:
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, to)
    os.sync()  # writing the copy is not part of opening it


def warm_up(directory: Path) -> None:
    """Everything but the sealed messages is in the page cache, as right after the crash."""
    for path in directory.rglob("*"):
        if path.is_file() and not path.with_suffix(".index").exists():
            path.read_bytes()


def cool_down(directory: Path) -> None:
    """Nothing is in the page cache, as after a reboot."""
    for path in directory.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
