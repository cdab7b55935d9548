"""Each checker finds its anomaly in a history that has just that, and none in a sound history."""

import json
from typing import Any

import pytest

from raftq.chaos.checkers import Rules, judge
from raftq.chaos.history import (
    KINDS,
    Cancel,
    DeadLetterSeen,
    Final,
    History,
    HistoryCall,
    LeasedDelivery,
    Operation,
    OwnedSpan,
    Publish,
    Recall,
    Receive,
    Redrive,
    SettleEvent,
    Store,
)

PLACE = ("t", 0)


class Story:
    """Writes a history by hand, of partition 0 of topic t, with one time per line."""

    def __init__(self) -> None:
        self.history = History()
        self.final = Final(logs={PLACE: []})

    def kinds(self, **rules: Any) -> list[str]:
        """The anomalies, also after the history has been to a file and back."""
        found = judge(self.history, self.final, Rules(skew_s=0.0, **rules))
        history = History.from_json(json.loads(json.dumps(self.history.to_json())))
        final = Final.from_json(json.loads(json.dumps(self.final.to_json())))
        assert judge(history, final, Rules(skew_s=0.0, **rules)) == found
        return [one.kind for one in found]

    def publish(self, value: str, at: float = 0.0, **more: Any) -> Publish:
        """Acknowledged at the end of the log, and kept there, unless said otherwise."""
        kept = more.pop("kept", True)
        log = self.final.logs[PLACE]
        settings: dict[str, Any] = {"ended": at + 0.1, "status": "ok", "offset": len(log)}
        settings |= more
        if kept:
            log.append((len(log), value))
        made = Publish(client="p", topic="t", partition=0, value=value, at=at, **settings)
        return self.history.add(made)

    def lease(self, offset: int, at: float, attempt: int = 1, **more: Any) -> LeasedDelivery:
        """For ten seconds, to w1, unless said otherwise."""
        settings: dict[str, Any] = {
            "client": "w1", "group": "g", "value": self._value(offset), "granted": at,
            "deadline": at + 10, "receipt": f"{offset} {at}", "asked": at,
        }  # fmt: skip
        settings |= more
        made = LeasedDelivery(
            topic="t", partition=0, offset=offset, attempt=attempt, at=at + 0.01, **settings
        )
        return self.history.add(made)

    def say(self, lease: LeasedDelivery, verb: str, at: float, **more: Any) -> SettleEvent:
        settings: dict[str, Any] = {"ended": at + 0.1, "status": "ok"}
        settings |= more
        made = SettleEvent(
            client=lease.client, group=lease.group, topic="t", partition=0, offset=lease.offset,
            receipt=lease.receipt, verb=verb, at=at, **settings,
        )  # type: ignore[arg-type]  # fmt: skip
        return self.history.add(made)

    def letter(self, offset: int, attempts: int = 3, group: str = "g") -> DeadLetterSeen:
        made = DeadLetterSeen(
            topic="t", partition=0, offset=offset, group=group, value=self._value(offset),
            attempts=attempts, reason="max_deliveries",
        )  # fmt: skip
        self.final.letters.append(made)
        return made

    def call(self, kind: type[HistoryCall], at: float, **more: Any) -> HistoryCall:
        settings: dict[str, Any] = {"client": "c", "ended": at + 0.1, "status": "ok"}
        settings |= more
        return self.history.add(kind(topic="t", partition=0, at=at, **settings))

    def receive(self, offset: int, at: float, client: str = "m1") -> Receive:
        made = Receive(
            client=client, topic="t", partition=0, at=at, group="g", offset=offset,
            value=self._value(offset),
        )  # fmt: skip
        return self.history.add(made)

    def own(self, client: str, epoch: int, at: float, **more: Any) -> OwnedSpan:
        made = OwnedSpan(
            client=client, topic="t", partition=0, at=at, group="g", owner_epoch=epoch, **more
        )
        return self.history.add(made)

    def _value(self, offset: int) -> str:
        return self.final.logs[PLACE][offset][1]


