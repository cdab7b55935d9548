"""Pure: judges a history.

The anomalies are listed in log_checkers, queue_checkers and group_checkers.
"""

from raftq.chaos.group_checkers import check_owners, check_receives, check_stores
from raftq.chaos.history import Final, History
from raftq.chaos.log_checkers import (
    check_changes,
    check_copies,
    check_leaders,
    check_offsets,
    check_order,
    check_progress,
)
from raftq.chaos.queue_checkers import (
    check_drained,
    check_leases,
    check_letters,
    check_records,
    check_times,
)
from raftq.chaos.verdict import Anomaly, Rules

__all__ = ["Anomaly", "Rules", "judge"]


def judge(history: History, final: Final, rules: Rules | None = None) -> list[Anomaly]:
    """Finds every anomaly of a history, given the final state of the cluster."""
    rules = rules or Rules()
    return [
        *check_records(history, final),
        *check_order(history, final),
        *check_offsets(history, final),
        *check_leaders(history),
        *check_copies(final),
        *check_changes(history, final),
        *check_progress(history, rules),
        *check_times(history, rules),
        *check_leases(history, rules),
        *check_drained(history, final, rules),
        *check_letters(history, final, rules),
        *check_stores(history),
        *check_owners(history),
        *check_receives(history, final),
    ]
