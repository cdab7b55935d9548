"""The real disk: errors are named, refused appends leave nothing, one process per directory."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raftq.client.common.disk import FileClosed, RealDisk, RealFile, storage_error
from raftq.client.common.errors import (
    DirectoryLocked,
    DirectoryReadOnly,
    DiskFull,
    StorageError,
    StorageFailed,
)


@pytest.fixture
def disk() -> RealDisk:
    return RealDisk()


def test_appended_buffers_are_read_back_as_one_stretch(disk: RealDisk, tmp_path: Path) -> None:
    file = disk.open(str(tmp_path / "a"), create=True)
    file.append([b"one", bytearray(b"two"), memoryview(b"three")])
    file.append([b"!"])
    assert file.size == 12
    assert file.read(0, 100) == b"onetwothree!"
    assert file.read(3, 3) == b"two"
    assert file.read(50, 3) == b""
    file.close()


def test_more_buffers_than_one_call_takes_are_all_written(disk: RealDisk, tmp_path: Path) -> None:
    file = disk.open(str(tmp_path / "a"), create=True)
    file.append([b"%05d" % number for number in range(3000)])
    assert file.size == 15000
    assert file.read(5 * 2999, 5) == b"02999"
    assert file.read(0, 15000) == b"".join(b"%05d" % number for number in range(3000))
    file.close()


def test_short_write_is_continued(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = disk.open(str(tmp_path / "a"), create=True)
    real = os.pwritev

    def short(fd: int, buffers: list[bytes], offset: int) -> int:
        return real(fd, [b"".join(buffers)[:4]], offset)

    monkeypatch.setattr(os, "pwritev", short)
    file.append([b"abc", b"defgh", b"i"])
    assert file.size == 9
    assert file.read(0, 9) == b"abcdefghi"
    file.close()


def test_disk_full_in_the_middle_of_an_append_leaves_the_old_size(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a")
    file = disk.open(path, create=True)
    file.append([b"before"])
    real = os.pwrite

    def first_part(fd: int, buffers: list[bytes], offset: int) -> int:
        return real(fd, b"".join(buffers)[:4], offset)

    def full(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", first_part)
        patch.setattr(os, "pwrite", full)
        with pytest.raises(DiskFull, match=path):
            file.append([b"does not fit"])
    assert file.size == os.stat(path).st_size == 6
    file.append([b", after"])
    assert file.read(0, 99) == b"before, after"
    file.close()


def test_full_tmpfs_refuses_and_recovers(disk: RealDisk, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    options = ["-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("tmpfs cannot be mounted here")
    try:
        file = disk.open(str(tmp_path / "a"), create=True)
        file.append([bytes(200 * 1024)])
        with pytest.raises(DiskFull):
            file.append([bytes(100 * 1024)])
        assert file.size == os.stat(tmp_path / "a").st_size == 200 * 1024
        with pytest.raises(DiskFull):
            disk.write_file_atomic(str(tmp_path / "b"), bytes(100 * 1024))
        assert disk.list(str(tmp_path)) == ["a"]
        file.truncate(0)
        file.append([bytes(100 * 1024)])
        file.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOSPC, DiskFull),
        (errno.EDQUOT, DiskFull),
        (errno.EROFS, DirectoryReadOnly),
        (errno.EACCES, DirectoryReadOnly),
        (errno.EMFILE, StorageFailed),
        (errno.EIO, StorageFailed),
    ],
)
def test_every_errno_becomes_an_error_that_names_the_path(
    number: int, expected: type[StorageError]
) -> None:
    error = storage_error(OSError(number, os.strerror(number)), "open", "/some/where")
    assert type(error) is expected
    assert "/some/where" in str(error)
    assert os.strerror(number) in str(error)


def test_directory_without_write_permission_is_named(disk: RealDisk, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write anywhere; the errno table above covers the mapping")
    tmp_path.chmod(0o500)
    with pytest.raises(DirectoryReadOnly, match="new"):
        disk.open(str(tmp_path / "new"), create=True)


def test_missing_file_and_full_descriptor_table_are_storage_failures(
    disk: RealDisk, tmp_path: Path
) -> None:
    with pytest.raises(StorageFailed, match="nothing"):
        disk.open(str(tmp_path / "nothing"))
    with pytest.raises(StorageFailed, match="nothing"):
        disk.read_file(str(tmp_path / "nothing"), 10)


def test_read_file_is_bounded(disk: RealDisk, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(100))
    assert disk.read_file(str(tmp_path / "a"), 100) == bytes(100)
    with pytest.raises(StorageFailed, match="over the limit"):
        disk.read_file(str(tmp_path / "a"), 99)


def test_atomic_write_replaces_the_content_and_leaves_no_temporary(
    disk: RealDisk, tmp_path: Path
) -> None:
    path = str(tmp_path / "a")
    disk.write_file_atomic(path, b"a longer first content")
    disk.write_file_atomic(path, b"second")
    assert disk.read_file(path, 100) == b"second"
    assert disk.list(str(tmp_path)) == ["a"]


def test_make_directory_creates_parents_and_may_be_repeated(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "b" / "c")
    disk.make_directory(path)
    disk.make_directory(path)
    assert disk.list(str(tmp_path / "a" / "b")) == ["c"]
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StorageError):
        disk.make_directory(str(tmp_path / "file"))


def test_second_lock_in_the_same_process_is_refused(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    lock = disk.lock(path)
    with pytest.raises(DirectoryLocked, match="this process"):
        disk.lock(path)
    lock.release()
    lock.release()
    disk.lock(path).release()


def test_lock_of_another_process_is_refused_with_its_pid(disk: RealDisk, tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    code = (
        "import sys; from raftq.client.common.disk import RealDisk\n"
        f"lock = RealDisk().lock({path!r}); print('held', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(DirectoryLocked, match=str(other.pid)):
            disk.lock(path)
        other.kill()
        other.wait()
        disk.lock(path).release()


def test_close_during_a_sync_waits_for_its_end(
    disk: RealDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A descriptor number that is reused while a sync is under way would sync a stranger."""
    file = disk.open(str(tmp_path / "a"), create=True)
    assert isinstance(file, RealFile)
    seen: list[int] = []

    def closing(fd: int) -> None:
        file.close()
        seen.append(os.fstat(fd).st_size)

    file.append([b"abc"])
    monkeypatch.setattr(os, "fdatasync", closing)
    file.sync()
    assert seen == [3]
    with pytest.raises(FileClosed):
        file.sync()
    file.write_behind(0, 3)
    file.drop_cache(0, 3)


def test_hints_change_nothing(disk: RealDisk, tmp_path: Path) -> None:
    file = disk.open(str(tmp_path / "a"), create=True)
    data = os.urandom(1 << 20)
    file.append([data])
    file.write_behind(0, 1 << 20)
    file.drop_cache(0, 1 << 20)
    assert file.read(0, 1 << 20) == data
    file.close()
    assert disk.free_bytes(str(tmp_path)) > 0
