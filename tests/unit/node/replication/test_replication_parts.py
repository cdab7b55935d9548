"""Small parts of the data plane: the tail in memory, walks over batches, who waits, identity."""

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simdisk import SimCrash, SimDisk

from raftq.client.common.errors import (
    ConfigError,
    CorruptBatch,
    NotLeader,
    RequestTimeout,
    StorageFailed,
)
from raftq.client.wire.batch import encode, encode_one, stamp
from raftq.client.wire.headers import clip_below, end_offset_of
from raftq.client.wire.messages import ProduceReply
from raftq.client.wire.node_messages import Replicated
from raftq.node.identity import Identity, Loss, remember, what_was_lost
from raftq.node.replication.follower import LeaderFetcher
from raftq.node.replication.leader import Throttle
from raftq.node.replication.offset_waiters import OffsetWaiters
from raftq.node.replication.recent_batches import RecentBatches
from raftq.node.replication.replica_files import remove_replica, truncated_logs
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log


def batches(*sizes: int) -> tuple[bytes, list[int]]:
    """Stored batches of so many records each, back to back, and their base offsets."""
    data, bases, base = b"", [], 0
    for size in sizes:
        batch = encode([b"v"] * size)
        stamp(batch, base, 1)
        data += bytes(batch)
        bases.append(base)
        base += size
    return data, bases


def test_batches_are_walked_by_their_headers() -> None:
    data, _ = batches(3, 1, 4)
    assert end_offset_of(data) == 8
    first, _ = batches(3)
    assert bytes(clip_below(data, 3)) == first
    assert bytes(clip_below(data, 4)) == batches(3, 1)[0]
    assert bytes(clip_below(data, 100)) == data
    assert bytes(clip_below(data, 0)) == b""


@pytest.mark.parametrize("damage", [0, 1, 4, 5, 6, 7])
def test_a_walk_over_damaged_batches_ends_with_an_error(damage: int) -> None:
    data, _ = batches(3, 1, 4)
    broken = bytearray(data)
    broken[damage] ^= 0x80
    with pytest.raises(CorruptBatch):
        end_offset_of(broken)
    with pytest.raises(CorruptBatch):
        clip_below(broken, 100)


def test_the_tail_hands_out_contiguous_batches_and_is_bounded() -> None:
    tail = RecentBatches(100)
    for base in range(0, 50, 5):
        tail.put(base, base + 5, bytes([base]) * 30)
    assert tail.size_bytes <= 100
    assert tail.take(0, 1000) is None
    assert tail.take(41, 1000) is None, "the middle of a batch is not where one begins"
    buffers, size, end = tail.take(40, 1000) or ([], 0, 0)
    assert (len(buffers), size, end) == (2, 60, 50)
    buffers, size, end = tail.take(40, 10) or ([], 0, 0)
    assert (len(buffers), size, end) == (1, 30, 45), "at least one, however big"
    tail.release(45)
    assert tail.take(40, 1000) is None
    assert tail.take(45, 1000) is not None
    tail.clear()
    assert tail.take(45, 1000) is None
    assert tail.size_bytes == 0


def test_requests_are_released_expired_and_failed() -> None:
    async def scenario() -> None:
        pending = OffsetWaiters()
        replies = [ProduceReply((n,)) for n in range(4)]
        futures = [
            pending.add(end, deadline, reply)
            for end, deadline, reply in zip((10, 20, 30, 40), (9.0, 1.0, 9.0, 9.0), replies,
                                            strict=True)
        ]  # fmt: skip
        pending.release(19)
        assert futures[0].result() is replies[0]
        assert not futures[1].done()
        pending.expire(2.0, RequestTimeout("late"))
        with pytest.raises(RequestTimeout):
            futures[1].result()
        futures[2].cancel()
        pending.expire(2.0, RequestTimeout("late"))
        assert pending
        pending.fail(NotLeader("elsewhere"))
        with pytest.raises(NotLeader):
            futures[3].result()
        assert not pending

    asyncio.run(scenario())


