"""Pure: the picture of latency: percentiles over time, one panel for each topic."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftq.client.spark.pipelines.drawing import (
    COLOURS,
    INK,
    day,
    duration,
    empty_figure,
    label,
    new_figure,
    quiet_axes,
    span,
    time_axis,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"p99_ms": COLOURS[3], "p90_ms": COLOURS[1], "p50_ms": COLOURS[0]}
# Powers of ten of a ms would be odd durations: 1 ms to 500 ms, 1 s to 30 s, and so on.
ROUND_MS = (
    *(power * step for power in (1, 10, 100) for step in (1, 2, 5)),
    *(unit * step for unit in (1000, 60_000) for step in (1, 2, 5, 10, 30)),
    *(3_600_000 * step for step in (1, 2, 6, 12, 24, 48, 7 * 24, 30 * 24)),
)
TICKS_MAX = 9
WIDE = 50  # from here on, largest against smallest, an axis of powers of ten is easier to read
MARKED_MAX = 60  # few points are marked, so that a single one can be seen


@dataclass(frozen=True, slots=True)
class Point:
    """Percentiles of one bucket of time, by name."""

    bucket_ms: int
    values: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class LatencyFigures:
    """What is drawn: points in order of time, by topic, the largest first."""

    bucket_ms: int
    by_topic: dict[str, list[Point]]
    left_out: int = 0
    """Topics that only the table has."""


def draw_latency(figures: LatencyFigures) -> "Figure":
    if not figures.by_topic:
        return empty_figure("no record of this range has an origin")
    count = len(figures.by_topic)
    figure = new_figure(11, 1.0 + 3.0 * count)
    panels = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
    for axes, (topic, points) in zip(panels, figures.by_topic.items(), strict=True):
        _panel(axes, topic, points)
    time_axis(panels[-1])
    buckets = [point.bucket_ms for points in figures.by_topic.values() for point in points]
    more = f"; {figures.left_out} more topics are in the table" if figures.left_out else ""
    figure.suptitle(
        f"Latency, {span(buckets, figures.bucket_ms)}{more}",
        x=0.01, ha="left", fontsize=13, color=INK,
    )  # fmt: skip
    return figure


def _panel(axes: "Axes", topic: str, points: list[Point]) -> None:
    times = [day(point.bucket_ms) for point in points]
    mark = "o" if len(points) <= MARKED_MAX else ""
    highest = [point.values["max_ms"] for point in points]
    # Dots, above the lines: if a bucket has few records, the largest one is the p99, too.
    axes.plot(times, highest, ".", color=INK, markersize=3, label="max", zorder=3)
    for name, colour in LINES.items():
        heights = [point.values[name] for point in points]
        axes.plot(times, heights, color=colour, marker=mark, markersize=3, linewidth=1.5,
                  label=name.removesuffix("_ms"))  # fmt: skip
    _latency_axis(axes, min(min(point.values.values()) for point in points), max(highest))
    axes.margins(x=0.01)
    axes.set_title(label(topic), loc="left", fontsize=11, color=INK)
    quiet_axes(axes)
    axes.legend(fontsize=9, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _latency_axis(axes: "Axes", lowest: int, highest: int) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator  # noqa: PLC0415 - optional

    if lowest > 0 and highest / lowest >= WIDE:
        axes.set_yscale("log")
        shown = [ms for ms in ROUND_MS if lowest <= ms <= highest]
        axes.yaxis.set_major_locator(FixedLocator(shown[:: -(-len(shown) // TICKS_MAX)]))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.set_ylim(bottom=min(lowest, 0))
    axes.yaxis.set_major_formatter(lambda ms, _: duration(ms))
