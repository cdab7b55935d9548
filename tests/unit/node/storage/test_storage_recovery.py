"""Opening a log after damage: torn tails are cut, damage is reported, nothing is renumbered."""

import shutil
from pathlib import Path

import pytest
from crc32c import crc32c

from raftq.client.common.disk import RealDisk
from raftq.client.common.errors import CorruptBatch, CorruptFile, DiskFull, UnknownFormat
from raftq.client.wire.batch import HEADER_BYTES, encode, encode_one, stamp
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log

SMALL = LogConfig(segment_bytes=4096, index_interval_bytes=256)


def open_log(path: Path, config: LogConfig = SMALL) -> Log:
    return Log.open(RealDisk(), str(path), config, 0)


def build(path: Path, count: int, size: int = 50, sync: bool = True) -> list[Path]:
    """A log of one-record batches, left as a crash leaves it; its segment files."""
    log = open_log(path)
    for offset in range(count):
        log.append(encode_one(b"%d" % offset + b" " * size, offset + 1, lane=offset % 5))
    if sync:
        log.sync()
    log.close(clean=False)
    return sorted(path.glob("*.log"))


def without_flushed_hint(path: Path) -> None:
    (path / "checkpoint").unlink()


def flip(path: Path, position: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def offsets(log: Log) -> list[int]:
    return [
        offset
        for batch in log.batches(log.start_offset, skip_damaged=True)
        for offset in batch.offsets()
    ]


def damaged(log: Log) -> list[tuple[int, int]]:
    return [(one.start, one.end) for one in log.damaged]


def test_mistake_15_torn_last_record_never_fails_open(tmp_path: Path) -> None:
    """Cut the file at every byte of the last batch: open works, cuts it, and goes on."""
    origin = tmp_path / "origin"
    log = open_log(origin)
    for offset in range(4):
        log.append(encode_one(b"%d" % offset + b" " * 50, offset + 1))
    log.sync()
    log.append(encode_one(b"the last one", 9))
    log.close(clean=False)
    (file,) = origin.glob("*.log")
    data = file.read_bytes()
    last = len(data) - len(encode_one(b"the last one", 9))
    for cut in range(last, len(data)):
        path = tmp_path / str(cut)
        shutil.copytree(origin, path)
        (path / file.name).write_bytes(data[:cut])
        log = open_log(path)
        assert offsets(log) == [0, 1, 2, 3]
        assert log.recovered.truncated_bytes == cut - last
        assert bool(log.recovered.truncated_reason) == (cut > last)
        assert log.damaged == []
        assert log.append(encode_one(b"again", 9)) == 4
        log.close()
        log = open_log(path)
        assert offsets(log) == [0, 1, 2, 3, 4]
        log.close()
        shutil.rmtree(path)


@pytest.mark.parametrize("tail", [bytes(1), bytes(200), b"RQ\x01\x00" + b"\xff" * 300, b"RQ" * 400])
def test_garbage_after_the_last_batch_is_cut(tmp_path: Path, tail: bytes) -> None:
    (file,) = build(tmp_path, 5)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + tail)
    log = open_log(tmp_path)
    assert (offsets(log), log.damaged) == ([0, 1, 2, 3, 4], [])
    assert log.recovered.truncated_bytes == len(tail)
    assert file.stat().st_size == size
    log.close()


def test_torn_batch_that_carries_a_batch_in_its_value_is_still_torn(tmp_path: Path) -> None:
    """A record may hold the bytes of a batch; they must not count as the log going on."""
    (file,) = build(tmp_path, 3)
    inner = encode_one(b"inner", 1)
    stamp(inner, 100, 0)
    outer = encode_one(bytes(inner) + bytes(100), 1)
    stamp(outer, 3, 0)
    file.write_bytes(file.read_bytes() + outer[:-10])
    log = open_log(tmp_path)
    assert (offsets(log), log.end_offset, log.damaged) == ([0, 1, 2], 3, [])
    log.close()


def test_flipped_bit_in_any_byte_of_the_last_flushed_batch_is_damage_and_not_cut(
    tmp_path: Path,
) -> None:
    origin = tmp_path / "origin"
    (file,) = build(origin, 3, size=4)
    data = file.read_bytes()
    length = len(data) // 3
    for position in range(2 * length, 3 * length, 3):
        path = tmp_path / str(position)
        shutil.copytree(origin, path)
        flip(path / file.name, position, position % 8)
        log = open_log(path)
        assert (damaged(log), log.end_offset) == ([(2, 3)], 3), position
        assert log.recovered.truncated_bytes == 0
        assert offsets(log) == [0, 1]
        with pytest.raises(CorruptBatch):
            log.batch_at(2)
        assert log.append(encode_one(b"next", 9)) == 3
        log.close()
        log = open_log(path)
        assert (offsets(log), damaged(log)) == ([0, 1, 3], [(2, 3)])
        log.close()
        shutil.rmtree(path)


