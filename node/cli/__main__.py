"""Shell: `python -m raftq.node.cli`, the same as `raftq`."""

from raftq.node.cli import main

if __name__ == "__main__":
    main()
