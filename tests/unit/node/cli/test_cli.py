"""The command line: its output is parsed, its errors are one line, and looking changes nothing."""

import base64
import json
import os
import signal
import subprocess
import sys
import threading

import pytest
from typer.testing import CliRunner

from raftq.node.cli import app
from raftq.node.queue.embedded.queue import Queue

BINARY = b"\xff\x00\xfe"
RUNNER = CliRunner()


def run(*arguments: str, stdin: bytes | None = None):
    return RUNNER.invoke(app, ["queue", *arguments], input=stdin)


def run_json(*arguments: str, stdin: bytes | None = None):
    """The one JSON document that a command prints."""
    done = run(*arguments, "--format", "json", stdin=stdin)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def run_lines(*arguments: str) -> list[dict]:
    done = run(*arguments, "--format", "json")
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in done.stdout.splitlines()]


def process(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "raftq.node.cli", *arguments]
    return subprocess.run(command, capture_output=True, timeout=60, **options)


def assert_refused(done, code: int, *words: str) -> None:
    """One line on stderr, nothing on stdout."""
    assert done.exit_code == code, done.output
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


@pytest.fixture
def directory(tmp_path) -> str:
    """A queue with three messages in two lanes, one of them binary, and one delayed."""
    path = str(tmp_path / "orders")
    with Queue.open(path) as queue:
        queue.enqueue(b"first", key=b"k1", headers={"a": b"1", "b": BINARY})
        queue.enqueue(BINARY, priority="critical", key=BINARY)
        queue.enqueue("zweites \N{SNOWMAN}".encode())
        queue.enqueue(b"later", delay=3600)
    return path


def test_the_version_is_printed():
    done = RUNNER.invoke(app, ["--version"])
    assert (done.exit_code, done.stdout.split()[0]) == (0, "raftq")
    assert done.stdout.split()[1][0].isdigit()


def test_without_a_command_there_is_help():
    assert "queue" in RUNNER.invoke(app, []).output
    assert "dequeue" in RUNNER.invoke(app, ["queue", "--help"]).output


def test_stats_as_json_counts_lanes_groups_and_disk(directory):
    stats = run_json("stats", directory)
    assert (stats["total"], stats["pending"], stats["delayed"], stats["dead"]) == (3, 3, 1, 0)
    assert stats["lanes"]["critical"] == {"pending": 1, "total": 1}
    assert stats["groups"]["default"]["pending"] == 3
    assert stats["disk_bytes"] > 0


def test_stats_as_a_table_names_every_part(directory):
    done = run("stats", directory)
    assert done.exit_code == 0
    for word in ("pending", "critical", "default", "acked", "segments", "Disk"):
        assert word in done.stdout
    assert "\x1b" not in done.stdout


def test_peek_shows_what_comes_next_and_takes_nothing(directory):
    first = run_lines("peek", directory)
    assert [each["value"] for each in first] == [
        base64.b64encode(BINARY).decode(), "first", "zweites \N{SNOWMAN}",
    ]  # fmt: skip
    assert [each["encoding"] for each in first] == ["base64", "utf-8", "utf-8"]
    assert run_lines("peek", directory, "-n", "1") == first[:1]


def test_json_of_a_message_keeps_every_byte(directory):
    binary, plain = run_lines("peek", directory, "-n", "2")
    assert base64.b64decode(binary["value"]) == BINARY
    assert binary["key_encoding"] == "base64"
    assert base64.b64decode(binary["key"]) == BINARY
    assert (plain["key"], plain["key_encoding"]) == ("k1", "utf-8")
    assert plain["headers"]["a"] == "1"
    assert plain["base64_headers"] == ["b"]
    assert base64.b64decode(plain["headers"]["b"]) == BINARY


def test_a_table_shows_no_control_characters(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path) as queue:
        queue.enqueue(b"\x1b[31mred[bold]\x07")
    out = run("peek", path).stdout
    assert "\\x1b[31mred[bold]\\x07" in out
    assert "\x1b" not in out


def test_tail_shows_the_newest_in_offset_order_also_when_settled(directory):
    with Queue.open(directory) as queue:
        queue.ack_batch(queue.dequeue_batch(10))
    assert [each["offset"] for each in run_lines("tail", directory)] == [0, 1, 2]
    assert [each["offset"] for each in run_lines("tail", directory, "-n", "2")] == [1, 2]
    assert run_json("stats", directory)["settled"] == 3


