"""Shell: breaks a promise of this node on purpose, to check that the checkers find it.

RAFTQ_SABOTAGE names the promises; a production node does not read it. The log says so loudly. The
checkers must find each of these within one run:

    ack-before-replication    the leader acknowledges records before others have them
    skip-epoch-fence          a copy counts up to its end, whichever epoch wrote it
    forget-dedup-on-failover  a new leader forgets what producers have sent before
    drop-ledger-on-failover   a new leader forgets what was leased and settled before
    deliver-early             delayed records are delivered one tick too early
    skip-crc                  damaged batches count as sound

This module replaces methods before the node starts, so that no product code knows of it.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from msgspec.structs import replace

from raftq.client.common.errors import ConfigError
from raftq.client.wire.batch import Batch
from raftq.client.wire.messages import Produce
from raftq.node.queue.leader.delay_firing import Firing
from raftq.node.queue.leader.ledger import Ledger
from raftq.node.replication import leader as follower_sessions
from raftq.node.replication.partition import Partition
from raftq.node.replication.replica import Decided
from raftq.node.storage import scan, stamped
from raftq.node.storage.producers import Producers

logger = logging.getLogger(__name__)

VARIABLE = "RAFTQ_SABOTAGE"
TICK_MS = 10


def break_promises(names: str) -> None:
    """Breaks the promises with these names, which are separated by commas."""
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name not in SABOTAGES:
            raise ConfigError(f"{VARIABLE}: {name!r} is none of {', '.join(SABOTAGES)}")
        logger.critical(
            "event=sabotaged promise=%s: this node is broken on purpose, its data is not safe", name
        )
        SABOTAGES[name]()


def _ack_before_replication() -> None:
    honest = Partition.produce

    def produce(self: Partition, message: Produce, raw: memoryview) -> Any:
        return honest(self, replace(message, acks="leader"), raw)

    _put(Partition, "produce", produce)


def _skip_epoch_fence() -> None:
    def common_end(leader: Any, leader_end: int, follower: Any, end: int) -> int:
        return min(end, leader_end)

    _put(follower_sessions, "common_end", common_end)


def _forget_dedup_on_failover() -> None:
    begin, check = Partition._begin, Producers.check

    def forgetful_begin(self: Partition, decided: Decided, me: int, now: float) -> None:
        if decided.leader == me:
            for partition_log in self.logs:
                partition_log.producers._known.clear()
        begin(self, decided, me, now)

    def trusting_check(
        self: Producers, producer_id: int, epoch: int, base_sequence: int, count: int
    ) -> int | None:
        if producer_id not in self:
            return None
        return check(self, producer_id, epoch, base_sequence, count)

    _put(Partition, "_begin", forgetful_begin)
    _put(Producers, "check", trusting_check)


def _drop_ledger_on_failover() -> None:
    def replay(self: Ledger, skip_damaged: bool = False) -> Iterator[None]:
        yield

    _put(Ledger, "replay", replay)


def _deliver_early() -> None:
    honest = Firing.__init__

    def begin(self: Firing, *given: Any) -> None:
        honest(self, *given)
        wall_ms = self._wall_ms
        self._wall_ms = lambda: wall_ms() + TICK_MS

    _put(Firing, "__init__", begin)


class _Whatever(int):
    """Equal to every checksum."""

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = int.__hash__


def _skip_crc() -> None:
    for module in (scan, stamped):
        _put(module, "crc32c", lambda *_: _Whatever())
    _put(Batch, "check_crc", lambda self: None)


def _put(owner: Any, name: str, stand_in: Callable[..., Any]) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, stand_in)


SABOTAGES: dict[str, Callable[[], None]] = {
    "ack-before-replication": _ack_before_replication,
    "skip-epoch-fence": _skip_epoch_fence,
    "forget-dedup-on-failover": _forget_dedup_on_failover,
    "drop-ledger-on-failover": _drop_ledger_on_failover,
    "deliver-early": _deliver_early,
    "skip-crc": _skip_crc,
}
