"""The figures for Prometheus: names, labels, counts, bounds."""

import pytest
from fake_http import FakeFacts, FakeMetadata, Rest, served
from prometheus_client.parser import text_string_to_metric_families

from raftq.node.metrics import exposition, queue_exposition
from raftq.node.metrics.counters import (
    KEYS_MAX,
    LATENCY_BOUNDS_S,
    OTHER,
    NodeMetrics,
    Timings,
)
from raftq.node.metrics.exposition import Exposition
from raftq.node.metrics.node_status import CoordinatedGroup, DelayedStats, GroupStats, ReplicaStats

# Names of the seed systems, under our prefix, as far as what they count exists here.
SEED_NAMES = {
    "raftq_log_size_bytes": {"topic", "partition"},
    "raftq_log_segments_total": {"topic", "partition"},
    "raftq_log_append_latency_seconds_sum": {"topic", "partition"},
    "raftq_messages_produced_total": {"topic"},
    "raftq_bytes_produced_total": {"topic"},
    "raftq_produce_errors_total": {"topic", "error_type"},
    "raftq_produce_latency_seconds_bucket": {"topic", "le"},
    "raftq_messages_consumed_total": {"group", "topic"},
    "raftq_partition_leader": {"topic", "partition", "node"},
    "raftq_replication_lag_messages": {"topic", "partition", "follower"},
    "raftq_nodes_total": {"status"},
    "raftq_consumer_lag": {"group", "topic", "partition"},
    "raftq_visibility_timeout_total": {"group", "topic"},
    "raftq_dlq_total": {"topic"},
}

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def replica(partition: int = 0, topic: str = "orders", **more: object) -> ReplicaStats:
    one = ReplicaStats(topic, 1, partition, "leader", 4, 10, 60, 50, 55, (1, 2), 1000)
    for name, value in more.items():
        setattr(one, name, value)
    return one


def parse(text: str) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, f"{key} is there twice"
            found[key] = sample.value
    return found


def scraped(facts: FakeFacts, metrics: NodeMetrics) -> Samples:
    return parse(Exposition(facts, metrics, "1.2.3").scrape().decode())


def test_the_names_of_the_seed_systems_are_there_with_their_labels() -> None:
    facts, metrics = FakeFacts(FakeMetadata()), NodeMetrics()
    facts.stats = [replica(follower_ends={2: 45})]
    facts.group_stats = [GroupStats("orders", 0, "billing", 3, counters={"acked": 1})]
    metrics.produced("orders", 0.001)
    metrics.refused("orders", "throttled")
    labels = {name: {label for label, _ in pairs} for name, pairs in scraped(facts, metrics)}
    assert {name: labels.get(name) for name in SEED_NAMES} == SEED_NAMES
    ours = {name for name in labels if not name.startswith(("process_", "python_"))}
    assert all(name.startswith("raftq_") for name in ours)
    assert "process_resident_memory_bytes" in labels


def test_figures_of_replicas_are_those_of_the_moment() -> None:
    facts, metrics = FakeFacts(FakeMetadata()), NodeMetrics()
    facts.stats = [
        replica(
            appended_records=7, appended_bytes=700, fetched_records=3, append_count=2,
            append_seconds=0.5, follower_ends={2: 45, 3: 60}, segments=4,
        ),
        replica(1, appended_records=5, role="follower", follower_ends={9: 0}),
    ]  # fmt: skip
    found = scraped(facts, metrics)
    place = (("partition", "0"), ("topic", "orders"))
    assert found["raftq_messages_produced_total", (("topic", "orders"),)] == 12
    assert found["raftq_messages_consumed_total", (("group", ""), ("topic", "orders"))] == 3
    assert found["raftq_log_segments_total", place] == 4
    assert found["raftq_partition_high_watermark", place] == 50
    assert found["raftq_log_append_latency_seconds_sum", place] == 0.5
    assert found["raftq_log_append_latency_seconds_count", place] == 2
    lags = {pairs[0][1]: value for (name, pairs), value in found.items() if "lag" in name}
    assert lags == {"2": 15, "3": 0}
    leads = {
        dict(pairs)["partition"]: value
        for (name, pairs), value in found.items()
        if name == "raftq_partition_leader"
    }
    assert leads == {"0": 1, "1": 0}


def test_groups_and_delays_are_shown_by_partition_and_their_counters_summed_by_topic() -> None:
    facts = FakeFacts(FakeMetadata())
    facts.group_stats = [
        GroupStats("t", 0, "g", 7, 2, 1, True, {"acked": 5, "dead": 2, "lease_expired": 3}),
        GroupStats("t", 1, "g", 1, 0, 0, False, {"acked": 4, "dead": 1}),
        GroupStats("t", 0, "h", 0, 0, 0, False, {"dead": 10, "parked": 2, "lost": 1}),
        GroupStats("t", 1, "readers", 9),
    ]
    facts.delayed_stats = [DelayedStats("t", 1, 12, 30, 4, 250)]
    facts.coordinated_groups = [CoordinatedGroup("g", 3, 8)]
    found = scraped(facts, NodeMetrics())

    def value(name: str, **labels: str) -> float:
        return found["raftq_" + name, tuple(sorted(labels.items()))]

    assert value("consumer_lag", group="g", topic="t", partition="0") == 7
    assert value("consumer_lag", group="readers", topic="t", partition="1") == 9
    assert value("group_in_flight", group="g", topic="t", partition="0") == 2
    assert value("group_waiting", group="g", topic="t", partition="0") == 1
    assert value("group_paused", group="g", topic="t", partition="0") == 1
    assert value("settlements_total", group="g", topic="t", outcome="acked") == 9
    assert value("settlements_total", group="g", topic="t", outcome="dead_lettered") == 3
    assert value("visibility_timeout_total", group="g", topic="t") == 3
    assert value("dlq_total", topic="t") == 13
    assert value("dlq_parked", topic="t") == 2
    assert value("dlq_lost_total", topic="t") == 1
    assert not [key for key in found if key[0] == "raftq_settlements_total" and
                ("group", "readers") in key[1]]  # fmt: skip
    assert value("delayed_pending", topic="t", partition="1") == 12
    assert value("delayed_late_seconds_max", topic="t", partition="1") == 0.25
    assert value("group_members", group="g") == 3
    assert value("group_generation", group="g") == 8


