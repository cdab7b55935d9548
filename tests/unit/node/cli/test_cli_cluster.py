"""The commands for clusters: their arguments, output and errors, against clients that pretend."""

import base64
import io
import json
import os
import socket
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
from msgspec.structs import asdict
from typer.testing import CliRunner

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.harness.local_files import LocalNode
from raftq.client.common.errors import ConnectFailed, NotEnoughReplicas, TopicExists, UnknownTopic
from raftq.client.results import Appended, PartitionDescription, Record, TopicDescription
from raftq.client.wire.admin_messages import ClusterStatusReply
from raftq.client.wire.messages import NodeInfo
from raftq.node.cli import app, local
from raftq.node.cli.consume import StartPoint, parse_place
from raftq.node.cli.output import Format, whole_writes
from raftq.node.cli.queue import DEFAULT_GROUP
from raftq.node.cli.topic import parse_config
from raftq.node.queue.embedded import engine

BINARY = b"\xff\x00\xfe"
RUNNER = CliRunner()
STATUS = ClusterStatusReply("blue", 1, 2, 7, 99, (1, 2, 3), 2, 6, 0, 1, 0, 0, "0.1.0")
MOMENT_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z


@dataclass
class World:
    """What the pretended cluster holds, and what it was asked."""

    topics: dict[str, list[list[Record]]] = field(default_factory=dict)
    calls: list[tuple] = field(default_factory=list)
    status: ClusterStatusReply = STATUS
    times: list[tuple] = field(default_factory=list)
    error: Exception | None = None
    missing_from: int | None = None  # offsets from here on are gone without a record

    def note(self, *call) -> None:
        self.calls.append(call)
        if self.error is not None:
            raise self.error

    def description(self, name: str) -> TopicDescription:
        if name not in self.topics:
            raise UnknownTopic(f"no topic is named {name!r}")
        parts = [
            PartitionDescription(number, 1, 4, (1, 2), (1,), (), 0, len(records))
            for number, records in enumerate(self.topics[name])
        ]
        return TopicDescription(name, 5, {"min_insync": 1}, tuple(parts))


class Pretended:
    world: ClassVar[World]

    def __init__(self, bootstrap: str, **settings) -> None:
        self.world.note("open", type(self).__name__, bootstrap, settings)

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        self.world.calls.append(("close", type(self).__name__))


class Admin(Pretended):
    def create_topic(self, name, partitions, replication, config):
        self.world.note("create", name, partitions, replication, config)
        if name in self.world.topics:
            raise TopicExists(f"there is a topic {name!r} already")
        self.world.topics[name] = [[] for _ in range(partitions)]
        return self.world.description(name)

    def list_topics(self):
        return sorted(self.world.topics)

    def describe_topic(self, name):
        return self.world.description(name)

    def describe_topics(self):
        return [self.world.description(name) for name in sorted(self.world.topics)]

    def delete_topic(self, name):
        self.world.note("delete", name)

    def alter_topic(self, name, config):
        self.world.note("alter", name, config)

    def add_partitions(self, name, total):
        self.world.note("add", name, total)

    def move_replica(self, topic, partition, replicas):
        self.world.note("move", topic, partition, replicas)

    def drain(self, node_id, drain=True, decommission=False, force=False):
        self.world.note("drain", node_id, drain, decommission, force)
        return 2

    def remove_node(self, node_id):
        self.world.note("remove", node_id)

    def nodes(self):
        return [NodeInfo(1, "h1", 7070, rack="[bold]r\x1b"), NodeInfo(2, "h2", 7070, alive=False)]

    def cluster_status(self):
        return self.world.status


@dataclass
class Delivery:
    appended: Appended

    def result(self, timeout):
        return self.appended


@dataclass
class Deliveries:
    all: list[Appended]

    def result(self, timeout):
        return self.all

    def wait(self, timeout):
        return None


class Producer(Pretended):
    def send(
        self, topic, value, key=None, headers=None, priority="normal", partition=None, delay=None,
        deliver_at=None, ttl=None,
    ):  # fmt: skip
        self.world.note("send", priority)
        self.world.times.append((delay, deliver_at, ttl))
        records = self.world.topics[topic][partition or 0]
        records.append(
            Record(topic, partition or 0, len(records), key, value, MOMENT_MS, headers or {}, 1)
        )
        return Delivery(Appended(topic, partition or 0, len(records) - 1, MOMENT_MS))

    def send_many(self, topic, values, keys=None, priority="normal", partition=None):
        assert keys is None or len(keys) == len(values)
        sent = [
            self.send(topic, value, None if keys is None else keys[at], None, priority, partition)
            for at, value in enumerate(values)
        ]
        return Deliveries([one.appended for one in sent])