def test_flipped_bit_in_an_unflushed_last_batch_is_cut(tmp_path: Path) -> None:
    (file,) = build(tmp_path, 5, sync=False)
    flip(file, file.stat().st_size - 1)
    log = open_log(tmp_path)
    assert (offsets(log), log.damaged, log.end_offset) == ([0, 1, 2, 3], [], 4)
    log.close()


@pytest.mark.parametrize("hint", [True, False])
def test_flipped_bit_in_the_middle_is_reported_and_nothing_moves(
    tmp_path: Path, hint: bool
) -> None:
    """Every byte of a batch in the middle, with and without a checkpoint."""
    origin = tmp_path / "origin"
    (file,) = build(origin, 9, size=4)
    if not hint:
        without_flushed_hint(origin)
    length = file.stat().st_size // 9
    for position in range(4 * length, 5 * length, 5):
        path = tmp_path / str(position)
        shutil.copytree(origin, path)
        flip(path / file.name, position, position % 8)
        log = open_log(path)
        assert (damaged(log), log.end_offset) == ([(4, 5)], 9), position
        assert log.recovered.damaged == log.damaged
        assert offsets(log) == [0, 1, 2, 3, 5, 6, 7, 8]
        with pytest.raises(CorruptBatch, match="offsets 4 to 5 are damaged"):
            log.read(4, 100)
        assert log.next_readable(4) == 5
        assert log.append(encode_one(b"next", 9)) == 9
        log.roll()
        log.close()
        log = open_log(path)
        assert (damaged(log), log.recovered.rebuilt_indexes) == ([(4, 5)], 0)
        assert offsets(log) == [0, 1, 2, 3, 5, 6, 7, 8, 9]
        log.close()
        shutil.rmtree(path)


def test_two_neighbouring_and_one_distant_damage_are_told_apart(tmp_path: Path) -> None:
    (file,) = build(tmp_path, 9, size=4)
    length = file.stat().st_size // 9
    for number in (2, 3, 6):
        flip(file, number * length + 30)
    log = open_log(tmp_path)
    assert damaged(log) == [(2, 4), (6, 7)]
    assert offsets(log) == [0, 1, 4, 5, 7, 8]
    log.truncate(6)
    assert (damaged(log), log.end_offset) == ([(2, 4)], 6)
    log.truncate(3)
    assert (damaged(log), log.end_offset) == ([], 2)
    log.close()