@pytest.fixture
def story() -> Story:
    made = Story()
    for number in range(3):
        made.publish(f"v{number}")
    return made


def test_a_history_of_everything_going_well_has_no_anomaly(story: Story) -> None:
    first = story.lease(0, 1.0)
    story.say(first, "ack", 2.0)
    held = story.lease(1, 1.0)
    story.say(held, "extend", 8.0, delay=10.0)
    story.say(held, "nack", 9.0)
    again = story.lease(1, 10.0, attempt=2, client="w2")
    story.say(again, "postpone", 11.0, delay=1.0)
    last = story.lease(1, 12.0, attempt=2)
    story.say(last, "reject", 13.0)
    story.letter(1, attempts=2)
    story.lease(2, 1.0)  # its holder was killed
    story.say(story.lease(2, 11.0, attempt=2, client="w2"), "ack", 12.0)
    story.final.drained = {"g": ["t"]}
    assert story.kinds() == []


def test_every_kind_of_operation_goes_to_a_file_and_comes_back() -> None:
    where: dict[str, Any] = {"client": "c", "topic": "t", "partition": 1, "at": 2.5}
    needs: dict[str, dict[str, Any]] = {
        "publish": {"value": "v"},
        "cancel": {"value": "v"},
        "redrive": {"value": "v"},
        "delivery": {
            "group": "g", "offset": 1, "value": "v", "attempt": 1, "receipt": "r",
            "granted": 1.0, "deadline": 2.0,
        },
        "settlement": {"group": "g", "offset": 1, "receipt": "r", "verb": "ack"},
        "receive": {"group": "g", "offset": 1, "value": "v"},
        "store": {"group": "g", "offset": 1},
        "recall": {"group": "g"},
        "ownership": {"group": "g", "owner_epoch": 4},
        "sighting": {"node": 2},
        "change": {"verb": "create"},
    }  # fmt: skip
    history = History([kind(**where, **needs[name]) for name, kind in KINDS.items()])
    assert History.from_json(json.loads(json.dumps(history.to_json()))) == history
    assert sum(history.counts().values()) == len(KINDS)
    assert isinstance(history.operations[0], Operation)


# Records.


def test_lost_record(story: Story) -> None:
    story.publish("gone", kept=False)
    assert story.kinds() == ["lost"]


def test_record_of_unknown_outcome_may_be_there_or_not(story: Story) -> None:
    story.publish("maybe", kept=False, status="unknown", offset=None)
    story.publish("came", kept=True, status="unknown", offset=None)
    assert story.kinds() == []


def test_revived_record(story: Story) -> None:
    story.publish("refused", status="failed", offset=None)
    assert story.kinds() == ["revived"]


def test_phantom_record(story: Story) -> None:
    story.final.logs[PLACE].append((3, "nobody's"))
    assert story.kinds() == ["phantom"]


def test_misplaced_record(story: Story) -> None:
    story.publish("moved", offset=17)
    assert story.kinds() == ["misplaced"]


def test_doubled_delay(story: Story) -> None:
    story.publish("later", deliver_at=5.0)
    story.final.logs[PLACE].append((4, "later"))
    assert story.kinds() == ["doubled"]


def test_lost_delay(story: Story) -> None:
    story.publish("later", deliver_at=5.0, kept=False)
    assert story.kinds() == ["lost"]


def test_early_delay(story: Story) -> None:
    story.publish("later", deliver_at=5.0, offset=99)
    story.lease(3, 4.9)
    assert story.kinds() == ["early"]


def test_early_delay_of_a_reader(story: Story) -> None:
    story.publish("later", deliver_at=5.0)
    for offset in range(4):
        story.receive(offset, 4.9)
    assert story.kinds() == ["early"]


def test_late_delay(story: Story) -> None:
    story.publish("later", deliver_at=5.0)
    story.lease(3, 7.5)
    assert story.kinds(late_s=2.0) == ["late"]
    assert story.kinds(late_s=3.0) == []


