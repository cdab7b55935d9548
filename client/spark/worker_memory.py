"""Shell: keeps Spark's Python workers from looking for garbage where there is none.

A worker collects garbage after every task, each time through everything that was ever imported:
38 ms with pyarrow and this package, ten times what a short task takes.
"""

import gc
from functools import cache


@cache
def spare_imports() -> None:
    """What is there at the first task stays, and is not looked at again."""
    gc.freeze()
