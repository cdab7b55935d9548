"""What a run looks like by the second: throughput, gaps, and the picture of it."""

from xml.etree import ElementTree

import pytest

from raftq.chaos.history import History, Publish, Receive
from raftq.chaos.report import figures, to_markdown, to_svg
from raftq.chaos.runner import RunOutcome
from raftq.chaos.scenario import Scenario, Step, actions
from raftq.chaos.timeline import (
    Span,
    Timeline,
    first_answer_after,
    percentile,
    seconds_of,
    slowest_window,
    without,
    worst_gap,
)
from raftq.chaos.verdict import Anomaly


class Noise:
    """A fault that does nothing but know whether it was copied."""

    name = "noise"
    needs = frozenset({"toxiproxy"})

    def __init__(self) -> None:
        self.targets: list[int] = []

    def inject(self, world: object) -> str:
        self.targets.append(1)
        return "to node 1"

    def heal(self, world: object) -> None:
        self.targets.clear()


def published(at: float, took: float = 0.1, status: str = "ok") -> Publish:
    one = Publish(client="a", topic="t", partition=0, at=at, value=f"{at}")
    one.end(status, at + took)  # type: ignore[arg-type]
    return one


def scenario(*plan: Step) -> Scenario:
    return Scenario(name="noise", rows=(1,), promise="It holds.", workloads=list, plan=plan)


def test_operations_count_in_the_second_in_which_they_ended() -> None:
    history = History([published(0.0), published(0.95, 0.1), published(1.5, status="unknown")])
    history.add(Receive(client="b", topic="t", partition=0, at=2.5, group="g", offset=0, value="x"))
    seconds = seconds_of(history, 0.0, 2.6)
    assert [one.done for one in seconds] == [1, 1, 1]
    assert [one.acknowledged for one in seconds] == [1, 1, 0]
    assert [one.failed for one in seconds] == [0, 1, 0]
    assert seconds[0].worst_ms == pytest.approx(100)


def test_the_worst_gap_includes_both_ends() -> None:
    history = History([published(1.0, 0.0), published(2.0, 0.0)])
    assert worst_gap(history, 0.5, 2.5) == pytest.approx(1.0)
    assert worst_gap(history, 0.5, 9.0) == pytest.approx(7.0)
    assert worst_gap(History(), 0.0, 3.0) == 3.0


def test_a_record_sent_before_a_fault_does_not_end_it() -> None:
    history = History([published(0.9, 0.3), published(1.1, 0.5)])
    assert first_answer_after(history, 1.0) == pytest.approx(0.6)
    assert first_answer_after(history, 2.0) is None


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(one) for one in range(1, 101)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1.0)] == [50, 99, 100]
    assert percentile([], 0.5) == 0.0
    assert percentile([7.0], 0.01) == 7.0


def test_the_slowest_window_is_found_wherever_it_is() -> None:
    history = History([published(second + 0.1) for second in (0, 1, 2, 7, 8, 9)])
    assert slowest_window(seconds_of(history, 0.0, 10.0), width=4) == 0.0
    assert slowest_window(seconds_of(history, 0.0, 10.0), width=5) == pytest.approx(0.2)


def test_times_without_a_majority_are_taken_out() -> None:
    assert without((0, 10), []) == ((0, 10),)
    assert without((0, 10), [(2, 3), (2.5, 4), (9, 12)]) == ((0, 2), (4, 9))
    assert without((0, 10), [(-1, 11)]) == ()
    assert without((5, 10), [(0, 1)]) == ((5, 10),)


def test_a_plan_heals_before_it_injects_at_the_same_time() -> None:
    first, second = Step(1.0, Noise(), 2.0), Step(3.0, Noise())
    found = [(one.at, one.step, one.injects) for one in actions([second, first])]
    assert found == [(1.0, first, True), (3.0, first, False), (3.0, second, True)]


def test_a_step_is_copied_with_its_fault_so_that_a_scenario_can_run_again() -> None:
    step = Step(1.0, Noise(), 2.0)
    copy = step.copy()
    copy.fault.inject(None)  # type: ignore[arg-type]
    assert step.fault.targets == []  # type: ignore[attr-defined]
    assert scenario(step).needs == {"toxiproxy"}
    assert scenario(step).lasts_s == 8.0


def outcome(*anomalies: Anomaly) -> RunOutcome:
    timeline = Timeline(100.0, 110.0)
    timeline.mark(101.0, "phase", "faults")
    timeline.mark(102.0, "fault", "noise: to <node> 1 | 2")
    timeline.mark(102.5, "leader", "t/0: node 2, epoch 2")
    timeline.mark(109.0, "phase", "stop")
    timeline.faults.append(Span(102.0, 105.0, "noise", "to <node> 1"))
    made = RunOutcome(scenario(Step(1.0, Noise(), 3.0)), 7, History(), timeline=timeline)
    for at in range(100, 109):
        made.history.add(published(at + 0.5))
    made.anomalies += anomalies
    return made


def test_a_report_tells_the_verdict_the_faults_and_how_to_run_it_again() -> None:
    text = to_markdown(outcome(Anomaly("lost", "a record")), "raftq chaos run noise --seed 7")
    assert text.startswith("# noise: FAILED, 1 anomalies\n")
    assert "- lost: a record" in text
    assert "`raftq chaos run noise --seed 7`" in text
    assert "| 2.0 | fault | noise: to <node> 1 \\| 2 |" in text
    assert to_markdown(outcome(), "again").startswith("# noise: passed\n")
    assert figures(outcome())["records acknowledged"] == "9"


def test_the_picture_is_well_formed_and_shows_every_fault() -> None:
    root = ElementTree.fromstring(to_svg(outcome(Anomaly("lost", "a record"))))
    texts = [one.text or "" for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "noise: to <node> 1" in texts
    assert "noise, seed 7: FAILED: 1 anomalies" in texts
