"""A local cluster: real processes of a stand-in node, started, killed, paused and brought back."""

import json
import os
import random
import select
import signal
import socket
import stat
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from raftq.chaos.harness import local_ports
from raftq.chaos.harness.local_cluster import LocalCluster, kill_node, restart_node
from raftq.chaos.harness.local_files import LocalFiles, command_line
from raftq.chaos.harness.local_ports import free_ports, is_free
from raftq.client.common.errors import ConfigError, InternalError, InvalidArgument, RequestTimeout
from raftq.node.config_source import load_config

STAND_IN = """
    import argparse, json, os, signal, socket, sys, tomllib

    parser = argparse.ArgumentParser()
    for name in ("--config", "--ready-file", "--die-with"):
        parser.add_argument(name)
    options = parser.parse_args()
    mode = os.environ.get("STAND_IN", "")
    with open(options.config, "rb") as file:
        config = tomllib.load(file)
    node_id = config["node_id"]
    if options.die_with:
        from raftq.node.process import die_with
        die_with(int(options.die_with))
    if mode == f"broken {node_id}":
        sys.exit("error: the disk is on fire")
    once = os.path.join(os.path.dirname(options.config), "clashed")
    if mode == f"clash {node_id}" and not os.path.exists(once):
        open(once, "w").close()
        sys.exit("OSError: [Errno 98] Address already in use")
    host, port = config["native"].rsplit(":", 1)
    listener = socket.create_server((host, int(port)))
    if mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    else:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    if mode != "slow":
        draft = options.ready_file + ".new"
        with open(draft, "w") as file:
            json.dump({"node_id": node_id, "pid": os.getpid()}, file)
        os.replace(draft, options.ready_file)
    while True:
        signal.pause()
"""


@pytest.fixture
def command(tmp_path) -> tuple[str, ...]:
    script = tmp_path / "stand_in.py"
    script.write_text(textwrap.dedent(STAND_IN))
    return (sys.executable, str(script))


@pytest.fixture
def make(tmp_path, command):
    made = []

    def make(nodes: int = 2, mode: str = "", **options) -> LocalCluster:
        options = {"command": command, "stop_s": 10.0} | options
        cluster = LocalCluster(tmp_path / "c", nodes, env={"STAND_IN": mode}, **options)
        made.append(cluster)
        return cluster

    yield make
    for cluster in made:
        cluster.close(timeout=0.0)


def answers(address: str) -> bool:
    host, port = address.rsplit(":", 1)
    with socket.socket() as one:
        one.settimeout(5)
        return one.connect_ex((host, int(port))) == 0


def test_every_node_is_a_process_told_of_in_cluster_json(make):
    with make(3) as cluster:
        told = json.loads(Path(cluster.files.cluster).read_text())["nodes"]
        assert [one["id"] for one in told] == [1, 2, 3]
        addresses = [one[name] for one in told for name in ("native", "http", "raft")]
        assert len(set(addresses)) == 9
        for one in told:
            assert set(one) == {"id", "pid", "host", "native", "http", "raft"}
            assert answers(one["native"])
            assert cluster.files.config(one["id"]) in command_line(one["pid"])
        assert cluster.bootstrap == ",".join(one["native"] for one in told)
    assert not any(command_line(one["pid"]) for one in told)


def test_a_killed_node_comes_back_under_its_address_with_another_pid(make):
    with make() as cluster:
        before = cluster.addresses(2)
        cluster.kill(2)
        assert not cluster.is_running(2)
        assert cluster.pid(2) is None
        assert not answers(before.native)
        assert cluster.died() == []  # it was told to
        with pytest.raises(InvalidArgument, match="does not run"):
            cluster.kill(2)
        cluster.restart(2)
        after = cluster.addresses(2)
        assert after.native == before.native
        assert after.pid != before.pid
        assert cluster.files.node(2).pid == after.pid
        with pytest.raises(InvalidArgument, match="runs already"):
            cluster.restart(2)


def test_stop_pause_and_resume_reach_the_process(make):
    with make() as cluster:
        pid = cluster.pid(1)
        cluster.pause(1)
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        cluster.resume(1)
        os.waitid(os.P_PID, pid, os.WCONTINUED | os.WNOWAIT)
        cluster.pause(1)
        cluster.stop(1)
        assert not cluster.is_running(1)
        assert cluster.is_running(2)


