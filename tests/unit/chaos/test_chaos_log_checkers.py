"""Each checker of logs, leaders and copies finds its anomaly where there is just that, and none in
a sound history; and histories go to files and come back."""

import json
from pathlib import Path
from typing import Any

import pytest

from raftq.chaos.checkers import Rules, judge
from raftq.chaos.history import (
    Change,
    Final,
    History,
    Publish,
    Receive,
    Sighting,
)
from raftq.chaos.journal import HistoryJournal, read_journal
from raftq.chaos.log_checkers import recovery, worst_gap

PLACE = ("t", 0)
DATA = ("t", 0, "data")


class Story:
    """Writes a history by hand, of partition 0 of topic t."""

    def __init__(self) -> None:
        self.history = History()
        self.final = Final(logs={PLACE: []})

    def kinds(self, **rules: Any) -> list[str]:
        """The anomalies, also after the history has been to a file and back."""
        found = judge(self.history, self.final, Rules(**rules))
        history = History.from_json(json.loads(json.dumps(self.history.to_json())))
        final = Final.from_json(json.loads(json.dumps(self.final.to_json())))
        assert judge(history, final, Rules(**rules)) == found
        return [one.kind for one in found]

    def publish(self, value: str, at: float = 0.0, **more: Any) -> Publish:
        """Acknowledged where it is kept: at the end of the log, unless said otherwise."""
        log = self.final.logs[PLACE]
        settings: dict[str, Any] = {
            "client": "p", "ended": at + 0.1, "status": "ok", "offset": len(log),
            "number": len(self.history.operations),
        }  # fmt: skip
        kept = more.pop("kept", True)
        settings |= more
        if kept:
            log.append((len(log), value))
        return self.history.add(Publish(topic="t", partition=0, value=value, at=at, **settings))

    def read(self, offset: int, value: str, at: float = 1.0, client: str = "r") -> Receive:
        made = Receive(
            client=client, topic="t", partition=0, at=at, group=client, offset=offset, value=value
        )
        return self.history.add(made)

    def see(self, node: int, epoch: int, at: float, **more: Any) -> Sighting:
        settings: dict[str, Any] = {"ended": at + 0.1, "status": "ok", "high_watermark": 3}
        settings |= more
        made = Sighting(
            client="w", topic="t", partition=0, at=at, node=node, epoch=epoch, **settings
        )
        return self.history.add(made)

    def change(self, verb: str, topic: str = "c", **more: Any) -> Change:
        settings: dict[str, Any] = {"ended": 1.0, "status": "ok"}
        settings |= more
        made = Change(client="a", topic=topic, partition=-1, at=0.5, verb=verb, **settings)  # type: ignore[arg-type]
        return self.history.add(made)

    def copy(self, *nodes: int) -> None:
        rows = [(0, "aa"), (2, "bb")]
        self.final.copies.setdefault(DATA, {}).update({node: list(rows) for node in nodes})


@pytest.fixture
def story() -> Story:
    made = Story()
    for number in range(3):
        made.publish(f"v{number}", float(number))
    return made


def test_a_sound_history_has_no_anomaly(story: Story) -> None:
    story.publish("late", 3.0, status="unknown", offset=None)
    for offset, value in story.final.logs[PLACE]:
        story.read(offset, value)
    story.see(1, 1, 1.0, high_watermark=1, end_offset=1)
    story.see(1, 1, 2.0, high_watermark=3, end_offset=2)
    story.see(2, 2, 3.0, high_watermark=2)  # a new leader may not know yet how far all have come
    story.see(3, 3, 3.0, status="failed", ended=3.1)
    story.copy(1, 2, 3)
    story.change("create", total=2, copies=3)
    story.change("grow", total=3)
    story.change("create", topic="gone")
    story.change("delete", topic="gone")
    story.final.topics = {"t": [[1, 2, 3]], "c": [[1, 2, 3], [2, 3, 1], [1, 2, 3]]}
    assert (
        story.kinds(progress_min=0.1, healthy=((0.0, 10.0),), faults=(0.5,), recovery_s=1.0) == []
    )