class Consumer(Pretended):
    def assign(self, partitions):
        self.at = dict.fromkeys(partitions, 0)

    def seek(self, topic, partition, offset=None, time=None, to=None):
        self.world.note("seek", partition, offset, time, to)
        if to == "latest":
            offset = len(self.world.topics[topic][partition])
        self.at[topic, partition] = offset or 0

    def position(self, topic, partition):
        return self.at[topic, partition]

    def poll(self, max_records, timeout):
        found = []
        for (topic, partition), offset in self.at.items():
            records = self.world.topics[topic][partition]
            kept = records[: self.world.missing_from]
            part = kept[offset : offset + max_records - len(found)]
            found += part
            gone = offset + len(part) >= len(kept) and self.world.missing_from is not None
            self.at[topic, partition] = len(records) if gone else offset + len(part)
        return found


@pytest.fixture
def world(monkeypatch) -> World:
    made = World()
    monkeypatch.setattr(Pretended, "world", made, raising=False)
    for kind in (Admin, Producer, Consumer):
        home = f"raftq.client.sync.{kind.__name__.lower()}"
        monkeypatch.setattr(f"{home}.{kind.__name__}", kind)
    monkeypatch.delenv("RAFTQ_BOOTSTRAP", raising=False)
    return made


def run(*arguments: str, stdin: bytes | None = None, env=None):
    return RUNNER.invoke(app, list(arguments), input=stdin, env=env)


