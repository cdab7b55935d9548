"""SimDisk itself: what a crash may and may not lose, and that a seed decides everything."""

from random import Random

import pytest
from simdisk import ENTRY_BYTES, SimCrash, SimDisk, SimFile

from raftq.client.common.errors import DirectoryLocked, DiskFull, StorageFailed

PATH = "/log/a"


def disk_with_file(seed: int = 0, entry_durable: bool = True) -> tuple[SimDisk, SimFile]:
    disk = SimDisk(seed)
    disk.make_directory("/log")
    file = disk.open(PATH, create=True)
    if entry_durable:
        disk.sync_directory("/log")
    return disk, file


def survivors(disk: SimDisk, crashes: int = 300) -> set[bytes | None]:
    """Contents of PATH after many different crashes at this moment; None is a missing file."""
    found = set()
    for seed in range(crashes):
        after = disk.crash(Random(seed))
        found.add(after.read_file(PATH, 1 << 20) if after.exists(PATH) else None)
    return found


def test_synced_bytes_survive_every_crash() -> None:
    disk, file = disk_with_file()
    file.append([b"ab", bytearray(b"cd")])
    file.sync()
    assert survivors(disk) == {b"abcd"}


def test_unsynced_writes_survive_as_a_prefix_with_a_torn_or_zeroed_end() -> None:
    disk, file = disk_with_file()
    file.append([b"ab"])
    file.sync()
    file.append([b"cd"])
    file.append([b"ef"])
    found = survivors(disk)
    assert {b"ab", b"abc", b"abcd", b"abcde", b"abcdef"} <= found
    zeros = found - {b"ab", b"abc", b"abcd", b"abcde", b"abcdef"}
    assert zeros <= {b"ab\0", b"ab\0\0", b"abcd\0", b"abcd\0\0"}
    assert zeros


def test_an_unsynced_overwrite_is_old_new_or_torn_and_never_zeroed() -> None:
    disk, file = disk_with_file()
    file.append([b"old!"])
    file.sync()
    file.write_at(0, b"NEW?")
    assert survivors(disk) == {b"old!", b"Nld!", b"NEd!", b"NEW!", b"NEW?"}


def test_an_unsynced_truncation_may_be_undone_and_a_synced_one_may_not() -> None:
    disk, file = disk_with_file()
    file.append([b"abcd"])
    file.sync()
    file.truncate(2)
    assert file.read(0, 10) == b"ab"
    assert survivors(disk) == {b"ab", b"abcd"}
    file.sync()
    assert survivors(disk) == {b"ab"}


def test_a_synced_file_without_a_synced_entry_may_vanish() -> None:
    disk, file = disk_with_file(entry_durable=False)
    file.append([b"ab"])
    file.sync()
    assert survivors(disk) == {None, b"ab"}
    disk.sync_directory("/log")
    assert survivors(disk) == {b"ab"}


def test_a_durable_rename_of_unsynced_bytes_can_leave_less_than_was_written() -> None:
    disk, _ = disk_with_file()
    other = disk.open("/log/b", create=True)
    other.append([b"new"])
    disk.rename("/log/b", PATH)
    disk.sync_directory("/log")
    assert b"" in survivors(disk)
    other.sync()
    assert survivors(disk) == {b"new"}


def test_unsynced_directory_operations_survive_as_a_prefix_in_order() -> None:
    disk, _ = disk_with_file()
    for name in ("b", "c", "d"):
        disk.open(f"/log/{name}", create=True)
    disk.remove(PATH)
    found = {tuple(disk.crash(Random(seed)).list("/log")) for seed in range(100)}
    chain = [("a",), ("a", "b"), ("a", "b", "c"), ("a", "b", "c", "d"), ("b", "c", "d")]
    assert found == set(chain)


def test_a_rename_never_leaves_both_names_or_neither() -> None:
    disk, _ = disk_with_file()
    disk.rename(PATH, "/log/z")
    assert {tuple(disk.crash(Random(seed)).list("/log")) for seed in range(50)} == {("a",), ("z",)}


def test_kill_keeps_everything_written_but_makes_nothing_durable() -> None:
    disk, file = disk_with_file(entry_durable=False)
    file.append([b"ab"])
    killed = disk.kill()
    assert killed.read_file(PATH, 10) == b"ab"
    assert {None, b"", b"a", b"ab"} <= survivors(killed)
    killed.open(PATH).sync()
    killed.sync_directory("/log")
    assert survivors(killed) == {b"ab"}
    assert b"" in survivors(disk)


def test_crash_at_stops_at_that_operation_and_everything_after_it() -> None:
    for seed in range(20):
        disk, file = disk_with_file(seed)
        disk.crash_at = disk.operations + 2
        file.append([b"ab"])
        with pytest.raises(SimCrash):
            file.sync()
        for call in (
            file.sync,
            lambda file=file: file.read(0, 1),
            lambda disk=disk: disk.list("/"),
        ):
            with pytest.raises(SimCrash):
                call()


