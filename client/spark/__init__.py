"""RaftQ in Spark: topics as batch and streaming DataFrames, and as sinks. Needs `raftq[spark]`.

    from raftq.client.spark import RaftqSource
    spark.dataSource.register(RaftqSource)
    spark.read.format("raftq").option("bootstrap", "127.0.0.1:7070").option("subscribe", "orders")

Names are loaded on first use: finding Java must not need PySpark.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from raftq.client.common.errors import ConfigError

if TYPE_CHECKING:
    from raftq.client.spark.java import find_java as find_java
    from raftq.client.spark.session import job_session as job_session
    from raftq.client.spark.session import local_session as local_session
    from raftq.client.spark.source import RaftqSource as RaftqSource

_HOMES = {
    "RaftqSource": "raftq.client.spark.source",
    "find_java": "raftq.client.spark.java",
    "job_session": "raftq.client.spark.session",
    "local_session": "raftq.client.spark.session",
}

__all__ = ["RaftqSource", "find_java", "job_session", "local_session"]


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'raftq.client.spark' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("pyspark", "pyarrow"):
            raise ConfigError("Spark needs the extra raftq[spark] (pyspark, pyarrow)") from error
        raise
