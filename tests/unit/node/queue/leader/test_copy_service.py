"""Copies to other topics: one each, whoever dies on either side, and nobody else waits for them."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from random import Random
from typing import Any

import pytest
from fake_copies import DEAD, SOURCE, World
from fake_queue import run

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.errors import InvalidArgument, RaftqError
from raftq.client.common.tasks import sleep
from raftq.client.wire.queue_messages import DeadLetters
from raftq.client.wire.record import HEADERS_BYTES_MAX, BatchRecord, pack_headers
from raftq.node.queue.core.copy_ledger import (
    CopiesAdded,
    CopiesDone,
    CopiesParked,
    CopiesUnparked,
    CopyLedger,
    CopyProducer,
    CopyRow,
    CopyStream,
    Death,
)
from raftq.node.queue.core.dead_letter_headers import (
    dead_headers,
    matches,
    origin,
    redriven_headers,
)
from raftq.node.queue.leader.copy_service import PARKED_S
from raftq.node.storage.producers import Producers


def test_letter_is_a_copy_with_the_facts_of_its_death() -> None:
    async def main() -> None:
        world = World(1)
        world.publish(b"a", b"b", keys=[b"k", None], headers=[{"h": b"1"}, None], lane=3)
        world.publish(b"c", lane=0, expiries=[world.wall_ms() + 60_000])
        await sleep(0.1)
        rows = await world.lease()
        reply = await world.settle("reject", rows, reason="bad", error="boom")
        assert reply.dead == 3
        await sleep(1)
        letters = {record.value: record for record in world.records(DEAD)}
        assert sorted(letters) == [b"a", b"b", b"c"]
        a = letters[b"a"]
        assert (a.key, a.priority, a.headers["h"], letters[b"b"].key) == (b"k", 3, b"1", None)
        assert (a.headers["x-dlq-reason"], a.headers["x-dlq-error"]) == (b"bad", b"boom")
        assert (a.headers["x-dlq-topic"], a.headers["x-dlq-offset"]) == (b"orders", b"0")
        assert letters[b"c"].priority == 0
        assert letters[b"c"].expires_at == 0
        described = world.queues.of(world.topics[SOURCE].partition.ref).engine
        group = described.deliveries.groups["g"].core
        assert (group.settled.prefix, group.state.counters.dead, group.in_flight) == (3, 3, 0)
        assert list(world.made) == [DEAD]
        world.stop()

    run(main())


def test_unreachable_target_holds_up_nobody_else() -> None:
    async def main() -> None:
        world = World(1)
        world.publish(b"a", b"b")
        await sleep(0.1)
        world.topics[DEAD].partition.end_epoch()
        (row,) = await world.lease(1)
        assert (await world.settle("reject", [row])).dead == 1
        for _ in range(20):
            await sleep(1)
            world.publish(b"x")
            await sleep(0.1)
            rows = await world.lease()
            assert rows
            assert set((await world.settle("ack", rows)).errors) == {""}
        assert world.records(DEAD) == []
        assert world.copy_sender.sent < 30
        world.topics[DEAD].partition.lead()
        await sleep(20)
        assert [record.value for record in world.records(DEAD)] == [b"a"]
        world.stop()

    run(main())


def test_target_that_forgot_the_producer_gets_a_new_epoch_and_one_copy() -> None:
    async def main() -> None:
        world = World(1)
        for number in range(3):
            world.publish(b"%d" % number)
            await sleep(0.1)
            await world.settle("reject", await world.lease())
            await sleep(5)
            # After days without a letter, or a topic that was made anew.
            world.topics[DEAD].producers = Producers()
        assert [record.value for record in world.records(DEAD)] == [b"0", b"1", b"2"]
        world.stop()

    run(main())


def test_expired_leases_become_letters_in_portions() -> None:
    async def main() -> None:
        world = World(1, max_deliveries=1, visibility_timeout_ms=1_000, in_flight_max=5_000)
        count = 1_300
        for start in range(0, count, 100):
            world.publish(*[b"%04d" % (start + at) * 300 for at in range(100)])
        await sleep(0.2)
        while await world.lease(37):
            pass
        await sleep(20)
        values = sorted(record.value for record in world.records(DEAD))
        assert values == [b"%04d" % number * 300 for number in range(count)]
        world.stop()

    run(main())


def test_records_that_retention_took_before_their_copy_hold_up_nobody() -> None:
    async def main() -> None:
        world = World(1)
        world.publish(b"a")
        await sleep(0.1)
        log = world.topics[SOURCE].partition.logs["data"].log
        log.roll()
        world.publish(b"b")
        await sleep(0.1)
        world.topics[DEAD].partition.end_epoch()
        rows = await world.lease()
        log.truncate_prefix(1)
        await world.settle("reject", rows)
        world.topics[DEAD].partition.lead()
        await sleep(10)
        assert [record.value for record in world.records(DEAD)] == [b"b"]
        world.stop()

    run(main())


def test_refused_letter_is_parked_and_holds_up_nobody() -> None:
    """
    1. One of four dying records is refused by the dead letters, for good.
    2. The others arrive; the refused one stays unsettled, and whoever asks is told.
    3. A new leader knows that, and tries again; what fits by then arrives, once.
    """

    async def main() -> None:
        world = World(1)
        world.copy_sender.refused = {b"b": None}
        world.publish(b"a", b"b", b"c", b"d")
        await sleep(0.1)
        await world.settle("reject", await world.lease(), reason="bad")
        await sleep(1)
        assert [record.value for record in world.records(DEAD)] == [b"a", b"c", b"d"]
        world.publish(b"e")
        await sleep(0.1)
        await world.settle("reject", await world.lease(), reason="bad")
        await sleep(1)
        assert [record.value for record in world.records(DEAD)] == [b"a", b"c", b"d", b"e"]
        for _ in range(3):
            one = await world.described()
            assert (one.counters["parked"], one.counters["dead"], one.in_flight) == (1, 4, 1)
            assert (one.settled_offset, one.unsettled) == (1, 1)
            assert await world.lease() == []
            world.fail_over(SOURCE)
            await sleep(2)
        engine = world.queues.of(world.topics[SOURCE].partition.ref).engine
        engine.ledger.begin_snapshot()
        await sleep(0.1)
        world.copy_sender.refused = {}
        world.fail_over(SOURCE)
        await sleep(5)
        values = [record.value for record in world.records(DEAD)]
        assert values == [b"a", b"c", b"d", b"e", b"b"]
        one = await world.described()
        assert (one.counters["parked"], one.settled_offset, one.unsettled) == (0, 5, 0)
        world.stop()

    run(main())


def test_parked_letter_is_tried_again_by_the_same_leader() -> None:
    async def main() -> None:
        world = World(1)
        world.copy_sender.refused = {b"a": None}
        world.publish(b"a")
        await sleep(0.1)
        await world.settle("reject", await world.lease())
        await sleep(30)
        sent = world.copy_sender.sent
        assert sent < 5
        await sleep(300)
        assert world.copy_sender.sent == sent
        world.copy_sender.refused = {}
        await sleep(2 * PARKED_S)
        assert [record.value for record in world.records(DEAD)] == [b"a"]
        world.stop()

    run(main())


def test_parked_letter_that_retention_took_is_told_and_no_dead_letter(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        world = World(1)
        world.copy_sender.refused = {b"a": None}
        world.publish(b"a")
        await sleep(0.1)
        log = world.topics[SOURCE].partition.logs["data"].log
        log.roll()
        world.publish(b"b")
        await sleep(0.1)
        await world.settle("reject", await world.lease())
        await sleep(1)
        log.truncate_prefix(1)
        assert "copy_lost" not in caplog.text
        await sleep(2 * PARKED_S)
        assert "event=copy_lost offset=0 group=g" in caplog.text
        one = await world.described()
        facts = [one.counters[name] for name in ("parked", "lost", "dead", "skipped")]
        assert (facts, one.settled_offset) == ([0, 1, 1, 1], 2)
        world.stop()

    run(main())


def test_refused_redrive_stays_a_letter_and_the_others_go() -> None:
    async def main() -> None:
        world = World(1)
        world.publish(b"a", b"b", b"c")
        await sleep(0.1)
        await world.settle("reject", await world.lease())
        await sleep(1)
        world.copy_sender.refused = {b"b": None}
        reply, _ = await world.letters("redrive")
        assert reply.count == 2
        assert [record.value for record in world.records(SOURCE)[3:]] == [b"a", b"c"]
        _, left = await world.letters()
        assert [record.value for record in left] == [b"b"]
        world.copy_sender.refused = {}
        reply, _ = await world.letters("redrive")
        assert reply.count == 1
        assert [record.value for record in world.records(SOURCE)[3:]] == [b"a", b"c", b"b"]
        world.stop()

    run(main())


def test_browse_redrive_and_purge_with_filters_and_portions() -> None:
    async def main() -> None:
        world = World(1)
        for group, reason in (("g", "bad"), ("h", "worse")):
            if group == "g":
                keys = [b"k%d" % one for one in range(10)]
                world.publish(*[b"%d" % one for one in range(10)], keys=keys)
                await sleep(0.1)
            await world.settle("reject", await world.lease(group=group), group, reason=reason)
            await sleep(0.5)
        assert len(world.records(DEAD)) == 20
        reply, some = await world.letters(limit=7)
        assert (len(some), reply.next_offset) == (7, 7)
        reply, some = await world.letters(offset=7, limit=100)
        assert (len(some), reply.next_offset) == (13, 20)
        _, some = await world.letters(group="h", key=b"k3")
        assert [record.headers["x-dlq-reason"] for record in some] == [b"worse"]
        _, some = await world.letters(since=world.wall_ms() + 1)
        assert some == []
        reply, _ = await world.letters("redrive", reason="worse", limit=4)
        assert reply.count == 4
        back = world.records(SOURCE)[10:]
        assert [record.value for record in back] == [b"0", b"1", b"2", b"3"]
        assert back[0].headers == {"x-redriven-from": b"orders.dlq/0/10"}
        reply, _ = await world.letters("purge", reason="bad")
        assert reply.count == 10
        _, some = await world.letters()
        assert [record.value for record in some] == [b"%d" % one for one in range(4, 10)]
        with pytest.raises(InvalidArgument):
            await world.ask(world.more_handlers.dead_letters, DeadLetters(SOURCE, 0, "browse"))
        world.stop()

    run(main())


def test_letter_whose_topic_is_no_more_stays() -> None:
    async def main() -> None:
        world = World(1)
        world.publish(b"a")
        await sleep(0.1)
        await world.settle("reject", await world.lease())
        await sleep(1)
        source = world.topics.pop(SOURCE)
        reply, _ = await world.letters("redrive")
        assert reply.count == 0
        world.topics[SOURCE] = source
        queue = world.queues.of(world.topics[DEAD].partition.ref)
        rows = {("gone", 0): [CopyRow(0, 1, 2, None)]}
        await queue.engine.copy_service.redrive(rows)
        await sleep(300)
        reply, some = await world.letters()
        assert [record.value for record in some] == [b"a"]
        reply, _ = await world.letters("redrive")
        assert reply.count == 1
        assert len(world.records(SOURCE)) == 2
        world.stop()

    run(main())


def test_headers_at_their_limit_make_room_for_the_facts() -> None:
    letter = Death("g", 1, 3, 1.5, 2.5, "why", "e" * 4_000)
    record = BatchRecord(7, 0, None, b"v", {f"h{one}": bytes(6_000) for one in range(10)}, 2)
    headers = dead_headers(record.headers, record.offset, letter, ("orders", 3))
    assert len(pack_headers(headers)) <= HEADERS_BYTES_MAX
    assert headers["x-dlq-topic"] == b"orders"
    assert headers["x-dlq-first-delivery"] == b"1500"
    dead = BatchRecord(1, 5, b"k", b"v", headers, 2)
    assert origin(dead) == ("orders", 3)
    assert not [name for name in redriven_headers(dead, ("orders.dlq", 3)) if "dlq-" in name]
    assert matches(LetterFilter("g", "why", b"k", since=5, until=5), dead)
    assert not matches(LetterFilter(until=4), dead)
    assert not matches(LetterFilter(key=b""), dead)
    assert origin(record) is None
    strange = {"x-dlq-topic": b"\xff", "x-dlq-partition": b"1"}
    assert origin(BatchRecord(1, 5, None, b"", strange, 2)) is None


@pytest.mark.parametrize("seed", range(20))
def test_snapshot_of_copies_says_what_its_entries_said(seed: int) -> None:
    rng = Random(seed)
    copies = CopyLedger()
    copies.apply(CopyProducer(9))
    at = 0
    for _ in range(60):
        stream = copies.stream((rng.choice(("a", "b")), rng.randrange(2)))
        choice = rng.random()
        if choice < 0.4:
            count = rng.randrange(1, 5)
            letter = rng.choice((None, Death("g", 5, 1, 1.0, 2.0, "r", "")))
            copies.apply(CopiesAdded(*stream.target, (CopyRow(at, at + count, 2, letter),)))
            at += count
        elif stream.pending and stream.open is None and choice < 0.7:
            copies.apply(stream.next_batch(rng.randint(1, stream.pending)))
        elif stream.open is not None:
            if choice < 0.8:
                copies.apply(stream.renumbered(stream.epoch + 1))
            elif choice < 0.85:
                copies.apply(stream.shortened(0))
                copies.apply(CopiesParked(*stream.target, 1, "too large"))
            else:
                copies.apply(CopiesDone(*stream.target, stream.open.count))
        elif stream.parked and choice > 0.9:
            copies.apply(CopiesUnparked(*stream.target))
        again = CopyLedger()
        for content in copies.snapshot():
            again.replay(content)
        assert again.producer_id == 9
        for target, one in copies.streams.items():
            assert _facts(again.stream(target)) == _facts(one)


def _facts(stream: CopyStream) -> tuple[Any, ...]:
    sent = stream.open
    number = None if sent is None else (sent.count, sent.epoch, sent.sequence)
    rows = [(r.start, r.end, r.lane, r.death) for r in stream.rows]
    return rows, stream.parked, stream.epoch, stream.sequence, stream.pending, number


class Story:
    """Random life of both topics; what clients were told, and what came of it."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed, max_deliveries=2, visibility_timeout_ms=2_000, backoff_ms=100)
        self.rng = Random(seed + 1)
        self.world.copy_sender.faults = self.rng.choice((0.0, 0.2, 0.5))
        self.published: dict[bytes, None] = {}
        self.dead: dict[tuple[int, int], None] = {}
        self.redriven = 0
        self.number = 0
        self.tasks: list[asyncio.Task[None]] = []

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def publish(self) -> None:
        count = self.rng.choice((1, 5, 60))
        values = [b"%06d" % (self.number + at) for at in range(count)]
        self.number += count
        self.published.update(dict.fromkeys(values))
        self.world.publish(*values, lane=self.rng.randrange(5))

    async def work(self) -> None:
        try:
            rows = await self.world.lease(self.rng.choice((1, 10, 100)))
            if not rows:
                return
            await sleep(self.rng.choice((0, 0.01, 0.5)))
            verb = self.rng.choice(("reject", "reject", "nack", "ack", "leave"))
            if verb == "leave":
                return
            more = {"delay_ms": 0} if verb == "nack" else {}
            reply = await self.world.settle(verb, rows, **more)
            if verb == "reject":
                for row, error in zip(rows, reply.errors, strict=True):
                    if not error:
                        self.dead[row.start, row.end] = None
        except RaftqError:
            return

    async def redrive(self) -> None:
        try:
            reply, _ = await self.world.letters("redrive", limit=self.rng.choice((1, 20)))
            self.redriven += reply.count
        except RaftqError:
            return

    def judge(self) -> None:
        source, dead = self.world.records(SOURCE), self.world.records(DEAD)
        copies = Counter(int(record.headers["x-dlq-offset"]) for record in dead)
        assert max(copies.values(), default=1) == 1, "a record with two letters"
        by_offset = {record.offset: record.value for record in source}
        for record in dead:
            assert by_offset[int(record.headers["x-dlq-offset"])] == record.value
        for start, end in self.dead:
            assert all(offset in copies for offset in range(start, end)), "a letter is missing"
        back = Counter(
            record.headers["x-redriven-from"]
            for record in source
            if "x-redriven-from" in record.headers
        )
        assert max(back.values(), default=1) == 1, "a letter that was redriven twice"
        assert len(back) >= self.redriven, "a letter that was not redriven"
        gone = self.world.queues.of(self.world.topics[DEAD].partition.ref).engine
        group = gone.deliveries.groups.get("__dlq")
        settled = 0 if group is None else sum(1 for one in dead if one.offset in group.core.settled)
        assert settled == len(back), "redriven and still a letter"
        for topic in self.world.topics.values():
            engine = self.world.queues.of(topic.partition.ref).engine
            for stream in engine.copy_service.copies.streams.values():
                assert stream.pending == 0, stream
        core = self.world.queues.of(self.world.topics[SOURCE].partition.ref).engine
        counters = core.deliveries.groups["g"].core
        for offset in copies:
            assert offset in counters.settled, "has a letter and is not settled"


