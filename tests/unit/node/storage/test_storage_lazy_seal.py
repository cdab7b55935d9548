"""A log that seals segments without a sync: the next sync makes them durable as well."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from simdisk import SimDisk

from raftq.client.common.disk import File, RealDisk, RealFile, storage_error
from raftq.client.common.errors import RaftqError
from raftq.client.wire.batch import encode_one
from raftq.node.storage.compaction import compact_by_key
from raftq.node.storage.config import LogConfig
from raftq.node.storage.flusher import Flusher
from raftq.node.storage.log import Log

LAZY = LogConfig(segment_bytes=4096, index_interval_bytes=256, seal_sync=False)


class CountingFile(RealFile):
    """A real file that counts the syncs of its disk."""

    syncs = 0

    def sync(self) -> None:
        CountingFile.syncs += 1
        super().sync()


class CountingDisk(RealDisk):
    def open(self, path: str, create: bool = False) -> File:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return CountingFile(os.open(path, flags, 0o644), path)
        except OSError as error:
            raise storage_error(error, "open", path) from error

    def sync_directory(self, path: str) -> None:
        CountingFile.syncs += 1
        super().sync_directory(path)


@pytest.fixture
def lazy(tmp_path: Path) -> Iterator[Log]:
    log = Log.open(CountingDisk(), str(tmp_path / "follower"), LAZY, 0)
    yield log
    log.close()


def rows(log: Log) -> list[tuple[int, bytes]]:
    batches = log.batches(log.start_offset)
    return [(batch.base_offset, value) for batch in batches for value in batch.values()]


def fill_segments(log: Log, count: int) -> None:
    until = log.segment_count + count
    while log.segment_count < until:
        log.append(encode_one(b"x" * 500, 1000))


def test_a_lazy_roll_waits_for_no_sync_and_the_next_sync_covers_all(lazy: Log) -> None:
    before = CountingFile.syncs
    fill_segments(lazy, 3)
    assert CountingFile.syncs == before
    assert lazy.flushed_offset == 0
    lazy.sync()
    assert CountingFile.syncs == before + 3 + 1 + 1 + 1, "sealed, active, names, checkpoint"
    assert lazy.flushed_offset == lazy.end_offset
    lazy.sync()
    assert CountingFile.syncs == before + 6


def test_sealed_segments_that_wait_for_a_sync_are_few(lazy: Log) -> None:
    fill_segments(lazy, 20)
    assert lazy.flushed_offset >= lazy.segments.bases[-10]


def test_a_sync_begun_before_a_lazy_roll_vouches_only_for_what_it_saw(lazy: Log) -> None:
    lazy.append(encode_one(b"x", 0))
    ticket = lazy.begin_sync()
    fill_segments(lazy, 2)
    ticket.run()
    assert lazy.flushed_offset == 1
    lazy.sync()
    assert lazy.flushed_offset == lazy.end_offset


@pytest.mark.parametrize("how", ["closed", "killed", "closed, then sealed with syncs"])
def test_the_name_of_an_empty_segment_is_durable_before_what_is_written_to_it(how: str) -> None:
    """
    1. Everything is synced, the log is sealed by age: the next segment is there, its name may not
       be durable, and no sync has a reason to care.
    2. The process ends; the next one appends and syncs.
    3. Power fails: what was synced is there.
    """
    disk = SimDisk(1)
    log = Log.open(disk, "/log", LAZY, 0)
    log.append(encode_one(b"old", 1000))
    log.sync()
    log.roll()
    log.set_readable(1)
    log.note_readable()  # the checkpoint knows the new segment now
    if how == "killed":
        disk = disk.kill()
    else:
        log.close()
    config = LogConfig() if how == "closed, then sealed with syncs" else LAZY
    log = Log.open(disk, "/log", config, 0)
    log.append(encode_one(b"new", 1000))
    log.sync()
    assert log.flushed_offset == 2
    for seed in range(20):
        after = Log.open(disk.crash(Random(seed)), "/log", config, 0)
        assert after.damaged == []
        assert rows(after) == [(0, b"old"), (1, b"new")]


def test_an_idle_log_with_an_empty_segment_opens_without_a_sync(tmp_path: Path) -> None:
    """Most logs of a node are idle; the name waits until there is something to sync."""
    path = str(tmp_path / "idle")
    log = Log.open(CountingDisk(), path, LAZY, 0)
    log.append(encode_one(b"x", 1000))
    log.sync()
    log.roll()
    log.set_readable(1)
    log.note_readable()
    log.close(clean=False)
    before = CountingFile.syncs
    log = Log.open(CountingDisk(), path, LAZY, 0)
    assert CountingFile.syncs == before
    log.append(encode_one(b"y", 1000))
    log.sync()
    assert CountingFile.syncs == before + 1 + 1, "the segment and its name"
    log.append(encode_one(b"z", 1000))
    log.sync()
    assert CountingFile.syncs == before + 3
    log.close()


@pytest.mark.parametrize("call", ["truncate", "truncate_prefix", "retain", "reset", "compact"])
def test_whatever_changes_segments_copes_with_unsynced_ones(
    lazy: Log, call: str, tmp_path: Path
) -> None:
    fill_segments(lazy, 3)
    ticket = lazy.begin_sync()
    middle = lazy.segments.bases[2]
    if call == "truncate":
        lazy.truncate(middle)
        assert lazy.flushed_offset == middle
    elif call == "truncate_prefix":
        lazy.truncate_prefix(middle)
    elif call == "retain":
        lazy.retain(0, bytes_max=0)
        assert lazy.segment_count == 1
    elif call == "reset":
        lazy.reset(5)
    else:
        compact_by_key(lazy, 0)
    ticket.run()
    fill_segments(lazy, 2)
    lazy.sync()
    assert lazy.flushed_offset == lazy.end_offset
    expected = rows(lazy)
    lazy.close()
    again = Log.open(RealDisk(), str(tmp_path / "follower"), LogConfig(), 0)
    assert rows(again) == expected
    again.close()


def test_a_flusher_beside_a_lazy_writer_reaches_every_target(lazy: Log) -> None:
    flusher = Flusher(0.001)
    flusher.add(lazy)
    errors: list[RaftqError | None] = []
    for number in range(300):
        lazy.append(encode_one(b"x" * 400, 1000))
        if number % 20 == 0:
            flusher.submit([(lazy, lazy.end_offset)], errors.append)
        if number % 70 == 69:
            lazy.truncate_prefix(lazy.segments.bases[-1])
    flusher.wait([(lazy, lazy.end_offset)])
    flusher.close()
    assert errors == [None] * 15
    assert lazy.flushed_offset == lazy.end_offset
