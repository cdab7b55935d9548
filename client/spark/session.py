"""Shell: a Spark session on this machine, with the data source registered.

For the pipelines, tests and first steps. On a cluster Spark makes the session, and only
`spark.dataSource.register(RaftqSource)` is needed.
"""

import os
import sys
from collections.abc import Mapping

from pyspark.sql import SparkSession

from raftq.client.spark.java import find_java
from raftq.client.spark.source import RaftqSource

DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.log.level": "ERROR",
}


def local_session(
    master: str = "local[*]", name: str = "raftq", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A session; Java is looked for, and executors use this Python."""
    if "SPARK_REMOTE" not in os.environ:
        os.environ["JAVA_HOME"] = find_java()
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    if master.startswith("local"):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.appName(name).master(master)
    for key, value in {**DEFAULTS, **(config or {})}.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    spark.dataSource.register(RaftqSource)
    return spark
