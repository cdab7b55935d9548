"""Shell: the figures of queues on a cluster: `python -m raftq_bench queue [FIGURE...]`.

Workers are separate processes. Records and leases are replicated three times before a worker gets a
record.
"""

from raftq_bench import queue_flow, queue_times, queue_worker, suite

FIGURES: dict[str, tuple[suite.Measure, str]] = {
    "lease-ack": (queue_flow.measure_rate, "3 nodes, 4 workers: lease + ack"),
    "in-flight": (queue_flow.measure_in_flight, "the same with 500,000 records in flight"),
    "worker": (queue_worker.measure, "3 nodes, one Worker process: a handler call per record"),
    "latency": (queue_times.measure_latency, "1,000 records/s: from send() to the handler"),
    "lanes": (queue_flow.measure_lanes, "shares and waits of five busy lanes"),
    "delays": (queue_times.measure_delays, "1,000,000 pending, 20,000 due per second"),
}
SUITE = suite.Suite("queue", __doc__ or "", FIGURES)