def test_tail_of_more_than_one_portion_shows_each_message_once(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path) as queue:
        queue.enqueue_batch([b"%d" % number for number in range(1300)])
    shown = run_lines("tail", path, "-n", "1200")
    assert [each["value"] for each in shown] == [str(number) for number in range(100, 1300)]


def test_looking_leaves_messages_groups_and_dead_letters_as_they_are(directory):
    with Queue.open(directory) as queue:
        queue.reject(queue.dequeue(), "broken")
    before = run_json("stats", directory)
    for command in ("peek", "tail", "dlq", "verify", "stats"):
        assert run(command, directory).exit_code == 0
    assert_refused(run("peek", directory, "--group", "nobody"), 2, "nobody")
    after = run_json("stats", directory)
    assert list(after["groups"]) == ["default"]
    for name in ("total", "pending", "in_flight", "delayed", "dead", "settled", "counters"):
        assert after[name] == before[name], name


def test_looking_does_not_bury_what_a_dead_process_had_leased(directory):
    code = (
        "import os, sys; from raftq import Queue; q = Queue.open(sys.argv[1], max_deliveries=9);"
        "q.dequeue_batch(3); os.kill(os.getpid(), 9)"
    )
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", code, directory], timeout=60)
        assert done.returncode == -signal.SIGKILL
    stats = run_json("stats", directory)
    assert (stats["pending"], stats["dead"]) == (3, 0)


def test_enqueue_creates_a_queue_and_prints_ids(tmp_path):
    path = str(tmp_path / "new")
    done = run("enqueue", path, "a", "b")
    assert (done.exit_code, done.stdout) == (0, "0\n1\n")
    assert run_json("enqueue", path, "c") == {"count": 1, "ids": ["2"]}
    assert [each["value"] for each in run_lines("peek", path)] == ["a", "b", "c"]


def test_enqueue_passes_on_everything_that_can_be_said_about_a_message(tmp_path):
    path = str(tmp_path / "q")
    options = (
        "--key",
        "k",
        "--priority",
        "1",
        "--ttl",
        "60",
        "--header",
        "a=b=c",
        "--header",
        "d=",
    )
    run_json("enqueue", path, "x", *options)
    (message,) = run_lines("peek", path)
    assert (message["key"], message["priority"]) == ("k", "high")
    assert message["headers"] == {"a": "b=c", "d": ""}
    assert message["expires_at"] == pytest.approx(message["timestamp"] + 60, abs=0.01)
    assert run_json("enqueue", path, "y", "--delay", "3600")["ids"] == ["d0"]
    assert run_json("stats", path)["delayed"] == 1


def test_a_dedup_id_adds_one_message_only(tmp_path):
    path = str(tmp_path / "q")
    first = run_json("enqueue", path, "x", "--dedup-id", "order-1")
    assert run_json("enqueue", path, "x", "--dedup-id", "order-1") == first
    assert run_json("stats", path)["total"] == 1
    assert_refused(run("enqueue", path, "x", "y", "--dedup-id", "z"), 2, "dedup id")
    assert_refused(run("enqueue", path, "-", "--dedup-id", "z", stdin=b"x"), 2, "dedup id")


def test_enqueue_takes_the_lines_of_stdin_byte_for_byte(tmp_path):
    path = str(tmp_path / "q")
    lines = [b"one", b"", BINARY, b"two\r", b"x" * 100_000, b"last without newline"]
    assert run_json("enqueue", path, "-", stdin=b"\n".join(lines))["count"] == 6
    with Queue.open(path) as queue:
        assert [message.value for message in queue.dequeue_batch(10)] == lines


def test_dequeue_acks_what_it_printed(directory):
    assert [each["value"] for each in run_lines("dequeue", directory, "-n", "2")][1] == "first"
    assert [each["offset"] for each in run_lines("dequeue", directory, "-n", "9")] == [2]
    assert run_lines("dequeue", directory) == []
    assert run_json("stats", directory)["counters"]["acked"] == 3


def test_dequeue_without_ack_gives_back_and_spends_no_attempt(directory):
    first = run_lines("dequeue", directory, "-n", "9", "--no-ack")
    assert [each["attempt"] for each in first] == [1, 1, 1]
    assert run_lines("dequeue", directory, "-n", "9", "--no-ack") == first


