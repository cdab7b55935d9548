"""Which seeds and crash points a simulation runs, and how a failure says how to repeat it.

A tenth of the seeds, and at least one, runs in `make test`; all of them in `make test-all`.

RAFTQ_SIM_SEEDS=1000   that many seeds instead of each test's default
RAFTQ_SIM_SEED=17      only this seed
RAFTQ_SIM_POINT=42     only this crash point
RAFTQ_SIM_POINTS=10    about so many crash points of a seed, for many seeds in little time
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

SMALL_SHARE = 10


def seeds(default: int, found: Sequence[int] = ()) -> list[Any]:
    """Seeds as parameters of one test; `default` is its share of the time of `make test-all`.

    Those that have `found` a mistake once run in every size.
    """
    numbers = _numbers(default)
    params = [_sized(one, one, default) for one in numbers if one not in found]
    is_single = "RAFTQ_SIM_SEED" in os.environ
    return params + [pytest.param(one) for one in found if not is_single or one in numbers]


def seed_groups(default: int, each: int) -> list[Any]:
    """The same in groups: each is one test, so that short runs spread over the processors."""
    numbers = _numbers(default)
    groups = [numbers[at : at + each] for at in range(0, len(numbers), each)]
    return [_sized(list(one), one[0], default, f"{one[0]}-{one[-1]}") for one in groups]


def _numbers(default: int) -> Sequence[int]:
    if "RAFTQ_SIM_SEED" in os.environ:
        return [int(os.environ["RAFTQ_SIM_SEED"])]
    return range(int(os.environ.get("RAFTQ_SIM_SEEDS", default)))


def _sized(value: Any, first: int, default: int, name: str | None = None) -> Any:
    """A seed that was asked for is never left out."""
    is_asked = "RAFTQ_SIM_SEED" in os.environ or "RAFTQ_SIM_SEEDS" in os.environ
    is_small = is_asked or first * SMALL_SHARE < default
    return pytest.param(value, marks=() if is_small else pytest.mark.full, id=name)


def points(total: int, seed: int, points_max: int) -> Sequence[int]:
    """Crash points 1..total, or about `points_max` of them spread evenly from a random first."""
    if "RAFTQ_SIM_POINT" in os.environ:
        return [int(os.environ["RAFTQ_SIM_POINT"])]
    points_max = int(os.environ.get("RAFTQ_SIM_POINTS", points_max))
    stride = -(-total // points_max)
    return range(1 + Random(f"points {seed}").randrange(stride), total + 1, stride)


@contextmanager
def replayable(test: str, seed: int, point: int | None = None) -> Iterator[None]:
    """Adds to a failure of this block how to repeat it."""
    try:
        yield
    except BaseException as error:
        at = "" if point is None else f" RAFTQ_SIM_POINT={point}"
        error.add_note(f"seed {seed}" + ("" if point is None else f", crash point {point}"))
        error.add_note(
            f"replay: RAFTQ_SIM_SEED={seed}{at} .venv/bin/python -m pytest tests/sim -k {test}"
        )
        raise


def assert_same_trace_elsewhere(call: str, module: str, trace_hash: str) -> None:
    """Runs a simulation in other processes, where sets of strings have another order."""
    here = Path(__file__).parent
    program = (
        "import sys\n"
        f"sys.path[:0] = [{str(here)!r}, {str(here.parent / 'fakes')!r}]\n"
        f"from {module} import simulate\n"
        f"print({call}.loop.trace_hash())\n"
    )
    for hash_seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        assert found.stdout.strip() == trace_hash
