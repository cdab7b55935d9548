"""Pure: checkers of records, delays, leases and dead letters: they find anomalies of a history.

    check_records    lost         acknowledged, not cancelled, and not in the log
                     misplaced    acknowledged at one offset and kept at another
                     doubled      in the log more often than it was sent
                     revived      in the log though it certainly failed
                     phantom      in the log and never sent
                     cancelled    in the log though its cancellation was acknowledged
    check_times      early        delivered before it was due
                     late         first delivered more than `late_s` after it was due
                     expired      delivered after it had expired
    check_leases     two holders  leased while another lease was certainly alive
                     retried      leased again before the delay that a holder requested was over
                     redelivered  leased again after it had been settled
                     stale        a settlement of an earlier lease was accepted though another
                                  holder had the record
                     attempts     delivered for the n-th time twice, or more often than allowed
    check_drained    forgotten    in the log, and never settled though the group drained the queue
    check_letters    two letters  more than one dead letter of a group's record
                     no letter    rejected with an acknowledgement, and no dead letter
                     stray letter a dead letter of an acknowledged or unknown record
                     attempts     the letter has fewer attempts than there were

Only what is certain counts: an operation of unknown outcome excuses everything it could explain.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import inf

from raftq.chaos.history import (
    Cancel,
    DeadLetterSeen,
    Final,
    History,
    LeasedDelivery,
    Publish,
    Receive,
    Redrive,
    SettleEvent,
)
from raftq.chaos.verdict import Anomaly, Rules
from raftq.client.common.types import PartitionKey


@dataclass(slots=True)
class HeldDelivery:
    """A delivery and all settlements of its holder."""

    delivery: LeasedDelivery
    settlements: list[SettleEvent] = field(default_factory=list)

    def when(self) -> tuple[float, int]:
        """The sort key by the nodes' clocks: the start of the lease and the attempt."""
        return self.delivery.granted, self.delivery.attempt

    def alive_until(self, skew_s: float) -> float:
        """The time until which certainly no other holder may have the record.

        If the nodes' clocks disagree, the holder's clock counts, from the time of its request:
        leases have the right length whatever the clocks show."""
        agree = skew_s <= SKEW_S_SMALL
        end = self.delivery.deadline - skew_s if agree else _shortened(self.delivery)
        given_up = inf
        for event in sorted(self.settlements, key=lambda event: event.at):
            if not event.may_have_happened:
                continue
            if event.verb != "extend":
                given_up = min(given_up, event.at)
                continue
            delay = event.delay or 0.0
            extended = event.at + delay - (skew_s if agree else delay * SLEW)
            end = extended if event.status == "ok" else min(end, extended)
        return min(end, given_up)

    def settled_with(self, *verbs: str) -> Iterator[SettleEvent]:
        return (
            event for event in self.settlements if event.verb in verbs and event.may_have_happened
        )

    def ends_it(self, rules: Rules) -> Iterator[SettleEvent]:
        """The settlements that end the record for good, if they happened."""
        yield from self.settled_with("ack", "reject")
        if self.delivery.attempt >= rules.max_deliveries:
            yield from self.settled_with("nack")


def _shortened(delivery: LeasedDelivery) -> float:
    return delivery.safe_until - (delivery.deadline - delivery.granted) * SLEW


LeaseKey = tuple[str, PartitionKey, int]


SKEW_S_SMALL = 0.1
SLEW = 0.011
"""How much faster than the holder's a node's clock may run while it approaches a clock that was
set."""
ROUNDED_S = 0.002


def leases_of(history: History, rules: Rules) -> dict[LeaseKey, list[HeldDelivery]]:
    """Every record of every group, with its leases in the order in which they were granted.

    If the nodes' clocks disagree, the order is that of arrival. Leases that arrived after their end
    are left out then: a later one may have overtaken them."""
    clocks_agree = rules.skew_s <= SKEW_S_SMALL
    found = all_leases(history)
    for key, leases in found.items():
        if clocks_agree:
            leases.sort(key=HeldDelivery.when)
        else:
            in_time = [lease for lease in leases if lease.delivery.at < _shortened(lease.delivery)]
            found[key] = sorted(in_time, key=lambda one: one.delivery.at)
    return found


