"""Shell: queue workers that do everything a worker can do, right and wrong, at random from a seed.

Records whose value begins with `poison` are never acknowledged: they end as dead letters. A
cancelled worker leaves its records leased, as a killed process does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from raftq.chaos.history import LeasedDelivery, Verb
from raftq.chaos.recorder import Recorder
from raftq.client.common.tasks import sleep
from raftq.client.common.types import PartitionKey

POISON = "poison"


@dataclass(frozen=True, slots=True, kw_only=True)
class Habits:
    """How often a worker does what, in a hundred deliveries. It acknowledges the rest."""

    nack: int = 10
    postpone: int = 5
    release: int = 4
    reject: int = 3
    hold: int = 4
    """The worker does nothing until the lease expires."""
    extend: int = 5
    """The worker extends the lease before it acknowledges."""
    late: int = 0
    """The worker acknowledges after the lease has expired."""
    lease_s: float = 1.5
    wait_s: float = 0.5
    records_max: int = 8
    work_s: float = 0.02
    """How long a batch of records takes."""


ONLY_ACK = Habits(nack=0, postpone=0, release=0, reject=0, hold=0, extend=0)


class QueueWorker:
    """Works until it is cancelled, or until `stopping` is set and its batch is settled."""

    def __init__(
        self,
        recorder: Recorder,
        partition_keys: Sequence[PartitionKey],
        habits: Habits,
        rng: Random,
    ) -> None:
        self.recorder = recorder
        self.stopping = False
        self._partition_keys = partition_keys
        self._habits = habits
        self._rng = rng

    async def run(self) -> None:
        habits = self._habits
        while not self.stopping:
            given = await self.recorder.lease(
                self._partition_keys, habits.records_max, habits.lease_s, habits.wait_s
            )
            if not given:
                await sleep(0.05)  # otherwise a missing leader would be asked again at once
                continue
            await sleep(self._rng.uniform(0, 2 * habits.work_s))
            await self._handle(given)

    async def _handle(self, given: list[LeasedDelivery]) -> None:
        decided: dict[tuple[PartitionKey, str], list[LeasedDelivery]] = {}
        for one in given:
            decided.setdefault((one.partition_key, self._decide(one)), []).append(one)
        for (_, decision), deliveries in decided.items():
            await self._say(decision, deliveries)

    def _decide(self, one: LeasedDelivery) -> str:
        habits = self._habits
        if one.value.startswith(POISON):
            return self._rng.choice(("nack", "nack", "nack", "reject", "hold"))
        drawn = self._rng.randrange(100)
        for choice in ("nack", "postpone", "release", "reject", "hold", "extend", "late"):
            drawn -= getattr(habits, choice)
            if drawn < 0:
                return choice
        return "ack"

    async def _say(self, decision: str, deliveries: list[LeasedDelivery]) -> None:
        settle = self.recorder.settle
        delays = {"nack": 0.1, "postpone": 0.1, "extend": self._habits.lease_s}
        verbs: dict[str, Verb] = {
            "nack": "nack", "postpone": "postpone", "release": "release", "reject": "reject",
            "extend": "extend", "ack": "ack", "late": "ack",
        }  # fmt: skip
        verb = verbs.get(decision)
        if verb is None:
            return
        if decision == "late":
            await sleep(self._habits.lease_s * 1.2)
        await settle(deliveries, verb, delays.get(decision), "by chance")
        if decision == "extend":
            await settle(deliveries, "ack")
