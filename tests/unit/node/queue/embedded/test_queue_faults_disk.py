"""A full disk stops publishing and nothing else; nothing that was acknowledged is lost."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
import queuefaults as faults
from queuefaults import START, Clock

from raftq.client.common.disk import Disk, File, RealDisk, RealFile, storage_error
from raftq.client.common.errors import DirectoryLocked, DiskFull, LeaseLost, StorageError
from raftq.client.common.types import Buffer
from raftq.node.queue.embedded import Queue
from raftq.node.queue.embedded.options import EmbeddedOptions

T = TypeVar("T")
KIB = 1024
OPTIONS = EmbeddedOptions(
    fsync="none", segment_bytes=16 * KIB, reserve_bytes=64 * KIB, max_deliveries=2,
    visibility_timeout=30.0, backoff=1.0, retention=None,
)  # fmt: skip


class QuotaFile(RealFile):
    """A file of a disk with a quota; a write that does not fit leaves its first bytes first."""

    def __init__(self, disk: "QuotaDisk", fd: int, path: str) -> None:
        super().__init__(fd, path)
        self.disk = disk

    def append(self, buffers: Sequence[Buffer]) -> None:
        room = self.disk.room()
        if sum(map(len, buffers)) <= room:
            super().append(buffers)
            return
        os.pwrite(self._fd, b"".join(map(bytes, buffers))[: max(room, 0)], self.size)
        self._undo_append(self.size)
        raise storage_error(OSError(errno.ENOSPC, "no space left"), "append to", self._path)

    def write_at(self, position: int, data: Buffer) -> None:
        if position + len(data) > self.size + max(self.disk.room(), 0):
            raise storage_error(OSError(errno.ENOSPC, "no space left"), "write to", self._path)
        super().write_at(position, data)

    def sync(self) -> None:
        pass


class QuotaDisk(RealDisk):
    """The real disk with room for so many bytes."""

    def __init__(self, root: Path, quota: int) -> None:
        self.root = root
        self.quota = quota

    def room(self) -> int:
        return self.quota - sum(p.stat().st_size for p in self.root.rglob("*") if p.is_file())

    def open(self, path: str, create: bool = False) -> File:
        file = super().open(path, create)
        assert isinstance(file, RealFile)
        twin = QuotaFile(self, os.dup(file._fd), path)
        file.close()
        return twin

    def free_bytes(self, directory: str) -> int:
        return max(self.room(), 0)

    def sync_directory(self, path: str) -> None:
        pass


class Medium:
    """A place for a queue that can be filled and emptied."""

    def __init__(self, root: Path, disk: Disk, full: Callable[[bool], None]) -> None:
        self.path = root / "queue"
        self.disk = disk
        self.clock = Clock(START)
        self.set_full = full

    def open(self, options: EmbeddedOptions = OPTIONS) -> Queue:
        return Queue(self.path, options, disk=self.disk, clock=self.clock, keeper=False)


@pytest.fixture(params=["tmpfs", "quota"])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Medium]:
    root = tmp_path / "disk"
    root.mkdir()
    if request.param == "quota":
        disk = QuotaDisk(root, 1024 * KIB)

        def limit(full: bool) -> None:
            disk.quota = disk.quota - disk.room() if full else 1024 * KIB

        yield Medium(root, disk, limit)
        return
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: a disk that is really full; mounting a tmpfs needs root")
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(root)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: a disk that is really full; mount fails: {mounted.stderr!r}")

    def fill(full: bool) -> None:
        ballast = root / "ballast"
        if not full:
            ballast.unlink()
            return
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(4096)):
                    pass
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017 - the only way to fill a disk

    try:
        yield Medium(root, RealDisk(), fill)
    finally:
        subprocess.run(["umount", str(root)], check=True)


def publish_until_full(queue: Queue) -> int:
    """The last pages of a file system have room for some more; the number that fitted."""
    for number in range(10_000):
        try:
            queue.enqueue(b"fits" + b"." * 200)
        except DiskFull:
            return number
    raise AssertionError("the disk never becomes full")


def numbered(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def test_full_disk_refuses_publishes_lets_consumers_go_on_and_recovers_by_itself(
    medium: Medium,
) -> None:
    """
    1. Every way to publish is refused and leaves nothing. 2. Everything is dequeued and acked.
    3. Space returns: publishing works without a reopen. 4. A reopen finds exactly that.
    """
    with medium.open() as queue:
        queue.enqueue_batch(numbered(100))
        medium.set_full(True)
        extra = publish_until_full(queue)
        before = queue.stats()
        publish: list[Callable[[], object]] = [
            lambda: queue.enqueue(b"x" * 5000),
            lambda: queue.enqueue_batch([b"x" * 5000] * 5),
            lambda: queue.enqueue(b"x" * 5000, delay=5.0),
            lambda: queue.enqueue(b"x" * 5000, dedup_id="d"),
            lambda: publish_in_transaction(queue, b"x" * 5000),
        ]
        for verb in publish:
            with pytest.raises(DiskFull):
                verb()
        after = queue.stats()
        assert (after.end_offset, after.delayed) == (before.end_offset, before.delayed)

        got = 0
        while message := queue.dequeue():
            queue.ack(message)
            got += 1
        assert got == 100 + extra
        with pytest.raises(DiskFull, match="acks still work"):
            queue.enqueue(b"y")

        medium.set_full(False)
        for verb in publish:
            verb()
        medium.clock.now += 10
        assert len(faults.drain(queue, "default", {})) == 9
    with medium.open() as queue:
        assert queue.dequeue() is None
        assert queue.stats().settled_offset == 100 + extra + 9
        assert queue.verify() == []


def publish_in_transaction(queue: Queue, value: bytes) -> None:
    with queue.transaction() as tx:
        tx.enqueue(value)


def test_close_and_reopen_work_on_a_full_disk(medium: Medium) -> None:
    queue = medium.open()
    queue.enqueue_batch(numbered(50))
    queue.enqueue(b"later", delay=100.0)
    medium.set_full(True)
    publish_until_full(queue)
    queue.ack_batch(queue.dequeue_batch(20))
    held = queue.dequeue_batch(5)
    assert [message.offset for message in held] == [20, 21, 22, 23, 24]
    queue.close()
    for _ in range(3):
        with medium.open() as again:
            message = again.dequeue()
            assert message is not None
            assert message.offset == 20
    medium.set_full(False)
    with medium.open() as again:
        offsets = [offset for offset, _ in faults.drain(again, "default", {})]
        assert offsets == list(range(20, again.stats().end_offset))
        assert again.stats().delayed == 1
        again.enqueue(b"works")


def test_full_disk_without_room_for_the_owner_of_the_lock_is_opened(medium: Medium) -> None:
    with medium.open() as queue:
        queue.enqueue_batch(numbered(50))
    (medium.path / "lock").unlink()
    medium.set_full(True)
    with medium.open() as queue:
        with pytest.raises(DirectoryLocked):
            medium.open()
        assert len(faults.drain(queue, "default", {})) == 50


def test_open_without_a_reserve_on_a_full_disk_works_or_says_so(medium: Medium) -> None:
    options = EmbeddedOptions(fsync="none", segment_bytes=16 * KIB, reserve_bytes=0)
    with medium.open(options) as queue:
        queue.enqueue_batch(numbered(50))
        queue.ack_batch(queue.dequeue_batch(20))
        medium.set_full(True)
        while True:
            try:
                queue.ack(queue.dequeue())  # type: ignore[arg-type]
            except DiskFull:
                break
            except AttributeError:  # nothing left: everything fitted into the last page
                break
        settled = queue.stats().settled_offset
    refused = ""
    try:
        medium.open(options).close()
    except DiskFull as error:
        refused = str(error)
    assert refused == "" or str(medium.path) in refused
    medium.set_full(False)
    with medium.open(options) as queue:
        assert queue.stats().settled_offset == settled


class BoastfulDisk(QuotaDisk):
    """A disk that claims more room than it has, as one with other users does a moment later."""

    def free_bytes(self, directory: str) -> int:
        return 10**9


def test_reserve_that_does_not_fit_leaves_no_part_of_itself(tmp_path: Path) -> None:
    disk = BoastfulDisk(tmp_path, 100 * KIB)
    options = EmbeddedOptions(fsync="none", reserve_bytes=200 * KIB)
    medium = Medium(tmp_path, disk, lambda full: None)
    with medium.open(options) as queue:
        with pytest.raises(DiskFull):
            queue.enqueue(b"x")
        assert disk.room() > 90 * KIB
        disk.quota = 400 * KIB
        queue.enqueue(b"x")
        assert (medium.path / "reserve").stat().st_size == 200 * KIB


def test_first_open_on_a_full_disk_is_refused_and_works_later(medium: Medium) -> None:
    medium.set_full(True)
    with pytest.raises(DiskFull, match=str(medium.path)):
        medium.open()
    medium.set_full(False)
    with medium.open() as queue:
        faults.works_on(queue)


def test_delay_that_is_due_on_a_full_disk_does_not_stop_deliveries(medium: Medium) -> None:
    """It waits for space, and comes once when there is some."""
    with medium.open() as queue:
        queue.enqueue(b"later" + b"." * 9000, delay=10.0)
        queue.enqueue_batch(numbered(20))
        medium.set_full(True)
        extra = publish_until_full(queue)
        medium.clock.now += 11
        got = faults.drain(queue, "default", {})
        assert len(got) == 20 + extra
        assert queue.stats().delayed == 1
        assert queue.due_in() > 0, "a full disk must not make the keeper spin"
        medium.set_full(False)
        medium.clock.now += 2
        assert [value[:5] for _, value in faults.drain(queue, "default", {})] == [b"later"]
    with medium.open() as queue:
        assert queue.dequeue() is None


def test_dead_letter_that_does_not_fit_does_not_stop_deliveries(medium: Medium) -> None:
    """1. Attempts are spent on a full disk. 2. Others are delivered. 3. It is buried later."""
    with medium.open() as queue:
        queue.enqueue(b"poison" + b"." * 9000)
        queue.nack(queue.dequeue(), delay=0.0)  # type: ignore[arg-type]
        poison = queue.dequeue()
        assert poison is not None
        assert poison.attempt == 2
        queue.enqueue_batch(numbered(20))
        medium.set_full(True)
        extra = publish_until_full(queue)
        medium.clock.now += 31
        assert len(faults.drain(queue, "default", {})) == 20 + extra
        with pytest.raises(LeaseLost):
            queue.ack(poison)
        assert queue.dead_letters() == []
        medium.set_full(False)
        medium.clock.now += 2
        assert queue.dequeue() is None
        assert [letter.value[:6] for letter in queue.dead_letters()] == [b"poison"]


def test_reject_that_does_not_fit_is_refused_and_can_be_tried_again(medium: Medium) -> None:
    with medium.open() as queue:
        queue.enqueue(b"bad" + b"." * 9000)
        message = queue.dequeue()
        assert message is not None
        medium.set_full(True)
        publish_until_full(queue)
        with pytest.raises(DiskFull):
            queue.reject(message, "bad")
        assert queue.dead_letters() == []
        medium.set_full(False)
        queue.reject(message, "bad")
        assert [letter.value[:3] for letter in queue.dead_letters()] == [b"bad"]


def test_acks_on_a_full_disk_do_not_use_up_the_reserve(medium: Medium) -> None:
    """Snapshots of the ledger give back what acks took: many times the reserve is written."""
    with medium.open() as queue:
        queue.enqueue_batch([b"x"] * 1500)
        medium.set_full(True)
        publish_until_full(queue)
        while message := queue.dequeue():
            queue.ack(message)
            if message.offset % 20 == 0:
                queue._keeper._upkeep(medium.clock.now)
        assert queue.stats().settled_offset == queue.stats().end_offset
    with medium.open() as queue:
        assert queue.dequeue() is None


def test_expired_messages_that_cannot_be_buried_do_not_take_others_along(medium: Medium) -> None:
    options = EmbeddedOptions(
        fsync="none", segment_bytes=16 * KIB, reserve_bytes=64 * KIB, dead_letter_expired=True
    )
    with medium.open(options) as queue:
        queue.enqueue(b"old" + b"." * 9000, ttl=5.0)
        queue.enqueue_batch(numbered(20))
        medium.set_full(True)
        publish_until_full(queue)
        medium.clock.now += 6
        got = [message.offset for message in queue.dequeue_batch(15)]
        assert got == list(range(1, 15))


def test_compact_frees_a_full_disk(medium: Medium) -> None:
    """Everything is settled, in one file that is still being written."""
    options = EmbeddedOptions(fsync="none", reserve_bytes=64 * KIB, segment_bytes=1024 * KIB)
    with medium.open(options) as queue:
        queue.enqueue_batch([b"." * 1000] * 400)
        medium.set_full(True)
        publish_until_full(queue)
        while messages := queue.dequeue_batch(100):
            queue.ack_batch(messages)
        assert queue.compact() > 300 * KIB
        queue.enqueue(b"there is room again")
        assert [value for _, value in faults.drain(queue, "default", {})] == [
            b"there is room again"
        ]
    with medium.open(options) as queue:
        assert queue.dequeue() is None
        assert queue.verify() == []


def test_disk_that_is_full_after_any_number_of_bytes_loses_nothing_acknowledged(
    tmp_path: Path,
) -> None:
    """The same work on disks of growing size; then the disk grows and the queue goes on."""
    for quota in range(0, 24_000, 661):
        root = tmp_path / str(quota)
        root.mkdir()
        disk = QuotaDisk(root, quota)
        medium = Medium(root, disk, lambda full: None)
        sent: list[tuple[str, bytes]] = []
        acked: list[str] = []
        try:
            queue = medium.open(faults.OPTIONS)
        except DiskFull:
            queue = None
        if queue is not None:
            work(queue, medium.clock, sent, acked)
            queue.close()
        disk.quota = 10**9
        with medium.open(faults.OPTIONS) as again:
            medium.clock.now += 1000
            left = dict(drain_ids(again))
            dead = {letter.value for letter in again.dead_letters()}
            for message_id, value in sent:
                places = [message_id in left, message_id in acked, value in dead]
                assert sum(places) == 1, f"{value!r} with {quota} bytes: {places}"
            assert again.verify() == []
            faults.works_on(again)


def work(queue: Queue, clock: Clock, sent: list[tuple[str, bytes]], acked: list[str]) -> None:
    for number in range(30):
        clock.now += 1.0
        work_once(queue, number, sent, acked)


def work_once(queue: Queue, number: int, sent: list[tuple[str, bytes]], acked: list[str]) -> None:
    """Some of everything; what raises nothing counts as done."""
    for value, about in (
        (b"plain %d" % number + b"." * 50, {}),
        (b"later %d" % number, {"delay": 3.0}),
        (b"once %d" % number, {"dedup_id": str(number)}),
    ):
        message_id = try_to(partial(queue.enqueue, value, **about))
        if message_id is not None:
            sent.append((message_id, value))
    messages = try_to(lambda: queue.dequeue_batch(2)) or []
    if messages and number % 3 == 0:
        try_to(lambda: queue.reject(messages.pop(), "bad"))
    if messages and try_to(lambda: (queue.ack_batch(messages), True)):
        acked += [message.id for message in messages]
    if number == 20:
        try_to(queue.compact)


def try_to(verb: Callable[[], T]) -> T | None:
    try:
        return verb()
    except (DiskFull, LeaseLost):
        return None


def drain_ids(queue: Queue) -> list[tuple[str, bytes]]:
    found = []
    while messages := queue.dequeue_batch(50):
        found += [(message.id, message.value) for message in messages]
        queue.ack_batch(messages)
    return found


class FailingFile(QuotaFile):
    """A file of a disk that has turned read-only."""

    def append(self, buffers: Sequence[Buffer]) -> None:
        if isinstance(self.disk, FailingDisk) and self.disk.failing:
            raise storage_error(OSError(self.disk.failing, "refused"), "append to", self._path)
        super().append(buffers)


class FailingDisk(QuotaDisk):
    failing = 0

    def open(self, path: str, create: bool = False) -> File:
        file = RealDisk.open(self, path, create)
        assert isinstance(file, RealFile)
        twin = FailingFile(self, os.dup(file._fd), path)
        file.close()
        return twin


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO])
def test_disk_that_fails_under_an_open_queue_fails_clearly_and_loses_nothing(
    tmp_path: Path, code: int
) -> None:
    disk = FailingDisk(tmp_path, 10**9)
    medium = Medium(tmp_path, disk, lambda full: None)
    queue = medium.open()
    queue.enqueue_batch(numbered(20))
    queue.ack_batch(queue.dequeue_batch(5))
    held = queue.dequeue_batch(3)
    disk.failing = code
    verbs: list[Callable[[], object]] = [
        lambda: queue.enqueue(b"x"),
        lambda: queue.ack_batch(held),
        lambda: queue.nack(held[0]),
        lambda: queue.dequeue(),
        queue.compact,
    ]
    for verb in verbs:
        with pytest.raises(StorageError, match=str(tmp_path)):
            verb()
    with suppress(StorageError):
        queue.close()
    disk.failing = 0
    with medium.open() as again:
        assert [offset for offset, _ in faults.drain(again, "default", {})] == list(range(5, 20))