def test_cancelled_delay_that_came_all_the_same(story: Story) -> None:
    story.publish("later", deliver_at=5.0)
    story.call(Cancel, 1.0, value="later")
    assert story.kinds() == ["cancelled"]


def test_cancelled_delay_is_not_lost(story: Story) -> None:
    story.publish("sure", deliver_at=5.0, kept=False)
    story.call(Cancel, 1.0, value="sure")
    story.publish("maybe", deliver_at=5.0, kept=False)
    story.call(Cancel, 1.0, value="maybe", status="unknown")
    assert story.kinds() == []


def test_delay_whose_cancel_was_refused_is_still_owed(story: Story) -> None:
    story.publish("owed", deliver_at=5.0, kept=False)
    story.call(Cancel, 1.0, value="owed", status="failed")
    assert story.kinds() == ["lost"]


def test_expired_record_given_out(story: Story) -> None:
    story.publish("short", expires_at=3.0)
    story.lease(3, 3.5)
    assert story.kinds() == ["expired"]


# Leases.


def test_record_held_by_two_live_leases(story: Story) -> None:
    story.lease(0, 1.0)
    story.lease(0, 10.9, attempt=2, client="w2")
    assert story.kinds() == ["two holders"]


def test_two_live_leases_of_different_groups_are_nothing_to_each_other(story: Story) -> None:
    story.lease(0, 1.0)
    story.lease(0, 2.0, group="other", client="w2")
    assert story.kinds() == []


def test_record_given_on_while_an_extended_lease_lives(story: Story) -> None:
    story.say(story.lease(0, 1.0), "extend", 9.0, delay=20.0)
    story.lease(0, 12.0, attempt=2)
    assert story.kinds() == ["two holders"]


def test_extension_of_unknown_outcome_promises_nothing(story: Story) -> None:
    story.say(story.lease(0, 1.0), "extend", 9.0, delay=20.0, status="unknown", ended=None)
    story.lease(0, 12.0, attempt=2)
    assert story.kinds() == []


@pytest.mark.parametrize("status", ["ok", "unknown"])
def test_lease_that_may_have_been_given_back_is_no_lease(story: Story, status: str) -> None:
    story.say(story.lease(0, 1.0), "nack", 2.0, delay=0.0, status=status)
    story.lease(0, 2.05, attempt=2)
    assert story.kinds() == []


def test_lease_whose_end_was_refused_lives_on(story: Story) -> None:
    story.say(story.lease(0, 1.0), "nack", 2.0, delay=0.0, status="failed")
    story.lease(0, 3.0, attempt=2)
    assert story.kinds() == ["two holders"]


def test_acknowledged_record_redelivered(story: Story) -> None:
    story.say(story.lease(0, 1.0), "ack", 2.0)
    story.lease(0, 20.0, attempt=2)
    assert story.kinds() == ["redelivered"]


def test_ack_of_a_lease_that_was_replaced_before(story: Story) -> None:
    """The lease had run out and another had the record: this ack should have been refused."""
    late = story.lease(0, 1.0)
    story.lease(0, 11.5, attempt=2, client="w2")
    story.say(late, "ack", 12.0)
    assert story.kinds() == ["redelivered"]


def test_return_of_a_lease_that_was_replaced_before(story: Story) -> None:
    late = story.lease(0, 1.0)
    story.lease(0, 11.5, attempt=2, client="w2")
    story.say(late, "nack", 12.0, delay=1.0)
    assert story.kinds() == ["stale"]


def test_what_was_said_before_a_lease_was_replaced_is_not_stale(story: Story) -> None:
    late = story.lease(0, 1.0)
    story.say(late, "nack", 10.9, ended=12.0)
    story.lease(0, 11.5, attempt=2, client="w2")
    assert story.kinds() == []