def test_each_group_dequeues_for_itself(directory):
    assert len(run_lines("dequeue", directory, "-n", "9", "--group", "mail")) == 3
    assert len(run_lines("dequeue", directory, "-n", "9")) == 3


def test_dequeue_waits_for_a_delayed_message(tmp_path):
    path = str(tmp_path / "q")
    run_json("enqueue", path, "much later", "--delay", "600")
    assert run_lines("dequeue", path) == []
    run_json("enqueue", path, "soon", "--delay", "0.2")
    (message,) = run_lines("dequeue", path, "--timeout", "30")
    assert (message["id"], message["value"]) == ("d1", "soon")


def test_dead_letters_are_listed_filtered_redriven_and_purged(directory):
    with Queue.open(directory) as queue:
        for reason in ("bad", "worse", "bad"):
            queue.reject(queue.dequeue(), reason, error="no such field")
    letters = run_json("dlq", directory)
    assert [letter["reason"] for letter in letters] == ["bad", "worse", "bad"]
    assert base64.b64decode(letters[0]["value"]) == BINARY
    assert letters[1]["headers"]["a"] == "1"
    assert [each["reason"] for each in run_json("dlq", directory, "--reason", "worse")] == ["worse"]
    assert len(run_json("dlq", directory, "--limit", "1")) == 1
    table = run("dlq", directory).stdout
    assert "no such field" in table
    assert "worse" in table
    assert run_json("dlq", directory, "--redrive", "--reason", "bad", "--limit", "1") == {
        "redriven": 1
    }
    assert run_json("dlq", directory, "--purge") == {"purged": 2}
    assert run_json("dlq", directory) == []
    assert len(run_lines("peek", directory)) == 1


def test_purge_with_a_filter_is_refused_and_purges_nothing(directory):
    with Queue.open(directory) as queue:
        queue.reject(queue.dequeue(), "bad")
    for extra in (("--reason", "x"), ("--limit", "1"), ("--redrive",)):
        assert_refused(run("dlq", directory, "--purge", *extra), 2, "--purge")
    assert len(run_json("dlq", directory)) == 1


def test_compact_frees_what_is_settled(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path) as queue:
        queue.enqueue_batch([b"x" * 1000] * 500)
        queue.ack_batch(queue.dequeue_batch(500))
    assert run_json("compact", path)["freed_bytes"] >= 500_000
    assert run_json("stats", path)["total"] == 0
    done = run("compact", path)
    assert (done.exit_code, done.stdout.split()[1:]) == (0, ["bytes", "freed"])


def test_verify_is_silent_about_a_sound_queue(directory):
    done = run("verify", directory)
    assert (done.exit_code, done.stdout.split(":")[0]) == (0, "clean")
    assert run_json("verify", directory)["problems"] == []


def test_verify_names_damage_and_exits_with_one(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path, segment_bytes=4096) as queue:
        for number in range(50):
            queue.enqueue(b"%d" % number * 200)
    segment = sorted(name for name in os.listdir(f"{path}/data") if name.endswith(".log"))[1]
    with open(f"{path}/data/{segment}", "r+b") as file:
        file.seek(600)
        file.write(b"\x00\x01\x02\x03")
    done = run("verify", path)
    assert done.exit_code == 1
    assert done.stdout.startswith("data: ")
    assert segment in done.stdout
    assert done.stdout.count("\n") == 1
    report = json.loads(run("verify", path, "--format", "json").stdout)
    assert (report["clean"], len(report["problems"])) == (False, 1)


@pytest.mark.parametrize(
    "command", ["stats", "peek", "tail", "dlq", "verify", "compact", "dequeue"]
)
def test_where_there_is_no_queue_none_is_made(tmp_path, command):
    missing = tmp_path / "missing"
    assert_refused(run(command, str(missing)), 2, "no directory", str(missing))
    assert not missing.exists()
    empty = tmp_path / "empty"
    empty.mkdir()
    assert_refused(run(command, str(empty)), 2, "not a RaftQ queue")
    assert list(empty.iterdir()) == []


def test_enqueue_into_a_strangers_directory_is_refused(tmp_path):
    (tmp_path / "letter.txt").write_text("mine")
    assert_refused(run("enqueue", str(tmp_path), "x"), 2, "letter.txt")


