"""Shell: where a report's picture goes, and what the report says if there is none.

Pictures are drawn with matplotlib on the driver, from aggregates. It is imported only when a
picture is drawn; a report without it is still a report.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from raftq.client.spark.pipelines.outcome import Drawn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BUCKETS_MAX = 2_000
DPI = 110
NO_MATPLOTLIB = "there is no picture, because matplotlib is not installed: pip install matplotlib"


def too_many(buckets: int) -> str:
    return (
        f"there is no picture, because {buckets:,} buckets of time are too many to see "
        f"(at most {BUCKETS_MAX:,}): make them larger"
    )


def local_path(path: str) -> str | None:
    """The path on this machine; None for one that only Spark can reach, such as s3a://..."""
    parts = urlsplit(path)
    if parts.scheme == "file":
        return unquote(parts.path)
    return path if not parts.scheme or len(parts.scheme) == 1 else None  # C:\...


def save_picture(draw: "Callable[[], Figure]", path: str, name: str, given: str) -> Drawn:
    """Draws into the file `given`, otherwise into `path`/`name`."""
    place = local_path(given or f"{path}/{name}")
    if place is None:
        return Drawn(why_not=f"there is no picture, because {path} is not a directory of this "
                     "machine: name a file for it")  # fmt: skip
    try:
        figure = draw()
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        return Drawn(why_not=NO_MATPLOTLIB)
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    fresh = f"{place}.{os.getpid()}"
    figure.savefig(fresh, format="png", dpi=DPI)
    os.replace(fresh, place)  # a reader sees the old file meanwhile
    return Drawn(path=place)