def all_leases(history: History) -> dict[LeaseKey, list[HeldDelivery]]:
    """Every record of every group, with its leases and their settlements."""
    found: dict[LeaseKey, list[HeldDelivery]] = {}
    by_receipt: dict[tuple[LeaseKey, str], HeldDelivery] = {}
    for delivery in history.of(LeasedDelivery):
        key = (delivery.group, delivery.partition_key, delivery.offset)
        lease = by_receipt[key, delivery.receipt] = HeldDelivery(delivery)
        found.setdefault(key, []).append(lease)
    for event in history.of(SettleEvent):
        key = (event.group, event.partition_key, event.offset)
        if (known := by_receipt.get((key, event.receipt))) is not None:
            known.settlements.append(event)
    return found


def check_records(history: History, final: Final) -> Iterator[Anomaly]:
    """Every acknowledged record is in the logs once, and every record in the logs was sent."""
    kept: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for (topic, number), rows in final.logs.items():
        for offset, value in rows:
            kept.setdefault((topic, value), []).append((number, offset))
    extra: dict[tuple[str, str], int] = {}
    for sent_back in history.of(Redrive):
        key = (sent_back.topic, sent_back.value)
        extra[key] = extra.get(key, 0) + sent_back.may_have_happened
    cancels = {(cancel.topic, cancel.value): cancel for cancel in history.of(Cancel)}
    topics = {topic for topic, _ in final.logs}
    sent = {}
    for one in history.of(Publish):
        key = (one.topic, one.value)
        sent[key] = one
        if one.topic in topics:
            found_at = kept.get(key, [])
            yield from _check_record(one, found_at, cancels.get(key), extra.get(key, 0))
    for key, found_at in kept.items():
        if key not in sent:
            yield Anomaly("phantom", f"{key[1]!r} at {found_at} of {key[0]}")


def _check_record(
    one: Publish, found_at: list[tuple[int, int]], cancel: Cancel | None, extra: int
) -> Iterator[Anomaly]:
    if len(found_at) > 1 + extra:
        yield Anomaly("doubled", f"{one} is at {found_at}")
    if cancel is not None and cancel.status == "ok":
        if found_at:
            yield Anomaly("cancelled", f"{one} is at {found_at}")
    elif one.status == "ok" and not found_at:
        if cancel is None or not cancel.may_have_happened:
            yield Anomaly("lost", str(one))
    elif one.status == "ok" and not one.deliver_at and (one.partition, one.offset) not in found_at:
        yield Anomaly("misplaced", f"{one} is at {found_at}")
    elif one.status == "failed" and found_at:
        yield Anomaly("revived", f"{one} is at {found_at}")


def check_times(history: History, rules: Rules) -> Iterator[Anomaly]:
    """No record is delivered before it is due or after it has expired."""
    # The time of a delivery comes from the node's clock, unless the rules name the clients' clock.
    by_node = rules.early_s is None
    early_s = rules.skew_s if rules.early_s is None else rules.early_s
    first: dict[tuple[str, str], float] = {}
    for given in history.operations:
        if isinstance(given, LeasedDelivery | Receive):
            moment = given.granted if by_node and isinstance(given, LeasedDelivery) else given.at
            key = (given.topic, given.value)
            first[key] = min(moment, first.get(key, inf))
    ends = {}
    for sent in history.of(Publish):
        ends[sent.topic, sent.value] = sent.expires_at
        moment = first.get((sent.topic, sent.value), inf)
        if moment < sent.deliver_at - early_s:
            yield Anomaly("early", f"{sent} was given out at {moment:.3f}")
        if sent.deliver_at and sent.deliver_at + rules.late_s < moment < inf:
            yield Anomaly("late", f"{sent} was given out at {moment:.3f}")
    for lease in history.of(LeasedDelivery):
        end = ends.get((lease.topic, lease.value), 0.0)
        if end and lease.granted > end + rules.skew_s:
            yield Anomaly("expired", f"{lease} ended at {end:.3f}")


def check_leases(history: History, rules: Rules) -> Iterator[Anomaly]:
    """There is one holder at a time, none after the settlement, and every attempt counts."""
    for leases in leases_of(history, rules).values():
        for at, lease in enumerate(leases):
            one = lease.delivery
            if one.attempt > rules.max_deliveries:
                yield Anomaly("attempts", f"{one}, allowed are {rules.max_deliveries}")
            if at:
                yield from _check_next(leases[:at], lease, rules)


