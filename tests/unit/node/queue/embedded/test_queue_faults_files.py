"""Damage in the other files of a queue: caches are rebuilt, logs report, old copies do no harm."""

import shutil
from pathlib import Path

import pytest
import queuefaults as faults
from queuefaults import HARMS, LATER, OPTIONS, START, Survey

from raftq.client.common.errors import StorageError
from raftq.node.queue.embedded import delays
from raftq.node.queue.embedded.options import EmbeddedOptions

CACHES = [
    "data/00000000000000000000.index",
    "ledger/00000000000000000000.index",
    "data/checkpoint",
    "delays/checkpoint",
    "dead/checkpoint",
    "ledger/checkpoint",
    "delays.snapshot",
    "lock",
    "reserve",
]


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("name", CACHES)
def test_damaged_cache_changes_nothing(copy: Path, healthy: Survey, name: str, harm: str) -> None:
    if not (copy / name).exists():
        assert name == "delays.snapshot"  # written by a clean close only
        shutil.copy(copy / "data" / "checkpoint", copy / name)
    HARMS[harm](copy / name)
    assert faults.survey(copy) == healthy


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("segment", [0, -1])
@pytest.mark.parametrize("log", ["delays", "dead"])
def test_damage_in_delays_and_dead_letters_costs_only_what_it_hit(
    image: Path, copy: Path, healthy: Survey, log: str, segment: int, harm: str
) -> None:
    file = faults.segment_files(copy, log)[segment]
    before = faults.batch_positions(file)
    HARMS[harm](file)

    found = faults.survey(copy)

    assert found.plain == healthy.plain
    known = segment == 0 or image.name == "closed"
    ranges = found.ranges[log]
    hit = sum(end - start for start, end in ranges)
    if known:
        assert ranges
        assert found.damaged == hit
        assert all(before[0][1] <= start <= end <= before[-1][2] for start, end in ranges)
        assert any(line.startswith(f"{log}: ") for line in found.problems)
    if log == "dead":
        assert found.fired == healthy.fired
        assert set(found.dead) <= set(healthy.dead)
        lost = {offset for offset, _ in set(healthy.dead) - set(found.dead)}
        assert not known or all(any(s <= at < e for s, e in ranges) for at in lost)
    else:
        assert found.dead == healthy.dead
        assert len(set(found.fired)) == len(found.fired), "a delayed message fired twice"
        if known:
            assert len(set(healthy.fired) - set(found.fired)) <= hit


def test_lost_mark_does_not_make_a_delayed_message_fire_twice(tmp_path: Path) -> None:
    """1. Two batches fire, each leaves a mark. 2. Killed; the first mark is damaged. 3. Reopen."""
    path, killed = tmp_path / "open", tmp_path / "killed"
    queue = faults.open_queue(path)
    for delay in (10.0, 20.0, 5000.0):
        queue.enqueue(b"due %d" % delay, delay=delay)
    for moment in (START + 11, START + 21):
        queue._clock.now = moment  # type: ignore[attr-defined]
        queue.ack_batch(queue.dequeue_batch(10))
    shutil.copytree(path, killed)
    queue.close()
    file = faults.segment_files(killed, "delays")[0]
    position = faults.batch_positions(file)[3][0]
    faults.flip(lambda size: position + 90)(file)
    with faults.open_queue(killed, START + 30) as again:
        assert again.dequeue_batch(10) == []
        assert again.stats().delayed == 1
        assert again.verify()


def aged(path: Path) -> Path:
    """A queue that went on after a copy was made of it; returns the copy."""
    faults.build(path, clean=True)
    old = Path(shutil.copytree(path, path.with_name("old")))
    with faults.open_queue(path, START + 1002) as queue:
        queue.enqueue_batch([b"plain %d" % n for n in range(1000, 1020)])
        faults.drain(queue, "audit", {})
        queue.ack_batch(queue.dequeue_batch(60))
        queue.enqueue(b"later 1000", delay=2000.0)
        queue.redrive(limit=4)
        queue.compact()
        queue.enqueue(b"plain 1020")
        queue.checkpoint("new")
    return old


def old_names() -> list[str]:
    names = ["delays.snapshot", "queue.format", "lock", "reserve"]
    for log in faults.LOGS:
        names += [f"{log}/checkpoint", f"{log}/last.log", f"{log}/last.index", f"{log}/all"]
    return names


@pytest.fixture(scope="module")
def aged_image(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Survey]:
    path = tmp_path_factory.mktemp("aged") / "queue"
    old = aged(path)
    healthy = faults.survey(Path(shutil.copytree(path, path.with_name("healthy"))))
    assert (healthy.damaged, healthy.problems) == (0, [])
    return path, old, healthy


@pytest.mark.parametrize("name", old_names())
def test_old_copy_of_a_file_loses_nothing_that_it_did_not_hold(
    aged_image: tuple[Path, Path, Survey], tmp_path: Path, name: str
) -> None:
    image, old, healthy = aged_image
    copy = Path(shutil.copytree(image, tmp_path / "queue"))
    folder, _, file = name.rpartition("/")
    if file == "all":
        shutil.rmtree(copy / folder)
        shutil.copytree(old / folder, copy / folder)
    elif file.startswith("last."):
        source = sorted((old / folder).glob(f"*.{file[5:]}"))[-1]
        shutil.copy(source, copy / folder / source.name)
    else:
        shutil.copy(old / name, copy / name)

    found = faults.survey(copy)

    lost = {offset for offset, value in healthy.plain.items() if found.plain.get(offset) != value}
    gone = set(healthy.fired) - set(found.fired)
    if folder not in ("data", "delays"):
        assert (lost, gone) == (set(), set())
    elif file == "last.log":
        ranges = found.ranges[folder]
        assert all(any(start <= at < end for start, end in ranges) for at in lost)
        assert not gone or ranges
    elif file != "all":
        assert (lost, gone) == (set(), set())


