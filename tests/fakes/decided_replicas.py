"""A decision of the controller about a partition with three replicas."""

from raftq.node.replication.replica import Decided

LAG_S = 3.0
ALIVE = {1: 11, 2: 22, 3: 33}


def decided(**changes: object) -> Decided:
    facts: dict[str, object] = {
        "epoch": 5,
        "version": 1,
        "leader": 1,
        "replicas": (1, 2, 3),
        "isr": (1, 2, 3),
        "min_insync": 2,
    }
    facts |= changes
    facts.setdefault("assignments", (1,) * len(facts["replicas"]))  # type: ignore[arg-type]
    return Decided(**facts)  # type: ignore[arg-type]