def run_json(*arguments: str, stdin: bytes | None = None):
    done = run(*arguments, "--format", "json", stdin=stdin)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def run_lines(*arguments: str) -> list[dict]:
    done = run(*arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_refused(done, code: int, *words: str) -> None:
    """One line on stderr, nothing on stdout."""
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


def test_the_nearest_bootstrap_wins_then_the_environment_then_this_machine(world):
    def used(*arguments: str, env=None) -> str:
        world.calls.clear()
        assert run(*arguments, env=env).exit_code == 0
        return world.calls[0][2]

    there = {"RAFTQ_BOOTSTRAP": "env:1"}
    assert used("topic", "list") == "127.0.0.1:7070"
    assert used("topic", "list", env=there) == "env:1"
    assert used("-b", "root:2", "topic", "list", env=there) == "root:2"
    assert used("-b", "root:2", "topic", "list", "-b", "own:3,own:4", env=there) == "own:3,own:4"
    assert used("--bootstrap", "root:2", "cluster", "nodes") == "root:2"


def test_topics_are_created_listed_described_altered_and_deleted(world):
    made = run_json(
        "topic", "create", "orders", "-p", "2", "-r", "3", "-c", "min_insync=2", "-c", "fsync=none"
    )
    assert world.calls[1] == ("create", "orders", 2, 3, {"min_insync": 2, "fsync": "none"})
    assert (made["name"], len(made["partitions"])) == ("orders", 2)
    assert run_json("topic", "list") == ["orders"]
    assert run("topic", "list").stdout == "orders\n"
    found = run_json("topic", "describe", "orders")
    assert found["partitions"][1] == {
        "partition": 1,
        "leader": 1,
        "epoch": 4,
        "replicas": [1, 2],
        "isr": [1],
        "target": [],
        "start_offset": 0,
        "high_watermark": 0,
        "waits_for": [],
    }
    table = run("topic", "describe", "orders").stdout
    assert "min_insync" in table
    assert "1,2" in table
    run_json("topic", "alter", "orders", "-c", "retention_ms=-1", "-c", "fsync=")
    assert world.calls[-2] == ("alter", "orders", {"retention_ms": -1, "fsync": None})
    assert run_json("topic", "add-partitions", "orders", "12")["partitions"] == 12
    assert world.calls[-2] == ("add", "orders", 12)
    assert run("topic", "delete", "orders", "--yes").exit_code == 0
    assert world.calls[-2] == ("delete", "orders")


def test_a_topic_is_not_deleted_without_a_yes(world):
    assert_refused(run("topic", "delete", "orders"), 2, "--yes")
    assert ("delete", "orders") not in world.calls


def test_the_cluster_is_looked_at(world):
    world.topics["orders"] = [[]]
    assert run_json("cluster", "status")["under_replicated"] == 1
    assert "applied index" in run("cluster", "status").stdout
    assert [one["alive"] for one in run_json("cluster", "nodes")] == [True, False]
    table = run("cluster", "nodes").stdout
    assert "[bold]r\\x1b" in table
    assert "\x1b" not in table
    assert run_json("cluster", "partitions")[0]["name"] == "orders"
    assert run_json("cluster", "partitions", "orders")[0]["name"] == "orders"
    assert "orders" in run("cluster", "partitions").stdout


def test_status_fails_when_partitions_cannot_be_written(world):
    facts = asdict(STATUS)
    for name in ("leaderless", "under_min_insync"):
        world.status = ClusterStatusReply(**(facts | {name: 1}))
        done = run("cluster", "status", "--format", "json")
        assert done.exit_code == 1
        assert json.loads(done.stdout)[name] == 1


def test_nodes_and_replicas_are_moved(world):
    assert run_json("cluster", "move", "orders", "3", "2,1")["target"] == [2, 1]
    assert run_json("cluster", "drain", "2")["leading"] == 2
    assert "still leads 2" in run("cluster", "decommission", "2", "--force").stdout
    assert run("cluster", "undrain", "2").exit_code == 0
    assert run("cluster", "remove", "2").exit_code == 0
    changes = [call for call in world.calls if call[0] not in ("open", "close")]
    assert changes == [
        ("move", "orders", 3, [2, 1]),
        ("drain", 2, True, False, False),
        ("drain", 2, True, True, True),
        ("drain", 2, False, False, False),
        ("remove", 2),
    ]


def test_records_from_arguments_are_told_one_by_one(world):
    world.topics["t"] = [[], []]
    rows = run_lines("produce", "t", "a", "b", "--key", "k", "--partition", "1", "--acks", "leader")
    assert [(one["partition"], one["offset"]) for one in rows] == [(1, 0), (1, 1)]
    assert world.calls[0][3]["acks"] == "leader"
    assert [(one.key, one.value) for one in world.topics["t"][1]] == [(b"k", b"a"), (b"k", b"b")]
    run_lines("produce", "t", "c", "--header", "x=1=2", "--priority", "4")
    assert world.topics["t"][0][0].headers == {"x": b"1=2"}
    assert world.calls[-2] == ("send", 4)
    assert "offset" in run("produce", "t", "d").stdout


def test_records_from_stdin_a_file_and_a_generator_end_in_a_summary(world, tmp_path):
    world.topics["t"] = [[]]
    facts = run_json("produce", "t", "-", stdin=b"one\n" + BINARY + b"\nlast")
    assert (facts["count"], facts["bytes"]) == (3, 10)
    assert [one.value for one in world.topics["t"][0]] == [b"one", BINARY, b"last"]
    assert run_json("produce", "t", stdin=b"x\n")["count"] == 1
    path = tmp_path / "lines"
    path.write_bytes(b"1\n2\n")
    assert run_json("produce", "t", "--file", str(path))["count"] == 2
    world.topics["t"] = [[]]
    facts = run_json("produce", "t", "--count", "5001", "--size", "700")
    assert (facts["count"], facts["bytes"]) == (5001, 5001 * 700)
    assert {len(one.value) for one in world.topics["t"][0]} == {700}
    assert len({one.value for one in world.topics["t"][0]}) > 500
    assert "records in" in run("produce", "t", "--count", "1").stdout


def test_records_are_produced_for_later_and_with_an_end(world):
    world.topics["orders"] = [[]]
    run_lines("produce", "orders", "a", "--delay", "1h30m", "--ttl", "250ms")
    run_lines("produce", "orders", "a", "--deliver-at", "2026-01-01T00:00:00Z")
    assert world.times == [(5400.0, None, 0.25), (None, MOMENT_MS / 1000, None)]
    for option, wrong in (("--delay", "soon"), ("--ttl", "5"), ("--deliver-at", "tomorrow")):
        assert_refused(run("produce", "orders", "a", option, wrong), 2, option, wrong)


def test_a_record_that_is_not_delivered_ends_produce_with_its_error(world):
    world.topics["t"] = [[]]
    for arguments in (("x",), ("--count", "3")):
        world.error = None
        world.calls.clear()
        error = NotEnoughReplicas("1 of 2 replicas is in sync")

        def fail_sends(*call, error=error) -> None:
            if call[0] == "send":
                raise error

        world.note = fail_sends  # type: ignore[method-assign]
        assert_refused(run("produce", "t", *arguments), 1, "1 of 2 replicas")


@pytest.fixture
def filled(world) -> World:
    for partition in range(2):
        world.topics.setdefault("t", []).append(
            [
                Record(
                    "t", partition, n, b"k", b"%d-%d" % (partition, n), MOMENT_MS, {"a": BINARY}, 2
                )
                for n in range(3000)
            ]
        )
    return world


def test_consume_ends_where_the_partitions_ended_when_it_began(filled):
    rows = run_lines("consume", "t")
    assert len(rows) == 6000
    assert rows[0]["base64_headers"] == ["a"]
    assert base64.b64decode(rows[0]["headers"]["a"]) == BINARY
    values = {(one["partition"], one["offset"]): one["value"] for one in rows}
    assert values[1, 2999] == "1-2999"
    assert len(values) == 6000


def test_consume_takes_partitions_a_start_and_a_most(filled):
    rows = run_lines("consume", "t", "-p", "1", "--from", "2990", "--max", "4")
    assert [one["value"] for one in rows] == ["1-2990", "1-2991", "1-2992", "1-2993"]
    assert len(run_lines("consume", "t", "--from", "2999")) == 2
    assert run("consume", "t", "--from", "latest").stdout == ""
    assert run("consume", "t", "--from", "2026-01-01T00:00:00", "-n", "1").exit_code == 0
    assert ("seek", 0, None, MOMENT_MS, None) in filled.calls
    assert run("consume", "t", "--follow", "-n", "3").stdout.count("\n") >= 3


def test_consume_ends_also_behind_offsets_that_hold_no_record(filled):
    filled.missing_from = 2500
    assert len(run_lines("consume", "t")) == 5000


def test_consume_raw_gives_values_byte_for_byte_and_a_table_shows_them(filled):
    filled.topics["t"][0][0] = filled.topics["t"][0][0]._replace(value=BINARY)
    done = run("consume", "t", "-p", "0", "-n", "2", "--format", "raw")
    assert done.stdout_bytes == BINARY + b"\n0-1\n"
    table = run("consume", "t", "-p", "0", "-n", "2").stdout
    assert "2026-01-01 00:00:00.000" in table
    assert "normal" in table


class ShortRaw(io.RawIOBase):
    """A pipe that takes a part only, as pipes may."""

    def __init__(self) -> None:
        self.taken = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        part = bytes(data)[:1000]
        self.taken += part
        return len(part)


class Unbuffered:
    """stdout under PYTHONUNBUFFERED: text straight onto a raw stream."""

    encoding, errors = "utf-8", "strict"

    def __init__(self, raw: io.RawIOBase) -> None:
        self.buffer = raw


def test_an_unbuffered_stdout_loses_nothing_when_a_pipe_takes_a_part_only():
    raw = ShortRaw()
    stream = whole_writes(Unbuffered(raw))
    stream.write("a" * 5000 + "\n")
    stream.buffer.write(b"b" * 50_000)
    stream.flush()
    assert raw.taken == b"a" * 5000 + b"\n" + b"b" * 50_000
    usual = io.TextIOWrapper(io.BytesIO())
    assert whole_writes(usual) is usual
    stream.close()


def test_a_place_is_an_end_an_offset_an_age_or_a_time():
    now = 10_000_000
    assert parse_place("earliest", now) == StartPoint(to="earliest")
    assert parse_place("17", now) == StartPoint(offset=17)
    assert parse_place("15m", now) == StartPoint(time_ms=now - 900_000)
    assert parse_place("9d", now) == StartPoint(time_ms=0)
    assert parse_place("2026-01-01T01:00:00+01:00", now) == StartPoint(time_ms=MOMENT_MS)
    assert parse_place("2026-01-01T00:00:00Z", now) == StartPoint(time_ms=MOMENT_MS)


def test_settings_of_topics_keep_their_type():
    assert parse_config(["a=1", "b=-1", "c=x=y", "d=", "e=1.5", "f=" + "9" * 30]) == {
        "a": 1, "b": -1, "c": "x=y", "d": None, "e": "1.5", "f": "9" * 30,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("topic", "create"), "TOPIC"),
        (("topic", "create", "t", "-p", "0"), "--partitions"),
        (("topic", "create", "t", "-p", "many"), "--partitions"),
        (("topic", "create", "t", "-c", "novalue"), "NAME=VALUE"),
        (("topic", "create", "t", "-c", "a=1", "-c", "a=2"), "twice"),
        (("topic", "alter", "t"), "nothing to change"),
        (("topic", "add-partitions", "t", "-3"), "-3"),
        (("topic", "list", "--format", "xml"), "xml"),
        (("topic", "nope"), "nope"),
        (("nope",), "nope"),
        (("--nope",), "--nope"),
        (("cluster", "move", "t", "0", "1,x"), "1,x"),
        (("cluster", "move", "t", "0", "1,1"), "twice"),
        (("cluster", "move", "t", "zero", "1"), "PARTITION"),
        (("cluster", "drain", "all"), "NODE"),
        (("cluster", "drain", "-1"), "-1"),
        (("cluster", "up", "--nodes", "0"), "--nodes"),
        (("cluster", "up", "--nodes", "99"), "--nodes"),
        (("cluster", "up", "--port", "99999"), "--port"),
        (("cluster", "up", "--set", "x"), "NAME=VALUE"),
        (("cluster", "kill", "1"), "--data"),
        (("cluster", "kill", "one", "--data", "."), "NODE"),
        (("cluster", "kill", "1", "--data", "/nowhere"), "/nowhere"),
        (("cluster", "restart", "1", "--data", "/nowhere"), "/nowhere"),
        (("produce",), "TOPIC"),
        (("produce", "t", "x", "--count", "3"), "not several"),
        (("produce", "t", "--file", "/nowhere"), "/nowhere"),
        (("produce", "t", "x", "--header", "bad"), "NAME=VALUE"),
        (("produce", "t", "--count", "0"), "--count"),
        (("produce", "t", "--size", "0", "--count", "1"), "--size"),
        (("produce", "t", "x", "--partition", "-1"), "--partition"),
        (("consume",), "TOPIC"),
        (("consume", "t", "-p", "7"), "no partition 7"),
        (("consume", "t", "--from", "yesterday"), "yesterday"),
        (("consume", "t", "--from", "9" * 30), "large"),
        (("consume", "t", "--max", "0"), "--max"),
        (("node", "--config", "/nowhere.toml"), "/nowhere.toml"),
        (("node", "--set", "x"), "NAME=VALUE"),
        (("node", "--node-id", "x", "--data-dir", "d", "--native", "no"), "native: 'no'"),
    ],
)
def test_a_wrong_call_is_one_line_and_exit_code_2(world, monkeypatch, arguments, words):
    world.topics["t"] = [[]]
    for name in [one for one in os.environ if one.startswith("RAFTQ_")]:
        monkeypatch.delenv(name)
    assert_refused(run(*arguments), 2, words)


