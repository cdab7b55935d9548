"""Pure: the report of a run: Markdown with the verdict, and a picture of what happened.

The picture has a row each for faults, operations per second, latency and leaders, over the same
seconds, so that a cause is above its effect.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from raftq.chaos.history import Publish
from raftq.chaos.outages import worst_by_fault
from raftq.chaos.runner import RunOutcome
from raftq.chaos.timeline import Second, percentile, seconds_of, slowest_window

ANOMALIES_SHOWN = 50

WIDTH, LEFT, RIGHT = 960, 90, 20
BAR, ROW_GAP, CHART = 16, 26, 110
INK, PALE, GOOD, BAD, FAULT, LEAD = (
    "#222", "#ddd", "#2a7f62", "#b3261e", "#e0a458", "#3c5a99",
)  # fmt: skip


def to_markdown(outcome: RunOutcome, command: str, picture: str = "timeline.svg") -> str:
    """The report. `command` repeats the run, `picture` is the path of the drawing."""
    scenario, timeline = outcome.scenario, outcome.timeline
    verdict = "passed" if outcome.passed else f"FAILED, {len(outcome.anomalies)} anomalies"
    lines = [
        f"# {scenario.name}: {verdict}",
        "",
        f"{scenario.promise}",
        "",
        f"Rows {', '.join(map(str, scenario.rows)) or '-'} of the list of faults; "
        f"{scenario.nodes} nodes; seed {outcome.seed}; again: `{command}`",
        "",
        f"![what happened]({picture})",
        "",
        "## Figures",
        "",
        *_table(("figure", "value"), figures(outcome).items()),
        "",
    ]
    if outcome.costs:
        lines += ["## The longest time without an acknowledgement in some partition, by fault", ""]
        rows = (
            (name, str(count), f"{worst:.2f} s")
            for name, count, worst in worst_by_fault(outcome.costs)
        )
        lines += [*_table(("single fault", "times", "worst"), rows), ""]
    if outcome.anomalies:
        lines += ["## Anomalies", ""]
        lines += [f"- {anomaly}" for anomaly in outcome.anomalies[:ANOMALIES_SHOWN]]
        if len(outcome.anomalies) > ANOMALIES_SHOWN:
            lines.append(f"- and {len(outcome.anomalies) - ANOMALIES_SHOWN} more")
        lines.append("")
    marks = sorted(timeline.marks, key=lambda mark: mark.at)
    rows = ((f"{mark.at - timeline.began:.1f}", mark.kind, mark.text) for mark in marks)
    lines += ["## What happened", "", *_table(("second", "what", ""), rows), ""]
    return "\n".join(lines)


def figures(outcome: RunOutcome) -> dict[str, str]:
    """The numbers of a run, for tables."""
    timeline = outcome.timeline
    seconds = under_load(outcome)
    waits = [
        (sent.ended - sent.at) * 1000
        for sent in outcome.history.of(Publish)
        if sent.status == "ok" and sent.ended is not None
    ]
    found = {
        "run": f"{timeline.ended - timeline.began:.1f} s",
        "records acknowledged": str(len(waits)),
        "latency p50 / p99 / worst": " / ".join(
            f"{percentile(waits, share):.0f}" for share in (0.5, 0.99, 1.0)
        )
        + " ms",
        "longest time without an acknowledged record": f"{outcome.gap_s:.2f} s",
        "longest outage of a partition by a single fault": f"{_worst(outcome):.2f} s",
        "operations/s, slowest 10 s": f"{slowest_window(seconds):.0f}",
        "leader changes": str(outcome.leader_changes),
    }
    counts = outcome.history.counts()
    return found | {name: str(count) for name, count in counts.items()}


def _worst(outcome: RunOutcome) -> float:
    return max((cost.outage_s for cost in outcome.costs), default=0.0)


def under_load(outcome: RunOutcome) -> list[Second]:
    """The whole seconds between the start of the faults and the end of the load."""
    phases = {one.text: one.at for one in outcome.timeline.of("phase")}
    began = phases.get("faults", outcome.timeline.began)
    ended = phases.get("stop", outcome.timeline.ended)
    return seconds_of(outcome.history, began, ended)[:-1]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        cells = (cell.replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


# The picture.


@dataclass(frozen=True, slots=True)
class _Axis:
    """Converts seconds of a run to coordinates of the picture."""

    began: float
    seconds: float

    def x(self, at: float) -> float:
        share = min(1.0, max(0.0, (at - self.began) / self.seconds))
        return LEFT + share * (WIDTH - LEFT - RIGHT)


def to_svg(outcome: RunOutcome) -> str:
    """Draws the faults, operations, latency and leaders of a run, over its seconds."""
    timeline = outcome.timeline
    axis = _Axis(timeline.began, max(1.0, timeline.ended - timeline.began))
    seconds = seconds_of(outcome.history, timeline.began, timeline.ended)
    parts: list[str] = []
    top = 34.0
    parts += _faults(outcome, axis, top)
    top += max(1, len(timeline.faults)) * (BAR + 4) + ROW_GAP
    done = [float(second.done) for second in seconds]
    failed = [float(second.failed) for second in seconds]
    parts += _bars(axis, top, "operations/s", done, failed)
    top += CHART + ROW_GAP
    worst = [second.worst_ms for second in seconds]
    parts += _bars(axis, top, "worst append, ms", worst, [])
    top += CHART + ROW_GAP
    parts += _leaders(outcome, axis, top)
    top += BAR + ROW_GAP
    parts += _seconds(axis, top)
    height = top + 24
    verdict = "passed" if outcome.passed else f"FAILED: {len(outcome.anomalies)} anomalies"
    title = f"{outcome.scenario.name}, seed {outcome.seed}: {verdict}"
    colour = GOOD if outcome.passed else BAD
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
        f'font-family="sans-serif" font-size="11" fill="{INK}">'
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="white"/>'
        f'<text x="{LEFT}" y="18" font-size="14" fill="{colour}">{escape(title)}</text>'
    )
    return head + "".join(parts) + "</svg>\n"


def _faults(outcome: RunOutcome, axis: _Axis, top: float) -> list[str]:
    parts = [_label(top + 12, "faults")]
    for number, one in enumerate(sorted(outcome.timeline.faults, key=lambda span: span.began)):
        y = top + number * (BAR + 4)
        left, right = axis.x(one.began), axis.x(one.ended)
        parts.append(
            f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(2.0, right - left):.1f}" '
            f'height="{BAR}" fill="{FAULT}"><title>{escape(one.text)}</title></rect>'
        )
        at, anchor = (right + 4, "start") if right < WIDTH * 0.6 else (left - 4, "end")
        text = escape(f"{one.name}: {one.text}"[:90])
        parts.append(f'<text x="{at:.1f}" y="{y + 12:.1f}" text-anchor="{anchor}">{text}</text>')
    return parts


def _bars(axis: _Axis, top: float, name: str, good: list[float], bad: list[float]) -> list[str]:
    most = max([1.0, *good, *bad])
    bottom = top + CHART
    parts = [
        _label(top + 10, name),
        _label(top + 24, f"max {most:.0f}"),
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{PALE}"/>',
    ]
    for values, colour in ((good, GOOD), (bad, BAD)):
        for number, value in enumerate(values):
            left, right = axis.x(axis.began + number), axis.x(axis.began + number + 1)
            height = value / most * CHART
            if height:
                parts.append(
                    f'<rect x="{left:.1f}" y="{bottom - height:.1f}" '
                    f'width="{max(0.5, right - left - 1):.1f}" height="{height:.1f}" '
                    f'fill="{colour}" fill-opacity="0.8"/>'
                )
    return parts


def _leaders(outcome: RunOutcome, axis: _Axis, top: float) -> list[str]:
    parts = [_label(top + 12, "new leaders")]
    for kind, colour in (("leader", LEAD), ("trouble", BAD)):
        parts += [
            f'<rect x="{axis.x(mark.at):.1f}" y="{top}" width="2" height="{BAR}" '
            f'fill="{colour}"><title>{escape(mark.text)}</title></rect>'
            for mark in outcome.timeline.marks
            if mark.kind == kind
        ]
    return parts


def _seconds(axis: _Axis, top: float) -> list[str]:
    step = next(one for one in (1, 2, 5, 10, 30, 60, 300, 600, 3600) if axis.seconds / one <= 16)
    parts = []
    for number in range(0, int(axis.seconds) + 1, step):
        x = axis.x(axis.began + number)
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="30" y2="{top}" stroke="{PALE}" '
            f'stroke-width="0.5"/><text x="{x:.1f}" y="{top + 14}" text-anchor="middle">'
            f"{number} s</text>"
        )
    return parts


def _label(y: float, text: str) -> str:
    return f'<text x="{LEFT - 8}" y="{y:.1f}" text-anchor="end">{escape(text)}</text>'
