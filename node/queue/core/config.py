"""Core: the settings of a group's queue delivery."""

from dataclasses import dataclass
from math import isfinite

from raftq.client.common.errors import ConfigError
from raftq.node.queue.core.entries import ATTEMPT_MAX
from raftq.node.queue.core.lanes import LANES, STARVATION_S, WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class DeliveryConfig:
    """How one group leases, retries and gives up."""

    lease_s: float = 30.0
    """Seconds a delivery may take. Too short: records are worked on twice; too long: the records
    of a crashed worker come back late."""

    max_deliveries: int = 3
    """Attempts before a record is a dead letter."""

    backoff_s: float = 1.0
    """Seconds before the second attempt after a nack."""

    backoff_factor: float = 2.0
    """By how much each further wait is longer than the one before."""

    backoff_cap_s: float = 60.0
    """The longest wait, in seconds."""

    jitter: float = 0.0
    """Fraction by which a wait may be shorter or longer, by chance, so that records which failed
    together do not come back together."""

    in_flight_max: int = 1000
    """Records one holder may have leased at a time: back-pressure."""

    in_flight_total_max: int | None = None
    """Records all holders together may have leased; None is no limit."""

    weights: tuple[int, ...] = WEIGHTS
    """Shares of the lanes, critical to background, while all are busy."""

    starvation_s: float = STARVATION_S
    """Seconds after which a lane with records is served out of turn."""

    def __post_init__(self) -> None:
        checks = (
            ("lease_s", _above(self.lease_s, 0), "above 0"),
            ("max_deliveries", _is_count(self.max_deliveries), "1 or more"),
            ("backoff_s", _at_least(self.backoff_s, 0), "0 or more"),
            ("backoff_factor", _at_least(self.backoff_factor, 1), "1 or more"),
            ("backoff_cap_s", _at_least(self.backoff_cap_s, 0), "0 or more"),
            ("jitter", _at_least(self.jitter, 0) and self.jitter <= 1, "from 0 to 1"),
            ("in_flight_max", _is_count(self.in_flight_max), "1 or more"),
            (
                "in_flight_total_max",
                self.in_flight_total_max is None or _is_count(self.in_flight_total_max),
                "1 or more, or None",
            ),
            (
                "weights",
                len(self.weights) == LANES and all(_is_count(each) for each in self.weights),
                f"{LANES} whole numbers from 1 on",
            ),
            ("starvation_s", _above(self.starvation_s, 0), "above 0"),
        )
        problems = [
            f"{name} must be {rule}, not {getattr(self, name)!r}"
            for name, good, rule in checks
            if not good
        ]
        if problems:
            raise ConfigError("delivery: " + "; ".join(problems))


def _at_least(value: float, low: float) -> bool:
    return type(value) in (int, float) and isfinite(value) and value >= low


def _above(value: float, low: float) -> bool:
    return _at_least(value, low) and value != low


def _is_count(value: object) -> bool:
    return type(value) is int and 1 <= value < ATTEMPT_MAX
