"""Shell: a Spark session with the data source registered.

`local_session` is for this machine: tests, first steps, and jobs of the command line. A job that
spark-submit has started uses the session with the settings given there, `job_session`. Any other
session only needs `spark.dataSource.register(RaftqSource)`.
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


LOCAL = "local[*]"
# Set by spark-submit for the program that it starts.
SUBMITTED = "PYSPARK_GATEWAY_PORT"


def is_submitted() -> bool:
    """Whether spark-submit has started this process: then Java runs already."""
    return SUBMITTED in os.environ


def job_session(master: str = "", name: str = "raftq") -> SparkSession:
    """The session of a job: that of spark-submit, otherwise a local one."""
    if not is_submitted():
        return local_session(master or LOCAL, name)
    spark = SparkSession.builder.getOrCreate()
    # Times without a zone mean UTC everywhere in the jobs.
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    spark.dataSource.register(RaftqSource)
    return spark


def local_session(
    master: str = LOCAL, name: str = "raftq", config: Mapping[str, str] | None = None
) -> SparkSession:
    """A new session. It looks for Java, and executors use this Python."""
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