def _check_next(
    earlier: list[HeldDelivery], lease: HeldDelivery, rules: Rules
) -> Iterator[Anomaly]:
    one = lease.delivery
    began = one.granted + rules.skew_s
    if rules.skew_s > SKEW_S_SMALL:
        began = one.at
    for before in earlier:
        end = before.alive_until(rules.skew_s)
        if began < end:
            text = f"{one} while {before.delivery} is alive until {end:.3f}"
            yield Anomaly("two holders", text)
        for event in before.settled_with("nack", "postpone"):
            due = event.at + (event.delay or 0.0) * (1 - SLEW) - ROUNDED_S
            if event.status == "ok" and event.at < one.at < due:
                yield Anomaly("retried", f"{one} before {due:.3f}, after {event}")
        done = [event for event in before.ends_it(rules) if event.status == "ok"]
        if done:
            yield Anomaly("redelivered", f"{one} after {done[0]}")
        stale = [
            event for event in before.settlements if event.status == "ok" and event.at >= one.at
        ]
        if stale and not done:
            yield Anomaly("stale", f"{stale[0]} after {one}")
    last = earlier[-1]
    spared = any(True for _ in last.settled_with("postpone", "release"))
    if one.attempt < last.delivery.attempt + (not spared):
        yield Anomaly("attempts", f"{one} after {last.delivery}")


def check_drained(history: History, final: Final, rules: Rules) -> Iterator[Anomaly]:
    """Every record of a drained queue was settled."""
    leases = all_leases(history)
    clocks_agree = rules.skew_s <= SKEW_S_SMALL
    ends = {(sent.topic, sent.value): sent.expires_at for sent in history.of(Publish)}
    dead = {
        (letter.group, (letter.topic, letter.partition), letter.offset) for letter in final.letters
    }
    for group, topics in final.drained.items():
        for partition_key, rows in final.logs.items():
            if partition_key[0] not in topics:
                continue
            for offset, value in rows:
                key = (group, partition_key, offset)
                held = leases.get(key, [])
                if clocks_agree:
                    # Only the last lease counts: settlements of earlier ones were refused.
                    held = sorted(held, key=HeldDelivery.when)[-1:]
                settled = any(True for lease in held for _ in lease.ends_it(rules))
                if not settled and key not in dead and not ends.get((partition_key[0], value)):
                    yield Anomaly(
                        "forgotten", f"{value!r} at {offset} of {partition_key} by {group}"
                    )


def check_letters(history: History, final: Final, rules: Rules) -> Iterator[Anomaly]:
    """Every rejected record is a dead letter once, and no other record is one."""
    letters: dict[LeaseKey, list[DeadLetterSeen]] = {}
    for letter in final.letters:
        letters.setdefault(
            (letter.group, (letter.topic, letter.partition), letter.offset), []
        ).append(letter)
    leases = leases_of(history, rules)
    back = _sent_back(history)
    for key, copies in letters.items():
        if len(copies) > 1:
            yield Anomaly("two letters", f"of {key}: {copies}")
        yield from _check_letter(copies[0], leases.get(key, []))
    for key, held in leases.items():
        if key in letters or not held or (key[1][0], held[-1].delivery.value) in back:
            continue
        for lease in held:
            for event in lease.ends_it(rules):
                if event.verb != "ack" and event.status == "ok":
                    yield Anomaly("no letter", f"of {lease.delivery} after {event}")


def _sent_back(history: History) -> Mapping[tuple[str, str], Redrive]:
    """Records whose dead letters may have been sent back."""
    return {
        (redrive.topic, redrive.value): redrive
        for redrive in history.of(Redrive)
        if redrive.may_have_happened
    }


def _check_letter(letter: DeadLetterSeen, leases: list[HeldDelivery]) -> Iterator[Anomaly]:
    for lease in leases:
        one = lease.delivery
        if any(event.status == "ok" for event in lease.settled_with("ack")):
            yield Anomaly("stray letter", f"{letter} was acknowledged: {one}")
        if one.value != letter.value:
            yield Anomaly("stray letter", f"{letter} is another record: {one}")
        spared = any(True for _ in lease.settled_with("postpone", "release"))
        if letter.attempts < one.attempt and not spared:
            yield Anomaly("attempts", f"{letter} after {one}")
