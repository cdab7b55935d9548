"""Shell: whether a task has got all its rows.

If something before the sink fails, Spark closes the stream of rows, and for a reader of Arrow that
looks like its regular end. The task would write its last, unfinished batches, and write them again,
whole, when it is repeated. After a regular end Spark's protocol goes on, so the next byte decides.
The stream is a local variable of Spark's own worker. If it cannot be found, nothing is known, and a
warning says what that may cost.
"""

import logging
import sys
from types import FrameType

from raftq.client.common.errors import RaftqError

logger = logging.getLogger(__name__)

NAME = "infile"  # in pyspark.worker.main


class RowsCut(RaftqError):
    """The rows of a task ended because something before the sink failed."""

    code = "spark_rows_cut"
    outcome = "failed"


def check_complete() -> None:
    """Raises RowsCut if rows are missing. Call it after the last row."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        stream = frame.f_locals.get(NAME)
        if stream is not None and hasattr(stream, "peek"):
            if not stream.peek(1):
                raise RowsCut("the rows of this task ended early: a step before the sink failed")
            return
        frame = frame.f_back
    logger.warning(
        "whether all rows came cannot be told here: if a step before the sink fails, its "
        "repetition may write up to one batch per partition twice"
    )
