"""Shell: keeps Spark's Python workers from looking for garbage where there is none.

A worker collects garbage after every task, each time through all imported modules: 38 ms with
pyarrow and this package, ten times as long as a short task.
"""

import gc
from functools import cache


@cache
def spare_imports() -> None:
    """Excludes everything that exists at the first task from garbage collection."""
    gc.freeze()
