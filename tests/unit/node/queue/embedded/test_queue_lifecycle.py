"""Opening, closing and finding the directory of an embedded queue."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from raftq import Queue
from raftq.client.common.errors import (
    CorruptFile,
    DirectoryLocked,
    InvalidArgument,
    QueueClosed,
    UnknownFormat,
)

WAIT_S = 10.0


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def test_messages_survive_close_and_reopen(open_queue) -> None:
    sent = []
    for n in range(5):
        queue = open_queue()
        sent.append(b"%d" % n)
        queue.enqueue(sent[-1])
        assert values(queue.peek()) == sent
        queue.close()


def test_close_may_be_called_twice_and_from_a_context(tmp_path: Path) -> None:
    with Queue.open(tmp_path / "q") as queue:
        queue.enqueue(b"a")
        queue.close()
        queue.close()
    queue.close()


def test_an_exception_in_the_context_closes_the_queue_and_passes_on(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Queue.open(tmp_path / "q") as queue:  # noqa: PT012
        queue.enqueue(b"a")
        raise KeyError
    with Queue.open(tmp_path / "q") as queue:
        assert queue.dequeue().value == b"a"


def test_every_verb_of_a_closed_queue_says_that_it_is_closed(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    message = queue.dequeue()
    queue.close()
    for call in (
        lambda: queue.enqueue(b"x"),
        lambda: queue.enqueue(b"x", key=b"k"),
        lambda: queue.enqueue(b"x", delay=5),
        lambda: queue.enqueue(b"x", dedup_id="x"),
        lambda: queue.enqueue_batch([b"x"]),
        lambda: queue.dequeue(),
        lambda: queue.dequeue(timeout=None),
        lambda: queue.dequeue_batch(5),
        lambda: next(queue.subscribe("g")),
        lambda: queue.ack(message),
        lambda: queue.ack_batch([message]),
        lambda: queue.nack(message),
        lambda: queue.postpone(message, 1),
        lambda: queue.reject(message, "r"),
        lambda: queue.extend(message, 1),
        lambda: queue.peek(),
        lambda: queue.browse(0),
        lambda: queue.browse(5, timeout=None),
        lambda: queue.delayed(),
        lambda: queue.cancel("d0"),
        lambda: queue.dead_letters(),
        lambda: queue.redrive(),
        lambda: queue.purge_dead_letters(),
        lambda: queue.checkpoint("c"),
        lambda: queue.checkpoints(),
        lambda: queue.replay_from(offset=0),
        lambda: queue.purge(),
        lambda: queue.pause(),
        lambda: queue.resume(),
        lambda: queue.groups(),
        lambda: queue.delete_group("g"),
        lambda: queue.compact(),
        lambda: queue.sync(),
        lambda: queue.stats(),
        lambda: queue.verify(),
    ):
        with pytest.raises(QueueClosed, match="closed"):
            call()


def test_a_queue_can_be_open_only_once(tmp_path: Path) -> None:
    with Queue.open(tmp_path / "q") as queue:
        with pytest.raises(DirectoryLocked, match="this process"):
            Queue.open(tmp_path / "q")
        queue.enqueue(b"still works")
        code = (
            "import sys; from raftq import Queue, errors\n"
            "try: Queue.open(sys.argv[1])\n"
            "except errors.DirectoryLocked as error: sys.exit(str(error))"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "q")],
            capture_output=True, timeout=30, check=False, text=True,
        )  # fmt: skip
        assert str(os.getpid()) in run.stderr
    with Queue.open(tmp_path / "q") as queue:
        assert queue.dequeue().value == b"still works"


@pytest.mark.parametrize("name", ["a path with spaces", "päth-☃", "deep/er/still", "dots..", "-q"])
def test_any_directory_name_will_do(tmp_path: Path, name: str) -> None:
    with Queue.open(tmp_path / name, fsync="none") as queue:
        queue.enqueue(b"a")
    with Queue.open(str(tmp_path / name), fsync="none") as queue:
        message = queue.dequeue()
        assert message.value == b"a"
        queue.ack(message)


def test_a_queue_stays_where_it_is_when_the_process_changes_its_directory(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Queue.open("q", fsync="none", segment_bytes=4096) as queue:
        monkeypatch.chdir(tmp_path / "elsewhere")
        for _ in range(20):
            queue.enqueue(bytes(1000))
        queue.enqueue(b"late", delay=3600)
        queue.compact()
        assert queue.stats().segments > 1
    assert os.listdir(tmp_path / "elsewhere") == []
    with Queue.open(tmp_path / "q", fsync="none") as queue:
        assert len(queue.dequeue_batch(100)) == 20


def test_a_directory_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    (tmp_path / "lock").write_text("precious")
    with pytest.raises(InvalidArgument, match=r"not a RaftQ queue.*thesis\.txt"):
        Queue.open(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["lock", "thesis.txt"]
    assert (tmp_path / "lock").read_text() == "precious"


def test_an_empty_directory_becomes_a_queue(tmp_path: Path) -> None:
    (tmp_path / "q").mkdir()
    with Queue.open(tmp_path / "q") as queue:
        assert queue.enqueue(b"a") == "0"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ('{"format": "raftq-queue", "version": 2}', UnknownFormat),
        ('{"format": "raftq-queue", "version": 0}', UnknownFormat),
        ('{"format": "other", "version": 1}', InvalidArgument),
        ("[]", CorruptFile),
        ("", CorruptFile),
        ('{"format": "raftq-queue", "version": 1e999}', CorruptFile),
        ("\xff\xfe", CorruptFile),
    ],
)
def test_a_format_file_of_another_time_is_refused(tmp_path: Path, content: str, error) -> None:
    Queue.open(tmp_path / "q").close()
    (tmp_path / "q" / "queue.format").write_bytes(content.encode("latin-1"))
    with pytest.raises(error):
        Queue.open(tmp_path / "q")


def test_settings_may_change_from_one_open_to_the_next(open_queue) -> None:
    queue = open_queue(segment_bytes=4096, compression="lz4", max_deliveries=5)
    queue.enqueue_batch([b"x" * 500] * 50)
    queue.nack(queue.dequeue(), 0)
    queue.close()
    queue = open_queue(compression="zstd", max_deliveries=2, value_bytes_max=100)
    queue.enqueue_batch([b"y"] * 50)
    queue.nack(queue.dequeue(), 0)
    assert queue.stats().dead == 1
    assert len(queue.dequeue_batch(1000)) == 99


def test_close_wakes_whoever_waits_and_tells_them(tmp_path: Path) -> None:
    queue = Queue.open(tmp_path / "q", fsync="none")
    queue.pause()
    outcomes: list[str] = []

    def wait(call) -> None:
        try:
            outcomes.append(repr(call()))
        except QueueClosed:
            outcomes.append("closed")

    calls = [
        lambda: queue.dequeue(timeout=None),
        lambda: queue.dequeue(timeout=3600),
        lambda: queue.dequeue_batch(5, timeout=None, group="g"),
        lambda: queue.browse(0, timeout=None),
        lambda: next(queue.subscribe("s")),
    ]
    threads = [threading.Thread(target=wait, args=(call,), daemon=True) for call in calls]
    for thread in threads:
        thread.start()
    until = time.monotonic() + WAIT_S
    while queue._waiters < len(calls):
        assert time.monotonic() < until, "they do not wait"
    queue.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert outcomes == ["closed"] * 5


def test_closing_while_others_publish_loses_nothing_that_was_confirmed(tmp_path: Path) -> None:
    queue = Queue.open(tmp_path / "q", fsync="none")
    confirmed: list[list[str]] = [[], [], []]
    enough = threading.Event()

    def publish(mine: list[str]) -> None:
        try:
            while True:
                mine.append(queue.enqueue(b"x"))
                if len(mine) == 200:
                    enough.set()
        except QueueClosed:
            return

    threads = [threading.Thread(target=publish, args=(mine,), daemon=True) for mine in confirmed]
    for thread in threads:
        thread.start()
    assert enough.wait(WAIT_S)
    queue.close()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    ids = sorted(int(each) for mine in confirmed for each in mine)
    with Queue.open(tmp_path / "q", fsync="none") as queue:
        assert ids == list(range(queue.stats().total))


KILLED = """
import os, sys
from raftq import Queue
queue = Queue.open(sys.argv[1], fsync=sys.argv[2], reserve_bytes=0)
ids = [queue.enqueue(b"plain"), queue.enqueue(b"late", delay=0.001)]
ids += queue.enqueue_batch([b"x"] * 10)
queue.enqueue(b"gone", delay=3600)
assert queue.cancel("d1") or queue.cancel("d2")
first = queue.dequeue()
queue.ack(first)
with queue.transaction() as tx:
    tx.enqueue(b"tx")
queue.reject(queue.dequeue(), "bad")
held = queue.dequeue()
print(first.value.decode(), held.id, flush=True)
os._exit(1)
"""


@pytest.mark.parametrize("fsync", ["none", "interval", "always"])
def test_mistake_16_a_killed_process_loses_nothing_and_its_leases_end(
    tmp_path: Path, fsync: str
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "q"), fsync],
        capture_output=True, timeout=30, check=False, text=True,
    )  # fmt: skip
    assert run.returncode == 1, run.stderr
    _, held_id = run.stdout.split()
    with Queue.open(tmp_path / "q", fsync="none") as queue:
        assert len(queue.dead_letters()) == 1
        found = []
        while (message := queue.dequeue(timeout=0.05)) is not None:
            found.append(message)
        assert len(found) == 11
        assert [m.attempt for m in found if m.id == held_id] == [2]
        assert values(found).count(b"tx") == 1
        assert b"gone" not in values(found)
        assert queue.stats().delayed == 0