def test_old_delay_snapshot_that_names_dropped_records_does_not_stop_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. One record is due far ahead, many are done. 2. All that tells of these is dropped.
    3. The snapshot from before comes back: it says they are pending."""
    monkeypatch.setattr(delays, "COMPACT_BYTES_MIN", 1)
    path = tmp_path / "queue"
    options = EmbeddedOptions(fsync="none", segment_bytes=4096, reserve_bytes=0)
    with faults.open_queue(path, options=options) as queue:
        for number in range(60):
            queue.enqueue(b"later %d" % number + b"." * 60, delay=10.0)
        queue.enqueue(b"far", delay=100_000.0)
        queue._engine.delays.upkeep(force=True)
        old = (path / "delays.snapshot").read_bytes()
        queue._clock.now = START + 20  # type: ignore[attr-defined]
        assert len(faults.drain(queue, "default", {})) == 60
        queue._files.delays.roll()
        queue.compact()
    (path / "delays.snapshot").write_bytes(old)
    with faults.open_queue(path, START + 30, options) as queue:
        faults.works_on(queue)
        assert [one.value for one in queue.delayed()] == [b"far"]
    with faults.open_queue(path, START + 200_000, options) as queue:
        assert [value for _, value in faults.drain(queue, "default", {})] == [b"far"]


@pytest.mark.parametrize("log", ["data", "delays", "dead"])
def test_lost_slot_of_a_checkpoint_does_not_make_dropped_segments_look_lost(
    tmp_path: Path, log: str
) -> None:
    """The other slot is from before the log moved its start."""
    path = tmp_path / "queue"
    faults.build(path, clean=True)
    queue = faults.open_queue(path, LATER)
    faults.drain(queue, "default", {})
    faults.drain(queue, "audit", {})
    queue.purge_dead_letters()
    moved = getattr(queue._files, log)
    moved.roll()
    moved.truncate_prefix(moved.end_offset)
    killed = Path(shutil.copytree(path, tmp_path / "killed"))
    queue.close()
    file = killed / log / "checkpoint"
    slots = [int.from_bytes(file.read_bytes()[at + 8 : at + 16], "little") for at in (0, 64)]
    faults.flip(lambda size: 64 * slots.index(max(slots)) + 30)(file)
    with faults.open_queue(killed, LATER) as again:
        assert again.stats().damaged == 0
        assert again.verify() == []
        faults.works_on(again)


@pytest.mark.parametrize("size", [0, 100, 8191])
def test_shrunken_reserve_is_made_whole_at_open(copy: Path, size: int) -> None:
    (copy / "reserve").write_bytes(bytes(size))
    faults.open_queue(copy).close()
    assert (copy / "reserve").stat().st_size == OPTIONS.reserve_bytes


@pytest.mark.parametrize("folder", ["", "data", "ledger", "delays", "dead"])
def test_leftover_temporary_files_are_harmless(copy: Path, healthy: Survey, folder: str) -> None:
    for name in ("queue.format.tmp", "delays.snapshot.tmp", "00000000000000000000.index.tmp",
                 "00000000000000000000.log.tmp", "checkpoint.tmp"):  # fmt: skip
        (copy / folder / name).write_bytes(b"half written")
    assert faults.survey(copy) == healthy
    assert folder == "" or not list((copy / folder).glob("*.tmp"))


def test_crash_leftovers_of_a_roll_open_as_if_nothing_happened(copy: Path, healthy: Survey) -> None:
    """1. No index of the last sealed segment. 2. An index of the active one. 3. An index of none.
    4. An empty segment behind the last."""
    for log in faults.LOGS:
        files = faults.segment_files(copy, log)
        index = files[-2].with_suffix(".index")
        shutil.copy(index, files[-1].with_suffix(".index"))
        shutil.copy(index, copy / log / "00000000000000009999.index")
        index.unlink()
        end = faults.batch_positions(files[-1])[-1][2]
        (copy / log / f"{end:020d}.log").touch()
    assert faults.survey(copy) == healthy


def test_overlapping_segments_are_refused_with_a_clear_error_and_left_alone(copy: Path) -> None:
    """A second file claims offsets that the one before it holds already."""
    first, second = faults.segment_files(copy, "data")[:2]
    stray = copy / "data" / f"{10:020d}.log"
    shutil.copy(second, stray)
    before = first.read_bytes()
    with pytest.raises(StorageError, match="into the next segment at 10"):
        faults.open_queue(copy)
    assert first.read_bytes() == before
    stray.unlink()
    assert len(faults.survey(copy).plain) > 90


def test_missing_middle_segment_keeps_every_other_offset(copy: Path, healthy: Survey) -> None:
    file = faults.segment_files(copy, "data")[2]
    start, end = int(file.stem), int(faults.segment_files(copy, "data")[3].stem)
    file.unlink()
    found = faults.survey(copy)
    assert found.ranges["data"] == [(start, end)]
    assert found.damaged == end - start
    assert {at: value for at, value in healthy.plain.items() if not start <= at < end} == (
        found.plain
    )


def test_nothing_is_left_open_when_a_queue_cannot_be_opened(copy: Path) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    shutil.copy(faults.segment_files(copy, "ledger")[1], copy / "ledger" / f"{1:020d}.log")
    before = descriptors()
    for _ in range(5):
        with pytest.raises(StorageError):
            faults.open_queue(copy, LATER)
    assert descriptors() == before
