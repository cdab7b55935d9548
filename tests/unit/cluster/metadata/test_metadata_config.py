"""Settings of a topic: defaults, ranges, and one error for all problems."""

import pytest

from raftq.client.common.errors import InvalidArgument
from raftq.cluster.metadata.topic_config import check_topic_name, topic_config


def test_defaults_are_those_of_the_specification() -> None:
    config = topic_config({}, 3)
    assert config.settings() == {
        "min_insync": 2,
        "retention_ms": 168 * 3_600_000,
        "retention_bytes": -1,
        "segment_bytes": 64 * 1024 * 1024,
        "value_bytes_max": 1024 * 1024,
        "visibility_timeout_ms": 30_000,
        "max_deliveries": 3,
        "backoff_ms": 1_000,
        "backoff_max_ms": 60_000,
        "backoff_jitter": 0,
        "in_flight_max": 1_000,
        "fsync": "interval",
        "cleanup": "delete",
        "dead_letter_expired": "false",
    }
    assert config.retention_bytes is None
    assert config.overrides == {}


@pytest.mark.parametrize(("replication", "min_insync"), [(1, 1), (2, 1), (3, 2), (5, 2)])
def test_min_insync_follows_the_replication_unless_it_is_set(
    replication: int, min_insync: int
) -> None:
    assert topic_config({}, replication).min_insync == min_insync
    assert topic_config({"min_insync": 1}, replication).min_insync == 1


def test_what_holds_can_be_given_back_as_overrides() -> None:
    config = topic_config({"retention_ms": -1, "fsync": "always", "min_insync": 3}, 3)
    again = topic_config(config.settings(), 3)
    assert again.settings() == config.settings()
    assert again.retention_ms is None


def test_none_means_the_default_and_is_no_override() -> None:
    assert topic_config({"retention_ms": None}, 3) == topic_config({}, 3)


def test_all_problems_are_reported_at_once() -> None:
    bad = {
        "retention": 5,
        "retention_ms": 0,
        "segment_bytes": "64MiB",
        "fsync": "sometimes",
        "value_bytes_max": 17 * 1024 * 1024,
        "min_insync": 4,
        "cleanup": True,
        "retention_bytes": True,
    }
    with pytest.raises(InvalidArgument) as caught:
        topic_config(bad, 3)
    for part in (
        "unknown setting 'retention'",
        "retention_ms must be 1 to",
        "segment_bytes must be an integer, not '64MiB'",
        "fsync must be one of interval, none, always, not 'sometimes'",
        "value_bytes_max must be 1 to 16777216, not",
        "min_insync 4 is more than the replication of 3",
        "cleanup must be one of",
        "retention_bytes must be an integer, not True",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "name", ["a", "A.b_c-9", "x" * 245, "x" * 245 + ".dlq", ".dlq", "__internal"]
)
def test_names_of_the_specification_are_accepted(name: str) -> None:
    check_topic_name(name)


@pytest.mark.parametrize(
    "name", ["", "x" * 246, "x" * 246 + ".dlq", "a b", "a/b", "ä", "a\n", ".", "..", "٣"]
)
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="1 to 245"):
        check_topic_name(name)
