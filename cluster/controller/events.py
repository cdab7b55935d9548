"""The events, effects and settings of the controller. (Pure.)"""

from collections.abc import Sequence
from dataclasses import dataclass

from raftq.client.common.errors import ConfigError, RaftqError
from raftq.cluster.metadata.changes import Change
from raftq.cluster.metadata.commands import Command
from raftq.cluster.metadata.state import ClusterState


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerConfig:
    lease_ms: int = 3000
    """A node without a heartbeat for this long is fenced. Too short: pauses of a busy node cost
    it its leadership. Too long: partitions of a hanging node stay without a leader."""
    balance_ms: int = 10_000
    """The time between two rounds that give partitions back to their preferred leaders."""
    balance_settle_ms: int = 5000
    """A node must be alive for this long before it gets leadership back."""
    resigned_ms: int = 60_000
    """A node that gave up a partition, because no follower fetched from it, must wait this long."""
    balance_max: int = 500
    """The most partitions that change their leader in one round."""
    moves_max: int = 4
    """While this many moves are under way, no further one begins."""
    move_patience_ms: int = 30_000
    """A move to a node that is down for this long is planned again."""
    probe_ms: int = 100
    """The time between two probes of a suspected node."""
    probe_timeout_ms: int = 2000
    """A probe without a result is forgotten after this time; the shell's own limit is shorter."""
    probes_max: int = 32
    """The most probes at the same time."""
    proposal_ms: int = 10_000
    """A proposal without an answer is forgotten after this time."""
    retry_ms: int = 500
    """The wait before a refused proposal is made again. It doubles up to `balance_ms`."""
    stall_ms: int = 500
    """A step that comes later than this after its deadline means that this process was stopped."""

    def __post_init__(self) -> None:
        problems = [
            f"{name} must be at least 1, not {value}"
            for name in self.__slots__
            if (value := getattr(self, name)) < 1
        ]
        if self.balance_max > 8192:
            problems.append(f"balance_max must be at most 8192, not {self.balance_max}")
        if self.retry_ms > self.balance_ms:
            problems.append("retry_ms must not be above balance_ms")
        if self.probe_ms >= self.lease_ms:
            problems.append("probe_ms must be below lease_ms")
        if problems:
            raise ConfigError("controller: " + "; ".join(problems))


@dataclass(frozen=True, slots=True)
class Promoted:
    state: ClusterState
    connected: tuple[int, ...] = ()
    """Nodes with a connection to this one. They need no probe."""
    rivals: tuple[int, ...] = ()
    """The other voters, any of which could be the controller instead."""


@dataclass(frozen=True, slots=True)
class Demoted:
    pass


@dataclass(frozen=True, slots=True)
class HeartbeatCame:
    node_id: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ConnectionEnded:
    node_id: int


@dataclass(frozen=True, slots=True)
class ProbeEnded:
    node_id: int
    incarnation: int | None
    """The incarnation that answered; that of the ProbeNode when the answer does not say; None:
    none."""
    refused: bool
    """The host says that nobody listens there, so the process is gone."""
    probed: int | None = None
    """The incarnation of the ProbeNode: a result about an older one is ignored."""


@dataclass(frozen=True, slots=True)
class Changed:
    changes: Sequence[Change]
    state: ClusterState


@dataclass(frozen=True, slots=True)
class ProposalEnded:
    command: Command
    error: RaftqError | None = None


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Promoted
    | Demoted
    | HeartbeatCame
    | ConnectionEnded
    | ProbeEnded
    | Changed
    | ProposalEnded
    | Tick
)


@dataclass(slots=True)
class ProposeCommand:
    command: Command
    reason: str


@dataclass(slots=True)
class ProbeNode:
    node_id: int
    incarnation: int


@dataclass(slots=True)
class Abdicate:
    """Let another voter be the controller. This one does not stand for a while."""

    reason: str


Effect = ProposeCommand | ProbeNode | Abdicate
