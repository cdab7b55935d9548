"""Members without a live object: joined, polled and settled by their ids alone."""

import asyncio
import random
from typing import Any

import pytest
from fake_cluster import simulate
from fake_groups import FakeGroups, fake_groups, fill

from raftq.client.common.errors import (
    AlreadySettled,
    FencedGeneration,
    LeaseForeign,
    NotLeader,
    RaftqError,
)
from raftq.client.queue.leased import LeasedRecord, Receipt, receipt_of
from raftq.client.queue.one_shot import Settled
from raftq.client.queue.settling import Settlement
from raftq.client.queue.stateless import StatelessMembers, StatelessOptions


def members_of(cluster: FakeGroups, **settings: Any) -> StatelessMembers:
    options = StatelessOptions(rng=random.Random(5), **settings)
    return StatelessMembers(cluster.bootstrap, options)


def receipts(records: Any) -> list[Receipt]:
    assert all(isinstance(one, LeasedRecord) for one in records)
    return [receipt_of(one) for one in records]


def test_a_queue_member_leases_and_settles_through_any_client() -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, members_of(cluster) as here:
            logs = cluster.add_topic("t", 2)
            for log in logs:
                fill(log, [b"a", b"b"])
            member = await here.join("g", ["t"], client_id="c")
            assert member.member_id.startswith("c-")
            assert member.assigned == [("t", 0), ("t", 1)]
            got = await here.poll("g", member.member_id, timeout=0)
            assert len(got) == 4
            async with members_of(cluster) as there:
                first, *rest = await there.settle("g", receipts(got), Settlement("ack"))
                assert isinstance(first, Settled)
                assert not any(isinstance(one, RaftqError) for one in rest)
                again = await there.settle("g", receipts(got)[:1], Settlement("ack"))
                assert isinstance(again[0], AlreadySettled)
                foreign = await there.settle("other", receipts(got)[:1], Settlement("ack"))
                assert isinstance(foreign[0], LeaseForeign)
                state = await there.heartbeat("g", member.member_id)
                assert state.assigned == member.assigned
                assert await there.leave("g", member.member_id)
            with pytest.raises(FencedGeneration):
                await here.poll("g", member.member_id, timeout=0)

    simulate(main())


def test_each_result_says_what_became_of_its_record() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, members_of(cluster) as members:
            fill(cluster.add_topic("t", 1)[0], [b"a", b"b", b"c"])
            member = await members.join("g", ["t"])
            got = receipts(await members.poll("g", member.member_id, visibility_timeout=60.0))
            (nacked,) = await members.settle("g", got[:1], Settlement("nack", 5_000))
            assert isinstance(nacked, Settled)
            assert (nacked.dead, nacked.next_visible > 0) == (False, True)
            (rejected,) = await members.settle("g", got[1:2], Settlement("reject", None, "bad"))
            assert isinstance(rejected, Settled)
            assert rejected.dead
            (more,) = await members.settle("g", got[2:], Settlement("extend", 90_000))
            assert isinstance(more, Settled)
            assert more.next_visible > nacked.next_visible

    simulate(main())


def test_what_is_given_back_comes_again_without_an_attempt() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, members_of(cluster) as members:
            fill(cluster.add_topic("t", 1)[0], [b"a"])
            member = await members.join("g", ["t"])
            got = await members.poll("g", member.member_id)
            await members.give_back("g", got)
            (again,) = await members.poll("g", member.member_id)
            assert isinstance(again, LeasedRecord)
            assert again.attempt == 1

    simulate(main())


@pytest.mark.parametrize("mode", ["queue", "stream"])
def test_a_poll_waits_for_the_first_record_at_any_leader(mode: Any) -> None:
    async def main() -> None:
        async with fake_groups(2) as cluster, members_of(cluster) as members:
            logs = cluster.add_topic("t", 2)
            cluster.lead("t", 1, 2)
            member = await members.join("g", ["t"], mode=mode)
            loop = asyncio.get_running_loop()
            began = loop.time()
            assert await members.poll("g", member.member_id, timeout=2.0) == []
            assert 2.0 <= loop.time() - began < 3.0
            waiting = asyncio.ensure_future(members.poll("g", member.member_id, timeout=60.0))
            await asyncio.sleep(30.0)
            fill(logs[1], [b"late"])
            cluster._changed()
            (record,) = await waiting
            assert record.value == b"late"

    simulate(main())


def test_a_stream_member_reads_from_what_it_committed() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, members_of(cluster) as members:
            logs = cluster.add_topic("t", 2)
            for log in logs:
                fill(log, [b"%d" % number for number in range(5)])
            member = await members.join("g", ["t"], mode="stream")
            assert member.assigned == [("t", 0), ("t", 1)]
            for _ in range(2):
                got = await members.poll("g", member.member_id, timeout=0)
                assert len(got) == 10
            await members.commit("g", member.member_id, {("t", 0): 5, ("t", 1): 3})
            got = await members.poll("g", member.member_id, timeout=0)
            assert [(one.partition, one.offset) for one in got] == [(1, 3), (1, 4)]
            with pytest.raises(FencedGeneration):
                await members.commit("g", "somebody", {("t", 0): 1})
            with pytest.raises(FencedGeneration):
                await members.commit("g", "", {("t", 0): 1})
            with pytest.raises(FencedGeneration, match=r"offsets\.t\.7"):
                await members.commit("g", member.member_id, {("t", 7): 1})

    simulate(main())


def test_what_another_member_took_is_revoked_and_let_go_with_the_next_heartbeat() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, members_of(cluster) as members:
            cluster.add_topic("t", 2)
            first = await members.join("g", ["t"], mode="stream")
            second = await members.join("g", ["t"], mode="stream")
            beat = await members.heartbeat("g", first.member_id, first.generation)
            assert len(beat.revoked) == 1
            await members.heartbeat("g", first.member_id, beat.generation)
            other = await members.heartbeat("g", second.member_id)
            assert other.assigned == beat.revoked

    simulate(main())


def test_a_queue_poll_without_any_leader_says_so() -> None:
    async def main() -> None:
        async with fake_groups() as cluster, members_of(cluster) as members:
            cluster.add_topic("t", 1)
            member = await members.join("g", ["t", "gone"])
            assert member.assigned == [("t", 0)]
            cluster.lead("t", 0, None)
            await asyncio.sleep(20)
            with pytest.raises(NotLeader):
                await members.poll("g", member.member_id, timeout=0.5)

    simulate(main())
