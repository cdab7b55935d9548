"""Which seeds and crash points a simulation runs, and how a failure says how to repeat it.

RAFTQ_SIM_SEEDS=1000   that many seeds instead of each test's default
RAFTQ_SIM_SEED=17      only this seed
RAFTQ_SIM_POINT=42     only this crash point
RAFTQ_SIM_POINTS=10    about so many crash points of a seed, for many seeds in little time
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from random import Random


def seeds(default: int) -> Sequence[int]:
    """Seeds of one test; `default` is its share of the time of a normal run."""
    if "RAFTQ_SIM_SEED" in os.environ:
        return [int(os.environ["RAFTQ_SIM_SEED"])]
    return range(int(os.environ.get("RAFTQ_SIM_SEEDS", default)))


def points(total: int, seed: int, points_max: int) -> Sequence[int]:
    """Crash points 1..total, or about `points_max` of them spread evenly from a random first."""
    if "RAFTQ_SIM_POINT" in os.environ:
        return [int(os.environ["RAFTQ_SIM_POINT"])]
    points_max = int(os.environ.get("RAFTQ_SIM_POINTS", points_max))
    stride = -(-total // points_max)
    return range(1 + Random(f"points {seed}").randrange(stride), total + 1, stride)


@contextmanager
def replayable(test: str, seed: int, point: int | None = None) -> Iterator[None]:
    """Tell whoever reads the failure of this block how to see it again."""
    try:
        yield
    except BaseException as error:
        at = "" if point is None else f" RAFTQ_SIM_POINT={point}"
        error.add_note(f"seed {seed}" + ("" if point is None else f", crash point {point}"))
        error.add_note(
            f"replay: RAFTQ_SIM_SEED={seed}{at} .venv/bin/python -m pytest tests/sim -k {test}"
        )
        raise