def test_the_number_of_group_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_exposition, "SERIES_MAX", 2)
    facts = FakeFacts(FakeMetadata())
    facts.group_stats = [GroupStats("t", number, "g", 1) for number in range(5)]
    found = scraped(facts, NodeMetrics())
    assert len([name for name, _ in found if name == "raftq_consumer_lag"]) == 2
    assert found["raftq_metrics_groups_omitted", ()] == 3


def test_the_cluster_is_counted_as_this_node_knows_it() -> None:
    metadata = FakeMetadata()
    metadata.put("t", 3, {})
    found = scraped(FakeFacts(metadata), NodeMetrics())
    alone = {name: value for (name, pairs), value in found.items() if not pairs}
    assert alone["raftq_raft_term"] == 3
    assert alone["raftq_raft_applied_index"] == 7
    assert alone["raftq_is_controller"] == 1
    assert alone["raftq_partitions"] == 3
    assert alone["raftq_leaderless_partitions"] == 0
    assert alone["raftq_leading_partitions"] == 3
    assert alone["raftq_connections"] == 4
    assert alone["raftq_ready"] == 1
    nodes = {pairs[0][1]: value for (name, pairs), value in found.items() if "nodes" in name}
    assert nodes == {"alive": 2, "draining": 0, "dead": 1}


def test_labels_are_escaped() -> None:
    facts = FakeFacts(FakeMetadata())
    facts.stats = [replica(topic='a"b\\c\nd')]
    found = scraped(facts, NodeMetrics())
    assert ("raftq_topic_size_bytes", (("topic", 'a"b\\c\nd'),)) in found


def test_the_number_of_series_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "PARTITIONS_MAX", 5)
    monkeypatch.setattr(exposition, "TOPICS_MAX", 2)
    facts = FakeFacts(FakeMetadata())
    facts.stats = [replica(at % 3, f"t{at // 3}") for at in range(12)]
    found = scraped(facts, NodeMetrics())
    names = [name for name, _ in found]
    assert names.count("raftq_log_size_bytes") == 5
    assert names.count("raftq_messages_produced_total") == 2
    assert found["raftq_metrics_partitions_omitted", ()] == 7
    assert found["raftq_metrics_topics_omitted", ()] == 2


def test_a_histogram_counts_what_is_not_longer_than_its_bounds() -> None:
    timings = Timings()
    for seconds in (0.0, 0.0001, 0.00011, 5.0, 99.0):
        timings.observe(seconds)
    assert timings.counts[0] == 2
    assert timings.counts[1] == 1
    assert timings.counts[LATENCY_BOUNDS_S.index(5.0)] == 1
    assert timings.counts[-1] == 1
    assert timings.count == 5
    metrics = NodeMetrics()
    metrics.requests["Produce"] = timings
    found = scraped(FakeFacts(FakeMetadata()), metrics)
    name = "raftq_request_latency_seconds"
    assert found[f"{name}_bucket", (("kind", "Produce"), ("le", "0.00025"))] == 3
    assert found[f"{name}_bucket", (("kind", "Produce"), ("le", "+Inf"))] == 5
    assert found[f"{name}_count", (("kind", "Produce"),)] == 5
    assert found[f"{name}_sum", (("kind", "Produce"),)] == pytest.approx(104.00021)


def test_names_from_outside_cannot_fill_the_memory() -> None:
    metrics = NodeMetrics()
    for number in range(2 * KEYS_MAX):
        metrics.produced(f"t{number}", 0.1)
        metrics.refused(f"t{number}", "throttled")
        metrics.request(f"k{number}", 0.1, "throttled")
        metrics.answered(f"r{number}", 200, 0.1)
    assert len(metrics.produce) == KEYS_MAX + 1
    assert metrics.produce[OTHER].count == KEYS_MAX
    assert metrics.produce_errors[(OTHER, "throttled")] == KEYS_MAX
    assert len(metrics.requests) == len(metrics.http) == KEYS_MAX + 1


def test_a_deleted_topic_takes_its_series_along() -> None:
    metrics = NodeMetrics()
    for topic in ("old", "new"):
        metrics.produced(topic, 0.1)
        metrics.refused(topic, "throttled")
        metrics.refused(topic, "too_large")
    metrics.forget_topic("old")
    assert list(metrics.produce) == ["new"]
    assert list(metrics.produce_errors) == [("new", "throttled"), ("new", "too_large")]


def test_scrapes_are_served_and_count_themselves() -> None:
    async def story(rest: Rest) -> None:
        rest.facts.stats = [replica()]
        await rest.get("/nowhere")
        await rest.get("/v1/metrics")
        answer = await rest.get("/metrics")
        assert answer.status == 200
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        found = parse(answer.raw.decode())
        route = ("route", "metrics"), ("status", "200")
        assert found["raftq_http_requests_total", route] == 1
        lost = ("route", "unmatched"), ("status", "404")
        assert found["raftq_http_requests_total", lost] == 1
        assert found["raftq_http_requests_in_flight", ()] == 1

    served(story)
