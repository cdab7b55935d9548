"""Group commit: one sync serves many, order holds, failures reach those who wait."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from raftq.client.common.disk import File, RealDisk, RealFile
from raftq.client.common.errors import RaftqError, StorageFailed
from raftq.client.wire.batch import encode_one
from raftq.node.storage.config import LogConfig
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log


class CountingDisk(RealDisk):
    """Notes every sync of a segment; `on_sync` runs before it."""

    def __init__(self) -> None:
        self.synced: list[str] = []
        self.on_sync: Callable[[str], None] = lambda path: None

    def open(self, path: str, create: bool = False) -> File:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0))
        return CountingFile(self, fd, path)


class CountingFile(RealFile):
    __slots__ = ("_disk",)

    def __init__(self, disk: CountingDisk, fd: int, path: str) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def sync(self) -> None:
        if self._path.endswith(".log"):
            self._disk.on_sync(self._path)
            self._disk.synced.append(self._path)
        super().sync()


def open_logs(disk: RealDisk, path: Path, *names: str) -> list[Log]:
    return [Log.open(disk, str(path / name), LogConfig(), 0) for name in names]


def test_eight_writers_share_far_fewer_syncs_than_appends(tmp_path: Path) -> None:
    disk = CountingDisk()
    (log,) = open_logs(disk, tmp_path, "a")
    flusher = Flusher()
    flusher.add(log)
    disk.synced.clear()
    lock, start = threading.Lock(), threading.Barrier(8)
    first_round = threading.Semaphore(0)
    arrived: list[int] = []

    def hold_first(path: str) -> None:
        """The first sync lasts until every writer has appended, as a slow disk would."""
        disk.on_sync = lambda path: None
        for _ in range(8):
            first_round.acquire()

    disk.on_sync = hold_first

    def write() -> None:
        start.wait()
        for number in range(25):
            with lock:
                end = log.append(encode_one(b"x", number)) + 1
            if number == 0:
                arrived.append(end)
                first_round.release()
            flusher.wait([(log, end)])
            assert log.flushed_offset >= end

    threads = [threading.Thread(target=write) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    flusher.close()
    assert log.flushed_offset == 200
    assert len(arrived) == 8
    assert len(disk.synced) <= 120, "each sync should have served several writers"
    log.close()


def test_round_syncs_logs_in_the_order_they_were_added(tmp_path: Path) -> None:
    disk = CountingDisk()
    data, ledger = open_logs(disk, tmp_path, "z-data", "a-ledger")
    flusher = Flusher()
    flusher.add(data)
    flusher.add(ledger)
    disk.synced.clear()
    data.append(encode_one(b"", 0))
    ledger.append(encode_one(b"", 0))
    flusher.wait([(ledger, 1), (data, 1)])
    assert [Path(path).parent.name for path in disk.synced] == ["z-data", "a-ledger"]
    flusher.close()
    for log in (data, ledger):
        log.close()


def test_logs_of_several_folders_are_synced_at_once_and_those_of_one_in_order(
    tmp_path: Path,
) -> None:
    disk = CountingDisk()
    names = ["p0/data", "p0/ledger", "p1/data", "p1/ledger"]
    for name in names:
        (tmp_path / name).mkdir(parents=True)
    logs = open_logs(disk, tmp_path, *names)
    flusher = Flusher(hands=2)
    for log in logs:
        flusher.add(log)
        log.append(encode_one(b"", 0))
    disk.synced.clear()
    together = threading.Barrier(2, timeout=10)  # broken when one has to wait for the other
    disk.on_sync = lambda path: together.wait() and None
    flusher.wait([(log, 1) for log in logs])
    assert [log.flushed_offset for log in logs] == [1] * 4
    for part in ("p0", "p1"):
        order = [Path(path).parent.name for path in disk.synced if f"/{part}/" in path]
        assert order == ["data", "ledger"]
    disk.on_sync = lambda path: None
    for log in logs:
        flusher.remove(log)
    flusher.close()
    for log in logs:
        log.close()


def test_wait_for_what_is_already_durable_costs_nothing(tmp_path: Path) -> None:
    disk = CountingDisk()
    (log,) = open_logs(disk, tmp_path, "a")
    flusher = Flusher()
    flusher.add(log)
    log.append(encode_one(b"", 0))
    log.sync()
    disk.synced.clear()
    flusher.wait([(log, 1), (log, 0)])
    assert disk.synced == []
    flusher.close()
    log.close()


def test_callback_runs_after_the_sync(tmp_path: Path) -> None:
    (log,) = open_logs(RealDisk(), tmp_path, "a")
    flusher = Flusher()
    flusher.add(log)
    called = threading.Event()
    answers: list[tuple[RaftqError | None, int]] = []

    def callback(error: RaftqError | None) -> None:
        answers.append((error, log.flushed_offset))
        called.set()

    log.append(encode_one(b"", 0))
    flusher.submit([(log, 1)], callback)
    assert called.wait(10)
    assert answers == [(None, 1)]
    flusher.close()
    log.close()


def test_interval_syncs_without_anybody_waiting(tmp_path: Path) -> None:
    disk = CountingDisk()
    (log,) = open_logs(disk, tmp_path, "a")
    synced = threading.Event()
    disk.on_sync = lambda path: synced.set()
    flusher = Flusher(interval_s=0.005)
    flusher.add(log)
    synced.clear()
    log.append(encode_one(b"", 0))
    assert synced.wait(10)
    flusher.close()
    assert log.flushed_offset == 1
    log.close()


def test_failed_sync_reaches_every_waiter_and_spares_other_logs(tmp_path: Path) -> None:
    disk = CountingDisk()
    bad, good = open_logs(disk, tmp_path, "bad", "good")
    flusher = Flusher()
    flusher.add(bad)
    flusher.add(good)

    def fail(path: str) -> None:
        if "/bad/" in path:
            raise StorageFailed("the disk does not answer")

    disk.on_sync = fail
    bad.append(encode_one(b"", 0))
    good.append(encode_one(b"", 0))
    for _ in range(2):
        with pytest.raises(StorageFailed, match="does not answer"):
            flusher.wait([(good, 1), (bad, 1)])
    with pytest.raises(StorageFailed, match="until it is opened again"):
        bad.append(encode_one(b"", 0))
    flusher.wait([(good, 1)])
    assert good.append(encode_one(b"", 0)) == 1
    flusher.close()
    for log in (bad, good):
        log.close()


def test_removed_log_and_closed_flusher_refuse_to_wait(tmp_path: Path) -> None:
    (log,) = open_logs(RealDisk(), tmp_path, "a")
    flusher = Flusher()
    flusher.add(log)
    flusher.remove(log)
    log.append(encode_one(b"", 0))
    with pytest.raises(StorageFailed):
        flusher.wait([(log, 1)])
    flusher.close()
    flusher.close()
    with pytest.raises(StorageFailed, match="closed"):
        flusher.wait([(log, 1)])
    log.close()


def test_close_serves_who_is_waiting(tmp_path: Path) -> None:
    disk = CountingDisk()
    (log,) = open_logs(disk, tmp_path, "a")
    flusher = Flusher()
    flusher.add(log)
    inside, go_on = threading.Event(), threading.Event()

    def hold(path: str) -> None:
        inside.set()
        go_on.wait(10)

    disk.on_sync = hold
    answers: list[RaftqError | None] = []
    log.append(encode_one(b"", 0))
    flusher.submit([(log, 1)], answers.append)
    assert inside.wait(10)
    log.append(encode_one(b"", 0))
    flusher.submit([(log, 2)], answers.append)
    closer = threading.Thread(target=flusher.close)
    closer.start()
    go_on.set()
    closer.join()
    assert answers == [None, None]
    log.close()


def test_a_failed_sync_that_nobody_waits_for_is_told(tmp_path: Path) -> None:
    """The log refuses writes from then on: its owner should not have to find out by writing."""
    disk = CountingDisk()
    (log,) = open_logs(disk, tmp_path, "a")
    told: list[tuple[Log, RaftqError]] = []
    heard = threading.Event()

    def note(failed: Log, error: RaftqError) -> None:
        told.append((failed, error))
        heard.set()

    def fail(path: str) -> None:
        raise StorageFailed("no more")

    flusher = Flusher(interval_s=0.01)
    flusher.on_failure = note
    disk.on_sync = fail
    log.append(encode_one(b"x", 1))
    flusher.add(log)
    assert heard.wait(10)
    flusher.close()
    assert told == [(log, log.failure)]
