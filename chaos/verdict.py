"""Pure: what checkers get and what they return."""

from dataclasses import dataclass
from math import inf

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What the cluster under test has promised."""

    max_deliveries: int = 3
    late_s: float = inf
    """How late a delayed record may be. Faults cost time."""
    skew_s: float = 0.005
    """How far the clocks of nodes and clients may differ."""
    early_s: float | None = None
    """How early a delayed record may come by the clients' clock, which is right when those of the
    nodes are wrong; None means `skew_s` by the clock of the node that delivered it."""
    healthy: tuple[Span, ...] = ()
    """The times with a healthy and connected majority, so that there had to be progress."""
    window_s: float = 10.0
    """In every window of this length within those times ..."""
    progress_min: float = 0.0
    """... this many operations per second must succeed; 0 switches the check off."""
    faults: tuple[float, ...] = ()
    """The times at which single faults began. After each of them an operation must succeed within
    ..."""
    recovery_s: float = inf
