"""The text that Prometheus reads. (Pure, except for the figures of the process.)

The series of replicas come from NodeFacts at the moment of the scrape and are written as lines at
once: through the families of the library, ten thousand of them would block the event loop for 80
ms. The library writes the figures of the process itself (memory, processor time, files, garbage
collection).

A node describes its own replicas; sums over nodes are made from the scrapes of all nodes. Beyond
PARTITIONS_MAX replicas there are only sums by topic, and beyond TOPICS_MAX topics only those of the
first. How many were left out is a series of its own.
"""

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, generate_latest

from raftq.cluster.metadata.state import ClusterState
from raftq.node.metrics.counters import LATENCY_BOUNDS_S, NodeMetrics, Timings
from raftq.node.metrics.lines import PREFIX, Lines, braced, escape, family, single
from raftq.node.metrics.node_status import NodeFacts, ReplicaStats
from raftq.node.metrics.queue_exposition import queue_lines

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PARTITIONS_MAX = 5_000
TOPICS_MAX = 1_000

_BOUNDS = (*(f"{bound:g}" for bound in LATENCY_BOUNDS_S), "+Inf")


class Exposition:
    """Writes the scrape of one node."""

    def __init__(self, facts: NodeFacts, metrics: NodeMetrics, version: str) -> None:
        self._facts = facts
        self._metrics = metrics
        self._version = version
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        GCCollector(registry=self._process)

    def scrape(self) -> bytes:
        facts = self._facts
        replicas = list(facts.replicas())
        lines: list[str] = []
        lines += self._node()
        lines += _cluster(facts)
        lines += _topics(replicas)
        lines += _partitions(replicas, facts.node_id)
        lines += queue_lines(facts)
        lines += _traffic(self._metrics)
        return "\n".join(lines).encode() + b"\n" + generate_latest(self._process)

    def _node(self) -> Lines:
        facts, metrics = self._facts, self._metrics
        labels = braced(version=self._version, node=str(facts.node_id), cluster=facts.cluster_id)
        yield from family("build_info", "gauge", "What runs here.", [(labels, 1)])
        yield from single("uptime_seconds", "gauge", "Since the start.", round(facts.uptime_s(), 3))
        ready = all(ok for ok, _ in facts.checks().values())
        yield from single("ready", "gauge", "Whether every readiness check passes.", int(ready))
        text = "Open connections of the native listener."
        yield from single("connections", "gauge", text, facts.connections())
        text = "Connections that were accepted."
        yield from single("connections_total", "counter", text, metrics.connections_total)
        text = "Connections that were refused for a limit."
        yield from single("connections_refused_total", "counter", text, metrics.connections_refused)


def _cluster(facts: NodeFacts) -> Lines:
    metadata = facts.metadata
    state = metadata.state
    yield from single("raft_term", "gauge", "Term of the metadata's Raft.", metadata.term)
    yield from single("raft_applied_index", "gauge", "Metadata applied up to here.", metadata.index)
    text = "Whether this node runs the controller."
    yield from single("is_controller", "gauge", text, int(metadata.is_controller))
    text = "Whether this node knows a controller."
    yield from single("has_controller", "gauge", text, int(metadata.controller is not None))
    statuses = [(braced(status=name), count) for name, count in node_statuses(state).items()]
    yield from family("nodes_total", "gauge", "Nodes of the cluster by status.", statuses)
    summary = state.summary()
    for name, text, value in (
        ("topics", "Topics of the cluster.", summary.topics),
        ("partitions", "Partitions of the cluster.", summary.partitions),
        ("leaderless_partitions", "Partitions without a leader.", summary.leaderless),
        ("under_replicated_partitions", "Partitions with a replica that is not in sync.",
         summary.under_replicated),
        ("under_min_insync_partitions", "Partitions that take no writes with acks=all.",
         summary.under_min_insync),
        ("moving_partitions", "Partitions whose replicas are being moved.", summary.moves),
        ("leading_partitions", "Partitions that this node leads.", state.leading(facts.node_id)),
    ):  # fmt: skip
        yield from single(name, "gauge", text, value)


def node_statuses(state: ClusterState) -> dict[str, int]:
    found = {"alive": 0, "draining": 0, "dead": 0}
    for node in state.nodes.values():
        found["dead" if not node.alive else "draining" if node.draining else "alive"] += 1
    return found


def _topics(replicas: list[ReplicaStats]) -> Lines:
    sums: dict[str, list[int]] = {}
    for replica in replicas:
        found = sums.setdefault(replica.topic, [0, 0, 0, 0, 0])
        found[0] += replica.appended_records
        found[1] += replica.appended_bytes
        found[2] += replica.fetched_records
        found[3] += replica.fetched_bytes
        found[4] += replica.size_bytes
    text = "Topics with replicas here that are left out of these figures."
    yield from single("metrics_topics_omitted", "gauge", text, max(0, len(sums) - TOPICS_MAX))
    shown = [(braced(topic=topic), found) for topic, found in list(sums.items())[:TOPICS_MAX]]
    for at, name, kind, text in (
        (0, "messages_produced_total", "counter", "Records taken from producers."),
        (1, "bytes_produced_total", "counter", "Bytes of batches taken from producers."),
        (3, "bytes_consumed_total", "counter", "Bytes of batches handed to consumers."),
        (4, "topic_size_bytes", "gauge", "Size of the replicas here."),
    ):
        yield from family(name, kind, text, ((labels, found[at]) for labels, found in shown))
    # Readers without a group have the empty group.
    grouped = ((f'{{group="",{labels[1:]}', found[2]) for labels, found in shown)
    text = "Records handed to consumers."
    yield from family("messages_consumed_total", "counter", text, grouped)


