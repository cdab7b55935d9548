"""Shell: checks before Spark starts, and the cause of a failed job.

Spark needs seconds to start and reports errors in pages. So everything that can be checked before
is checked before. The cause of a failed job is reported in one sentence.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from raftq.client.common.errors import (
    DirectoryReadOnly,
    InvalidArgument,
    RaftqError,
    UnknownTopic,
)
from raftq.client.spark.failures import JobFailed, cause
from raftq.node.cli.bootstrap import open_admin
from raftq.node.cli.output import TRACEBACK
from raftq.node.cli.spark_log import SparkLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def need_spark() -> None:
    """Checks that PySpark and Java are here; raises ConfigError if not. PySpark may be imported
    then."""
    from raftq.client.spark import find_java, job_session  # noqa: F401, PLC0415
    from raftq.client.spark.session import is_submitted  # noqa: PLC0415

    if not is_submitted():
        find_java()


def names(text: str) -> tuple[str, ...]:
    """The names in a list that is separated by commas."""
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def need_topics(bootstrap: str, topics: Sequence[str], pattern: str = "", suffix: str = "") -> None:
    """Checks that named topics exist, and one that matches. `suffix` may be part of a name or
    not."""
    try:
        wanted = re.compile(pattern)
    except re.error as error:
        raise InvalidArgument(f"{pattern!r} is no regular expression: {error}") from None
    with open_admin(bootstrap) as admin:
        known = set(admin.list_topics())
    bare = {name.removesuffix(suffix) for name in known}
    for topic in topics:
        if topic not in known and topic.removesuffix(suffix) not in bare:
            raise UnknownTopic(f"no topic is named {topic!r}")
    if pattern and not any(wanted.fullmatch(name) for name in known | bare):
        raise UnknownTopic(f"no topic matches {pattern!r}")


def need_place(path: str, master: str) -> None:
    """Checks that a directory of this machine can be written to."""
    place = _local(path, master)
    if place is None:
        return
    try:
        os.makedirs(place, exist_ok=True)
    except OSError as error:
        raise DirectoryReadOnly(f"{path} cannot be written to: {error.strerror}") from None
    if not os.access(place, os.W_OK | os.X_OK):
        raise DirectoryReadOnly(f"{path} cannot be written to: permission denied")


def need_archive(path: str, master: str) -> None:
    place = _local(path, master)
    if place is not None and not os.path.isdir(os.path.join(place, "data")):
        raise InvalidArgument(f"there is no archive at {path}")


def _local(path: str, master: str) -> str | None:
    """The path if Spark runs here and paths without a scheme are those of this machine."""
    from raftq.client.spark.pipelines.picture_file import local_path  # noqa: PLC0415
    from raftq.client.spark.session import is_submitted  # noqa: PLC0415

    here = not is_submitted() and (not master or master.startswith("local"))
    return local_path(path) if here else None


@contextmanager
def job(master: str) -> "Iterator[SparkSession]":
    """A session for one job. A failure becomes one sentence."""
    from raftq.client.spark import job_session  # noqa: PLC0415
    from raftq.client.spark.session import is_submitted  # noqa: PLC0415

    log = SparkLog()
    try:
        with nullcontext() if is_submitted() or os.environ.get(TRACEBACK) else log.aside():
            spark = job_session(master)
        yield spark
    except RaftqError:
        log.drop()
        raise
    except Exception as error:
        sentence = cause(error)
        if sentence is None or os.environ.get(TRACEBACK):
            raise
        raise JobFailed(sentence + log.where()) from error
    log.drop()