def test_early_by_the_clock_of_clients_when_those_of_nodes_disagree(story: Story) -> None:
    rules = Rules(skew_s=7200.0, early_s=0.01)
    story.publish("later", deliver_at=20.0)
    story.lease(3, 19.0, granted=3619.0, deadline=3629.0)
    assert [one.kind for one in judge(story.history, story.final, rules)] == ["early"]
    story.history.operations.pop()
    story.lease(3, 20.5, granted=16.9, deadline=26.9)
    assert judge(story.history, story.final, rules) == []


def test_record_acknowledged_with_unknown_outcome_may_come_again(story: Story) -> None:
    story.say(story.lease(0, 1.0), "ack", 2.0, status="unknown", ended=None)
    story.lease(0, 11.5, attempt=2)
    assert story.kinds() == []


def test_lost_attempt(story: Story) -> None:
    story.lease(0, 1.0)
    story.lease(0, 12.0, attempt=1)
    assert story.kinds() == ["attempts"]


def test_attempts_that_go_back(story: Story) -> None:
    story.say(story.lease(0, 1.0, attempt=2), "release", 2.0)
    story.lease(0, 3.0, attempt=1)
    assert story.kinds() == ["attempts"]


def test_attempts_that_nobody_saw_are_no_anomaly(story: Story) -> None:
    story.lease(0, 1.0)
    story.lease(0, 32.0, attempt=3)
    assert story.kinds() == []


def test_more_attempts_than_allowed(story: Story) -> None:
    story.lease(0, 1.0, attempt=4)
    assert story.kinds() == ["attempts"]
    assert story.kinds(max_deliveries=4) == []


def test_another_record_at_the_leased_offset(story: Story) -> None:
    story.lease(0, 1.0, value="v1")
    assert story.kinds() == ["two values"]


def test_two_holders_are_found_though_the_clocks_of_nodes_disagree(story: Story) -> None:
    """The second leader's clock is forty seconds ahead: to it the first lease is long over."""
    rules = Rules(skew_s=120.0)
    story.lease(0, 1.0)
    story.lease(0, 10.5, attempt=2, client="w2", granted=50.5, deadline=60.5)
    assert [one.kind for one in judge(story.history, story.final, rules)] == ["two holders"]
    story.history.operations.pop()
    story.lease(0, 11.0, attempt=2, client="w2", granted=51.0, deadline=61.0)
    assert judge(story.history, story.final, rules) == []


def test_extended_lease_is_alive_by_the_clock_of_its_holder(story: Story) -> None:
    rules = Rules(skew_s=120.0)
    story.say(story.lease(0, 1.0), "extend", 8.0, delay=10.0)
    story.lease(0, 17.0, attempt=2, client="w2", granted=57.0, deadline=67.0)
    assert [one.kind for one in judge(story.history, story.final, rules)] == ["two holders"]


def test_retry_that_comes_before_its_time(story: Story) -> None:
    story.say(story.lease(0, 1.0), "nack", 2.0, delay=5.0)
    story.lease(0, 6.5, attempt=2)
    assert story.kinds() == ["retried"]
    story.history.operations.pop()
    story.lease(0, 7.0, attempt=2)
    assert story.kinds() == []


def test_nothing_is_forgotten_because_a_clock_was_an_hour_behind(story: Story) -> None:
    for offset in range(3):
        lease = story.lease(offset, 5000.0, granted=1400.0, deadline=1410.0)
        story.say(lease, "ack", 5001.0)
    story.final.drained = {"g": ["t"]}
    assert judge(story.history, story.final, Rules(skew_s=7200.0)) == []
    story.history.operations.pop()
    forgotten = judge(story.history, story.final, Rules(skew_s=7200.0))
    assert [one.kind for one in forgotten] == ["forgotten"]


def test_forgotten_record(story: Story) -> None:
    story.say(story.lease(0, 1.0), "ack", 2.0)
    story.say(story.lease(1, 1.0), "ack", 2.0)
    story.final.drained = {"g": ["t"]}
    assert story.kinds() == ["forgotten"]