# Order and offsets.


def test_records_that_changed_places(story: Story) -> None:
    first, second, *_ = story.history.of(Publish)
    first.offset, second.offset = 1, 0
    story.final.logs[PLACE][:2] = [(0, "v1"), (1, "v0")]
    assert story.kinds() == ["reordered"]


def test_records_are_in_order_only_per_client_and_lane(story: Story) -> None:
    story.publish("low", number=-1 + 2, priority=4)
    story.publish("other", number=0, client="q")
    story.publish("whenever", number=-1)
    assert story.kinds() == []


def test_a_record_of_unknown_outcome_may_come_late(story: Story) -> None:
    story.publish("given up", number=1, status="unknown", offset=None)
    assert story.kinds() == []


def test_two_records_acknowledged_at_one_offset(story: Story) -> None:
    story.publish("v3", status="unknown", kept=False, offset=None)
    story.history.operations[-1].status = "ok"  # type: ignore[attr-defined]
    story.history.operations[-1].offset = 2  # type: ignore[attr-defined]
    assert sorted(story.kinds()) == ["lost", "two values"]


def test_readers_that_saw_different_records_at_one_offset(story: Story) -> None:
    del story.final.logs[PLACE][0]
    story.history.operations.clear()
    story.publish("v1", offset=1, kept=False)
    story.publish("v2", offset=2, kept=False)
    story.read(0, "x", client="r1")
    story.read(0, "y", client="r2")
    assert story.kinds() == ["two values"]


def test_a_reader_that_saw_another_record_than_is_kept(story: Story) -> None:
    story.history.operations.clear()
    for offset, value in story.final.logs[PLACE]:
        story.publish(value, status="unknown", offset=None, kept=False)
        story.read(offset, value if offset else "x")
    assert story.kinds() == ["two values"]


# Leaders.


def test_two_leaders_of_one_epoch(story: Story) -> None:
    story.see(1, 4, 1.0)
    story.see(2, 4, 2.0)
    assert story.kinds() == ["two leaders"]


def test_a_high_watermark_that_goes_back(story: Story) -> None:
    story.see(1, 4, 1.0)
    story.see(1, 4, 2.0, high_watermark=2)
    assert story.kinds() == ["went back"]


def test_answers_that_overtake_each_other_are_no_anomaly(story: Story) -> None:
    story.see(1, 4, 1.0, ended=2.0)
    story.see(1, 4, 1.5, high_watermark=2)
    assert story.kinds() == []


def test_records_beyond_the_high_watermark(story: Story) -> None:
    story.see(1, 4, 1.0, end_offset=4)
    assert story.kinds() == ["beyond"]


# Copies.


def test_copies_of_which_one_has_other_bytes(story: Story) -> None:
    story.copy(1, 2, 3)
    story.final.copies[DATA][2][1] = (2, "cc")
    assert story.kinds() == ["copies differ"]


def test_copies_of_which_one_is_shorter(story: Story) -> None:
    story.copy(1, 2, 3)
    story.final.copies[DATA][3].pop()
    assert story.kinds() == ["copies differ"]


def test_copies_of_which_one_has_a_hole(story: Story) -> None:
    story.copy(1, 2)
    for rows in story.final.copies[DATA].values():
        rows.append((5, "dd"))
    story.final.copies[DATA][2].pop(1)
    assert story.kinds() == ["copies differ"]


def test_a_copy_that_still_has_what_others_have_cut_off_at_the_start(story: Story) -> None:
    story.copy(1, 2, 3)
    story.final.copies[DATA][3].pop(0)
    assert story.kinds() == []


# Topics.


def test_a_topic_that_is_gone(story: Story) -> None:
    story.change("create")
    story.final.topics = {"t": [[1]]}
    assert story.kinds() == ["topic lost"]


def test_a_topic_whose_deletion_may_have_happened(story: Story) -> None:
    story.change("create")
    story.change("delete", status="unknown")
    story.final.topics = {"t": [[1]]}
    assert story.kinds() == []


