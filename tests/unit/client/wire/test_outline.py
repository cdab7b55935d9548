"""Batches without content: the same numbers under a checksum of their own; damage is passed on."""

from pathlib import Path

import pytest
from fake_cluster import fake_cluster, simulate
from real_node import address, run, running

from raftq.aio import Admin, Consumer, Producer
from raftq.client.wire.batch import Batch, decode, encode, stamp, validate
from raftq.client.wire.codecs import CODECS
from raftq.client.wire.encoder import encode_control
from raftq.client.wire.messages import Fetch
from raftq.client.wire.outline import outlines

FOLDER = Path(__file__).resolve().parents[3] / "golden"
GOLDEN = {path.stem: path.read_bytes() for path in sorted(FOLDER.glob("*.bin"))}


def made(count: int, base: int, codec: str = "none") -> bytes:
    values = [b"v%d" % one * 100 for one in range(count)]
    keys = [b"k", *[None] * (count - 1)]
    headers = [{"a": b"1"}, *[None] * (count - 1)]
    times = [7 + one for one in range(count)]
    batch = encode(values, keys, headers, times, codec=CODECS[codec])
    stamp(batch, base, 3)
    return bytes(batch)


def split(raw: bytes) -> list[Batch]:
    found = []
    at = 0
    while at < len(raw):
        found.append(Batch(raw, at))
        at += found[-1].length
    return found


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_an_outline_has_the_numbers_of_its_batch(name: str) -> None:
    batch = decode(GOLDEN[name])
    (short,) = split(outlines(GOLDEN[name]))
    assert (short.base_offset, short.end_offset, short.epoch, short.lane, short.count) == (
        *(batch.base_offset, batch.end_offset, batch.epoch),
        *(batch.lane, batch.count),
    )
    assert list(short.offsets()) == list(batch.offsets())
    assert short.timestamps() == batch.timestamps()
    assert short.expiries() == batch.expiries()
    short.check_crc()
    if short.length != batch.length:
        assert short.values() == [b""] * batch.count
        validate(short)


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_batches_are_outlined_one_after_the_other(codec: str) -> None:
    raw = made(50, 100, codec) + made(1, 150, codec) + made(3, 151, codec)
    short = outlines(raw)
    assert len(short) < len(raw) if codec == "none" else len(short) <= len(raw)
    assert [one.base_offset for one in split(short)] == [100, 150, 151]
    assert [one for batch in split(short) for one in batch.offsets()] == list(range(100, 154))
    if codec == "none":
        assert {value for batch in split(short) for value in Batch.values(batch)} == {b""}


def test_a_control_batch_keeps_what_it_says() -> None:
    batch = encode_control(b"x")
    stamp(batch, 9, 1)
    assert outlines(bytes(batch)) == bytes(batch)


def test_what_is_damaged_is_passed_on_as_it_is() -> None:
    """A reader must find the damage; an outline with a fresh checksum would hide it."""
    first, second = made(5, 0), bytearray(made(5, 5))
    second[-1] ^= 1
    short = outlines(first + bytes(second) + made(5, 10))
    assert short.endswith(bytes(second) + made(5, 10))
    assert [one.count for one in split(short)] == [5, 5, 5]
    second[30] ^= 0xFF  # a header that contradicts itself
    assert outlines(bytes(second)) == bytes(second)
    assert outlines(b"") == b""


def test_a_node_sends_outlines_to_whom_asks_for_them(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with running(tmp_path) as node, Admin(address(node)) as admin:
            await admin.create_topic("t", 1, 1)
            async with Producer(address(node)) as producer:
                await producer.send_many("t", [b"x" * 1000] * 500)
            async with Consumer(address(node), outlines=True) as consumer:
                await consumer.assign([("t", 0)])
                batches = []
                while sum(one.batch.count for one in batches) < 500:
                    batches += await consumer.poll_batches()
                assert sum(one.batch.length for one in batches) < 10_000
                await consumer.seek("t", 0, offset=499)
                (last,) = await consumer.poll()
                assert (last.offset, last.value) == (499, b"")
            async with Consumer(address(node)) as consumer:
                await consumer.assign([("t", 0)])
                assert (await consumer.poll(1))[0].value == b"x" * 1000

    run(scenario)


def test_a_reader_of_a_range_fetches_nothing_behind_it() -> None:
    """1. A log of ten batches; 2. a reader that stops inside the fourth; 3. it gets that batch
    whole, and asks for no offset after it; 4. after a seek it may fetch again."""

    async def main() -> None:
        asked: list[int] = []

        async def fetching(request: Fetch, node_id: int) -> None:
            asked.extend(one.offset for one in request.partitions)

        async with (
            fake_cluster() as cluster,
            Consumer(cluster.bootstrap, fetch_bytes=1) as consumer,
        ):
            (log,) = cluster.add_topic("t", 1)
            for _ in range(10):
                log.append(memoryview(encode([b"v"] * 10, timestamps=1)))
            cluster.fetching = fetching
            await consumer.assign([("t", 0)])
            await consumer.stop_at("t", 0, 35)
            await consumer.seek("t", 0, offset=0)
            found = []
            while records := await consumer.poll(timeout=0.5):
                found += records
            assert [one.offset for one in found] == list(range(40))
            assert max(asked) == 30
            await consumer.seek("t", 0, offset=20)
            assert (await consumer.poll(timeout=0.5))[0].offset == 20

    simulate(main())


def test_a_range_that_ends_in_batches_without_records_is_read_on_to_one_that_has_some() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, Consumer(cluster.bootstrap) as consumer:
            (log,) = cluster.add_topic("t", 1)
            log.append(memoryview(encode([b"v"], timestamps=1)))
            log.append(memoryview(encode_control(b"c")))
            log.append(memoryview(encode([b"w"], timestamps=1)))
            await consumer.assign([("t", 0)])
            await consumer.stop_at("t", 0, 2)
            found = []
            while records := await consumer.poll(timeout=0.5):
                found += records
            assert [one.value for one in found] == [b"v", b"w"]

    simulate(main())
