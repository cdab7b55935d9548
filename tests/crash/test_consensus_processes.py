"""Real processes under kill -9, SIGSTOP and restarts of all at once, while the log is compacted.

RAFTQ_CHAOS_SECONDS makes the run longer than its few seconds, RAFTQ_CHAOS_SEED another one.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from consensus_cluster import IDS, Cluster

SECONDS = float(os.environ.get("RAFTQ_CHAOS_SECONDS", "8"))
SEED = int(os.environ.get("RAFTQ_CHAOS_SEED", "1"))

TIMES = {
    "election_ms_min": 300,
    "election_ms_max": 600,
    "append_ms": 60,
    "fallback_ms": 900,
    "connection_ms": 3000,
}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    # Compaction every few hundred entries: most kills meet one.
    limits = {"compact_entries": 300, "keep_entries": 50}
    made = Cluster(tmp_path, limits=limits, times=TIMES, payload=100)
    try:
        yield made
    finally:
        made.close()


def harm(cluster: Cluster, rng: Random) -> None:
    kind = rng.choice(["kill", "kill leader", "stop", "stop leader", "all", "all"])
    victim = cluster.leader[1] if "leader" in kind else rng.choice(IDS)
    if kind.startswith("kill"):
        cluster.kill(victim)
        cluster.poll(rng.uniform(0.1, 1.0))
    elif kind.startswith("stop"):
        cluster.signal(victim, signal.SIGSTOP)
        cluster.poll(rng.uniform(0.1, 1.5))
        cluster.signal(victim, signal.SIGCONT)
    else:
        for one in IDS:
            cluster.kill(one)
    restart(cluster)


def restart(cluster: Cluster) -> None:
    gone = [one for one in IDS if one not in cluster.children]
    cluster.start_all()
    cluster.wait_for("ready", len(gone), 30.0)
    for one in gone:
        cluster.tell(one, "work 5")


def test_kills_pauses_and_full_stops_lose_nothing_and_apply_nothing_twice(
    cluster: Cluster,
) -> None:
    rng = Random(SEED)
    restart(cluster)
    cluster.wait_for_leader(0, 20.0)
    cluster.poll(1.0)
    spent = 0.0
    while spent < SECONDS:
        harm(cluster, rng)
        calm = rng.uniform(0.3, 1.2)
        cluster.poll(calm)
        spent += calm + 0.7
    for one in IDS:
        cluster.tell(one, "quiet")
    before = len(cluster.acknowledged)
    cluster.poll(2.0)
    applied = cluster.verdict()
    assert applied >= before > 300, f"{applied} applied, {before} acknowledged"
