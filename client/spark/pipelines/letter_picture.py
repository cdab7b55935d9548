"""Pure: the picture of dead letters: how many died when and why, and where most of them died."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from raftq.client.spark.pipelines.drawing import (
    COLOURS,
    DAY_MS,
    INK,
    REST,
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

BAR = 0.9  # of a bucket's width
BUCKETS_SHOWN_MIN = 12


@dataclass(frozen=True, slots=True)
class LetterFigures:
    """What is drawn: letters by reason and bucket (ms), and by topic and group, the largest
    first."""

    bucket_ms: int
    by_reason: dict[str, dict[int, int]]
    by_place: dict[str, int]


def draw_letters(figures: LetterFigures) -> "Figure":
    if not figures.by_reason:
        return empty_figure("no dead letters in this range")
    rows = len(figures.by_place)
    below = 0.8 + 0.3 * rows
    figure = new_figure(11, 4.2 + below)
    above, beneath = figure.subplots(2, 1, height_ratios=[4.2, below])
    _over_time(above, figures)
    _places(beneath, figures.by_place)
    return figure


def _over_time(axes: "Axes", figures: LetterFigures) -> None:
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - optional, and slow to load

    buckets = sorted({point for points in figures.by_reason.values() for point in points})
    # Bars stand on the beginning of their bucket and are as wide as it, in days.
    width = figures.bucket_ms / DAY_MS * BAR
    floor = dict.fromkeys(buckets, 0)
    for number, (reason, points) in enumerate(figures.by_reason.items()):
        colour = COLOURS[number] if number < len(COLOURS) else REST
        heights = [points.get(bucket, 0) for bucket in buckets]
        axes.bar(
            [day(bucket) for bucket in buckets], heights, width,
            [floor[bucket] for bucket in buckets],
            align="edge", color=colour, label=f"{label(reason)}: {sum(heights):,}",
        )  # fmt: skip
        for one, height in zip(buckets, heights, strict=True):
            floor[one] += height
    total = sum(floor.values())
    title = f"{total:,} dead letters, {span(buckets, figures.bucket_ms)}"
    axes.set_title(title, loc="left", fontsize=13, color=INK)
    axes.set_ylabel(f"letters in {duration(figures.bucket_ms)}", color=INK)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    # A single bar must not fill the picture.
    spare = max(BUCKETS_SHOWN_MIN - (buckets[-1] - buckets[0]) // figures.bucket_ms, 1) / 2
    axes.set_xlim(
        day(buckets[0]) - spare * day(figures.bucket_ms),
        day(buckets[-1]) + (spare + BAR) * day(figures.bucket_ms),
    )
    quiet_axes(axes)
    time_axis(axes)
    axes.legend(title="reason", alignment="left", fontsize=9, frameon=False,
                loc="upper left", bbox_to_anchor=(1.0, 1.0))  # fmt: skip


def _places(axes: "Axes", by_place: dict[str, int]) -> None:
    names = [label(place) for place in by_place]
    counts = list(by_place.values())
    places = range(len(names))
    bars = axes.barh(places, counts, 0.7, color=COLOURS[0])
    axes.bar_label(bars, [f"{count:,}" for count in counts], padding=4, fontsize=9, color=INK)
    axes.set_yticks(places, names)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_title("where: topic \u2192 group", loc="left", fontsize=11, color=INK)
    quiet_axes(axes)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="x", bottom=False, labelbottom=False)
    axes.tick_params(axis="y", left=False)
