"""Pure: why a Spark job failed, in one sentence.

Spark reports an error of a task or of the driver as text: nested exceptions of Java and Python,
with the stacks of both. A person needs the innermost cause.
"""

import re

from raftq.client.common.errors import RaftqError

# The last line of a Python traceback with one of our errors: its class and its text.
_OURS = re.compile(r"^\s*(?:[\w.]*raftq[\w.]*\.)(\w+): (.+)$", re.MULTILINE)
# A Java exception, which py4j begins with a colon and Java with "Caused by: ".
_JAVA = re.compile(
    r"^(?:Caused by: |: )?((?:[a-z]\w*\.)+[A-Z]\w*(?:Exception|Error)): (.+)$", re.MULTILINE
)
_CONDITION = re.compile(r"^\[([A-Z_.0-9]+)\] ")
_SQLSTATE = re.compile(r" SQLSTATE: \w+$")
LENGTH_MAX = 400


class JobFailed(RaftqError):
    """A Spark job has failed."""

    code = "spark_job_failed"


def cause(error: BaseException) -> str | None:
    """The sentence; None for an error that does not come from Spark."""
    if not type(error).__module__.startswith(("pyspark.", "py4j.")):
        return None
    text = str(error)
    ours = _OURS.findall(text)
    if ours:
        return _short(ours[-1][1])
    java = _JAVA.findall(text)
    if java:
        return _short(f"{java[-1][0].rpartition('.')[2]}: {java[-1][1]}")
    return _short(text)


def _short(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "Spark says nothing")
    line = _SQLSTATE.sub("", _CONDITION.sub("", line))
    return line if len(line) <= LENGTH_MAX else line[: LENGTH_MAX - 1] + "\u2026"
