"""What checkers are told and what they say. (Pure.)"""

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
    """What the cluster under test had promised."""

    max_deliveries: int = 3
    late_s: float = inf
    """How late a delayed record may be; faults cost what they cost."""
    skew_s: float = 0.005
    """How far the clocks of nodes and clients may be apart."""
    early_s: float | None = None
    """How early a delayed record may come by the clients' clock, which does not err with those of
    the nodes; None: as early as `skew_s` by the clock of the node that gave it."""
    healthy: tuple[Span, ...] = ()
    """When a majority was whole and in touch, so that there had to be progress."""
    window_s: float = 10.0
    """In every stretch of this length within those times ..."""
    progress_min: float = 0.0
    """... so many operations per second have to end well; 0: that is not asked."""
    faults: tuple[float, ...] = ()
    """When single faults began; after each of them something has to end well within ..."""
    recovery_s: float = inf