def test_length_field_of_two_gibibytes_is_just_an_invalid_header(tmp_path: Path) -> None:
    (file,) = build(tmp_path, 9, size=4)
    data = bytearray(file.read_bytes())
    at = 4 * (len(data) // 9)
    data[at + 4 : at + 8] = (1 << 31).to_bytes(4, "little")
    file.write_bytes(data)
    log = open_log(tmp_path)
    assert (damaged(log), offsets(log)) == ([(4, 5)], [0, 1, 2, 3, 5, 6, 7, 8])
    log.close()
    # The same with a stamp that vouches for it.
    data[at + 20 : at + 24] = crc32c(bytes(data[at : at + 20])).to_bytes(4, "little")
    file.write_bytes(data)
    log = open_log(tmp_path)
    assert (damaged(log), offsets(log)) == ([(4, 5)], [0, 1, 2, 3, 5, 6, 7, 8])
    log.close()


def test_flipped_bit_in_a_sealed_segment_is_found_when_its_index_is_rebuilt(tmp_path: Path) -> None:
    files = build(tmp_path, 100)
    base = int(files[0].stem)
    length = len(encode_one(b"5" + b" " * 50, 0))
    flip(files[0], 5 * length + 40)
    files[0].with_suffix(".index").unlink()
    log = open_log(tmp_path)
    assert damaged(log) == [(base + 5, base + 6)]
    assert log.recovered.rebuilt_indexes == 1
    assert len(offsets(log)) == 99
    log.close()


def test_damaged_tail_of_a_sealed_segment_keeps_its_offsets(tmp_path: Path) -> None:
    files = build(tmp_path, 100)
    index = files[0].with_suffix(".index")
    index.unlink()
    next_base = int(files[1].stem)
    with open(files[0], "r+b") as file:
        file.truncate(files[0].stat().st_size - 10)
    log = open_log(tmp_path)
    assert damaged(log) == [(next_base - 1, next_base)]
    assert log.end_offset == 100
    assert len(offsets(log)) == 99
    log.close()


def test_missing_segment_in_the_middle_is_damage_for_its_range(tmp_path: Path) -> None:
    files = build(tmp_path, 200)
    start, end = int(files[1].stem), int(files[2].stem)
    files[1].unlink()
    for _ in range(2):
        log = open_log(tmp_path)
        assert damaged(log) == [(start, end)]
        assert offsets(log) == [*range(start), *range(end, 200)]
        assert log.next_readable(start) == end
        with pytest.raises(CorruptBatch, match="no file"):
            log.read(start, 10)
        with pytest.raises(CorruptBatch):
            log.batch_at(end - 1)
        assert log.append(encode_one(b"", 0)) == 200
        log.truncate(200)
        log.close()
    log = open_log(tmp_path)
    log.truncate(start + 1)
    assert (log.end_offset, log.damaged) == (start, [])
    log.close()


def test_missing_last_segments_are_damage_up_to_what_was_flushed(tmp_path: Path) -> None:
    files = build(tmp_path, 200)
    for file in files[2:]:
        file.unlink()
    end = int(files[2].stem)
    log = open_log(tmp_path)
    assert (damaged(log), log.end_offset) == ([(end, 200)], 200)
    assert log.append(encode_one(b"", 0)) == 200
    log.close()
    log = open_log(tmp_path)
    assert (damaged(log), offsets(log)) == ([(end, 200)], [*range(end), 200])
    log.close()


def test_directory_that_lost_every_segment_does_not_start_again_at_zero(tmp_path: Path) -> None:
    for file in build(tmp_path, 50):
        file.unlink()
    log = open_log(tmp_path)
    assert (damaged(log), log.append(encode_one(b"", 0))) == ([(0, 50)], 50)
    log.close()


def test_empty_active_segment_is_fine(tmp_path: Path) -> None:
    build(tmp_path, 10)
    log = open_log(tmp_path)
    log.roll()
    log.roll()
    assert log.segment_count == 2
    log.close(clean=False)
    log = open_log(tmp_path)
    assert (log.end_offset, log.segment_count, log.damaged) == (10, 2, [])
    log.close()


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "flipped head", "flipped body"])
def test_index_that_cannot_be_believed_is_rebuilt(tmp_path: Path, how: str) -> None:
    files = build(tmp_path, 300)
    index = files[1].with_suffix(".index")
    data = index.read_bytes()
    if how == "missing":
        index.unlink()
    elif how == "truncated":
        index.write_bytes(data[:-9])
    elif how == "empty":
        index.write_bytes(b"")
    else:
        flip(index, 30 if how == "flipped head" else len(data) - 3)
    log = open_log(tmp_path)
    assert offsets(log) == list(range(300))
    assert sum(log.count_from(lane, 77) for lane in range(5)) == 223
    assert [log.next_run(offset % 5, offset) for offset in range(300)] == [
        (offset, offset + 1) for offset in range(300)
    ]
    assert log.damaged == []
    log.close()
    assert index.read_bytes() == data


def test_every_flipped_bit_of_an_index_is_noticed(tmp_path: Path) -> None:
    files = build(tmp_path, 60)
    index = files[0].with_suffix(".index")
    data = index.read_bytes()
    for position in range(0, len(data), 7):
        flip(index, position, position % 8)
        log = open_log(tmp_path)
        assert offsets(log) == list(range(60)), position
        assert sum(log.count_from(lane, 1) for lane in range(5)) == 59
        log.close()
        index.write_bytes(data)


def test_index_of_a_segment_that_changed_its_size_is_not_believed(tmp_path: Path) -> None:
    files = build(tmp_path, 100)
    data = files[0].read_bytes()
    length = len(encode_one(b"5" + b" " * 50, 0))
    files[0].write_bytes(data[: 3 * length] + data[4 * length :])
    log = open_log(tmp_path)
    assert log.recovered.rebuilt_indexes == 1
    assert damaged(log) == [(3, 4)]
    log.close()


def test_lanes_are_added_to_a_log_that_was_written_without(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=4096, with_lanes=False)
    log = open_log(tmp_path, config)
    for number in range(100):
        log.append(encode_one(bytes(60), 1, lane=number % 2))
    log.close()
    log = open_log(tmp_path)
    assert log.recovered.rebuilt_indexes == log.segment_count - 1
    assert (log.count_from(0, 0), log.count_from(1, 50)) == (50, 25)
    log.close()


