"""The verdict of the demo's second story follows from what was acknowledged and what was read."""

import pytest

from raftq_demo.cluster import ClusterStory, Kill, judge_cluster
from raftq_demo.cluster_writer import Acknowledged, WriterReport, value_of


def story() -> ClusterStory:
    """Two writers, ten records each, alternating in one partition; one kill at 5.0."""
    read = [value_of(1 + place % 2, place // 2) for place in range(20)]
    reports = [
        WriterReport(
            writer,
            [
                Acknowledged(n, 0, 2 * n + writer - 1, float(n), n + 0.25 if n > 5 else n + 0.01)
                for n in range(10)
            ],
            [],
            10,
        )
        for writer in (1, 2)
    ]
    return ClusterStory([Kill(1, (0,), 5.5, False)], reports, {0: read})


def failed(told: ClusterStory) -> list[str]:
    return [check.claim.removeprefix("cluster: ") for check in judge_cluster(told) if not check.ok]


def test_a_whole_story_passes_and_names_its_failover() -> None:
    assert failed(story()) == []
    assert story().failovers() == [pytest.approx(0.75)]


def test_a_lost_record_is_found() -> None:
    told = story()
    told.read[0][6] = value_of(1, 99)
    assert "acknowledged records that are lost" in failed(told)
    assert "records nobody sent" in failed(told)


def test_a_record_that_is_there_twice_is_found() -> None:
    told = story()
    told.read[0].append(value_of(2, 9))
    assert failed(told) == [
        "records that are there twice",
        "records out of the order they were sent in",
    ]


def test_records_out_of_order_are_found() -> None:
    told = story()
    values = told.read[0]
    values[4], values[6] = values[6], values[4]
    assert "records out of the order they were sent in" in failed(told)


def test_a_refused_record_and_a_slow_failover_are_found() -> None:
    told = story()
    told.reports[0].failed.append("3 unknown no answer")
    told.kills[0].at = 100.0
    assert failed(told) == ["records that were refused or given up", "longest failover"]
