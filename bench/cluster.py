"""Shell: the figures of a cluster: `python -m raftq_bench cluster [FIGURE...]`.

Each is compared with a bare socket and file loop of the same bytes in the same run.
"""

import argparse
from collections.abc import Sequence

from raftq_bench import (
    cluster_failover,
    cluster_flow,
    cluster_latency,
    cluster_many,
    suite,
)

FIGURES: dict[str, tuple[suite.Measure, str]] = {
    "produce-1": (cluster_flow.measure_produce_1, "1 node, acks=leader, send_many"),
    "consume-records": (cluster_flow.measure_consume_records, "1 node, to Record objects"),
    "consume-arrow": (cluster_flow.measure_consume_arrow, "1 node, to Arrow tables"),
    "produce-3": (cluster_flow.measure_produce_3, "3 nodes, replication 3, acks=all, send_many"),
    "latency": (cluster_latency.measure_latency, "3 nodes, acks=all, one record at a time"),
    "send": (cluster_flow.measure_send, "1 node, producer.send() in a loop"),
    "concurrent": (cluster_flow.measure_concurrent, "1 node, 1,000 awaiting publishers"),
    "rest": (cluster_latency.measure_rest, "3 nodes, one record per REST request"),
    "partitions": (cluster_many.measure, "3 nodes with 1,000 partitions: idle, start, change"),
    "failover": (cluster_failover.measure, "3 nodes, leaders killed -9 under load"),
}
SUITE = suite.Suite("cluster", __doc__ or "", FIGURES, ("partitions", "failover"))


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    return suite.parse(SUITE, arguments)