def test_a_topic_that_came_back(story: Story) -> None:
    story.change("create")
    story.change("delete")
    story.final.topics = {"c": [[1]]}
    assert story.kinds() == ["topic revived"]


def test_partitions_that_are_gone(story: Story) -> None:
    story.change("create", total=1)
    story.change("grow", total=2)
    story.final.topics = {"c": [[1]]}
    assert story.kinds() == ["too few"]


def test_copies_that_were_not_made_again(story: Story) -> None:
    story.change("create", total=1, copies=3)
    story.final.topics = {"c": [[1, 2]]}
    assert story.kinds() == ["too few"]


# Progress.


def test_a_stretch_without_progress(story: Story) -> None:
    for number in range(100):
        at = number / 10 if number < 50 else 10 + number / 10
        story.publish(f"w{number}", at, status="ok")
    assert story.kinds(progress_min=2.0, window_s=5.0, healthy=((0.0, 20.0),)) == [
        "no progress", "no progress"
    ]  # fmt: skip
    assert story.kinds(progress_min=2.0, window_s=5.0, healthy=((0.0, 5.0), (15.0, 19.0))) == []


def test_a_stretch_that_is_shorter_than_a_window_is_not_judged(story: Story) -> None:
    assert story.kinds(progress_min=2.0, window_s=5.0, healthy=((50.0, 54.0),)) == []


def test_failed_operations_are_no_progress(story: Story) -> None:
    for number in range(60):
        story.publish(f"w{number}", 10 + number / 10, status="failed", offset=None, kept=False)
    assert story.kinds(progress_min=1.0, window_s=5.0, healthy=((10.0, 15.0),)) == ["no progress"]


def test_a_fault_after_which_nothing_goes_on_in_time(story: Story) -> None:
    story.publish("w", 20.0)
    assert recovery(story.history, 10.0) == pytest.approx(10.1)
    assert recovery(story.history, 30.0) is None
    assert story.kinds(faults=(10.0,), recovery_s=5.0) == ["no recovery"]
    assert story.kinds(faults=(30.0,), recovery_s=5.0) == ["no recovery"]
    assert story.kinds(faults=(19.0,), recovery_s=5.0) == []


def test_what_was_sent_before_a_fault_is_no_recovery(story: Story) -> None:
    story.publish("w", 9.0, ended=12.0)
    story.publish("x", 20.0)
    assert recovery(story.history, 10.0) == pytest.approx(10.1)


def test_the_worst_gap_counts_both_ends(story: Story) -> None:
    assert worst_gap(story.history, 0.0, 10.0) == pytest.approx(7.9)
    assert worst_gap(story.history, 0.0, 2.2) == pytest.approx(1.0)
    assert worst_gap(History(), 1.0, 5.0) == 4.0


# Files.


def test_a_history_is_in_its_file_with_what_became_of_its_operations(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryJournal(path) as journal:
        sent = journal.add(Publish(client="p", topic="t", partition=0, at=1.0, value="v"))
        open_one = journal.add(Publish(client="p", topic="t", partition=0, at=2.0, value="w"))
        sent.end("ok", 3.0)
        journal.note(sent)
        open_one.end("unknown", 4.0)  # and nobody notes it
        final = Final(
            logs={PLACE: [(0, "v")]}, copies={DATA: {1: [(0, "aa")]}}, topics={"t": [[1]]}
        )
        journal.conclude(final)
        history, end = read_journal(path)
    assert history.operations == [sent, open_one]
    assert end == final


def test_a_file_that_was_cut_is_read_up_to_there(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryJournal(path) as journal:
        for number in range(3):
            at = float(number)
            journal.add(Publish(client="p", topic="t", partition=0, at=at, value=f"v{number}"))
    path.write_bytes(path.read_bytes()[:-20])
    history, end = read_journal(path)
    assert [one.value for one in history.of(Publish)] == ["v0", "v1"]
    assert end is None
