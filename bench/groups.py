"""Shell: the figures of consumer groups: `python -m raftq_bench groups [FIGURE...]`."""

from raftq_bench import group_changes, group_flow, suite

FIGURES: dict[str, tuple[suite.Measure, str]] = {
    "consume": (group_flow.measure, "3 nodes, one member, with commits"),
    "join": (group_changes.measure_join, "one more joins 8 members on 64 partitions under load"),
    "kill": (group_changes.measure_kill, "a member is killed -9"),
    "crowd": (group_changes.measure_crowd, "200 members join"),
}
SUITE = suite.Suite("groups", __doc__ or "", FIGURES, rounds=4)