def test_a_node_that_dies_by_itself_is_reported_once(make):
    with make() as cluster:
        assert cluster.died() == []
        os.kill(cluster.pid(1), signal.SIGKILL)
        os.waitid(os.P_PID, cluster.addresses(1).pid, os.WEXITED | os.WNOWAIT)
        assert cluster.died() == [(1, "signal 9")]
        assert cluster.died() == []


def test_a_node_that_ends_at_its_start_says_why(make):
    cluster = make(mode="broken 2")
    with pytest.raises(InternalError, match=r"node 2 .* the disk is on fire"), cluster:
        pass
    assert not cluster.is_running(1)


def test_a_port_that_was_taken_meanwhile_is_chosen_again(make):
    cluster = make(mode="clash 2")
    cluster.start()
    first = cluster.addresses(1).native
    cluster.wait_ready()
    assert cluster.addresses(1).native != first
    assert answers(cluster.addresses(1).native)


def test_a_node_that_is_never_ready_is_an_error_in_time(make):
    cluster = make(1, mode="slow")
    cluster.start()
    with pytest.raises(RequestTimeout, match="node 1 is not ready"):
        cluster.wait_ready(0.2)


def test_close_kills_what_does_not_stop(make):
    cluster = make(mode="deaf", stop_s=0.2)
    with cluster:
        pids = [cluster.pid(one) for one in cluster.ids]
        with pytest.raises(RequestTimeout, match="does not stop"):
            cluster.stop(1)
    assert not any(command_line(pid) for pid in pids)


def test_nodes_end_with_the_process_that_started_them(tmp_path, command):
    code = (
        "import sys; from raftq.chaos.harness.local_cluster import LocalCluster;"
        "c = LocalCluster(sys.argv[1], 2, command=sys.argv[2:]); c.start(); c.wait_ready();"
        "print(*(c.pid(n) for n in c.ids), flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "c"), *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        pids = [int(one) for one in parent.stdout.readline().split()]
        watched = [os.pidfd_open(pid) for pid in pids]
        parent.kill()
    for pid, descriptor in zip(pids, watched, strict=True):
        _wait_readable(descriptor)
        os.close(descriptor)
        assert not command_line(pid)


def _wait_readable(descriptor: int) -> None:
    assert select.select([descriptor], [], [], 20)[0], "the process lives on"


def test_a_second_start_keeps_addresses_and_secret_and_refuses_another_size(make):
    first = make()
    with first:
        known = {one: first.addresses(one).native for one in first.ids}
        other = make()
        with pytest.raises(InvalidArgument, match="runs already"), other:
            pass
        assert all(first.is_running(one) for one in first.ids)
    secret = Path(first.files.secret).read_text()
    with make() as again:
        assert {one: again.addresses(one).native for one in again.ids} == known
    assert Path(first.files.secret).read_text() == secret
    assert len(secret.strip()) == 64
    assert stat.S_IMODE(os.stat(first.files.secret).st_mode) == 0o600
    with pytest.raises(InvalidArgument, match="2 nodes, not 3"):
        make(3).start()


def test_what_another_process_kills_and_restarts_is_adopted(make, command):
    """The restarted node outlives its starter, and ends with the cluster that adopted it."""
    code = (
        "import sys; from raftq.chaos.harness import local_cluster;"
        "local_cluster.COMMAND = sys.argv[2:];"
        "print(local_cluster.restart_node(sys.argv[1], 1).pid)"
    )
    with make() as cluster:
        directory = cluster.files.directory
        old = cluster.pid(1)
        assert kill_node(directory, 1) == old
        # The one who kills sees it gone a moment before its parent can collect it.
        os.waitid(os.P_PID, old, os.WEXITED | os.WNOWAIT)
        assert cluster.died() == [(1, "signal 9")]
        with pytest.raises(InvalidArgument, match="does not run"):
            kill_node(directory, 1)
        starter = [sys.executable, "-c", code, directory, *command]
        pid = int(subprocess.run(starter, check=True, capture_output=True).stdout)
        assert cluster.adopt() == [1]
        assert cluster.adopt() == []
        assert cluster.pid(1) == pid != old
        assert answers(cluster.addresses(1).native)
        with pytest.raises(InvalidArgument, match="runs already"):
            restart_node(directory, 1)
    assert not command_line(pid)


def test_a_pid_that_is_somebody_else_is_never_signalled(tmp_path):
    files = LocalFiles(str(tmp_path))
    row = {"id": 1, "pid": os.getpid(), "host": "h", "native": "h:1", "http": "h:2", "raft": "h:3"}
    (tmp_path / "cluster.json").write_text(json.dumps({"nodes": [row]}))
    assert not files.is_running(files.node(1))
    with pytest.raises(InvalidArgument, match="does not run"):
        kill_node(str(tmp_path), 1)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no cluster"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"nodes": [{"id": 1}]}', "damaged"),
        (
            '{"nodes": [{"id":1,"pid":-1,"host":"h","native":"","http":"","raft":""}]}',
            "positive number",
        ),
        ('{"nodes": []}', "there is no node 1"),
    ],
)
def test_a_missing_or_damaged_cluster_file_is_a_clear_error(tmp_path, content, words):
    if content is not None:
        (tmp_path / "cluster.json").write_text(content)
    for act in (kill_node, restart_node):
        with pytest.raises(InvalidArgument, match=words):
            act(str(tmp_path), 1)