def test_crash_at_a_write_happens_before_or_in_the_middle_of_it() -> None:
    left = set()
    for seed in range(100):
        disk, file = disk_with_file(seed)
        disk.crash_at = disk.operations + 1
        with pytest.raises(SimCrash):
            file.append([b"abc"])
        left.add(disk.kill().read_file(PATH, 10))
    assert left == {b"", b"a", b"ab", b"abc"}


def test_crash_at_a_sync_makes_a_prefix_durable() -> None:
    left = set()
    for seed in range(200):
        disk, file = disk_with_file(seed)
        file.append([b"a"])
        file.append([b"b"])
        disk.crash_at = disk.operations + 1
        with pytest.raises(SimCrash):
            file.sync()
        left |= {frozenset(survivors(disk, 30))}
    assert frozenset({b"ab"}) in left
    assert any(b"" in contents for contents in left)


def test_a_full_disk_refuses_the_whole_write_and_takes_it_once_there_is_room() -> None:
    disk, file = disk_with_file()
    disk.capacity = ENTRY_BYTES + 3
    file.append([b"ab"])
    with pytest.raises(DiskFull):
        file.append([b"cd"])
    assert (file.size, file.read(0, 10)) == (2, b"ab")
    with pytest.raises(DiskFull):
        disk.open("/log/b", create=True)
    assert disk.list("/log") == ["a"]
    assert disk.free_bytes("/log") == 1
    disk.capacity += 1
    file.append([b"cd"])
    assert file.read(0, 10) == b"abcd"


def test_a_failed_sync_loses_what_it_was_to_write_even_if_a_later_one_succeeds() -> None:
    disk, file = disk_with_file()
    file.append([b"ab"])
    file.sync()
    file.append([b"cd"])
    disk.fail_sync = True
    with pytest.raises(StorageFailed):
        file.sync()
    disk.fail_sync = False
    file.sync()
    assert file.read(0, 10) == b"abcd"
    found = set()
    for seed in range(20):
        disk, file = disk_with_file(seed)
        file.append([b"cd"])
        disk.fail_sync = True
        with pytest.raises(StorageFailed):
            file.sync()
        disk.fail_sync = False
        file.sync()
        found |= survivors(disk, 5)
    assert found == {b"", b"cd"}


def test_a_flipped_bit_is_there_for_readers_and_after_a_crash() -> None:
    disk, file = disk_with_file()
    file.append([b"\0\0"])
    file.sync()
    disk.flip_bit(PATH, 11)
    assert file.read(0, 2) == b"\0\x08"
    assert survivors(disk) == {b"\0\x08"}


def test_an_atomic_write_is_the_old_or_the_new_content_at_every_crash_point() -> None:
    found = set()
    for seed in range(20):
        for point in range(1, 8):
            disk, _ = disk_with_file(seed)
            disk.write_file_atomic(PATH, b"old")
            disk.crash_at = disk.operations + point
            try:
                disk.write_file_atomic(PATH, b"new")
            except SimCrash:
                found |= survivors(disk, 5)
            else:
                assert survivors(disk, 5) == {b"new"}
    assert found == {b"old", b"new"}


def test_a_lock_is_refused_until_released_or_the_process_is_gone() -> None:
    disk, _ = disk_with_file()
    lock = disk.lock("/log/lock")
    with pytest.raises(DirectoryLocked):
        disk.lock("/log/lock")
    lock.release()
    disk.lock("/log/lock")
    disk.kill().lock("/log/lock")


def story(seed: int) -> tuple[list[str], list[bytes]]:
    rng = Random(seed)
    disk, file = disk_with_file(seed)
    disk.crash_at = rng.randint(10, 40)
    try:
        while True:
            rng.choice([file.sync, lambda: file.append([rng.randbytes(rng.randint(1, 9))])])()
    except SimCrash:
        after = [disk.crash(Random(seed)), disk.kill()]
    return disk.trace, [image.read_file(PATH, 1 << 20) for image in after]


def test_the_same_seed_gives_the_same_result_and_another_seed_another() -> None:
    stories = [story(seed) for seed in range(50)]
    assert stories == [story(seed) for seed in range(50)]
    assert len({tuple(images) for _, images in stories}) > 40


def test_a_machine_that_stops_while_it_creates_a_file_does_not_report_a_full_disk() -> None:
    for seed in range(10):
        disk = SimDisk(seed)
        disk.capacity, disk.crash_at = 0, 1
        with pytest.raises(SimCrash):
            disk.open("/a", create=True)


def test_a_power_loss_after_a_failed_sync_may_leave_a_hole() -> None:
    disk = SimDisk(1)
    file = disk.open("/a", create=True)
    disk.sync_directory("/")
    file.append([b"lost"])
    disk.fail_sync = True
    with pytest.raises(StorageFailed):
        file.sync()
    disk.fail_sync = False
    file.append([b"kept"])
    file.sync()
    assert disk.dropped
    assert file.read(0, 8) == b"lostkept"
    after = disk.crash(Random(1))
    assert after.dropped
    assert after.read_file("/a", 100) == bytes(4) + b"kept"
