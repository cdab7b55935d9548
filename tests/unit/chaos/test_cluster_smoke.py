"""A cluster in one command: real nodes, real clients, kill -9, and nothing is lost."""

import json
import os
import signal
import subprocess
import sys
import threading

from typer.testing import CliRunner

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.harness.local_files import command_line
from raftq.node.cli import app

RUNNER = CliRunner()
WHOLE_S = 300


def lines(*arguments: str, stdin: bytes | None = None) -> list:
    done = RUNNER.invoke(app, [*arguments, "--format", "json"], input=stdin)
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_three_nodes_in_one_command_survive_a_kill_without_losing_a_record(tmp_path):
    """
    1. `raftq cluster up`; a topic with three replicas; 500 records.
    2. The leader of partition 0 is killed with SIGKILL; 500 more records.
    3. It is restarted and adopted; every record is read exactly once, in order.
    4. Ctrl-C stops all of them, the adopted one too.
    """
    data = str(tmp_path / "cluster")
    command = [sys.executable, "-m", "raftq.node.cli", "cluster", "up", "--data", data]
    up = subprocess.Popen(
        [*command, "--format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    watchdog = threading.Timer(WHOLE_S, up.kill)
    watchdog.start()
    with up:
        try:
            told = json.loads(up.stdout.readline())
            assert [one["id"] for one in told["nodes"]] == [1, 2, 3]
            assert told["data"] == data
            progress = ("-b", told["bootstrap"])
            lines(*progress, "topic", "create", "t", "-p", "1", "-r", "3")
            first = b"".join(b"%d\n" % n for n in range(500))
            assert lines(*progress, "produce", "t", "-", stdin=first)[0]["count"] == 500

            leader = lines(*progress, "topic", "describe", "t")[0]["partitions"][0]["leader"]
            lines("cluster", "kill", str(leader), "--data", data)
            assert f"node {leader} died (signal 9)".encode() in up.stderr.readline()
            second = b"".join(b"%d\n" % n for n in range(500, 1000))
            assert lines(*progress, "produce", "t", "-", stdin=second)[0]["count"] == 500

            pid = lines("cluster", "restart", str(leader), "--data", data)[0]["pid"]
            assert f"node {leader} is back (process {pid})".encode() in up.stderr.readline()
            values = [int(one["value"]) for one in lines(*progress, "consume", "t")]
            assert values == list(range(1000))
        finally:
            up.send_signal(signal.SIGINT)
            rest = up.stderr.read()
            watchdog.cancel()
    assert up.returncode == 0, rest
    assert b"the data is kept" in rest
    pids = [
        one["pid"] for one in json.loads((tmp_path / "cluster/cluster.json").read_text())["nodes"]
    ]
    assert pid in pids
    assert not any(command_line(one) for one in pids)


def test_a_cluster_that_was_stopped_or_killed_whole_comes_back_with_its_records(tmp_path):
    with LocalCluster(tmp_path / "c", 3) as cluster:
        progress = ("-b", cluster.bootstrap)
        lines(*progress, "topic", "create", "t", "-p", "2", "-r", "3")
        lines(*progress, "produce", "t", *(str(n) for n in range(20)))
        for node_id in cluster.ids:
            os.kill(cluster.pid(node_id), signal.SIGKILL)
        for node_id in cluster.ids:
            os.waitid(os.P_PID, cluster.addresses(node_id).pid, os.WEXITED | os.WNOWAIT)
            cluster.restart(node_id, timeout=None)
        cluster.wait_ready()
        lines(*progress, "produce", "t", "20")
    with LocalCluster(tmp_path / "c", 3) as cluster:
        values = sorted(int(one["value"]) for one in lines("-b", cluster.bootstrap, "consume", "t"))
    assert values == list(range(21))