def test_the_settings_of_every_node_are_ones_that_a_node_accepts(make):
    """Five voters of six; the last one only follows and gets seeds."""
    cluster = make(6, settings={"storage.scrub_bytes_s": 0, "rack": 'a "b"', "log_format": "json"})
    os.makedirs(cluster.files.directory)
    cluster.files.make_secret()
    cluster.nodes = cluster._planned()
    cluster._write_files()
    loaded = [load_config(cluster.files.config(one), environment={}) for one in cluster.ids]
    assert [one.is_voter for one in loaded] == [True] * 5 + [False]
    assert len(loaded[5].seeds) == 5
    for node_id, config in enumerate(loaded, 1):
        assert config.node_id == node_id
        assert config.data_dir == os.path.join(cluster.files.directory, f"node-{node_id}")
        assert str(config.native) == cluster.addresses(node_id).native
        assert (config.rack, config.storage.scrub_bytes_s) == ('a "b"', 0)
        assert config.secret == loaded[0].secret


def test_given_ports_are_used_or_refused(make):
    def is_row(port: int) -> bool:
        return all(is_free("127.0.0.1", port + apart) for apart in (100, 200))

    # The ports above may be taken by whatever else runs here.
    base = next(port for port in free_ports("127.0.0.1", 50) if is_row(port))
    cluster = make(1, port=base)
    node = cluster._planned()[1]
    assert [int(one.rsplit(":", 1)[1]) - base for one in (node.native, node.http, node.raft)] == [
        0,
        100,
        200,
    ]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        if port < 65000:
            with pytest.raises(InvalidArgument, match=f"port {port}"):
                make(1, port=port)._planned()
    with pytest.raises(InvalidArgument, match="no room"):
        make(1, port=65500)._planned()
    for count in (0, 33):
        with pytest.raises(InvalidArgument, match="1 to 32"):
            make(count)
    with pytest.raises(InvalidArgument, match="no node 3"):
        make(2).kill(3)


def test_free_ports_are_different_free_and_below_the_outgoing_range():
    ports = free_ports("127.0.0.1", 20)
    assert len(set(ports)) == 20
    assert all(is_free("127.0.0.1", port) for port in ports)
    assert max(ports) < 32768 or not os.path.exists("/proc/sys/net")
    with pytest.raises(ConfigError, match="free ports"):
        free_ports("192.0.2.1", 1)  # an address that this machine does not have


def test_a_port_is_not_given_out_again_though_nobody_listens_there_yet(monkeypatch):
    """Also not by another process: a node that is down for a while must be able to come back."""
    if not sys.platform.startswith("linux"):
        pytest.skip("claims are for Linux only")
    first = free_ports("127.0.0.1", 30, random.Random(7))
    assert not set(first) & set(free_ports("127.0.0.1", 30, random.Random(7)))
    code = (
        "import random\n"
        "from raftq.chaos.harness.local_ports import free_ports\n"
        "print(free_ports('127.0.0.1', 30, random.Random(7)))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(first) & set(json.loads(told.stdout))
    monkeypatch.setattr(local_ports, "CLAIMS_MAX", 5)
    free_ports("127.0.0.1", 1)
    assert len(local_ports._claims) == 5, "the oldest claims are given up"
