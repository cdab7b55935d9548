"""Shell: the result of a figure and its conditions, as text, table and JSON."""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from raftq_bench.runner import VALUE_BYTES, Settings


@dataclass(frozen=True, slots=True)
class Bar:
    """What a figure must reach: its `value` or its `ratio` to the baseline."""

    of: str
    limit: float
    at_most: bool = False

    def met(self, value: float, ratio: float | None) -> bool:
        seen = value if self.of == "value" else ratio
        assert seen is not None, "a bar on the ratio needs a baseline"
        return seen <= self.limit if self.at_most else seen >= self.limit

    def __str__(self) -> str:
        sign = "<=" if self.at_most else ">="
        return f"{self.of} {sign} {self.limit:,g}"


@dataclass(slots=True, kw_only=True)
class Result:
    """One line of the report."""

    figure: str
    title: str
    unit: str
    value: float
    measured_s: float
    fsync: str
    baseline_name: str | None = None
    baseline: float | None = None
    ratio: float | None = None
    """value / baseline."""
    bar: Bar | None = None
    passed: bool | None = None
    """None for a line that has no bar."""
    value_bytes: int = VALUE_BYTES
    notes: list[str] = field(default_factory=list)
    detail: dict[str, Any] = field(default_factory=dict)

    def judge(self, settings: Settings) -> "Result":
        """Sets ratio and verdict. A figure that was measured too briefly has not passed."""
        if self.baseline is not None and self.ratio is None:
            self.ratio = self.value / self.baseline
        if self.bar is not None:
            self.passed = self.bar.met(self.value, self.ratio)
        if self.measured_s < settings.seconds:
            self.notes.append(f"measured for {self.measured_s:.2f} s only: does not count")
            self.passed = False
        return self

    @property
    def verdict(self) -> str:
        return "-" if self.passed is None else "pass" if self.passed else "MISS"

    def as_json(self) -> dict[str, Any]:
        found = asdict(self)
        found["bar"] = None if self.bar is None else asdict(self.bar)
        return found


def conditions(settings: Settings) -> dict[str, Any]:
    return {
        "cores": os.cpu_count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "kernel": platform.release(),
        "machine": platform.machine(),
        "filesystem": filesystem_of(settings.directory),
        "directory": str(settings.directory),
        "value_bytes": VALUE_BYTES,  # if a line does not say otherwise
        "seconds": settings.seconds,
        "quick": settings.quick,
    }


def filesystem_of(path: Path) -> str:
    """Type of the mounted file system that holds the path, or 'unknown'."""
    try:
        mounts = Path("/proc/mounts").read_text()
    except OSError:
        return "unknown"
    best = ("", "unknown")
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        inside = Path(path).resolve().is_relative_to(point)
        if inside and len(point) >= len(best[0]):
            best = (point, kind)
    return best[1]


def describe(result: Result, found: dict[str, Any]) -> str:
    """One figure with everything that is needed to believe it."""
    lines = [
        f"{result.title}",
        f"  conditions  {found['cores']} cores, {found['python']}, Linux {found['kernel']}, "
        f"{found['filesystem']}, fsync {result.fsync}, {result.value_bytes} B values, "
        f"{result.measured_s:.1f} s measured",
        f"  figure      {result.value:,.3f} {result.unit}",
    ]
    if result.baseline is not None:
        lines.append(f"  baseline    {result.baseline:,.3f} {result.unit}: {result.baseline_name}")
        lines.append(f"  ratio       {result.ratio:,.3f}")
    lines.append(f"  bar         {result.bar or 'none'}: {result.verdict}")
    lines += [f"  note        {note}" for note in result.notes]
    return "\n".join(lines)


def print_table(results: Sequence[Result], found: dict[str, Any], console: Console) -> None:
    kind = "smoke run, the numbers mean nothing" if found["quick"] else "benchmarks"
    table = Table(title=f"RaftQ {kind} ({found['cores']} cores, {found['filesystem']})")
    for name in ("figure", "value", "unit", "baseline", "ratio", "bar", "verdict"):
        table.add_column(name, justify="right" if name in ("value", "baseline", "ratio") else None)  # type: ignore[arg-type]
    for result in results:
        table.add_row(
            result.title,
            f"{result.value:,.2f}",
            result.unit,
            "-" if result.baseline is None else f"{result.baseline:,.2f}",
            "-" if result.ratio is None else f"{result.ratio:,.2f}",
            str(result.bar or "-"),
            {"pass": "[green]pass[/]", "MISS": "[red]MISS[/]"}.get(result.verdict, "-"),
        )
    console.print(table)


def write_json(path: Path, results: Sequence[Result], found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"conditions": found, "results": [result.as_json() for result in results]}
    path.write_text(json.dumps(document, indent=2) + "\n")