def test_a_file_in_place_of_a_directory_is_an_error(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    assert_refused(run("stats", str(path)), 2, "no directory")
    assert_refused(run("enqueue", str(path), "x"), 1, str(path))


def test_a_damaged_format_file_is_an_error(directory):
    with open(f"{directory}/queue.format", "w") as file:
        file.write("{")
    assert_refused(run("stats", directory), 1, "queue.format")


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--priority", "urgent"), "urgent"),
        (("--priority", "5"), "priority"),
        (("--header", "novalue"), "novalue"),
        (("--header", "=x"), "NAME=VALUE"),
        (("--ttl", "-1"), "ttl"),
        (("--delay", "inf"), "delay"),
    ],
)
def test_bad_arguments_of_enqueue_are_refused(directory, arguments, word):
    assert_refused(run("enqueue", directory, "x", *arguments), 2, word)
    assert run_json("stats", directory)["total"] == 3


def test_a_value_over_the_limit_is_refused_and_nothing_is_written(directory):
    done = run("enqueue", directory, "-", stdin=b"x" * (1024 * 1024 + 1))
    assert_refused(done, 1, "1048577")
    assert run_json("stats", directory)["total"] == 3


@pytest.mark.parametrize("timeout", ["-1", "nan"])
def test_a_timeout_that_is_none_is_refused(directory, timeout):
    assert_refused(run("dequeue", directory, "--timeout", timeout), 2, "timeout")


def test_unknown_options_and_counts_below_one_are_usage_errors(directory):
    for arguments in (("peek", directory, "--nope"), ("peek", directory, "-n", "0"), ("stats",)):
        done = run(*arguments)
        assert done.exit_code == 2
        assert "Traceback" not in done.stderr


def test_a_queue_held_by_another_process_names_it(directory):
    code = (
        "import sys; from raftq import Queue; q = Queue.open(sys.argv[1]);"
        "print('open', flush=True); sys.stdin.read(); q.close()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, directory], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"open\n"
        for command in ("stats", "tail", "dequeue"):
            assert_refused(run(command, directory), 1, f"process {holder.pid}")
        holder.stdin.close()
    assert run("stats", directory).exit_code == 0


def test_a_real_process_takes_and_prints_raw_bytes(tmp_path):
    path = str(tmp_path / "q")
    done = process("queue", "enqueue", path, "-", input=b"a\n" + BINARY + b"\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"0\n1\n", b"")
    done = process("queue", "dequeue", path, "-n", "5", "--format", "json")
    assert (done.returncode, done.stderr) == (0, b"")
    values = [json.loads(line)["value"] for line in done.stdout.splitlines()]
    assert values == ["a", base64.b64encode(BINARY).decode()]


def test_a_real_process_reports_an_error_without_a_traceback(tmp_path):
    done = process("queue", "stats", str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stdout == b""
    assert done.stderr.startswith(b"error: there is no directory")
    assert b"Traceback" not in done.stderr


# Whoever is started in the background ignores SIGINT, and so do its children; a terminal's do not.
IN_FOREGROUND = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def test_follow_shows_a_delayed_message_when_it_is_due_and_ctrl_c_ends_it_quietly(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path) as queue:
        queue.enqueue(b"now")
        queue.enqueue(b"soon", delay=1.0)
    command = [sys.executable, "-c", IN_FOREGROUND, "-m", "raftq.node.cli", "queue", "tail", path]
    child = subprocess.Popen(
        [*command, "--follow", "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    watchdog = threading.Timer(120, child.kill)
    watchdog.start()
    with child:
        lines = [child.stdout.readline() for _ in range(2)]
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == b""
    watchdog.cancel()
    assert [json.loads(line)["value"] for line in lines] == ["now", "soon"]
    assert child.returncode == 130
    assert run_json("stats", path)["pending"] == 2


def test_a_reader_that_leaves_the_pipe_ends_dequeue_without_losing_a_message(tmp_path):
    path = str(tmp_path / "q")
    with Queue.open(path) as queue:
        queue.enqueue_batch([b"x" * 1000] * 2000)
    command = [sys.executable, "-m", "raftq.node.cli", "queue", "dequeue", path, "-n", "2000"]
    child = subprocess.Popen(
        [*command, "--format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with child:
        child.stdout.readline()
        child.stdout.close()
        assert b"Traceback" not in child.stderr.read()
    assert child.returncode == 1
    # The first portions may have been printed whole; the one that was cut is not acked.
    assert run_json("stats", path)["pending"] >= 500