def test_failures_are_one_line_and_exit_code_1(world):
    assert_refused(run("consume", "nothere"), 1, "nothere")
    world.topics["t"] = [[]]
    assert_refused(run("topic", "create", "t"), 1, "already")
    world.error = ConnectFailed("no node answers\nat all")
    assert_refused(run("topic", "list"), 1, "no node answers\\nat all")
    world.error = RuntimeError("a bug")
    assert_refused(run("topic", "list"), 1, "RuntimeError('a bug')")


def test_a_local_cluster_does_not_take_over_a_strangers_directory(world, tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    assert_refused(run("cluster", "up", "--data", str(tmp_path)), 2, "holds no cluster")
    file = str(tmp_path / "letter.txt")
    assert_refused(run("cluster", "up", "--data", file), 2, "not a directory")
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_a_local_cluster_that_cannot_start_says_only_why(world, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        arguments = ("--data", str(tmp_path / "c"), "--nodes", "1", "--port", str(port))
        assert_refused(run("cluster", "up", *arguments), 2, f"port {port}")


def test_the_settings_of_a_node_can_be_checked_alone(tmp_path):
    (tmp_path / "key").write_text("x" * 32)
    arguments = (
        "--node-id",
        "7",
        "--data-dir",
        str(tmp_path),
        "--secret-file",
        str(tmp_path / "key"),
    )
    done = run("node", *arguments, "--set", "storage.scrub_bytes_s=0", "--check")
    assert (done.exit_code, done.stdout) == (0, "node 7: the settings are sound\n")
    assert_refused(run("node", *arguments, "--set", "storage.nope=0", "--check"), 2, "storage.nope")


def test_names_that_the_command_line_repeats_are_the_right_ones():
    """Repeated, so that help does not load the engine."""
    assert engine.DEFAULT_GROUP == DEFAULT_GROUP


def test_a_new_cluster_is_announced_with_the_addresses_of_all_its_nodes(tmp_path, capsys):
    """One address would not do: the next line tells how to kill that node."""
    cluster = LocalCluster(tmp_path / "c", 3)
    for node_id in cluster.ids:
        cluster.nodes[node_id] = LocalNode(
            id=node_id, pid=1, host="h", native=f"h:{10 + node_id}", http="h:20", raft="h:30"
        )
    local._announce(cluster, Format.table)
    assert "connect:  export RAFTQ_BOOTSTRAP=h:11,h:12,h:13\n" in capsys.readouterr().out
