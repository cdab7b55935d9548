"""The parts that simulations of whole clusters have in common, and how they are run."""

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from clusterchecks import Invariants
from simcluster import SimCluster
from simplan import Plan


def new_cluster(plan: Plan) -> SimCluster:
    """A cluster that keeps its story if RAFTQ_SIM_STORY is set."""
    cluster = SimCluster(plan)
    if "RAFTQ_SIM_STORY" in os.environ:
        cluster.loop.story = []
    return cluster


def run_cluster(
    cluster: SimCluster,
    main: Coroutine[Any, Any, None],
    invariants: Invariants,
    counts: Callable[[], object] | None = None,
) -> None:
    """Runs a scenario, prints its story if it is kept, and checks that no node has complained."""
    try:
        cluster.run(main, invariants.after_turn)
    finally:
        if cluster.loop.story is not None:
            sys.stdout.write("\n".join(cluster.loop.story) + "\n")
            if counts is not None:
                sys.stdout.write(f"{counts()}\n")
    assert not cluster.bugs, cluster.bugs
    assert not cluster.complaints.found, cluster.complaints.found
    assert not cluster.loop.unhandled, cluster.loop.unhandled


async def begin(
    cluster: SimCluster, create_topics: Callable[[SimCluster], Awaitable[None]]
) -> None:
    """Starts all nodes and creates the topics."""
    for node in cluster.nodes.values():
        node.start()
    await cluster.until("all nodes serve", cluster.is_whole, 30)
    await create_topics(cluster)
    await cluster.until("the topics are there", cluster.is_whole, 30)


async def until_sent(cluster: SimCluster, producing: Sequence["asyncio.Future[Any]"]) -> None:
    """Waits until every send has ended; raises the error of one that failed."""
    await cluster.until("every send has ended", lambda: all(task.done() for task in producing), 200)
    for task in producing:
        task.result()