def _partitions(replicas: list[ReplicaStats], node_id: int) -> Lines:
    text = "Replicas here that are left out of the figures by partition."
    omitted = max(0, len(replicas) - PARTITIONS_MAX)
    yield from single("metrics_partitions_omitted", "gauge", text, omitted)
    places: dict[str, str] = {}
    shown: list[tuple[str, ReplicaStats]] = []
    for replica in replicas[:PARTITIONS_MAX]:
        topic = places.get(replica.topic)
        if topic is None:
            topic = places[replica.topic] = f'topic="{escape(replica.topic)}",partition="'
        shown.append((f'{topic}{replica.partition}"', replica))
    for name, kind, text, values in (
        ("log_size_bytes", "gauge", "Size of the log.",
         [replica.size_bytes for _, replica in shown]),
        ("log_segments_total", "gauge", "Files of the log.",
         [replica.segments for _, replica in shown]),
        ("log_start_offset", "gauge", "First offset kept.",
         [replica.start_offset for _, replica in shown]),
        ("log_end_offset", "gauge", "Next offset to write.",
         [replica.end_offset for _, replica in shown]),
        ("log_flushed_offset", "gauge", "Next offset not yet durable.",
         [replica.flushed_offset for _, replica in shown]),
        ("partition_high_watermark", "gauge", "Next offset not yet readable.",
         [replica.high_watermark for _, replica in shown]),
        ("partition_epoch", "gauge", "Epoch of the leadership.",
         [replica.epoch for _, replica in shown]),
        ("partition_isr", "gauge", "Replicas in sync.", [len(replica.isr) for _, replica in shown]),
        ("log_truncations_total", "counter", "Times that a diverged end was cut.",
         [replica.truncations for _, replica in shown]),
        ("duplicate_batches_total", "counter", "Batches that producers sent again.",
         [replica.duplicates for _, replica in shown]),
    ):  # fmt: skip
        rows = zip(shown, values, strict=True)
        yield from family(name, kind, text, ((f"{{{at}}}", value) for (at, _), value in rows))
    node = f',node="{node_id}"'
    leads = ((f"{{{at}{node}}}", int(replica.role == "leader")) for at, replica in shown)
    yield from family("partition_leader", "gauge", "Whether the node leads.", leads)
    yield from _lags(shown)
    yield from _append_latency(shown)


def _lags(shown: list[tuple[str, ReplicaStats]]) -> Lines:
    text = "Records that a follower is behind the leader's log, as the leader knows."
    lags = (
        (f'{{{at},follower="{follower}"}}', max(0, replica.end_offset - end))
        for at, replica in shown
        if replica.role == "leader"
        for follower, end in replica.follower_ends.items()
    )
    yield from family("replication_lag_messages", "gauge", text, lags)


def _append_latency(shown: list[tuple[str, ReplicaStats]]) -> Lines:
    name = f"{PREFIX}log_append_latency_seconds"
    yield f"# HELP {name} Time spent in appends to the log."
    yield f"# TYPE {name} summary"
    for at, replica in shown:
        yield f"{name}_count{{{at}}} {replica.append_count}"
        yield f"{name}_sum{{{at}}} {replica.append_seconds:.9g}"


def _traffic(metrics: NodeMetrics) -> Lines:
    for name, text, value in (
        ("isr_shrinks_total", "Times that a leader here shrank an isr.", metrics.isr_shrinks),
        ("isr_expansions_total", "Times that a leader here grew an isr.", metrics.isr_expansions),
        ("elections_total", "Times that this node began to lead.", metrics.elections),
    ):
        yield from single(name, "counter", text, value)
    in_flight = metrics.http_in_flight
    yield from single("http_requests_in_flight", "gauge", "HTTP requests under way.", in_flight)
    text = "From a produce request to its answer."
    yield from _histograms("produce_latency_seconds", text, _by("topic", metrics.produce))
    errors = metrics.produce_errors.items()
    rows = ((braced(topic=topic, error_type=code), n) for (topic, code), n in errors)
    yield from family("produce_errors_total", "counter", "Refused produce requests.", rows)
    text = "From a native request to its answer."
    yield from _histograms("request_latency_seconds", text, _by("kind", metrics.requests))
    errors = metrics.request_errors.items()
    rows = ((braced(kind=kind, error_type=code), n) for (kind, code), n in errors)
    yield from family("request_errors_total", "counter", "Refused native requests.", rows)
    text = "From an HTTP request to its answer."
    yield from _histograms("http_request_latency_seconds", text, _by("route", metrics.http))
    statuses = metrics.http_statuses.items()
    rows = ((braced(route=route, status=str(status)), n) for (route, status), n in statuses)
    yield from family("http_requests_total", "counter", "HTTP requests by status.", rows)
    yield from _histograms("fsync_latency_seconds", "Of one sync.", [("", metrics.fsync)])


def _by(label: str, timings: Mapping[str, Timings]) -> list[tuple[str, Timings]]:
    return [(f'{label}="{escape(key)}"', timing) for key, timing in timings.items()]


def _histograms(name: str, text: str, series: list[tuple[str, Timings]]) -> Lines:
    yield f"# HELP {PREFIX}{name} {text}"
    yield f"# TYPE {PREFIX}{name} histogram"
    for labels, timings in series:
        comma, total = "," if labels else "", 0
        for bound, count in zip(_BOUNDS, timings.counts, strict=True):
            total += count
            yield f'{PREFIX}{name}_bucket{{{labels}{comma}le="{bound}"}} {total}'
        braces = f"{{{labels}}}" if labels else ""
        yield f"{PREFIX}{name}_count{braces} {total}"
        yield f"{PREFIX}{name}_sum{braces} {timings.sum_s:.9g}"
