"""The README's lines and the examples in docs/ do what they say."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from raftq.chaos.harness.local_cluster import LocalCluster

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAMPLES = ROOT / "docs" / "EXAMPLES.md"
README_LINES_MAX = 180
README_PORTS = [first + node for first in (7070, 7170, 7270) for node in range(3)]
BLOCK = re.compile(r"^```(python|console)\n(.*?)^```", re.DOTALL | re.MULTILINE)
DONE = "--- done:"


def blocks(path: Path, language: str) -> list[str]:
    return [text for found, text in BLOCK.findall(path.read_text()) if found == language]


def example(path: Path, importing: str) -> str:
    """The one Python block that imports this."""
    (found,) = [text for text in blocks(path, "python") if f"import {importing}\n" in text]
    return found


def run(text: str, directory: Path) -> list[str]:
    script = directory / "example.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script)], cwd=directory, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


class Terminal:
    """A shell that runs one line after the other, as a reader types them."""

    def __init__(self, directory: Path, environment: dict[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash", "--noprofile", "--norc"],
            cwd=directory,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def type(self, line: str) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(line + "\n")
        self._shell.stdin.flush()

    def read_to(self, mark: str) -> tuple[str, str]:
        """What is printed before the line that begins with the mark, and that line."""
        assert self._shell.stdout is not None
        printed = ""
        for line in self._shell.stdout:
            if line.startswith(mark):
                return printed, line
            printed += line
        raise AssertionError(f"the shell ended before {mark!r}: {printed}")

    def run(self, line: str) -> str:
        """Run a line in the foreground; fails when its exit code is not 0."""
        self.type(f"{{ {line.rstrip()}\n}} </dev/null; echo; echo {DONE} $?")
        printed, done = self.read_to(DONE)
        assert done == f"{DONE} 0\n", f"$ {line}\n{printed}"
        return printed

    def close(self) -> None:
        """End the shell and what runs in it, and wait: the output ends when all have ended."""
        os.killpg(self._shell.pid, signal.SIGTERM)
        self._shell.communicate(timeout=60)


@contextmanager
def terminals(directory: Path, environment: dict[str, str]) -> Iterator[list[Terminal]]:
    """The open ones; the last one is typed into."""
    opened = [Terminal(directory, environment)]
    try:
        yield opened
    finally:
        for one in opened:
            one.close()


def fresh_copy(directory: Path) -> Path:
    """The tracked files as they are now: a clone that has the changes not committed yet."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    clone = directory / "raftq-clone"
    for name in filter(None, listed.stdout.split("\0")):
        if os.path.lexists(ROOT / name):
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name, follow_symlinks=False)
    return clone


def lend_dependencies(venv: Path) -> None:
    """Let the new environment import our installed dependencies, so that pip downloads only the
    build tool. The path in a .pth file shows packages but does not run the .pth files in it, so an
    editable install of raftq there stays hidden."""
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")


def port_in_use() -> int | None:
    for port in README_PORTS:
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            return port
    return None


def follow(opened: list[Terminal], clone: Path, environment: dict[str, str]) -> list[str]:
    """Run every block of the README, in order; what each line printed."""
    printed = []
    for number, (language, text) in enumerate(BLOCK.findall(README.read_text())):
        if language == "python":
            (clone / f"example_{number}.py").write_text(text)
            command = (
                f"python example_{number}.py"  # twice: the second run meets what the first left
            )
            printed += [opened[-1].run(command), opened[-1].run(command)]
            continue
        for line in text.splitlines():
            command = line.removeprefix("$ ")
            if command.startswith("raftq cluster up"):
                opened[-1].type(command)
                before, connect = opened[-1].read_to("connect:")
                printed += [before, connect]
                opened[-1].read_to("stop:")
                opened.append(Terminal(clone, environment))
                continue
            printed.append(opened[-1].run(command))
            if "-m venv" in command:
                lend_dependencies(clone / ".venv")
    return printed


@pytest.mark.full
def test_the_lines_of_the_readme_work_in_order_in_a_fresh_clone(tmp_path: Path) -> None:
    """1. Copy the repository; a new environment; an ordinary install, not an editable one.
    2. Type every line of the README in the clone's directory, each Python block twice.
    3. `import raftq` in the clone's directory finds the installed package.
    """
    if (port := port_in_use()) is not None:
        pytest.skip(f"the README's cluster needs port {port}, which is in use")
    clone = fresh_copy(tmp_path)
    python = Path(sys.executable).resolve().parent
    environment = {
        "PATH": f"{python}:/usr/local/bin:/usr/bin:/bin",
        "HOME": str(tmp_path),
        "COLUMNS": "200",
        "PIP_NO_DEPS": "1",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    with terminals(clone, environment) as opened:
        printed = "".join(follow(opened, clone, environment))
        home = opened[-1].run('python -c "import raftq; raftq.Queue; print(raftq.__file__)"')
    assert str(clone / ".venv") in home
    connect = "export RAFTQ_BOOTSTRAP=127.0.0.1:7070,127.0.0.1:7071,127.0.0.1:7072"
    assert connect in printed, "`cluster up` names every node, as the README does"
    assert "Appended(topic='payments', partition=" in printed
    assert "10001 records" in printed
    assert "'rejected': 1" in printed
    assert "2 dead letters sent back" in printed, "the example ran twice"


def test_no_folder_of_the_checkout_hides_an_installed_package() -> None:
    """Python looks into the current directory first, and the README has readers work in it."""
    assert PathFinder.find_spec("raftq", [str(ROOT)]) is None
    assert PathFinder.find_spec("raftq", [str(ROOT / "src")]) is not None


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    text = README.read_text()
    assert len(text.splitlines()) <= README_LINES_MAX
    for page in [README, *ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_the_readme_s_queue_example_runs_as_it_stands(tmp_path: Path) -> None:
    letters, counts = run(example(README, "Queue"), tmp_path)
    assert letters == "[b'bad order']"
    assert counts == "0 pending, 1 delayed"


def test_the_long_queue_example_runs_as_it_stands(tmp_path: Path) -> None:
    *audited, letters, counts = run(example(EXAMPLES, "Queue"), tmp_path)
    assert len(audited) == 8, "six messages and two that were shipped"
    assert letters == "['cannot read this order'] 1"
    assert counts == "9 pending, 1 delayed"


def test_the_cluster_examples_run_against_three_nodes(tmp_path: Path) -> None:
    names = ("Admin, Consumer, Producer, QueueClient, Reject, Worker", "Consumer", "Producer")
    with LocalCluster(tmp_path / "cluster", nodes=3) as cluster:
        (assigned, counts), (count,), (appended,) = [
            run(example(EXAMPLES, name).replace("127.0.0.1:7070", cluster.bootstrap), tmp_path)
            for name in names
        ]
    assert "('tickets', 2)" in assigned
    assert "'rejected': 1" in counts
    assert count == "4 records"
    assert appended.startswith("Appended(topic='tickets', partition=")
