"""Settings of a node: three sources, one result, and every problem told at once."""

import io
import json
import logging
import os

import pytest

from raftq.client.common.errors import ConfigError
from raftq.node.config import Address, NodeConfig, ReplicationConfig, StorageConfig
from raftq.node.config_source import load_config
from raftq.node.logs import set_up_logs

SECRET = "0123456789abcdef"
WHOLE = f"""
node_id = 2
cluster_id = "blue"
secret = "{SECRET}"
data_dir = "data"
rack = "r1"
advertised_host = "n2.example"
native = "0.0.0.0:7171"
http = {{ port = 8181 }}
raft = "[::1]:7001"
seeds = ["n1:7070", "n3:7070"]
heartbeat_ms = 250
[voters]
1 = "n1:7000"
2 = "n2:7000"
3 = "n3:7000"
[storage]
page_cache_bytes = "none"
[controller]
lease_ms = 4000
"""


@pytest.fixture
def file(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "node.toml"
        path.write_text(text)
        return str(path)

    return write


def load(path: str | None, environment=None, **arguments: str) -> NodeConfig:
    dotted = {name.replace("__", "."): text for name, text in arguments.items()}
    return load_config(path, environment=environment or {}, arguments=dotted)


def problems(path: str | None, environment=None, **arguments: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(path, environment, **arguments)
    return str(caught.value).split("; ")


def test_a_file_is_read_whole(file, tmp_path):
    config = load(file(WHOLE))
    assert (config.node_id, config.cluster_id, config.rack) == (2, "blue", "r1")
    assert config.secret == SECRET.encode()
    assert config.data_dir == str(tmp_path / "data")
    assert (str(config.native), str(config.http)) == ("0.0.0.0:7171", "127.0.0.1:8181")
    assert (config.raft.host, str(config.raft)) == ("::1", "[::1]:7001")
    assert config.voters == {1: "n1:7000", 2: "n2:7000", 3: "n3:7000"}
    assert config.seeds == ("n1:7070", "n3:7070")
    assert config.storage.page_cache_bytes is None
    assert (config.controller.lease_ms, config.heartbeat_ms) == (4000, 250)
    assert (config.is_voter, config.host) == (True, "n2.example")
    assert config.raft_address == "n2:7000"


def test_defaults_run_a_node_alone_on_loopback(file):
    config = load(file(f'node_id = 1\nsecret = "{SECRET}"\ndata_dir = "/d"\n'))
    assert [str(one) for one in (config.native, config.http, config.raft)] == [
        "127.0.0.1:7070",
        "127.0.0.1:8080",
        "127.0.0.1:7000",
    ]
    assert config.voters == {1: "127.0.0.1:7000"}
    assert config.is_voter
    assert (config.log_level, config.log_format, config.drain_ms) == ("info", "text", 10_000)


def test_arguments_win_over_environment_and_environment_over_the_file(file):
    path = file(WHOLE)
    environment = {
        "RAFTQ_NODE_ID": "3",
        "RAFTQ_HEARTBEAT_MS": "100",
        "RAFTQ_STORAGE__SCRUB_BYTES_S": "1_000",
        "RAFTQ_DATA_DIR": "/env",
    }
    config = load(path, environment, node_id="1", controller__lease_ms="5000")
    assert (config.node_id, config.heartbeat_ms) == (1, 100)
    assert config.storage.scrub_bytes_s == 1000
    assert config.storage.page_cache_bytes is None
    assert (config.controller.lease_ms, config.data_dir) == (5000, "/env")


def test_a_part_of_an_address_can_be_replaced_alone(file):
    path = file(WHOLE)
    environment = {"RAFTQ_NATIVE__PORT": "0", "RAFTQ_RAFT__HOST": "0.0.0.0"}
    config = load(path, environment, http="none")
    assert (str(config.native), str(config.raft)) == ("0.0.0.0:0", "0.0.0.0:7001")
    assert config.http is None
    assert str(load(path, {"RAFTQ_HTTP": "9090"}).http) == "127.0.0.1:9090"
    bare = file(f'node_id = 1\nsecret = "{SECRET}"\ndata_dir = "/d"\nhttp = false\n')
    assert load(bare).http is None
    assert str(load(bare, {"RAFTQ_NATIVE__HOST": "10.0.0.1"}).native) == "10.0.0.1:7070"
    assert str(load(bare, {"RAFTQ_HTTP__PORT": "1234"}).http) == "127.0.0.1:1234"


def test_voters_and_seeds_can_be_text(file):
    path = file(f'node_id = 4\nsecret = "{SECRET}"\ndata_dir = "/d"\n')
    config = load(path, {"RAFTQ_VOTERS": "1=a:1, 2=b:2,3=c:3", "RAFTQ_SEEDS": "a:7070, b:7070"})
    assert config.voters == {1: "a:1", 2: "b:2", 3: "c:3"}
    assert config.seeds == ("a:7070", "b:7070")
    assert not config.is_voter
    assert load(path, {"RAFTQ_SEEDS": "a:7070"}).voters == {}


def test_a_secret_comes_from_a_file_and_the_last_source_decides(file, tmp_path):
    (tmp_path / "key").write_text("from the file, long enough\n")
    path = file('node_id = 1\ndata_dir = "/d"\nsecret_file = "key"\n')
    assert load(path).secret == b"from the file, long enough"
    assert load(path, {"RAFTQ_SECRET": SECRET}).secret == SECRET.encode()
    (found,) = problems(path, {"RAFTQ_SECRET_FILE": "/nowhere/key"})
    assert "/nowhere/key" in found
    both = file(f'node_id = 1\ndata_dir = "/d"\nsecret_file = "key"\nsecret = "{SECRET}"\n')
    assert problems(both) == ["secret and secret_file are both set"]


def test_the_secret_is_never_shown(file):
    config = load(file(WHOLE))
    assert SECRET not in repr(config)
    with pytest.raises(ConfigError) as caught:
        load(None, node_id="1", data_dir="/d", secret="short-secret")
    assert "short-secret" not in str(caught.value)


def test_all_problems_of_all_sources_are_told_at_once(file):
    path = file(WHOLE.replace("node_id = 2", 'node_id = "two"\ncolour = "blue"'))
    found = problems(
        path,
        {"RAFTQ_STORAGE__SCRUB_BYTES_S": "fast", "RAFTQ_NOTHING__HERE": "1"},
        replication__wait_ms="9000",
        native__port="70000",
        log_level="loud",
        raft_times__tick_ms="0",
        heartbeat_ms="3000",
        server__backlog="0",
        controller__probe_ms="0",
    )
    for words in (
        "node_id is 'two', not a whole number",
        "colour is no setting",
        "storage.scrub_bytes_s is 'fast'",
        "RAFTQ_STORAGE__SCRUB_BYTES_S",
        "nothing is no setting (environment RAFTQ_NOTHING__HERE)",
        "replication.wait_ms 9000 must be below lag_ms 3000",
        "native.port is 70000",
        "log_level is 'loud'",
        "raft_times.tick_ms must be above 0",
        "heartbeat_ms 3000 must be below half of controller.lease_ms",
        "server.backlog must be at least 1",
        "controller.probe_ms must be at least 1",
    ):
        assert any(words in one for one in found), (words, found)


def test_what_is_missing_is_named():
    assert problems(None) == ["node_id is missing", "secret is missing", "data_dir is missing"]


def test_names_of_others_in_the_environment_are_left_alone(file):
    load(file(WHOLE), {"RAFTQ_SERVICE_HOST": "10.1.2.3", "RAFTQ_BOOTSTRAP": "x", "HOME": "/"})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("node_id = ", "not TOML"),
        ("\x00", "not TOML"),
        ("storage = 3", "storage is 3, not a table"),
        ("native = 'nowhere'", "native: 'nowhere' is not host:port"),
        ("native = '::1:70'", "needs brackets"),
        ("native = ['a']", "not host:port"),
        ("native = 'a b:1'", "not a name or an address"),
        ("voters = 3", "not a table"),
        ("voters = 'x'", "NODE=HOST:PORT"),
        ("voters = '1=a:1,1=b:1'", "twice"),
        ("[voters]\none = 'a:1'", "NODE=HOST:PORT"),
        ("[voters]\n1 = 2", "NODE=HOST:PORT"),
        ("[node_id]\nx = 1", "node_id is a table"),
        ("rack = 3", "rack is 3, not text"),
        ("seeds = 3", "not a list"),
        ("heartbeat_ms = true", "not a whole number"),
        ("heartbeat_ms = 1.5", "not a whole number"),
        ("secret = 3", "secret is not text"),
    ],
)
def test_a_file_with_a_wrong_value_says_which(file, text, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        load(file(text))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml: No such file"):
        load(str(tmp_path / "no.toml"))
    with pytest.raises(ConfigError, match="cannot read"):
        load(str(tmp_path))
    big = tmp_path / "big.toml"
    big.write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="over 1048576 bytes"):
        load(str(big))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"voters": {1: "a:1", 2: "b:2"}}, "1, 3, 5 or 7 nodes, not 2"),
        ({"voters": {n: f"a:{n}" for n in range(1, 10)}}, "not 9"),
        ({"voters": {1: "a:1", 2: "a:1", 3: "c:3"}}, "different addresses"),
        ({"voters": {1: "a:0"}}, "nobody can connect to a:0"),
        ({"voters": {1: "0.0.0.0:1"}}, "nobody can connect"),
        ({"voters": {5: "a:1"}}, "seeds must be set: node 1 is not one of the voters"),
        ({"seeds": ("a",)}, "'a' is not host:port"),
        ({"native": Address("0.0.0.0", 1)}, "advertised_host must be set"),
        ({"native": Address("::", 1)}, "advertised_host must be set"),
        ({"advertised_host": "0.0.0.0"}, "nobody can connect"),
        ({"advertised_host": "a b"}, "not a name"),
        ({"advertised_port": 0}, "advertised_port is 0"),
        ({"advertised_port": 65536}, "advertised_port is 65536"),
        ({"raft": Address(port=0)}, "raft.port must not be 0"),
        ({"raft": Address(port=7070)}, "different addresses"),
        ({"secret": b"short"}, "at least 16 bytes"),
        ({"data_dir": ""}, "data_dir"),
        ({"node_id": -1}, "node_id is -1"),
        ({"node_id": True}, "node_id is True"),
        ({"cluster_id": ""}, "cluster_id"),
        ({"cluster_id": "a\n"}, "printable"),
        ({"rack": "x" * 201}, "rack"),
        ({"drain_ms": -1}, "drain_ms"),
        ({"log_format": "xml"}, "log_format is 'xml'"),
    ],
)
def test_relations_between_settings_are_checked(changes, words):
    sound = {"node_id": 1, "secret": b"x" * 16, "data_dir": "/d"}
    NodeConfig(**sound)
    with pytest.raises(ConfigError, match=words):
        NodeConfig(**(sound | changes))


