"""The commands for queues, groups, delays and dead letters, at a real node."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_node import live_node
from typer.testing import CliRunner

from raftq.node.cli import app

RUNNER = CliRunner()


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with live_node(tmp_path_factory.mktemp("node")) as live:
        yield live.native


class Shell:
    def __init__(self, native: str) -> None:
        self._native = native

    def run(self, *arguments: str, code: int = 0) -> Any:
        done = RUNNER.invoke(app, ["-b", self._native, *arguments])
        assert done.exit_code == code, (arguments, done.output, done.stderr)
        return done

    def json(self, *arguments: str) -> Any:
        return json.loads(self.run(*arguments, "--format", "json").stdout)

    def lines(self, *arguments: str) -> list[Any]:
        done = self.run(*arguments, "--format", "json")
        return [json.loads(line) for line in done.stdout.splitlines()]

    def topic(self, name: str) -> str:
        config = ("-c", "max_deliveries=2", "-c", "backoff_ms=10")
        self.run("topic", "create", name, "-p", "2", *config)
        return name


def until(found: Callable[[], list[Any]]) -> list[Any]:
    """What comes soon: letters are copied after the answer."""
    for _ in range(200):
        if result := found():
            return result
        time.sleep(0.05)
    raise AssertionError("nothing came")


@pytest.fixture
def shell(native: str) -> Shell:
    return Shell(native)


def test_work_prints_every_record_once(shell: Shell) -> None:
    topic = shell.topic("printed")
    shell.run("produce", topic, "a", "b", "c", "--key", "k", "--header", "h=1")
    work = ("work", topic, "-g", "printers", "--idle", "1s")
    found = shell.lines(*work)
    assert [one["value"] for one in found] == ["a", "b", "c"]
    assert (found[0]["attempt"], found[0]["headers"]) == (1, {"h": "1"})
    assert found[0]["receipt"].startswith(f"{topic}:")
    assert shell.lines(*work) == []
    assert "a" in shell.run("work", topic, "-g", "others", "-n", "1").stdout


def test_work_runs_a_command_whose_exit_code_settles(shell: Shell, tmp_path: Path) -> None:
    """0 acks, the chosen code rejects, others nack until the attempts are used up."""
    topic = shell.topic("run")
    shell.run("produce", topic, "good", "bad", "hopeless", "--key", "k", "--header", "x-id=7")
    seen = tmp_path / "seen"
    script = tmp_path / "handle.py"
    script.write_text(
        "import os, sys\n"
        "value = sys.stdin.read()\n"
        f"with open({str(seen)!r}, 'a') as log:\n"
        "    facts = [os.environ['RAFTQ_' + one] for one in ('KEY', 'ATTEMPT', 'HEADER_X_ID')]\n"
        "    print(value, *facts, file=log)\n"
        "sys.exit({'good': 0, 'bad': 1, 'hopeless': 42}[value])\n"
    )
    command = ("--", sys.executable, str(script))
    done = shell.run(
        "work", topic, "-g", "g", "-c", "2", "--idle", "2s", "--reject-code", "42", *command
    )
    assert "1 acked, 2 nacked, 1 rejected" in done.stderr
    lines = sorted(seen.read_text().splitlines())
    assert lines == ["bad k 1 7", "bad k 2 7", "good k 1 7", "hopeless k 1 7"]


def test_a_command_that_takes_too_long_is_ended(shell: Shell, tmp_path: Path) -> None:
    topic = shell.topic("slow")
    shell.run("produce", topic, "a")
    command = ("--", sys.executable, "-c", "import time; time.sleep(60)")
    work = ("work", topic, "-g", "g", "-n", "1", "--timeout", "300ms")
    assert "1 nacked" in shell.run(*work, *command).stderr


def test_a_call_that_is_wrong_spends_no_attempts(shell: Shell) -> None:
    topic = shell.topic("wrong")
    shell.run("produce", topic, "a")
    assert "--group" in shell.run("work", topic, code=2).stderr
    missing = shell.run("work", topic, "-g", "g", "--", "no-such-command", code=2)
    assert "no-such-command" in missing.stderr
    assert "--idle" in shell.run("work", topic, "-g", "g", "--idle", "soon", code=2).stderr
    (found,) = shell.lines("work", topic, "-g", "g", "-n", "1")
    assert found["attempt"] == 1


def test_consume_with_a_group_goes_on_where_the_group_was(shell: Shell) -> None:
    topic = shell.topic("shared")
    shell.run("produce", topic, "a", "b")
    consume = ("consume", topic, "--group", "readers")
    assert sorted(one["value"] for one in shell.lines(*consume)) == ["a", "b"]
    assert shell.lines(*consume) == []
    shell.run("produce", topic, "c")
    assert [one["value"] for one in shell.lines(*consume, "-n", "1")] == ["c"]
    refused = shell.run(*consume, "--from", "5", code=2)
    assert "--group" in refused.stderr


def test_groups_are_listed_described_reset_and_deleted(shell: Shell) -> None:
    topic = shell.topic("grouped")
    shell.run("produce", topic, "a", "b", "c")
    shell.lines("consume", topic, "--group", "team")
    listed = {one["group"]: one for one in shell.json("group", "list")}
    assert (listed["team"]["mode"], listed["team"]["members"]) == ("stream", 0)
    assert "team" in shell.run("group", "list").stdout
    found = shell.json("group", "describe", "team")
    assert (found["lag"], found["state"]) == (0, "empty")
    assert sum(one["position"] or 0 for one in found["partitions"]) == 3
    assert "lag 0" in shell.run("group", "describe", "team").stdout
    reset = shell.json("group", "reset", "team", topic, "--to", "earliest")
    assert reset["offsets"] == {"0": 0, "1": 0}
    assert shell.json("group", "describe", "team")["lag"] == 3
    assert topic in shell.run("group", "reset", "team", topic, "--to", "15m", "-p", "1").stdout
    assert "--to" in shell.run("group", "reset", "team", topic, "--to", "soon", code=2).stderr
    assert "--yes" in shell.run("group", "delete", "team", code=2).stderr
    shell.run("group", "delete", "team", "--yes")
    assert "team" in shell.run("group", "describe", "team", code=1).stderr


def test_dead_letters_are_listed_sent_back_and_forgotten(shell: Shell) -> None:
    topic = shell.topic("deadly")
    shell.run("produce", topic, "poison", "--key", "k")
    work = ("work", topic, "-g", "g", "-n", "1", "--reject-code", "9")
    shell.run(*work, "--", sys.executable, "-c", "import sys; sys.exit(9)")
    (letter,) = until(lambda: shell.lines("dlq", "list", topic))
    assert (letter["topic"], letter["value"], letter["group"]) == (topic, "poison", "g")
    assert "exit code 9" in letter["error"]
    assert "poison" in shell.run("dlq", "list", topic).stdout
    assert shell.lines("dlq", "list", topic, "--key", "other") == []
    assert shell.lines("dlq", "list", topic, "--until", "2020-01-01T00:00:00Z") == []
    assert shell.json("dlq", "redrive", topic, "--group", "nobody") == {"redriven": 0}
    assert shell.json("dlq", "redrive", topic, "--rate", "100") == {"redriven": 1}
    assert shell.lines("dlq", "list", topic) == []
    shell.run(*work, "--", sys.executable, "-c", "import sys; sys.exit(9)")
    until(lambda: shell.lines("dlq", "list", topic))
    assert "--yes" in shell.run("dlq", "purge", topic, code=2).stderr
    assert shell.json("dlq", "purge", topic, "--yes") == {"purged": 1}
    assert "no-such-topic" in shell.run("dlq", "list", "no-such-topic", code=1).stderr


def test_delayed_records_are_listed_counted_and_cancelled(shell: Shell) -> None:
    topic = shell.topic("later")
    (one,) = shell.lines("produce", topic, "v", "--delay", "1h", "--key", "k", "-p", "1")
    assert one["delayed"] is True
    assert "delivered at" in shell.run("produce", topic, "w", "--delay", "2h", "-p", "1").stdout
    first, second = shell.lines("delay", "list", topic)
    assert (first["value"], first["key"], first["offset"]) == ("v", "k", one["offset"])
    assert second["value"] == "w"
    assert "v" in shell.run("delay", "list", topic, "-p", "1").stdout
    assert shell.json("delay", "stats", topic)["pending"] == 2
    assert "pending" in shell.run("delay", "stats", topic).stdout
    cancel = ("delay", "cancel", topic, "1")
    assert shell.json(*cancel, str(one["offset"])) == {"cancelled": 1}
    assert "none of these" in shell.run(*cancel, "777", code=1).stderr
    assert len(shell.lines("delay", "list", topic)) == 1
