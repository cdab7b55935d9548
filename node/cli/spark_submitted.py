"""Shell: the program that spark-submit is given; its arguments are those of `raftq spark`.

spark-submit --master yarn $(raftq spark file) archive hdfs:///archive --topics orders
"""

import sys


def main() -> None:
    # Here, so that the commands can name this file without a circle of imports.
    from raftq.node.cli import main as raftq  # noqa: PLC0415

    sys.argv[1:1] = ["spark"]
    raftq()


if __name__ == "__main__":
    main()
