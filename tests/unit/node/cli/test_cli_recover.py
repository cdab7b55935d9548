"""`raftq cluster recover` and what `status` says of partitions without a leader."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from raftq.client.admin.recovery import Leaderless, ReplicaCopy
from raftq.client.common.errors import FencedEpoch, RaftqError
from raftq.client.results import PartitionDescription, TopicDescription
from raftq.client.sync import admin as blocking
from raftq.client.wire.admin_messages import ClusterStatusReply
from raftq.node.cli import app

RUNNER = CliRunner()
GONE = Leaderless(
    topic="t",
    topic_id=5,
    partition=0,
    version=9,
    replicas=(1, 2, 3),
    isr=(1,),
    waits_for=(),
    copies=(ReplicaCopy(3, ((4, 900), (4, 12), (0, 0)), 880), ReplicaCopy(2, ((4, 100),), 100)),
    silent=(1,),
)
WAITING = replace(GONE, partition=1, isr=(), waits_for=(3,), copies=(), silent=(1, 2, 3))


class Admin:
    """Pretends."""

    found: tuple[Leaderless, ...] = ()
    recovered: list[tuple[str, int, int | None]]
    error: RaftqError | None = None

    def __init__(self, bootstrap, **settings) -> None:
        type(self).recovered = []

    def __enter__(self):
        return self

    def __exit__(self, *error) -> None:
        pass

    def leaderless(self, topic=None, partition=None):
        return [
            one
            for one in self.found
            if topic in (None, one.topic) and partition in (None, one.partition)
        ]

    def recover(self, topic, partition, version=None):
        self.recovered.append((topic, partition, version))
        if self.error is not None:
            raise self.error
        return 3

    def describe_topic(self, name):
        part = PartitionDescription(0, 2, 4, (1, 2), (2,), (), 0, 7)
        waiting = PartitionDescription(1, None, 4, (1, 2), (), (), None, None, (1, 2))
        return TopicDescription(name, 5, {}, (part, waiting))

    def cluster_status(self):
        return ClusterStatusReply("blue", 1, 2, 7, 99, (1, 2, 3), 1, 2, len(self.found), 1, 0, 0)


@pytest.fixture(autouse=True)
def admin(monkeypatch):
    monkeypatch.setattr(blocking, "Admin", Admin)
    monkeypatch.setattr(Admin, "found", (GONE,))
    monkeypatch.setattr(Admin, "error", None)


def run(*arguments: str):
    return RUNNER.invoke(app, ["cluster", *arguments])


def test_a_dry_run_says_who_would_lead_and_what_would_be_lost() -> None:
    done = run("recover", "--dry-run")
    assert done.exit_code == 0, done.output
    assert "t/0 has no leader: no node of its isr (1) is alive" in done.output
    assert "node 3: data epoch 4, ends at 900; ledger epoch 4, ends at 12;" in done.output
    assert "readable to 880; it would lead" in done.output
    assert "what only nodes 1 had from offset 900 on; at least 0 records" in done.output
    assert Admin.recovered == []


def test_a_copy_that_knows_of_more_readable_records_shows_a_certain_loss() -> None:
    one = replace(GONE, copies=(ReplicaCopy(3, ((5, 40),), 40), ReplicaCopy(2, ((4, 100),), 90)))
    assert one.lost_min == 50
    assert WAITING.lost_min == 0


def test_nothing_happens_without_a_terminal_or_yes() -> None:
    done = run("recover", "t")
    assert done.exit_code == 2
    assert "needs --yes" in str(done.exception) or "needs --yes" in done.output
    assert Admin.recovered == []


def test_what_was_shown_is_what_is_decided_about() -> None:
    done = run("recover", "t", "0", "--yes")
    assert done.exit_code == 0, done.output
    assert Admin.recovered == [("t", 0, 9)]
    assert "t/0: node 3 leads" in done.output


def test_a_refusal_is_told_and_the_exit_code_says_so(monkeypatch) -> None:
    monkeypatch.setattr(Admin, "error", FencedEpoch("t/0 has changed since"))
    done = run("recover", "--yes", "--format", "json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)[0]["error"] == "t/0 has changed since"


def test_a_partition_without_any_copy_cannot_be_recovered(monkeypatch) -> None:
    monkeypatch.setattr(Admin, "found", (WAITING,))
    done = run("recover", "--yes")
    assert done.exit_code == 1
    assert "nothing can be done: no copy is on a node that is alive" in done.output
    assert "t/1 has no leader: it waits for the ends of nodes 3" in done.output
    assert Admin.recovered == []


def test_a_partition_that_is_led_needs_no_recovery(monkeypatch) -> None:
    monkeypatch.setattr(Admin, "found", ())
    done = run("recover")
    assert (done.exit_code, done.output) == (0, "every partition has a leader\n")
    refused = run("recover", "t", "0")
    assert refused.exit_code == 2
    assert "node 2 of its isr is alive" in str(refused.exception) + refused.output


def test_the_status_says_why_a_partition_has_no_leader() -> None:
    done = run("status")
    assert done.exit_code == 1
    assert "t/0 has no leader: no node of its isr (1) is alive" in done.output
    assert "raftq cluster recover --dry-run" in done.output


def test_a_topic_says_what_its_partitions_wait_for() -> None:
    done = RUNNER.invoke(app, ["topic", "describe", "t"])
    assert "t/1 waits for the ends of nodes 1,2: the longest copy is to lead" in done.output
