"""Directories that cannot be opened say why, and are left as they were."""

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import queuefaults as faults
from crc32c import crc32c

from raftq.client.common.errors import (
    CorruptFile,
    DirectoryLocked,
    DirectoryReadOnly,
    InvalidArgument,
    StorageError,
    UnknownFormat,
)
from raftq.node.queue.embedded.files import FORMAT_VERSION


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("open") / "queue"
    faults.build(path, clean=True)
    return path


@pytest.fixture
def copy(image: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(image, tmp_path / "queue"))


def contents(path: Path, but: tuple[str, ...] = ("lock",)) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in sorted(path.rglob("*"))
        if file.is_file() and file.name not in but
    }


# Versions


def newer_format(path: Path) -> None:
    text = f'{{"format": "raftq-queue", "version": {FORMAT_VERSION + 1}}}'
    (path / "queue.format").write_text(text)


def newer_batch(file: Path) -> None:
    """The last batch of a segment as a later version would stamp it."""
    data = bytearray(file.read_bytes())
    at = faults.batch_positions(file)[-1][0]
    data[at + 2] = 200
    data[at + 20 : at + 24] = struct.pack("<I", crc32c(bytes(data[at : at + 20])))
    file.write_bytes(data)


def newer_index(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[4:6] = struct.pack("<H", 200)
    length = struct.unpack_from("<I", data, 8)[0]
    head = bytes(data[:length])
    data[12:16] = struct.pack("<I", crc32c(head[16:], crc32c(head[:12])))
    file.write_bytes(data)


def newer_checkpoint(file: Path) -> None:
    data = bytearray(file.read_bytes())
    for at in (0, 64):
        data[at + 4 : at + 6] = struct.pack("<H", 200)
        data[at + 60 : at + 64] = struct.pack("<I", crc32c(bytes(data[at : at + 60])))
    file.write_bytes(data)


def newer_snapshot(path: Path) -> None:
    file = path / "delays.snapshot"
    body = bytearray(file.read_bytes()[:-4])
    body[4:8] = struct.pack("<I", 200)
    file.write_bytes(bytes(body) + struct.pack("<I", crc32c(bytes(body))))


NEWER: dict[str, Callable[[Path], None]] = {
    "queue.format": newer_format,
    "delays.snapshot": newer_snapshot,
    **{
        f"{log} batch": lambda path, log=log: newer_batch(faults.segment_files(path, log)[-1])  # type: ignore[misc]
        for log in faults.LOGS
    },
    **{
        f"{log} index": lambda path, log=log: newer_index(path / log / f"{0:020d}.index")  # type: ignore[misc]
        for log in faults.LOGS
    },
    **{
        f"{log} checkpoint": lambda path, log=log: newer_checkpoint(path / log / "checkpoint")  # type: ignore[misc]
        for log in faults.LOGS
    },
}


@pytest.mark.parametrize("place", NEWER)
def test_newer_version_is_refused_and_nothing_is_changed(
    image: Path, copy: Path, place: str
) -> None:
    """Going back to the version that wrote it finds everything: only hints may be rewritten."""
    NEWER[place](copy)
    before = contents(copy, but=("lock", "checkpoint"))
    with pytest.raises(UnknownFormat, match=r"version (200|2)\b") as refused:
        faults.open_queue(copy)
    after = contents(copy, but=("lock", "checkpoint"))
    assert before.keys() == after.keys()
    assert before == after
    assert str(copy) in str(refused.value)
    for name in contents(image):
        shutil.copy(image / name, copy / name)
    assert len(faults.survey(copy).plain) > 90


# queue.format


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\0" * 40,
        b"\xff" * 40,
        b"{",
        b"[]",
        b"7",
        b"null",
        b'{"format": "raftq-queue"}',
        b'{"version": 1}',
        b'{"format": "raftq-queue", "version": null}',
        b'{"format": "raftq-queue", "version": "one"}',
        b'{"format": "raftq-queue", "version": 1e999}',
        b'{"format": "raftq-queue", "version": NaN}',
        b"[" * 4096,
        b" " * 5000,
    ],
)
def test_damaged_format_file_says_what_to_write(copy: Path, text: bytes) -> None:
    (copy / "queue.format").write_bytes(text)
    with pytest.raises(CorruptFile, match='"format": "raftq-queue", "version": 1') as refused:
        faults.open_queue(copy)
    assert str(copy / "queue.format") in str(refused.value)
    (copy / "queue.format").write_bytes(b'{"format": "raftq-queue", "version": 1}')
    assert len(faults.survey(copy).plain) > 90


@pytest.mark.parametrize("position", range(0, 40, 3))
@pytest.mark.parametrize("bit", [0, 5, 7])
def test_flipped_bit_in_the_format_file_opens_or_says_why(
    copy: Path, position: int, bit: int
) -> None:
    faults.flip(lambda size: position, bit)(copy / "queue.format")
    try:
        faults.open_queue(copy).close()
    except (CorruptFile, UnknownFormat, InvalidArgument) as error:
        refused = str(error)
    else:
        return
    assert str(copy) in refused