@pytest.mark.parametrize("how", ["missing", "empty", "zeros", "flipped newest", "flipped both"])
def test_damaged_checkpoint_loses_nothing(tmp_path: Path, how: str) -> None:
    files = build(tmp_path, 150)
    checkpoint = tmp_path / "checkpoint"
    data = checkpoint.read_bytes()
    if how == "missing":
        checkpoint.unlink()
    elif how == "empty":
        checkpoint.write_bytes(b"")
    elif how == "zeros":
        checkpoint.write_bytes(bytes(128))
    else:
        newest = max((0, 64), key=lambda at: int.from_bytes(data[at + 8 : at + 16], "little"))
        flip(checkpoint, newest + 33)
        if how == "flipped both":
            flip(checkpoint, 64 - newest + 5)
    log = open_log(tmp_path)
    assert (offsets(log), log.damaged, log.flushed_offset) == (list(range(150)), [], 150)
    log.close()
    assert len(files) > 2


def test_unknown_versions_refuse_to_open_and_change_nothing(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    files = build(origin, 100)

    def refused(path: Path, name: str) -> None:
        before = {file.name: file.read_bytes() for file in path.iterdir()}
        with pytest.raises(UnknownFormat, match=name):
            open_log(path)
        assert {file.name: file.read_bytes() for file in path.iterdir()} == before

    path = tmp_path / "batch"
    shutil.copytree(origin, path)
    data = bytearray(files[-1].read_bytes())
    length = len(encode_one(b"99" + b" " * 50, 0))
    newer = data[-length:]
    newer[2] = 2
    newer[20:24] = crc32c(bytes(newer[:20])).to_bytes(4, "little")
    (path / files[-1].name).write_bytes(data[:-length] + newer)
    refused(path, files[-1].name)

    path = tmp_path / "index"
    shutil.copytree(origin, path)
    index = path / files[0].with_suffix(".index").name
    data = bytearray(index.read_bytes())
    data[4] = 9
    head = int.from_bytes(data[8:12], "little")
    crc = crc32c(bytes(data[16:head]), crc32c(bytes(data[:12])))
    data[12:16] = crc.to_bytes(4, "little")
    index.write_bytes(data)
    refused(path, index.name)

    path = tmp_path / "checkpoint"
    shutil.copytree(origin, path)
    data = bytearray((path / "checkpoint").read_bytes())
    for at in (0, 64):
        data[at + 4] = 7
        data[at + 60 : at + 64] = crc32c(bytes(data[at : at + 60])).to_bytes(4, "little")
    (path / "checkpoint").write_bytes(data)
    refused(path, "checkpoint")


def test_leftovers_of_interrupted_work_are_removed(tmp_path: Path) -> None:
    files = build(tmp_path, 100)
    (tmp_path / (files[0].name + ".tmp")).write_bytes(b"half a compaction")
    (tmp_path / f"{7777:020d}.index").write_bytes(b"an orphan")
    (tmp_path / "notes.txt").write_bytes(b"not ours")
    log = open_log(tmp_path)
    assert log.recovered.removed_files == [files[0].name + ".tmp", f"{7777:020d}.index"]
    assert (tmp_path / "notes.txt").exists()
    assert offsets(log) == list(range(100))
    log.close()


def test_segments_that_overlap_are_refused(tmp_path: Path) -> None:
    files = build(tmp_path, 100)
    (tmp_path / f"{3:020d}.log").write_bytes(files[1].read_bytes())
    with pytest.raises(CorruptFile, match="into the next segment"):
        open_log(tmp_path)


def test_log_with_a_lost_index_opens_on_a_full_disk(tmp_path: Path) -> None:
    class FullDisk(RealDisk):
        def write_file_atomic(self, path: str, data: object) -> None:
            raise DiskFull("no space left")

    files = build(tmp_path, 100)
    files[0].with_suffix(".index").unlink()
    log = Log.open(FullDisk(), str(tmp_path), SMALL, 0)
    assert offsets(log) == list(range(100))
    log.close()


def test_batches_larger_than_the_scan_window_survive_a_reopen(tmp_path: Path) -> None:
    config = LogConfig(segment_bytes=64 * 1024 * 1024)
    log = open_log(tmp_path, config)
    for number in range(3):
        log.append(encode([bytes(3_000_000), b"%d" % number, bytes(2_500_000)]))
    log.close(clean=False)
    log = open_log(tmp_path, config)
    assert [batch.values()[1] for batch in log.batches(0)] == [b"0", b"1", b"2"]
    log.close(clean=False)
    (file,) = tmp_path.glob("*.log")
    length = file.stat().st_size // 3
    flip(file, length + 10)
    flip(file, HEADER_BYTES + 5)
    log = open_log(tmp_path, config)
    assert damaged(log) == [(0, 6)]
    assert offsets(log) == [6, 7, 8]
    log.close()
