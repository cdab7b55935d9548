"""Consumers that are processes of their own, killed with SIGKILL, on nodes that are killed, too."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from clusterwork import until
from queuework import Stage, on_stage

from raftq.chaos.harness.local_cluster import LocalCluster
from raftq.chaos.history import History, OwnedSpan
from raftq.client.common.tasks import sleep

SCRIPT = Path(__file__).with_name("group_process.py")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "cluster", nodes=3) as made:
        yield made


class Children:
    """Processes that consume, and what they printed."""

    def __init__(self, stage: Stage, directory: Path) -> None:
        self._stage = stage
        self._directory = directory
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, name: str) -> None:
        stage = self._stage
        arguments = (kind, stage.cluster.bootstrap, stage.topic, name)
        with (self._directory / name).open("wb") as out, open(os.devnull, "wb") as nowhere:
            self.running[name] = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments], stdout=out, stderr=nowhere
            )

    def kill(self, name: str) -> None:
        child = self.running.pop(name)
        child.kill()
        child.wait()

    def kill_all(self) -> None:
        for name in list(self.running):
            self.kill(name)

    def lines(self, name: str) -> list[dict[str, Any]]:
        """What it printed; a line that its death cut short is none."""
        whole = (self._directory / name).read_bytes().split(b"\n")[:-1]
        return [json.loads(line) for line in whole]

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The history that a member printed, each operation as it was last."""
        found: dict[int, dict[str, Any]] = {}
        for line in self.lines(name):
            found[line["number"]] = line["row"]
        return list(found.values())


@contextmanager
def children(stage: Stage, directory: Path) -> Iterator[Children]:
    made = Children(stage, directory)
    try:
        yield made
    finally:
        made.kill_all()


def test_members_killed_with_their_records_skip_nothing(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Two members, one is killed, then a leader, and a third takes over: every record was seen, and
    no position was stored past one that was not."""

    async def scene(stage: Stage) -> None:
        overseer = await stage.recorder("overseer", "readers")
        with children(stage, tmp_path) as group:
            for name in ("m1", "m2"):
                group.start("member", name)
            sending = stage.spawn(stage.send_many([f"v{at}" for at in range(500)], pause_s=0.01))
            await until(lambda: saw_something(group, "m1", "m2"), 15)
            group.kill("m1")
            await stage.kill_leader(("work", 0), down_s=0.2)
            group.start("member", "m3")
            await sending
            await until(lambda: all_stored(stage, overseer), 20)
            group.kill_all()
            rows = [row for name in ("m1", "m2", "m3") for row in group.rows(name)]
        rows.sort(key=lambda row: row["at"])
        for one in History.from_json(rows).operations:
            if isinstance(one, OwnedSpan) and one.how == "open":
                one.how = "died"
            stage.history.add(one)
        final = await stage.final()
        final.read = {"readers": ["work"]}
        stage.judge(final)

    on_stage(cluster, scene, partitions=3)


async def saw_something(group: Children, *names: str) -> bool:
    return all(any(row["kind"] == "receive" for row in group.rows(name)) for name in names)


async def all_stored(stage: Stage, overseer: Any) -> bool:
    described = await stage.admin.describe_topic(stage.topic)
    for place in stage.places:
        stored = await overseer.recall(place)
        if stored.offset != described.partitions[place[1]].high_watermark:
            return False
    return True


@pytest.mark.full
def test_killed_workers_leave_their_records_to_the_others(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """1. Three workers handle what comes in; some records make their handlers fail.
    2. One worker is killed in the midst, then a leader.
    3. Every record was handled to its end by somebody, none by two at once, and those that failed
       are dead letters, once each, after three attempts.
    """

    async def scene(stage: Stage) -> None:
        await stage.recorder("overseer", "workers")
        values = [f"{'poison' if at % 50 == 0 else 'v'} {at}" for at in range(400)]
        names = ("w1", "w2", "w3")
        with children(stage, tmp_path) as group:
            for name in names:
                group.start("worker", name)
            sending = stage.spawn(stage.send_many(values, pause_s=0.005))
            await until(lambda: began(group, *names), 20)
            await sleep(0.3)
            group.kill("w1")
            await stage.kill_leader(("work", 1), down_s=0.2)
            await sending
            await stage.drained("workers")
            group.kill_all()
            lines = [line for name in names for line in group.lines(name)]
        done = {line["value"] for line in lines if line["what"] == "end"}
        poison = {value for value in values if value.startswith("poison")}
        assert done == set(values) - poison
        check_one_at_a_time(lines)
        final = await stage.final("workers")
        assert sorted(letter.value for letter in final.letters) == sorted(poison)
        assert {letter.attempts for letter in final.letters} == {3}

    on_stage(cluster, scene, backoff_ms=50)


async def began(group: Children, *names: str) -> bool:
    return all(group.lines(name) for name in names)


def check_one_at_a_time(lines: list[dict[str, Any]]) -> None:
    """A handler that began with a record while another was at it, whose worker lived."""
    spans: dict[str, list[tuple[float, float, str]]] = {}
    begun: dict[tuple[str, str, int], float] = {}
    for line in sorted(lines, key=lambda line: line["at"]):
        key = (line["worker"], line["value"], line["attempt"])
        if line["what"] == "begin":
            assert key not in begun, f"delivered twice with one attempt: {key}"
            begun[key] = line["at"]
        else:
            span = (begun[key], line["at"], line["worker"])
            spans.setdefault(line["value"], []).append(span)
    for value, found in spans.items():
        found.sort()
        for before, after in pairwise(found):
            assert before[1] <= after[0], f"{value} had two handlers at once: {found}"
