"""Ready-made jobs: archive, replay, compaction, and reports of dead letters and of latency.

Each is a function of a session, so it runs from the command line (`raftq spark ...`), from
spark-submit, or from a notebook. Records stay in Spark; only aggregates come to the driver.
"""

from raftq.client.spark.pipelines.archiving import ArchiveProgress, archive, archived
from raftq.client.spark.pipelines.compaction import compact
from raftq.client.spark.pipelines.dead_letters import LetterReport, dead_letter_report
from raftq.client.spark.pipelines.latency import LatencyReport, Origin, latency_report, parse_origin
from raftq.client.spark.pipelines.outcome import Done
from raftq.client.spark.pipelines.replaying import Replay, replay
from raftq.client.spark.pipelines.selection import Selection

__all__ = [
    "ArchiveProgress",
    "Done",
    "LatencyReport",
    "LetterReport",
    "Origin",
    "Replay",
    "Selection",
    "archive",
    "archived",
    "compact",
    "dead_letter_report",
    "latency_report",
    "parse_origin",
    "replay",
]