def test_a_throttle_hands_out_its_rate_and_tells_how_long_to_wait() -> None:
    throttle = Throttle(1000)
    assert throttle.wait_s(100.0) == 0
    throttle.spend(3000)
    assert throttle.wait_s(100.0) > 1.9
    assert throttle.wait_s(101.0) > 0.9
    assert throttle.wait_s(102.5) == 0


ME = Identity(1, "c", "boot-a", 7)


def disk_with(identity: Identity | None, clean: bool = False) -> SimDisk:
    disk = SimDisk()
    disk.make_directory("/data")
    if identity is not None:
        remember(disk, "/data", identity, clean)
    return disk


def test_a_killed_process_has_lost_nothing() -> None:
    assert what_was_lost(disk_with(ME), "/data", ME).lost == "nothing"


def test_a_machine_that_went_down_may_have_lost_its_tail() -> None:
    assert what_was_lost(disk_with(ME), "/data", Identity(1, "c", "boot-b")).lost == "tail"
    assert (
        what_was_lost(disk_with(Identity(1, "c", "")), "/data", Identity(1, "c", "")).lost == "tail"
    )


def test_a_clean_stop_vouches_for_everything_across_boots() -> None:
    assert (
        what_was_lost(disk_with(ME, clean=True), "/data", Identity(1, "c", "boot-b")).lost
        == "nothing"
    )


def test_logs_that_are_older_than_the_node_remembers_are_noticed() -> None:
    disk = disk_with(ME)
    old = disk.read_file("/data/logs/incarnation", 100)
    remember(disk, "/data", replace(ME, incarnation=8), clean=True)
    assert what_was_lost(disk, "/data", ME) == Loss("nothing", 8, synced=True)
    disk.write_file_atomic("/data/logs/incarnation", old)
    assert what_was_lost(disk, "/data", ME) == Loss("past", 8)
    disk.remove("/data/logs/incarnation")
    assert what_was_lost(disk, "/data", ME) == Loss("past", 8)


def log_with(disk: SimDisk, directory: str, count: int) -> str:
    """A log that was synced and then killed; where its active segment is."""
    disk.make_directory(directory)
    config = LogConfig(segment_bytes=4096, seal_sync=False)
    log = Log.open(disk, directory, config, 0)
    for _ in range(count):
        log.append(encode_one(b"x" * 1000, 0))
    log.sync()
    log.append(encode_one(b"not synced", 0))
    path = log.segments.active.path
    log.close(clean=False)
    return path


def test_a_log_that_lost_bytes_which_were_durable_is_noticed() -> None:
    disk = disk_with(ME)
    assert truncated_logs(disk, "/data") == []
    good = log_with(disk, "/data/logs/t-1/0/data", 6)
    bad = log_with(disk, "/data/logs/t-1/1/ledger", 6)
    size = disk.size(good)
    assert truncated_logs(disk, "/data") == []
    for path in (good, bad):
        file = disk.open(path)
        # In the first only the record goes that was not synced: no one can notice that.
        file.truncate(size - 100 if path is good else size - 1000)
        file.close()
    assert truncated_logs(disk, "/data") == ["/data/logs/t-1/1/ledger"]
    disk.remove(good)
    assert truncated_logs(disk, "/data") == ["/data/logs/t-1/0/data", "/data/logs/t-1/1/ledger"]
    disk.write_file_atomic("/data/logs/t-1/0/removed", b"removed")
    assert truncated_logs(disk, "/data") == ["/data/logs/t-1/1/ledger"]


def test_a_log_that_was_cut_on_purpose_has_not_lost_its_end() -> None:
    disk = disk_with(ME)
    directory = "/data/logs/t-1/0/data"
    log_with(disk, directory, 20)
    for cut in (15, 3, 0):
        log = Log.open(disk, directory, LogConfig(segment_bytes=4096, seal_sync=False), 0)
        log.truncate(cut)
        log.close(clean=False)
        assert truncated_logs(disk, "/data") == []
    log = Log.open(disk, directory, LogConfig(segment_bytes=4096, seal_sync=False), 0)
    log.reset(100)
    log.close(clean=False)
    assert truncated_logs(disk, "/data") == []


