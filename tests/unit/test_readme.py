"""The README's examples do what they say."""

import re
import subprocess
import sys
from pathlib import Path

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.client.sync.admin import Admin

README = Path(__file__).parents[2] / "README.md"


def example(importing: str) -> str:
    """The one Python block that imports this."""
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if f"import {importing}" in block]
    return str(found)


def run(text: str, directory: Path) -> list[str]:
    script = directory / "example.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_queue_example_runs_as_it_stands(tmp_path: Path) -> None:
    *audited, letters, counts = run(example("Queue"), tmp_path)
    assert len(audited) == 8, "six messages and two that were shipped"
    assert letters == "['cannot read this order'] 1"
    assert counts == "9 pending, 1 delayed"


def test_the_cluster_example_runs_against_three_nodes(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", nodes=3) as cluster:
        text = example("Admin").replace("127.0.0.1:7070", cluster.bootstrap)
        appended, counted = run(text, tmp_path)
    assert appended.startswith("Appended(topic='payments', partition=")
    assert counted == "10001 records"


def test_the_example_of_groups_and_queues_runs_against_three_nodes(tmp_path: Path) -> None:
    with LocalCluster(tmp_path / "cluster", nodes=3) as cluster:
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("orders", partitions=3, replication=3)
        text = example("Consumer, Producer, QueueClient").replace(
            "127.0.0.1:7070", cluster.bootstrap
        )
        assigned, counts = run(text, tmp_path)
    assert "('orders', 2)" in assigned
    assert "'rejected': 1" in counts