def test_forgotten_after_its_lease_ran_out(story: Story) -> None:
    """An ack of unknown outcome is no excuse once the record was delivered again."""
    for offset in range(2):
        story.say(story.lease(offset, 1.0), "ack", 2.0)
    story.say(story.lease(2, 1.0), "ack", 2.0, status="unknown")
    assert story.kinds() == []
    story.final.drained = {"g": ["t"]}
    assert story.kinds() == []
    story.lease(2, 12.0, attempt=2)
    assert story.kinds() == ["forgotten"]


# Dead letters.


def test_two_letters_of_one_record(story: Story) -> None:
    story.say(story.lease(0, 1.0), "reject", 2.0)
    story.letter(0, attempts=1)
    story.letter(0, attempts=1)
    assert story.kinds() == ["two letters"]


def test_letters_of_two_groups_are_two(story: Story) -> None:
    for group in ("g", "other"):
        story.say(story.lease(0, 1.0, group=group), "reject", 2.0)
        story.letter(0, attempts=1, group=group)
    assert story.kinds() == []


@pytest.mark.parametrize(("verb", "attempt"), [("reject", 1), ("nack", 3)])
def test_no_letter_of_a_record_that_was_given_up(story: Story, verb: str, attempt: int) -> None:
    story.say(story.lease(0, 1.0, attempt=attempt), verb, 2.0)
    assert story.kinds() == ["no letter"]
    story.letter(0, attempts=attempt)
    assert story.kinds() == []


def test_given_up_record_redelivered(story: Story) -> None:
    story.say(story.lease(0, 1.0, attempt=1), "reject", 2.0)
    story.lease(0, 3.0, attempt=2)
    story.letter(0, attempts=2)
    assert story.kinds() == ["redelivered"]


def test_letter_of_an_acknowledged_record(story: Story) -> None:
    story.say(story.lease(0, 1.0), "ack", 2.0)
    story.letter(0)
    assert story.kinds() == ["stray letter"]


def test_letter_that_forgot_attempts(story: Story) -> None:
    story.lease(0, 1.0, attempt=3)
    story.letter(0, attempts=1)
    assert story.kinds() == ["attempts"]


def test_redriven_twice(story: Story) -> None:
    log = story.final.logs[PLACE]
    story.say(story.lease(0, 1.0), "reject", 2.0)
    story.call(Redrive, 3.0, value="v0")
    log.append((3, "v0"))
    assert story.kinds() == []
    log.append((4, "v0"))
    assert story.kinds() == ["doubled"]


# Stream groups.


def test_a_member_that_gets_records_of_what_it_was_told_it_lost(story: Story) -> None:
    story.own("m1", 1, 1.0, ended=2.0, how="revoked")
    story.receive(0, 0.9)
    story.receive(1, 1.5)
    story.receive(2, 2.1)
    assert story.kinds() == ["not told", "not told"]
    story.own("m1", 1, 2.05)
    assert story.kinds() == ["not told"]


def test_a_stream_group_that_hands_over_well(story: Story) -> None:
    story.own("m1", 1, 1.0, ended=3.0, how="revoked")
    story.call(Recall, 1.0, group="g", client="m1", owner_epoch=1)
    story.receive(0, 1.5)
    story.call(Store, 2.0, group="g", client="m1", owner_epoch=1, offset=1)
    story.own("m2", 2, 3.1)
    story.call(Recall, 3.1, group="g", client="m2", owner_epoch=2, offset=1)
    story.receive(1, 3.5, client="m2")
    story.receive(2, 3.5, client="m2")
    story.final.read = {"g": ["t"]}
    assert story.kinds() == []


def test_stored_position_that_goes_back(story: Story) -> None:
    for offset in range(3):
        story.receive(offset, 0.5)
    story.call(Store, 1.0, group="g", offset=1)
    story.call(Store, 2.0, group="g", offset=3)
    story.call(Recall, 3.0, group="g", offset=1)
    assert story.kinds() == ["went back"]


def test_stored_position_that_is_gone(story: Story) -> None:
    story.receive(0, 0.5)
    story.call(Store, 1.0, group="g", offset=1)
    story.call(Recall, 3.0, group="g", offset=-1)
    assert story.kinds() == ["went back"]


