"""Pure: the tables that the demo prints."""

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from raftq.client.common.names import LANE_NAMES
from raftq.node.queue.core.lanes import WEIGHTS
from raftq.node.queue.embedded.message import DeadMessage
from raftq_demo.checks import Check, Deliveries, shares
from raftq_demo.cluster import Kill
from raftq_demo.group_checks import GroupStory


def checks_table(checks: Sequence[Check]) -> Table:
    table = _table("Checks", "claim", "expected", "found", "")
    for check in checks:
        mark = Text("ok", style="green") if check.ok else Text("FAILED", style="bold red")
        table.add_row(check.claim, check.expected, check.found, mark)
    return table


def shares_table(lanes: Sequence[int], title: str = "Shares while all lanes are busy") -> Table:
    table = _table(title, "lane", "messages", "expected", "measured")
    for name, count, weight, share in zip(LANE_NAMES, lanes, WEIGHTS, shares(lanes), strict=True):
        table.add_row(name, str(count), f"{weight} %", f"{share:.1f} %")
    return table


def delays_table(seen: Deliveries) -> Table:
    table = _table("Delayed messages", "", "messages", "earliest", "median", "worst")
    rows = (
        ("ready after due, while the queue was open", seen.firing),
        ("received after due, behind the backlog", seen.lateness),
    )
    for name, late in rows:
        ordered = sorted(late) or [0.0]
        points = (ordered[0], ordered[len(ordered) // 2], ordered[-1])
        table.add_row(name, str(len(late)), *(f"{1000 * point:.1f} ms" for point in points))
    return table


def letters_table(letters: Sequence[DeadMessage]) -> Table:
    table = _table("Dead letters", "reason", "attempts", "messages")
    counts = Counter((letter.reason, letter.attempts) for letter in letters)
    for (reason, attempts), count in sorted(counts.items()):
        table.add_row(Text(reason), str(attempts), str(count))
    return table


def timings_table(timings: Sequence[tuple[str, int | None, float]]) -> Table:
    """Rows of (what, messages or None, seconds)."""
    table = _table("Timings", "what", "messages", "seconds", "messages/s")
    for what, count, seconds in timings:
        rate = f"{count / seconds:,.0f}" if count and seconds else ""
        table.add_row(what, "" if count is None else str(count), f"{seconds:.3f}", rate)
    return table


def failovers_table(kills: Sequence[Kill], seconds: Sequence[float]) -> Table:
    """The time until records were acknowledged again in partitions of the killed node."""
    table = _table("Failovers", "killed", "was leader of", "was the controller", "back after")
    for kill, waited in zip(kills, seconds, strict=True):
        led = f"{len(kill.led)} partitions"
        controls = "yes" if kill.controller else "no"
        table.add_row(f"node {kill.node_id}", led, controls, f"{1000 * waited:.0f} ms")
    return table


def workers_table(story: GroupStory) -> Table:
    """What each worker of the group did."""
    table = _table("Workers of the group", "worker", "handled", "")
    fates = {story.killed: "killed -9", story.joined: "joined after that"}
    for worker, count in story.workers().items():
        table.add_row(f"worker {worker}", str(count), fates.get(worker, ""))
    return table


def _table(title: str, first: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
