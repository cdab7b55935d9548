"""Why a Spark job failed, in one sentence. (Pure.)

Spark hands on what went wrong in a task or on the driver as text: exceptions of Java and of Python
one in another, with the stacks of both. What a person needs is the innermost cause.
"""

import re

from raftq.client.common.errors import RaftqError

# The last line of a Python traceback with one of our errors: its class, and what it says.
_OURS = re.compile(r"^\s*(?:[\w.]*raftq[\w.]*\.)(\w+): (.+)$", re.MULTILINE)
# A Java exception, which py4j begins with a colon and Java with "Caused by: ".
_JAVA = re.compile(
    r"^(?:Caused by: |: )?((?:[a-z]\w*\.)+[A-Z]\w*(?:Exception|Error)): (.+)$", re.MULTILINE
)
_CONDITION = re.compile(r"^\[([A-Z_.0-9]+)\] ")
_SQLSTATE = re.compile(r" SQLSTATE: \w+$")
LENGTH_MAX = 400


class JobFailed(RaftqError):
    """A job of Spark did not come to its end."""

    code = "spark_job_failed"


def cause(error: BaseException) -> str | None:
    """The sentence; None for an error that is not one of Spark."""
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
