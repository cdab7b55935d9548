"""The commands for queues, groups, delays and dead letters, at a real node."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from livenode import live_node
from typer.testing import CliRunner

from raftq.node.cli import app

pytestmark = pytest.mark.slow
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
