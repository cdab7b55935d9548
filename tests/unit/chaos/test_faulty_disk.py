"""The disk for fault injection: it fails as told, and a power cut takes what was not synced."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest

from raftq.chaos.harness.faulty_disk import FaultyDisk
from raftq.chaos.harness.node import (
    VARIABLE,
    Control,
    Disturbances,
    surroundings,
    unsynced_path,
    write_control,
)
from raftq.chaos.harness.power_cut import Unsynced, lose
from raftq.client.common.disk import File
from raftq.client.common.errors import DiskFull, StorageFailed


class Bench:
    """A disk with its switches, and a data directory."""

    def __init__(self, base: Path) -> None:
        self.data = base / "data"
        self.notes = str(base / "notes")
        self.data.mkdir(parents=True)
        self.now = Disturbances()
        self.disk = self.again()

    def again(self) -> FaultyDisk:
        """As a new process has it."""
        self.disk = FaultyDisk(lambda: self.now, Unsynced(self.notes))
        return self.disk

    def path(self, name: str) -> str:
        return str(self.data / name)

    def open(self, name: str) -> File:
        return self.disk.open(self.path(name), create=True)

    def stored(self) -> dict[str, bytes]:
        return {one.name: one.read_bytes() for one in self.data.iterdir()}

    def cut_power(self, tear: Random | None = None) -> int:
        self.disk.unsynced.close()
        return lose(self.notes, tear)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_power_cut_takes_appends_after_the_last_sync(bench: Bench) -> None:
    file = bench.open("log")
    bench.disk.sync_directory(str(bench.data))
    file.append([b"synced"])
    file.sync()
    file.append([b" and", b" not"])
    file.append([b" synced"])
    assert bench.stored() == {"log": b"synced and not synced"}
    bench.cut_power()
    assert bench.stored() == {"log": b"synced"}


def test_a_file_without_a_synced_directory_is_gone_whatever_was_synced_of_it(bench: Bench) -> None:
    file = bench.open("log")
    file.append([b"synced"])
    file.sync()
    bench.cut_power()
    assert bench.stored() == {}


def test_an_overwrite_and_a_truncation_are_undone(bench: Bench) -> None:
    file = bench.open("slots")
    bench.disk.sync_directory(str(bench.data))
    file.append([b"0123456789"])
    file.sync()
    file.write_at(2, b"XX")
    file.truncate(4)
    file.append([b"new"])
    file.write_at(6, b"longer")
    assert bench.stored() == {"slots": b"01XX" + b"nelonger"}
    bench.cut_power()
    assert bench.stored() == {"slots": b"0123456789"}


def test_a_replaced_file_comes_back_until_its_directory_is_synced(bench: Bench) -> None:
    bench.disk.write_file_atomic(bench.path("facts"), b"old")
    draft = bench.open("facts.tmp")
    draft.append([b"new"])
    draft.sync()
    bench.disk.rename(bench.path("facts.tmp"), bench.path("facts"))
    bench.cut_power()
    assert bench.stored() == {"facts": b"old"}


def test_a_file_that_was_written_atomically_stays(bench: Bench) -> None:
    bench.disk.write_file_atomic(bench.path("facts"), b"old")
    bench.disk.write_file_atomic(bench.path("facts"), b"new")
    assert bench.cut_power() == 0
    assert bench.stored() == {"facts": b"new"}


def test_appends_to_a_renamed_open_file_are_undone_under_its_new_name(bench: Bench) -> None:
    file = bench.open("journal.tmp")
    file.append([b"kept"])
    file.sync()
    bench.disk.rename(bench.path("journal.tmp"), bench.path("journal"))
    bench.disk.sync_directory(str(bench.data))
    file.append([b" lost"])
    bench.cut_power()
    assert bench.stored() == {"journal": b"kept"}


def test_a_killed_process_loses_nothing_and_its_successor_still_knows_what_is_unsynced(
    bench: Bench,
) -> None:
    file = bench.open("log")
    bench.disk.sync_directory(str(bench.data))
    file.append([b"first"])
    bench.again()
    assert bench.stored() == {"log": b"first"}
    bench.disk.open(bench.path("log")).append([b" second"])
    bench.cut_power()
    assert bench.stored() == {"log": b""}


def test_a_half_written_note_of_a_killed_process_is_dropped(bench: Bench) -> None:
    file = bench.open("log")
    bench.disk.sync_directory(str(bench.data))
    file.append([b"lost"])
    with open(os.path.join(bench.notes, "journal"), "a", encoding="utf-8") as notes:
        notes.write('["do", 9')
    bench.again()
    bench.cut_power()
    assert bench.stored() == {"log": b""}


def test_a_torn_tail_keeps_what_was_synced_and_ends_in_garbage(bench: Bench) -> None:
    file = bench.open("log")
    bench.disk.sync_directory(str(bench.data))
    file.append([b"s" * 100])
    file.sync()
    file.append([b"u" * 1000])
    bench.cut_power(Random(3))
    (left,) = bench.stored().values()
    assert left.startswith(b"s" * 100)
    assert 100 < len(left) < 1100
    assert left[-16:] != b"u" * 16


def test_a_removed_directory_is_forgotten(bench: Bench) -> None:
    inside = f"{bench.data}/topic"
    bench.disk.make_directory(inside)
    bench.disk.open(f"{inside}/log", create=True).append([b"x"])
    bench.disk.remove_directory(inside)
    assert bench.disk.unsynced.count == 0
    assert bench.cut_power() == 0


@dataclass
class Inode:
    content: bytes = b""
    durable: bytes = b""
    file: File | None = field(default=None, repr=False)


@pytest.mark.parametrize("seed", range(60))
def test_a_power_cut_leaves_what_a_plain_model_says(tmp_path: Path, seed: int) -> None:
    """Random changes of a few files, a few new processes, then the cut."""
    rng = Random(seed)
    bench = Bench(tmp_path)
    names: dict[str, Inode] = {}
    durable: dict[str, Inode] = {}

    def opened(name: str) -> tuple[Inode, File]:
        one = names.setdefault(name, Inode())
        if one.file is None:
            one.file = bench.open(name)
        return one, one.file

    for _ in range(rng.randint(5, 60)):
        name = rng.choice("abc")
        step = rng.choice(["append", "append", "write", "cut", "sync", "names", "move", "drop"])
        if rng.random() < 0.03:
            bench.again()
            for one in {id(one): one for one in [*names.values(), *durable.values()]}.values():
                one.file = None
        if step == "append":
            one, file = opened(name)
            data = rng.randbytes(rng.randint(1, 9))
            file.append([data])
            one.content += data
        elif step == "write":
            one, file = opened(name)
            position, data = rng.randint(0, len(one.content)), rng.randbytes(rng.randint(1, 5))
            file.write_at(position, data)
            one.content = one.content[:position] + data + one.content[position + len(data) :]
        elif step == "cut":
            one, file = opened(name)
            one.content = one.content[: rng.randint(0, len(one.content))]
            file.truncate(len(one.content))
        elif step == "sync":
            one, file = opened(name)
            file.sync()
            one.durable = one.content
        elif step == "names":
            bench.disk.sync_directory(str(bench.data))
            durable = dict(names)
        elif step == "move" and name in names:
            other = rng.choice([one for one in "abc" if one != name])
            bench.disk.rename(bench.path(name), bench.path(other))
            names[other] = names.pop(name)
        elif step == "drop" and name in names:
            bench.disk.remove(bench.path(name))
            del names[name]
        assert bench.stored() == {name: one.content for name, one in names.items()}
    bench.cut_power()
    assert bench.stored() == {name: one.durable for name, one in durable.items()}


def test_a_full_disk_takes_only_what_was_freed_since(bench: Bench) -> None:
    reserve, log = bench.open("reserve"), bench.open("log")
    reserve.append([b"r" * 100])
    bench.now = Disturbances(full=True)
    with pytest.raises(DiskFull):
        log.append([b"x"])
    assert bench.disk.free_bytes(str(bench.data)) == 0
    bench.disk.remove(bench.path("reserve"))
    log.append([b"x" * 60])
    with pytest.raises(DiskFull):
        log.append([b"x" * 60])
    assert log.size == 60
    bench.now = Disturbances()
    log.append([b"x" * 60])
    assert bench.disk.free_bytes(str(bench.data)) > 1000


def test_failing_writes_change_nothing_and_failing_syncs_make_nothing_durable(
    bench: Bench,
) -> None:
    file = bench.open("log")
    bench.disk.sync_directory(str(bench.data))
    bench.now = Disturbances(fail_writes=True)
    with pytest.raises(StorageFailed, match="Input/output"):
        file.append([b"x"])
    with pytest.raises(StorageFailed):
        file.write_at(0, b"x")
    assert bench.stored() == {"log": b""}
    bench.now = Disturbances(fail_syncs=True)
    file.append([b"x"])
    with pytest.raises(StorageFailed, match="sync"):
        file.sync()
    with pytest.raises(StorageFailed, match="sync"):
        bench.disk.sync_directory(str(bench.data))
    bench.cut_power()
    assert bench.stored() == {"log": b""}


def test_a_node_without_the_variable_gets_the_machines_own_disk_and_clock(tmp_path: Path) -> None:
    assert surroundings({}, 1, lambda: 5) is None
    assert surroundings({VARIABLE: ""}, 1, lambda: 5) is None


def test_a_control_file_disturbs_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    around = surroundings({VARIABLE: str(tmp_path)}, 7, lambda: 5_000)
    assert around is not None
    assert "runs under fault injection" in caplog.text
    assert around.wall_ms() == 5_000
    write_control(str(tmp_path), 7, Disturbances(clock_s=-2.5, full=True))
    assert around.wall_ms() == 2_500
    assert around.disk.free_bytes(str(tmp_path)) == 0
    write_control(str(tmp_path), 7, Disturbances(boot="another"))
    assert around.wall_ms() == 5_000
    again = surroundings({VARIABLE: str(tmp_path)}, 7, lambda: 5_000)
    assert again is not None
    assert again.boot == "another"
    assert os.path.isdir(unsynced_path(str(tmp_path), 7))


def test_a_control_file_that_goes_away_changes_nothing(tmp_path: Path) -> None:
    write_control(str(tmp_path), 7, Disturbances(fail_syncs=True))
    control = Control(str(tmp_path / "node-7.json"))
    assert control().fail_syncs
    (tmp_path / "node-7.json").unlink()
    assert control().fail_syncs
