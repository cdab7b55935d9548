"""The coordinator on a log in memory: what is written, who waits, and who may be answered."""

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest
from fake_leadership import FakeLed
from simloop import VirtualTimeLoop

from raftq.client.common.errors import (
    CorruptBatch,
    FencedGeneration,
    NotEnoughReplicas,
    NotLeader,
    RequestTimeout,
    UnknownGroup,
)
from raftq.client.wire.group_messages import GroupHeartbeat, LeaveGroup, Owned
from raftq.cluster.groups.groups import GroupsConfig
from raftq.cluster.groups.records import Beat, unpack
from raftq.node.groups.coordinator import PROOF_S, REPEAT_S, RETRY_S, Coordinator

TOPICS = {"t": 4}


def simulated(scenario: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test in virtual time."""

    def test() -> None:
        loop = VirtualTimeLoop()
        asyncio.set_event_loop(loop)
        try:
            loop.run(scenario(), seconds_max=1000)
        finally:
            asyncio.set_event_loop(None)
            loop.end()
        assert not loop.unhandled, loop.unhandled

    test.__name__ = scenario.__name__
    test.__doc__ = scenario.__doc__
    return test


def lead(leadership: FakeLed) -> Coordinator:
    coordinator = Coordinator(
        leadership,
        GroupsConfig(),
        Random(1),
        lambda: 0,
        lambda: dict(TOPICS),
        lambda: NotLeader("another node leads"),
        lambda stopped: None,
    )
    if not leadership.old_epochs_replicated.done():
        leadership.old_epochs_replicated.set_result(None)
    return coordinator


async def begin(**leadership: Any) -> tuple[FakeLed, Coordinator]:
    found = FakeLed(**leadership)
    coordinator = lead(found)
    await coordinator.until_ready()
    return found, coordinator


def beat(name: str, reply: Any = None, **fields: Any) -> GroupHeartbeat:
    """A heartbeat of a member that does what it was told last."""
    facts: dict[str, Any] = {"topics": ("t",)}
    if reply is not None:
        facts["member_epoch"] = reply.member_epoch
        facts["generation"] = reply.generation
        facts["owned"] = tuple(Owned(one.topic, one.partition) for one in reply.assigned)
    return GroupHeartbeat("g", name, **{**facts, **fields})


def records(leadership: FakeLed) -> list[Any]:
    return [unpack(value) for batch in leadership.data.log.batches(0) for value in batch.values()]


def now() -> float:
    return asyncio.get_running_loop().time()


@simulated
async def test_requests_of_a_moment_share_a_batch_and_are_answered_when_it_is_replicated() -> None:
    leadership, coordinator = await begin(delay=lambda: 0.05)
    began = now()
    joins = [coordinator.heartbeat(beat(f"m{at}"), "h") for at in range(20)]
    replies = await asyncio.gather(*joins)
    assert now() - began == pytest.approx(0.05, abs=0.01)
    assert leadership.data.appends == 1
    assert [len(one.assigned) for one in replies].count(4) == 1
    assert all(one.pending for one in replies)


@simulated
async def test_one_that_was_replaced_answers_nobody() -> None:
    """Not even a heartbeat that changes nothing: it would renew a session that the next
    coordinator does not know of."""
    leadership, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a"), "h")
    leadership.cut_off = True
    waiting = coordinator.heartbeat(beat("a", reply), "h")
    late = coordinator.heartbeat(beat("a", reply, wait_ms=500), "h")
    await asyncio.sleep(60)
    assert not waiting.done()
    assert not late.done()
    leadership.end()
    coordinator.stop()
    for future in (waiting, late):
        with pytest.raises(NotLeader) as refused:
            await future
        assert refused.value.outcome == "unknown"
    with pytest.raises(NotLeader):
        coordinator.heartbeat(beat("a", reply), "h")


@simulated
async def test_heartbeats_without_news_share_a_beat() -> None:
    leadership, coordinator = await begin()
    members = {}
    for at in range(10):
        members[at] = await coordinator.heartbeat(beat(f"m{at}"), "h")
    await asyncio.sleep(1)
    for _ in range(4):
        for at in members:
            members[at] = await coordinator.heartbeat(beat(f"m{at}", members[at]), "h")
    before = leadership.data.appends
    began = now()
    await asyncio.gather(
        *(coordinator.heartbeat(beat(f"m{at}", reply), "h") for at, reply in members.items())
    )
    assert leadership.data.appends == before + 1
    assert now() - began == pytest.approx(PROOF_S, abs=0.01)
    assert isinstance(records(leadership)[-1], Beat)


@simulated
async def test_queue_members_cost_the_log_nothing() -> None:
    leadership, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a", mode="queue"), "h")
    before = leadership.data.appends
    began = now()
    await coordinator.heartbeat(beat("a", reply, mode="queue", owned=()), "h")
    assert now() - began < 0.001
    waiting = coordinator.heartbeat(beat("a", reply, mode="queue", owned=(), wait_ms=2_000), "h")
    await coordinator.heartbeat(beat("b", mode="queue"), "h")
    await waiting
    assert now() - began == pytest.approx(2, abs=0.1), "another worker is no news"
    TOPICS["t"] = 5
    try:
        waiting = coordinator.heartbeat(beat("a", reply, mode="queue", wait_ms=9_000), "h")
        coordinator.topics_changed()
        assert len((await waiting).assigned) == 5
    finally:
        TOPICS["t"] = 4
    assert (
        leadership.data.appends == before + 3
    )  # the member, its generation, and that of the topics


@simulated
async def test_a_parked_heartbeat_hears_of_news_at_once_and_of_the_same_again_after_a_while() -> (
    None
):
    _, coordinator = await begin()
    a = await coordinator.heartbeat(beat("a"), "h")
    await asyncio.sleep(1)
    waiting = coordinator.heartbeat(beat("a", a, wait_ms=8_000), "h")
    began = now()
    await asyncio.sleep(2)
    b = await coordinator.heartbeat(beat("b"), "h")
    told = await waiting
    assert now() - began == pytest.approx(2, abs=0.05)
    assert len(told.assigned) == 2
    # It still has all four, and knows that it should not: no busy loop.
    began = now()
    held = beat("a", told, owned=beat("a", a).owned, wait_ms=8_000)
    assert (await coordinator.heartbeat(held, "h")).assigned == told.assigned
    assert now() - began == pytest.approx(REPEAT_S + PROOF_S, abs=0.05)
    waiting = coordinator.heartbeat(beat("b", b, wait_ms=8_000), "h")
    await coordinator.heartbeat(beat("a", told), "h")
    began = now()
    assert len((await waiting).assigned) == 2
    assert now() - began < 0.05


@simulated
async def test_a_wait_ends_well_within_the_session() -> None:
    _, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a", session_ms=3_000), "h")
    began = now()
    for _ in range(10):
        message = beat("a", reply, session_ms=3_000, wait_ms=60_000)
        reply = await coordinator.heartbeat(message, "h")
    assert now() - began == pytest.approx(10 * (1 + PROOF_S), abs=0.2)
    assert coordinator.core.groups["g"].members


@simulated
async def test_a_newer_heartbeat_takes_the_place_of_a_parked_one() -> None:
    _, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a"), "h")
    first = coordinator.heartbeat(beat("a", reply, wait_ms=9_000), "h")
    second = coordinator.heartbeat(beat("a", reply, wait_ms=9_000), "h")
    began = now()
    await first
    assert now() - began < 1
    assert not second.done()
    second.cancel()
    await asyncio.sleep(0)
    third = coordinator.heartbeat(beat("a", reply, wait_ms=2_000), "h")
    assert (await third).generation == 1


@simulated
async def test_a_parked_member_hears_that_it_is_gone() -> None:
    _, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a", instance_id="i"), "h")
    waiting = coordinator.heartbeat(beat("a", reply, instance_id="i", wait_ms=9_000), "h")
    await coordinator.heartbeat(beat("b", instance_id="i"), "h")
    with pytest.raises(FencedGeneration):
        await waiting
    reply = await coordinator.heartbeat(beat("c"), "h")
    waiting = coordinator.heartbeat(beat("c", reply, wait_ms=9_000), "h")
    assert (await coordinator.leave(LeaveGroup("g", "c"))).left
    with pytest.raises(FencedGeneration):
        await waiting
    assert not (await coordinator.leave(LeaveGroup("g", "c"))).left


@simulated
async def test_a_full_disk_only_delays() -> None:
    leadership, coordinator = await begin()
    leadership.data.full = True
    joins = [coordinator.heartbeat(beat(f"m{at}"), "h") for at in range(3)]
    await asyncio.sleep(5)
    joins.append(coordinator.heartbeat(beat("m3"), "h"))
    assert not any(one.done() for one in joins)
    leadership.data.full = False
    await asyncio.sleep(RETRY_S + 0.1)
    assert all(one.done() for one in joins)
    after = lead(leadership.successor())
    await after.until_ready()
    assert len(after.core.groups["g"].members) == 4


@simulated
async def test_without_enough_replicas_nothing_begins() -> None:
    leadership, coordinator = await begin()
    reply = await coordinator.heartbeat(beat("a"), "h")
    leadership.enough = False
    with pytest.raises(NotEnoughReplicas):
        coordinator.heartbeat(beat("b"), "h")
    with pytest.raises(NotEnoughReplicas):
        coordinator.delete("g")
    await coordinator.heartbeat(beat("a", reply), "h")


@simulated
async def test_a_log_that_has_grown_is_replaced_by_a_snapshot() -> None:
    leadership, coordinator = await begin()
    coordinator.snapshot_bytes_min = 10_000
    for at in range(300):
        await coordinator.heartbeat(beat(f"m{at}"), "h")
        await coordinator.leave(LeaveGroup("g", f"m{at}"))
    for name in "abc":
        await coordinator.heartbeat(beat(name), "h")
    assert leadership.data.log.rolls > 2
    assert leadership.data.log.start_offset > 0
    assert leadership.data.log.size_bytes < 60_000
    await asyncio.sleep(1)
    before = coordinator.core.snapshot()
    after = lead(leadership.successor())
    await after.until_ready()
    assert after.core.snapshot() == before


@simulated
async def test_the_next_coordinator_waits_a_session_before_it_gives_partitions_away() -> None:
    leadership, coordinator = await begin()
    await coordinator.heartbeat(beat("a", session_ms=10_000), "h")
    await asyncio.sleep(9)
    after = lead(leadership.successor())
    await after.until_ready()
    began = now()
    reply = await after.heartbeat(beat("b"), "h")
    while not reply.assigned:
        reply = await after.heartbeat(beat("b", reply, wait_ms=1_000), "h")
    assert 10 <= now() - began < 10.5


@simulated
async def test_a_log_that_cannot_be_read_is_tried_again() -> None:
    leadership, coordinator = await begin()
    await coordinator.heartbeat(beat("a"), "h")
    after_led = leadership.successor()
    read = after_led.data.log.batches

    def damaged(*args: Any) -> Any:
        raise CorruptBatch("rotten")

    after_led.data.log.batches = damaged  # type: ignore[method-assign]
    after = lead(after_led)
    with pytest.raises(RequestTimeout):
        await after.until_ready()
    after_led.data.log.batches = read  # type: ignore[method-assign]
    await after.until_ready()
    assert list(after.core.groups["g"].members) == ["a"]


@simulated
async def test_who_waits_for_a_coordinator_that_never_begins_hears_of_it() -> None:
    leadership = FakeLed()
    coordinator = Coordinator(
        leadership,
        GroupsConfig(),
        Random(1),
        lambda: 0,
        dict,
        lambda: NotLeader("no"),
        lambda one: None,
    )
    waiting = asyncio.ensure_future(coordinator.until_ready())
    await asyncio.sleep(1)
    leadership.end()
    coordinator.stop()
    coordinator.stop()
    with pytest.raises(NotLeader):
        await waiting
    leadership.old_epochs_replicated.set_result(None)
    await asyncio.sleep(1)
    with pytest.raises(UnknownGroup):
        coordinator.core.find("g")
