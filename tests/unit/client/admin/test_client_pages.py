"""The admin client's pages of records, dead letters and delayed records, and its sums."""

import random
from typing import Any

import pytest
from fake_cluster import fake_cluster, simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.aio import Admin, Producer
from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.results import LetterPlace
from raftq.client.common.errors import NotLeader, OffsetOutOfRange, UnknownTopic
from raftq.client.consumer.pages import Position

MIB = 1024 * 1024


def admin_of(cluster: Any, **settings: Any) -> Admin:
    return Admin(cluster.bootstrap, rng=random.Random(3), timeout_ms=5_000, **settings)


def letters(cluster: FakeGroups, count: int = 6) -> None:
    """Dead letters of `t`, so many in each of two partitions."""
    cluster.add_topic("t", 2)
    for log in cluster.add_topic("t.dlq", 2):
        for number in range(count):
            facts = {"x-dlq-group": b"g", "x-dlq-reason": (b"rejected", b"attempts")[number % 2]}
            fill(log, [b"v%d" % number], keys=[b"k%d" % number], headers=[facts])


def test_pages_end_at_their_limits_and_go_on_from_there() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, admin_of(cluster) as admin:
            (log,) = cluster.add_topic("t", 1)
            for _ in range(5):
                fill(log, [b"x" * 1000] * 10)

            async def at(position: Position, limit: int = 1000, most: int = MIB) -> list[int]:
                page = await admin.read_page("t", 0, position, limit, most)
                return [record.offset for record in page.records]

            assert await at(Position()) == list(range(50))
            assert await at(Position(13), limit=4) == [13, 14, 15, 16]
            assert await at(Position(8), limit=15) == list(range(8, 23))
            assert await at(Position(50)) == []
            assert await at(Position(3), most=5_500) == [3, 4, 5, 6, 7]
            assert await at(Position(3), most=1) == [3]
            assert await at(Position(time_ms=0), limit=1) == [0]
            assert await at(Position(time_ms=1 << 60)) == []
            seen, offset = 0, 0
            while offset < 50:
                page = await admin.read_page("t", 0, Position(offset), 7, 4_000)
                assert [one.offset for one in page.records] == list(range(offset, page.next_offset))
                seen, offset = seen + len(page.records), page.next_offset
            assert seen == 50
            with pytest.raises(OffsetOutOfRange, match="51"):
                await at(Position(51))

    simulate(main())


def test_a_page_can_be_larger_than_one_fetch() -> None:
    async def main() -> None:
        async with fake_cluster() as cluster, admin_of(cluster) as admin:
            (log,) = cluster.add_topic("t", 1)
            for _ in range(6):
                fill(log, [b"x" * 700_000])
            page = await admin.read_page("t", 0, bytes_max=8 * MIB)
            assert [one.offset for one in page.records] == list(range(6))
            page = await admin.read_page("t", 0, bytes_max=2 * MIB)
            assert [one.offset for one in page.records] == [0, 1]

    simulate(main())


def test_a_page_is_read_from_whoever_leads() -> None:
    async def main() -> None:
        async with fake_cluster(2) as cluster, admin_of(cluster) as admin:
            (log,) = cluster.add_topic("t", 1)
            fill(log, [b"a"])
            for leader in (1, 2, 1):
                cluster.lead("t", 0, leader)
                assert len((await admin.read_page("t", 0)).records) == 1
            cluster.lead("t", 0, None)
            with pytest.raises(NotLeader):
                await admin.read_page("t", 0)
            with pytest.raises(UnknownTopic):
                await admin.read_page("nothing", 0)

    simulate(main())


def test_letters_are_browsed_page_by_page() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, admin_of(cluster) as admin:
            letters(cluster)
            seen: list[tuple[int, int]] = []
            place: LetterPlace | None = LetterPlace()
            pages = 0
            while place is not None:
                page = await admin.letter_page("t.dlq", LetterFilter(), place, 4)
                seen += [(one.partition, one.offset) for one in page.records]
                place = page.next
                pages += 1
            assert seen == [(number, at) for number in range(2) for at in range(6)]
            assert pages >= 3
            rejected = await admin.letter_page("t.dlq", LetterFilter(reason="rejected"))
            assert [one.offset for one in rejected.records] == [0, 2, 4] * 2
            one = await admin.letter_page("t.dlq", LetterFilter(partition=1, key=b"k3"))
            assert [(each.partition, each.offset) for each in one.records] == [(1, 3)]
            assert one.next is None

    simulate(main())


def test_a_sweep_ends_in_time_and_the_next_one_goes_on() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, admin_of(cluster) as admin:
            letters(cluster, 20)
            query = LetterFilter()
            first = await admin.sweep_letters("t.dlq", "redrive", query, 100, rate=5, seconds=3)
            assert not first.complete
            assert 10 <= first.count <= 20
            rest = await admin.sweep_letters("t.dlq", "purge", query, 5)
            assert (rest.count, rest.complete) == (5, False)
            rest = await admin.sweep_letters("t.dlq", "purge", query, 100)
            assert (first.count + 5 + rest.count, rest.complete) == (40, True)

    simulate(main())


def test_delayed_records_are_listed_found_and_summed() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, admin_of(cluster) as admin:
            cluster.add_topic("t", 2)
            async with Producer(cluster.bootstrap, linger_ms=0) as producer:
                for number in range(6):
                    delay = 100.0 + number
                    await (await producer.send("t", b"v", partition=number % 2, delay=delay))
            page = await admin.delayed_page("t", 1, 3)
            assert page.pending == 6
            assert [(one.partition, one.offset) for one in page.records] == [(1, 0), (0, 1), (1, 1)]
            assert page.records[0].deliver_at < page.records[1].deliver_at
            found = await admin.find_delayed("t", 2, 1)
            assert found is not None
            assert (found.partition, found.offset) == (1, 2)
            assert await admin.find_delayed("t", 9) is None
            sums = await admin.delay_sums(["t", "gone"])
            assert (sums.pending, sums.missing) == (6, 0)
            cluster.lead("t", 1, None)
            sums = await admin.delay_sums(["t"])
            assert (sums.pending, sums.missing) == (3, 1)

    simulate(main())


def test_deliveries_of_all_groups_are_summed() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, admin_of(cluster) as admin:
            letters(cluster)
            sums = await admin.queue_sums(["t", "t.dlq"])
            assert (sums.letters, sums.in_flight, sums.missing) == (12, 0, 0)
            assert await admin.queue_groups("t", 0) == []
            assert await admin.stored_offsets("g", ["t"]) == {}

    simulate(main())