def test_parts_check_themselves():
    for part, changes, words in (
        (StorageConfig, {"fsync_interval_ms": 0, "scrub_bytes_s": -1}, "fsync_interval_ms.*scrub"),
        (StorageConfig, {"page_cache_bytes": 1}, "page_cache_bytes is 1"),
        (ReplicationConfig, {"lag_ms": 1, "move_bytes_s": 0}, "lag_ms.*move_bytes_s"),
    ):
        with pytest.raises(ConfigError, match=words):
            part(**changes)


@pytest.fixture
def quiet_root():
    root, package = logging.getLogger(), logging.getLogger("raftq")
    before = (root.handlers[:], root.level, package.level, logging.raiseExceptions)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    package.setLevel(before[2])
    logging.raiseExceptions = before[3]


def test_logs_are_json_lines_with_the_node_and_the_error(quiet_root):
    stream = io.StringIO()
    set_up_logs("info", "json", node_id=3, stream=stream)
    logger = logging.getLogger("raftq.node.test")
    logger.debug("not shown")
    logger.info("event=%s", "a\nb")
    try:
        raise ValueError("no\x1b")
    except ValueError:
        logger.exception("event=failed")
    logging.getLogger("stranger").info("not shown either")
    first, second = (json.loads(line) for line in stream.getvalue().splitlines())
    assert (first["level"], first["node"], first["logger"]) == ("info", 3, "raftq.node.test")
    assert first["message"] == "event=a\nb"
    assert first["time"].endswith("Z")
    assert "ValueError: no\x1b" in second["error"]


def test_logs_as_text_are_one_line_each_whatever_strangers_send(quiet_root):
    stream = io.StringIO()
    set_up_logs("debug", "text", node_id=3, stream=stream)
    logger = logging.getLogger("raftq.node.test")
    logger.warning("peer=%s", "x\n2026-01-01 forged\x1b[31m")
    logger.info("%d", "no number")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2
    assert " warning node=3 raftq.node.test peer=x\\n2026-01-01 forged\\x1b[31m" in lines[0]
    assert "no number" in lines[1]


def test_relative_paths_outside_the_file_are_left_to_the_working_directory(file):
    config = load(file(WHOLE), data_dir="elsewhere")
    assert config.data_dir == "elsewhere"
    assert not os.path.isabs(config.data_dir)
