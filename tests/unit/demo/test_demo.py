"""The demo: it runs through, and it would notice a loss."""

import os
import signal
import subprocess
import sys

import pytest

from raftq.node.queue.embedded.message import DeadMessage, QueueStats
from raftq_demo.checks import (
    Deliveries,
    Found,
    WriterRun,
    judge_delivery,
    judge_end,
    judge_shares,
    judge_survival,
    judge_writers,
    verdict,
)
from raftq_demo.plan import NACKED, REJECTED, is_rejected, number_of, payload, plan

JOBS = plan(2000, seed=1)
KILLED_AFTER = 200


@pytest.fixture
def run():
    """A writer that was killed after some calls."""
    acked = {job.index: (f"i{job.start}", f"i{job.end - 1}") for job in JOBS[:KILLED_AFTER]}
    return WriterRun(acked=acked, exit_code=-signal.SIGKILL)


@pytest.fixture
def found():
    """A queue that holds exactly what that writer was told it holds."""
    found = Found()
    for number in range(JOBS[KILLED_AFTER].start):
        found.add(payload(number), f"i{number}")
    return found


@pytest.fixture
def seen():
    """Consumers that saw everything once."""
    seen = Deliveries(lanes=[500, 250, 150, 70, 30])
    seen.settled.update(range(2000))
    seen.lateness = [0.01] * sum(len(job.numbers) for job in JOBS if job.kind == "delayed")
    return seen


def dead_letter(number: int, attempts: int | None = None) -> DeadMessage:
    reason = REJECTED if is_rejected(number) else NACKED
    if attempts is None:
        attempts = 1 if is_rejected(number) else 3
    return DeadMessage(
        0, payload(number), None, {}, "normal", 0.0, reason, "", "default", 0, attempts, 0.0, 0.0
    )


@pytest.fixture
def letters():
    return [dead_letter(job.start) for job in JOBS if job.kind == "poison"]


def failed(checks) -> list[str]:
    return [check.claim for check in checks if not check.ok]


def test_the_plan_numbers_every_message_once_and_fills_the_lanes_evenly():
    numbers = [number for job in JOBS for number in job.numbers]
    by_lane = [sum(len(job.numbers) for job in JOBS if job.lane == lane) for lane in range(5)]
    assert numbers == list(range(2000))
    assert max(by_lane) - min(by_lane) <= 250
    assert {job.kind for job in JOBS} == {"batch", "single", "delayed", "poison"}
    assert plan(2000, seed=1) == JOBS


def test_a_payload_tells_its_number_and_any_other_bytes_are_nobodys():
    assert [number_of(payload(number)) for number in (0, 7, 99_999)] == [0, 7, 99_999]
    for value in (b"", b":", b"x:", payload(7)[:-1], payload(7) + b"x", b"8" + payload(7)[1:]):
        assert number_of(value) == -1
    assert all(200 <= len(payload(number)) <= 1000 for number in range(1000))


def test_a_queue_that_kept_everything_acknowledged_passes(run, found):
    checks = judge_survival(JOBS, run, found)
    assert verdict(checks) == (
        True, f"PASSED: all {len(checks)} checks held; nothing acknowledged was lost",
    )  # fmt: skip


def test_the_call_under_way_at_the_kill_may_be_stored(run, found):
    for number in JOBS[KILLED_AFTER].numbers:
        found.add(payload(number), f"i{number}")
    assert failed(judge_survival(JOBS, run, found)) == []


def test_one_lost_message_fails_the_demo(run, found):
    lost = next(job for job in JOBS if job.kind == "single" and job.index < KILLED_AFTER)
    del found.ids[lost.start]
    checks = judge_survival(JOBS, run, found)
    assert failed(checks) == ["acknowledged before the kill, missing after it"]
    passed, sentence = verdict(checks)
    assert not passed
    assert sentence.startswith("FAILED: 1 of")
    assert "missing after it: 1" in sentence


def test_a_half_stored_batch_fails_the_demo(run, found):
    batch = next(job for job in JOBS if job.kind == "batch" and job.index < KILLED_AFTER)
    del found.ids[batch.start + 1]
    assert failed(judge_survival(JOBS, run, found)) == [
        "acknowledged before the kill, missing after it",
        "batches stored only in part",
    ]


def test_strangers_duplicates_damage_and_moved_messages_fail_the_demo(run, found):
    found.add(payload(1999), "i1999")
    found.add(payload(3), "i9999")
    found.add(payload(4)[:-1], "i4")
    found.ids[JOBS[0].start] = "i77"
    assert failed(judge_survival(JOBS, run, found)) == [
        "found under another id than acknowledged",
        "found but never sent",
        "found twice",
        "found with other bytes than sent",
        *(["batches stored only in part"] if len(JOBS[-1].numbers) > 1 else []),
    ]


def test_a_writer_that_was_not_killed_in_the_middle_fails_the_demo(run, found):
    run.exit_code = 0
    assert failed(judge_survival(JOBS, run, found)) == ["the writer was killed in the middle"]


def test_a_second_writer_that_stops_early_fails_the_demo(found):
    rest = {job.index: ("", "") for job in JOBS[KILLED_AFTER:]}
    assert failed(judge_writers(JOBS, found, WriterRun(acked=rest))) == []
    rest.popitem()
    assert failed(judge_writers(JOBS, found, WriterRun(acked=rest, exit_code=1))) == [
        "calls made by both writers",
        "exit code of the second writer",
    ]


def test_consumers_that_saw_everything_once_pass(seen, letters):
    assert failed(judge_delivery(JOBS, seen, letters, 3)) == []


def test_missing_repeated_early_and_damaged_deliveries_fail_the_demo(seen, letters):
    del seen.settled[5]
    seen.settled[6] += 1
    seen.settled[-1] += 1
    seen.lateness[0] = -0.001
    assert failed(judge_delivery(JOBS, seen, letters, 3)) == [
        "never delivered",
        "settled more than once",
        "delivered with other bytes than sent",
        "delayed messages that came early",
    ]


def test_wrong_dead_letters_fail_the_demo(seen, letters):
    twice = [*letters, letters[0]]
    assert failed(judge_delivery(JOBS, seen, twice, 3)) == ["dead letters, one for each poisoned"]
    soon = [dead_letter(number_of(letters[0].value), attempts=2), *letters[1:]]
    assert failed(judge_delivery(JOBS, seen, soon, 3)) == [
        "dead letters with a wrong reason or attempt"
    ]


def test_shares_two_points_off_pass_and_equal_shares_fail():
    assert judge_shares([52, 25, 13, 7, 3]).ok
    assert not judge_shares([53, 25, 12, 7, 3]).ok
    assert not judge_shares([20, 20, 20, 20, 20]).ok
    assert not judge_shares([0, 0, 0, 0, 0]).ok


def test_leftovers_and_damage_fail_the_demo():
    assert failed(judge_end(QueueStats(), [])) == []
    assert failed(judge_end(QueueStats(delayed=1), ["data: broken"])) == [
        "left in the queue",
        "damaged ranges in its files",
    ]


def test_nothing_checked_is_not_a_pass():
    assert verdict([]) == (False, "FAILED: nothing was checked")


def test_the_demo_kills_a_writer_loses_nothing_and_leaves_no_files(tmp_path):
    command = [sys.executable, "-m", "raftq_demo", "--messages", "5000", "--seed", "11"]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    checks = 38 if "SKIPPED, Spark" in done.stdout else 41
    assert done.stdout.splitlines()[-1].startswith(f"PASSED: all {checks} checks held")
    assert "exit code -9" in done.stdout
    assert list(tmp_path.iterdir()) == []
