"""The one place that knows how pysyncobj looks inside. (Shell.)

`Library` is `SyncObj` with names for the private fields that the adapter reads and sets, and with
everything in it that must not run any more closed off. What is used of the library: its constructor
and settings, its state, its nodes, its transport interface and its poller. The protocol itself is
overridden in node.py, because as released it loses acknowledged commands; the private names it
overrides exist in exactly one release, so any other is refused at import.
"""

from typing import Any

from pysyncobj.config import SyncObjConf
from pysyncobj.node import Node
from pysyncobj.poller import POLL_EVENT_TYPE
from pysyncobj.syncobj import SyncObj
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from raftq.cluster.raft.config import RaftTimes

__all__ = ["CANDIDATE", "FOLLOWER", "LEADER", "POLL_EVENT_TYPE", "Library", "Node", "Transport"]

REQUIRED_VERSION = "0.3.17"

FOLLOWER, CANDIDATE, LEADER = 0, 1, 2


def require_version(version: str) -> None:
    if version != REQUIRED_VERSION:
        raise ImportError(
            f"raftq needs pysyncobj {REQUIRED_VERSION} exactly, because it overrides private"
            f" methods of that release; found {version}. Run: pip install"
            f" pysyncobj=={REQUIRED_VERSION}"
        )


require_version(VERSION)


def _field(name: str) -> Any:
    mangled = f"_SyncObj__{name}"

    def get(self: Any) -> Any:
        return getattr(self, mangled)

    def put(self: Any, value: Any) -> None:
        setattr(self, mangled, value)

    return property(get, put)


class Library(SyncObj):  # type: ignore[misc]
    """SyncObj on its own journal, ticked by hand, with a fixed set of voters."""

    state: int = _field("raftState")
    term_now: int = _field("raftCurrentTerm")
    voted_for: str | None = _field("votedForNodeId")
    leader: Node | None = _field("raftLeader")
    commit: int = _field("raftCommitIndex")
    applied: int = _field("raftLastApplied")
    election_deadline: float = _field("raftElectionDeadline")
    connected: set[Node] = _field("connectedNodes")
    others: set[Node] = _field("otherNodes")
    log: Any = _field("raftLog")
    transport: Any = _field("transport")

    def __init__(self, node_id: str, others: list[str], times: RaftTimes, transport: Any) -> None:
        conf = SyncObjConf(
            autoTick=False,
            autoTickPeriod=times.tick_ms / 1000,
            raftMinTimeout=times.election_ms_min / 1000,
            raftMaxTimeout=times.election_ms_max / 1000,
            appendEntriesPeriod=times.append_ms / 1000,
            leaderFallbackTimeout=times.fallback_ms / 1000,
            connectionRetryTime=times.reconnect_ms / 1000,
            connectionTimeout=times.connection_ms / 1000,
            commandsWaitLeader=False,
            dynamicMembershipChange=False,
            useFork=False,
            # The library keeps nothing on disk: its journal is replaced right after construction.
            journalFile=None,
            fullDumpFile=None,
        )
        super().__init__(
            Node(node_id), [Node(node_id) for node_id in others], conf, transportClass=transport
        )

    # Ways of the library that the adapter does not go: reaching one is a mistake of ours.

    def _closed_off(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("this part of pysyncobj is not used")

    _applyCommand = _closed_off
    _checkCommandsToApply = _closed_off
    _autoTickThread = _closed_off
    _SyncObj__doApplyCommand = _closed_off
    _SyncObj__sendNextNodeIdx = _closed_off
    _SyncObj__sendAppendEntries = _closed_off
    _SyncObj__deleteEntriesFrom = _closed_off
    _SyncObj__deleteEntriesTo = _closed_off
    _SyncObj__onBecomeLeader = _closed_off
    _SyncObj__setCurrentTerm = _closed_off
    _SyncObj__tryLogCompaction = _closed_off
    _SyncObj__loadDumpFile = _closed_off
    _SyncObj__doChangeCluster = _closed_off
    _SyncObj__updateClusterConfiguration = _closed_off
    addNodeToCluster = _closed_off
    removeNodeFromCluster = _closed_off
    transferLeadership = _closed_off
    setCodeVersion = _closed_off