def test_stored_position_of_unknown_outcome_may_hold_later(story: Story) -> None:
    for offset in range(3):
        story.receive(offset, 0.5)
    story.call(Store, 1.0, group="g", offset=1, status="unknown")
    story.call(Store, 2.0, group="g", offset=3)
    story.call(Recall, 3.0, group="g", offset=1)
    assert story.kinds() == []


def test_position_of_an_older_owner_that_came_late(story: Story) -> None:
    """Its store began before the next owner's, and was let through after it."""
    for offset in range(3):
        story.receive(offset, 0.5)
    story.call(Store, 1.0, group="g", offset=1, owner_epoch=1, ended=5.0)
    story.call(Store, 2.0, group="g", offset=3, owner_epoch=2)
    story.call(Recall, 6.0, group="g", offset=1)
    assert story.kinds() == ["went back"]


def test_position_that_nobody_stored(story: Story) -> None:
    story.call(Recall, 3.0, group="g", offset=2)
    assert story.kinds() == ["never stored"]


def test_old_owner_that_is_not_fenced(story: Story) -> None:
    story.receive(0, 0.5)
    story.call(Recall, 1.0, group="g", owner_epoch=2)
    story.call(Store, 2.0, group="g", offset=1, owner_epoch=1)
    assert story.kinds() == ["not fenced"]


def test_two_owners_in_one_generation(story: Story) -> None:
    story.own("m1", 1, 1.0, ended=2.0, how="died")
    story.own("m2", 1, 3.0)
    assert story.kinds() == ["two owners"]


def test_partition_given_on_before_it_was_given_up(story: Story) -> None:
    story.own("m1", 1, 1.0, ended=5.0, how="revoked")
    story.own("m2", 2, 4.0)
    assert story.kinds() == ["two owners"]


def test_owner_that_died_or_lost_it_may_overlap(story: Story) -> None:
    story.own("m1", 1, 1.0, ended=5.0, how="lost")
    story.own("m2", 2, 4.0, ended=9.0, how="died")
    story.own("m3", 3, 8.0)
    assert story.kinds() == []


def test_owner_epoch_that_goes_back(story: Story) -> None:
    story.own("m1", 5, 1.0, ended=2.0, how="revoked")
    story.own("m2", 4, 3.0)
    assert story.kinds() == ["old owner"]


def test_skipped_record(story: Story) -> None:
    story.receive(0, 1.0)
    story.receive(2, 1.0)
    assert story.kinds() == ["skipped"]


def test_stored_past_a_record_that_nobody_got(story: Story) -> None:
    story.receive(0, 1.0)
    story.call(Store, 2.0, group="g", offset=3)
    assert story.kinds() == ["skipped"]


def test_skipped_at_a_handover(story: Story) -> None:
    story.own("m1", 1, 0.5, ended=1.5, how="revoked")
    story.receive(0, 1.0)
    story.own("m2", 2, 2.0)
    story.receive(2, 3.0, client="m2")
    assert story.kinds() == ["skipped"]


def test_gap_in_the_log_is_no_skip(story: Story) -> None:
    story.final.logs[PLACE] = [(0, "v0"), (2, "v2")]
    story.history = History()
    for number in (0, 2):
        made = story.publish(f"v{number}", kept=False)
        made.offset = number
    story.receive(0, 1.0)
    story.history.add(
        Receive(client="m1", topic="t", partition=0, at=1.0, group="g", offset=2, value="v2")
    )
    story.final.read = {"g": ["t"]}
    assert story.kinds() == []


def test_record_that_a_member_got_twice(story: Story) -> None:
    story.receive(0, 1.0)
    story.receive(0, 1.1)
    assert story.kinds() == ["went back"]


def test_unread_record(story: Story) -> None:
    story.receive(0, 1.0)
    story.final.read = {"g": ["t"]}
    assert story.kinds() == ["unread"]
