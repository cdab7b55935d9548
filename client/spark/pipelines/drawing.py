"""Pure: what the pictures of reports have in common: colours, axes of time, labels.

The functions import matplotlib: a report must not need it.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind people can tell apart; grey is for the rest.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#CC79A7")
REST = "#B0B0B0"
GRID = "#E4E4E4"
INK = "#333333"
LABEL_CHARS_MAX = 48
DAY_MS = 86_400_000


def new_figure(width: float, height: float) -> "Figure":
    # Not pyplot: it keeps figures in a global, and needs a screen.
    from matplotlib.figure import Figure  # noqa: PLC0415 - optional, and slow to load

    return Figure(figsize=(width, height), layout="constrained")


def label(text: str) -> str:
    """Foreign text: short, printable, and without formulas, which `$` would begin."""
    clean = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    short = clean if len(clean) <= LABEL_CHARS_MAX else clean[: LABEL_CHARS_MAX - 1] + "\u2026"
    return short.replace("$", r"\$")


def day(ms: int) -> float:
    """Days since 1970, the unit of time axes."""
    return ms / DAY_MS


def _moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def span(buckets_ms: Iterable[int], bucket_ms: int) -> str:
    """The range of time that buckets cover, for a title."""
    all_of = list(buckets_ms)
    first, end = _moment(min(all_of)), _moment(max(all_of) + bucket_ms)
    return f"{first:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC"


def quiet_axes(axes: "Axes") -> None:
    """Draws a light grid behind the data, and no box around it."""
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=GRID)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(colors=INK, labelsize=9)


def time_axis(axes: "Axes") -> None:
    """Shows days since 1970 as times of day and dates, in UTC."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter  # noqa: PLC0415

    locator = AutoDateLocator(tz=UTC, minticks=4, maxticks=10)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    formatter = ConciseDateFormatter(locator, tz=UTC)  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_formatter(formatter)


def duration(ms: float) -> str:
    """A duration for people: 850 ms, 2.5 s, 3 min, 7 h, 2 d."""
    for unit, length in (("d", DAY_MS), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if abs(ms) >= length:
            return f"{ms / length:.3g} {unit}"
    return f"{ms:.3g} ms"


def empty_figure(why: str) -> "Figure":
    figure = new_figure(8, 2.5)
    figure.text(0.5, 0.5, why, ha="center", va="center", fontsize=13, color=INK)
    return figure
