"""Shell: the figures of Spark beside a cluster: `python -m raftq_bench spark [FIGURE...]`.

A warm session (local[2]) and three nodes on this machine; each figure is compared with Spark doing
the same with Parquet, in the same run. Needs raftq[spark] and Java.
"""

from raftq_bench import spark_read, spark_stream, spark_write, suite

SIZE_GIB = 4.0
FIGURES: dict[str, tuple[suite.Measure, str]] = {
    "read": (spark_read.measure, "batch: values, group by, count, and memory of a worker"),
    "stream": (spark_stream.measure_backlog, "a stream that works off a backlog"),
    "trickle": (spark_stream.measure_trickle, "what a micro-batch costs when little comes"),
    "write": (spark_write.measure, "rows copied from Parquet to a topic, acks=all"),
}
SUITE = suite.Suite("spark", __doc__ or "", FIGURES, size_gib=SIZE_GIB)
