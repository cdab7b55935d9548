"""Shell: the program for spark-submit; its arguments are those of `raftq spark`.

spark-submit --master yarn $(raftq spark file) archive hdfs:///archive --topics orders
"""

import os
import sys


def main() -> None:
    # Python looks for modules in a program's own folder first, and a module here is named `queue`.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != here]
    from raftq.node.cli import main as raftq  # noqa: PLC0415

    sys.argv[1:1] = ["spark"]
    raftq()


if __name__ == "__main__":
    main()