def test_an_empty_directory_has_lost_everything() -> None:
    assert what_was_lost(disk_with(None), "/data", ME).lost == "everything"


@pytest.mark.parametrize("other", [Identity(2, "c", "boot-a"), Identity(1, "d", "boot-a")])
def test_a_directory_of_another_node_or_cluster_is_refused(other: Identity) -> None:
    with pytest.raises(ConfigError, match="belongs to"):
        what_was_lost(disk_with(other), "/data", ME)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"format": 99}', b"\xff"])
def test_an_unreadable_identity_is_a_clear_error(content: bytes) -> None:
    disk = disk_with(ME)
    disk.write_file_atomic("/data/node.json", content)
    with pytest.raises(ConfigError, match=r"node\.json"):
        what_was_lost(disk, "/data", ME)


def test_a_replica_is_removed_although_the_disk_is_full() -> None:
    disk = SimDisk()
    log = Log.open(disk, "/p/0/data", LogConfig(segment_bytes=4096), 0)
    for _ in range(5):
        log.append(encode([b"x" * 3000]))
    log.close()
    disk.capacity = disk.used_bytes()
    remove_replica(disk, "/p/0")
    assert not disk.exists("/p/0")


def test_a_crash_while_a_replica_is_removed_leaves_a_mark_or_a_shorter_log() -> None:
    """Whatever is left is removed at the next open, or is the beginning of what was there."""
    for full in (False, True):
        for point in range(1, 12):
            disk = SimDisk(point)
            log = Log.open(disk, "/p/0/data", LogConfig(segment_bytes=4096), 0)
            for _ in range(5):
                log.append(encode([b"x" * 3000]))
            log.close()
            disk.capacity = disk.used_bytes() if full else None
            disk.crash_at = disk.operations + point
            try:
                remove_replica(disk, "/p/0")
            except SimCrash:
                left = disk.kill()
                left.capacity = None
                if left.exists("/p/0/data") and not left.exists("/p/0/removed"):
                    again = Log.open(left, "/p/0/data", LogConfig(segment_bytes=4096), 0)
                    assert again.start_offset == 0
                    assert len(list(again.batches(0))) == again.end_offset


def test_a_follower_whose_log_fails_while_it_is_cut_says_so() -> None:
    """A cut that a full disk refuses is only repeated: the log is as it was."""

    async def scenario() -> None:
        disk = SimDisk()
        log = Log.open(disk, "/l", LogConfig(), 0)
        for _ in range(3):
            log.append(encode_one(b"x", 1), 1)
        log.sync()
        replica = SimpleNamespace(epoch=2, assignment=1, role="follower")
        partition_log = SimpleNamespace(key=(7, 0, 0), log=log, replica=replica, cut=log.truncate)
        net = SimpleNamespace(loop=asyncio.get_running_loop())
        told: list[BaseException] = []
        fetcher = LeaderFetcher(net, 1, told.append)  # type: ignore[arg-type]

        def cut() -> None:
            fetcher.want(partition_log)  # type: ignore[arg-type]
            fetcher._subscribed[partition_log.key] = 2, 1
            fetcher._apply(Replicated(7, 0, 2, "truncate", offset=1, assignment=1), memoryview(b""))

        disk.full_overwrites = True
        cut()
        assert (told, log.end_offset) == ([], 3)
        disk.full_overwrites, disk.fail_sync = False, True
        cut()
        assert told == [log.failure]

        def cut_and_not_read(end_offset: int) -> None:
            raise StorageFailed("cannot read what is left")

        partition_log.cut = cut_and_not_read
        cut()
        assert len(told) == 2

    asyncio.run(scenario())