def test_deleted_format_file_is_written_again(copy: Path, image: Path) -> None:
    (copy / "queue.format").unlink()
    assert len(faults.survey(copy).plain) > 90
    assert (copy / "queue.format").read_bytes() == (image / "queue.format").read_bytes()


# Not a queue


def test_directory_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(InvalidArgument, match=r"not a RaftQ queue.*thesis\.txt"):
        faults.open_queue(tmp_path)
    assert contents(tmp_path) == {"thesis.txt": b"do not touch"}


def test_format_of_another_program_is_refused(copy: Path) -> None:
    (copy / "queue.format").write_text('{"format": "other", "version": 1}')
    with pytest.raises(InvalidArgument, match="'other', not a RaftQ queue"):
        faults.open_queue(copy)


@pytest.mark.parametrize(
    "name",
    ["", "data", "ledger", "queue.format", "lock", "data/checkpoint", "delays.snapshot", "parent"],
)
def test_wrong_kind_of_file_gives_a_clear_error(tmp_path: Path, image: Path, name: str) -> None:
    """A file where a directory should be, or a directory where a file should be."""
    path = tmp_path / "queue"
    if name == "parent":
        path.write_text("a file")
        path = path / "below"
    elif not name:
        path.write_text("a file")
    else:
        shutil.copytree(image, path)
        place = path / name
        if place.is_dir():
            shutil.rmtree(place)
            place.write_text("a file")
        else:
            place.unlink()
            place.mkdir()
    with pytest.raises(StorageError) as refused:
        faults.open_queue(path)
    assert str(tmp_path / "queue") in str(refused.value)


# Locks


HOLDER = """
import sys
from raftq.node.queue.embedded import Queue
queue = Queue.open(sys.argv[1], reserve_bytes=0)
queue.enqueue(b"from the holder")
print("open", flush=True)
sys.stdin.read()
"""


@contextmanager
def another_process(path: Path) -> Iterator[subprocess.Popen[bytes]]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        yield holder
    finally:
        holder.kill()
        holder.communicate()


def test_second_process_is_refused_by_pid_and_a_dead_one_leaves_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "queue"
    with another_process(path) as holder, pytest.raises(DirectoryLocked) as refused:
        faults.open_queue(path)
    assert f"process {holder.pid}; close it there first" in str(refused.value)
    assert (path / "lock").read_text() == f"{holder.pid}\n"
    with faults.open_queue(path) as queue:
        message = queue.dequeue()
        assert message is not None
        assert message.value == b"from the holder"


def test_same_process_is_refused_and_the_first_queue_goes_on(copy: Path) -> None:
    with faults.open_queue(copy) as queue:
        with pytest.raises(DirectoryLocked, match="this process"):
            faults.open_queue(copy)
        assert len(faults.drain(queue, "default", {})) > 90
    assert faults.survey(copy).problems == []


@pytest.mark.parametrize("left", [b"", b"999999\n", b"\xff\xfe", b"x" * 10_000])
def test_lock_file_left_by_a_dead_process_does_not_matter(copy: Path, left: bytes) -> None:
    (copy / "lock").write_bytes(left)
    with faults.open_queue(copy) as queue:
        assert (copy / "lock").read_text() == f"{os.getpid()}\n"
        faults.drain(queue, "default", {})


def test_refused_open_lets_go_of_the_lock(copy: Path) -> None:
    good = (copy / "queue.format").read_bytes()
    newer_format(copy)
    for _ in range(3):
        with pytest.raises(UnknownFormat):
            faults.open_queue(copy)
    (copy / "queue.format").write_bytes(good)
    faults.open_queue(copy).close()


# Read-only


@contextmanager
def read_only(path: Path) -> Iterator[None]:
    """A read-only bind mount for root, whom permissions do not stop; chmod for others."""
    if os.geteuid() != 0:
        modes = {file: file.stat().st_mode for file in [path, *path.rglob("*")]}
        for file in modes:
            file.chmod(0o555 if file.is_dir() else 0o444)
        try:
            yield
        finally:
            for file, mode in modes.items():
                file.chmod(mode)
        return
    mounted = subprocess.run(["mount", "--bind", path, path], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"NOT TESTED: read-only directory; mount fails: {mounted.stderr!r}")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", path], check=True)
        yield
    finally:
        subprocess.run(["umount", path], check=True)


def test_read_only_directory_is_named_and_left_as_it_is(copy: Path) -> None:
    before = contents(copy, but=())
    with read_only(copy), pytest.raises(DirectoryReadOnly, match=str(copy)):
        faults.open_queue(copy)
    assert contents(copy, but=()) == before
    assert len(faults.survey(copy).plain) > 90


def test_read_only_parent_is_named(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    with read_only(home), pytest.raises(DirectoryReadOnly, match="home"):
        faults.open_queue(home / "queue")
    faults.open_queue(home / "queue").close()