@pytest.mark.parametrize("seed", range(30))
def test_one_letter_and_one_redrive_whatever_dies_when(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raftq.node.queue.leader.ledger.SNAPSHOT_RECORDS", 60)

    async def main() -> None:
        story = Story(seed)
        world, rng = story.world, story.rng
        for _ in range(200):
            choice = rng.random()
            if choice < 0.15:
                story.publish()
            elif choice < 0.55:
                story.spawn(story.work())
            elif choice < 0.65:
                story.spawn(story.redrive())
            elif choice < 0.75:
                world.fail_over(rng.choice((SOURCE, DEAD)), rng.choice((0.001, 0.05, 1)))
            elif choice < 0.8:
                world.fail_over(SOURCE)
                world.fail_over(DEAD)
            lag = rng.choice((0.0005, 0.002, 0.05))
            for topic in world.topics.values():
                topic.partition.lag_s = lag
            await sleep(rng.choice((0, 0.001, 0.01, 0.1, 1)))
        world.copy_sender.faults = 0
        for topic in world.topics.values():
            topic.partition.lag_s = 0.002
        await sleep(30)
        # Everybody who still waits for a lease or an answer is done by now.
        await asyncio.gather(*story.tasks, *world.copy_sender.tasks)
        await sleep(30)
        story.judge()
        world.stop()

    run(main())
