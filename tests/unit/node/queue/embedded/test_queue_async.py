"""The embedded queue for asyncio: the same verbs, waiting without threads, cancellation, close."""

# ruff: noqa: PT012, ASYNC110 - whole blocks fail; what is waited for has no event

import asyncio
import inspect
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from raftq import AsyncQueue, Queue
from raftq.client.common.errors import (
    ConfigError,
    DirectoryLocked,
    InvalidArgument,
    LeaseExpired,
    LeaseLost,
    QueueClosed,
)

WAIT_S = 20.0

Story = Callable[[AsyncQueue], Awaitable[None]]


def play(path: Path, story: Story, **settings: Any) -> None:
    """Run the story against an open queue, within bounds."""

    async def main() -> None:
        settings.setdefault("fsync", "none")
        async with asyncio.timeout(WAIT_S), AsyncQueue.open(path, **settings) as queue:
            await story(queue)

    asyncio.run(main())


async def until_waiting(queue: AsyncQueue, count: int) -> None:
    while len(queue.queue._listeners) < count:
        await asyncio.sleep(0)


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def test_every_verb_of_the_queue_exists_with_the_same_arguments() -> None:
    skip = {"open", "listen", "due_in", "give_back", "finish", "browse"}
    for name, verb in inspect.getmembers(Queue, inspect.isfunction):
        if name.startswith("_") or name in skip:
            continue
        twin = inspect.signature(getattr(AsyncQueue, name)).parameters
        if any(p.kind is p.VAR_KEYWORD for p in twin.values()):
            continue
        assert list(twin) == list(inspect.signature(verb).parameters), name


@pytest.mark.parametrize("fsync", ["none", "interval", "always"])
def test_the_verbs_work_together(tmp_path: Path, fsync: str) -> None:
    async def story(q: AsyncQueue) -> None:
        first = await q.enqueue(b"a", key=b"k", priority="high", headers={"h": b"1"}, dedup_id="x")
        assert await q.enqueue(b"a", dedup_id="x") == first
        assert len(await q.enqueue_batch([b"b", b"c", b"d"])) == 3
        message = await q.dequeue()
        assert (message.id, message.key, message.headers) == (first, b"k", {"h": b"1"})
        await q.extend(message, 60)
        await q.ack(message)
        b, c, d = await q.dequeue_batch(10)
        await q.nack(b, 0)
        await q.postpone(c, 0)
        await q.reject(d, "bad", "why")
        assert values(await q.dead_letters(reason="bad")) == [b"d"]
        assert await q.redrive("bad") == 1
        messages = await q.dequeue_batch(10)
        assert [(m.value, m.attempt) for m in messages] == [(b"b", 2), (b"c", 1), (b"d", 1)]
        await q.ack_batch(messages)
        later = await q.enqueue(b"later", delay=3600)
        assert [each.id for each in await q.delayed()] == [later]
        assert await q.cancel(later) is True
        assert await q.checkpoint("end") == 5
        assert await q.checkpoints() == {"end": 5}
        assert await q.replay_from(offset=4) == 4
        await q.pause()
        assert await q.dequeue() is None
        await q.resume()
        assert values(await q.peek()) == [b"d"]
        async with q.transaction() as tx:
            tx.ack(await q.dequeue())
            tx.enqueue(b"e")
        assert tx.ids == ["5"]
        seen = [m.value async for m in q.subscribe("g", timeout=0)]
        assert seen == [b"a", b"b", b"c", b"d", b"d", b"e"]
        assert await q.groups() == ["default", "g"]
        assert await q.delete_group("g") is True
        assert await q.purge() == 1
        assert await q.purge_dead_letters() == 0
        assert await q.compact() > 0
        await q.sync()
        assert await q.verify() == []
        stats = await q.stats()
        assert (stats.pending, stats.flushed_offset) == (0, stats.end_offset)

    play(tmp_path / "q", story, fsync=fsync)


def test_a_hundred_tasks_produce_and_consume_everything_once(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        seen: list[bytes] = []

        async def produce(number: int) -> None:
            for n in range(20):
                await q.enqueue(b"%d-%d" % (number, n))
                await asyncio.sleep(0)

        async def consume() -> None:
            for _ in range(20):
                message = await q.dequeue(timeout=None)
                seen.append(message.value)
                await q.ack(message)

        async with asyncio.TaskGroup() as tasks:
            for number in range(50):
                tasks.create_task(consume())
                tasks.create_task(produce(number))
        assert len(seen) == 1000
        assert set(Counter(seen).values()) == {1}
        assert (await q.stats()).settled_offset == 1000

    play(tmp_path / "q", story)


def test_a_hundred_tasks_share_fsyncs(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(q.enqueue(b"%d" % n)) for n in range(100)]
        assert sorted(int(task.result()) for task in sent) == list(range(100))
        assert (await q.stats()).flushed_offset == 100
        assert q.queue._files.flusher.rounds < 100

    play(tmp_path / "q", story, fsync="always")


def test_a_cancelled_wait_loses_no_message(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        for n in range(30):
            task = asyncio.ensure_future(q.dequeue(timeout=None))
            await until_waiting(q, 1)
            if n % 3 == 0:
                task.cancel()
                await q.enqueue(b"%d" % n)
            elif n % 3 == 1:
                await q.enqueue(b"%d" % n)
                task.cancel()
            else:
                await q.enqueue(b"%d" % n)
                await asyncio.sleep(0)
                task.cancel()
            result = (await asyncio.gather(task, return_exceptions=True))[0]
            message = await q.dequeue() if isinstance(result, BaseException) else result
            assert message.value == b"%d" % n
            assert message.attempt == 1
            await q.ack(message)
            assert await q.dequeue() is None
        assert q.queue._listeners == {}

    play(tmp_path / "q", story)


def test_a_waiting_task_is_woken_by_all_that_brings_messages(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        async def woken_by(bring: Callable[[], Awaitable[Any]]) -> Any:
            task = asyncio.ensure_future(q.dequeue(timeout=None))
            await until_waiting(q, 1)
            await bring()
            return await task

        message = await woken_by(lambda: q.enqueue(b"a"))
        held = message
        message = await woken_by(lambda: q.nack(held, 0.05))
        again = message
        message = await woken_by(lambda: q.extend(again, 0.05))
        assert message.attempt == 3
        await q.reject(message, "bad")
        message = await woken_by(q.redrive)
        await q.ack(message)
        message = await woken_by(lambda: q.enqueue(b"late", delay=0.05))
        assert message.value == b"late"
        # From another thread, through the queue underneath.
        message = await woken_by(lambda: asyncio.to_thread(q.queue.enqueue, b"thread"))
        assert message.value == b"thread"
        await q.pause()
        await q.enqueue(b"paused")
        message = await woken_by(q.resume)
        assert message.value == b"paused"

    play(tmp_path / "q", story)


def test_a_timeout_ends_a_wait_with_nothing(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        assert await q.dequeue() is None
        assert await q.dequeue(timeout=0.02) is None
        assert await q.dequeue_batch(5, timeout=0.02) == []
        assert [m async for m in q.subscribe("g", timeout=0.01)] == []

    play(tmp_path / "q", story)


def test_the_loop_stays_free_while_a_consumer_waits(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        tasks = [asyncio.ensure_future(q.dequeue(timeout=None)) for _ in range(200)]
        await until_waiting(q, 200)
        await q.enqueue_batch([b"%d" % n for n in range(200)])
        found = await asyncio.gather(*tasks)
        assert len({message.value for message in found}) == 200

    play(tmp_path / "q", story)


def test_a_transaction_that_raises_or_loses_a_lease_changes_nothing(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        await q.enqueue_batch([b"a", b"b"])
        message = await q.dequeue(visibility_timeout=0.01)
        with pytest.raises(KeyError):
            async with q.transaction() as tx:
                tx.enqueue(b"x")
                raise KeyError
        with pytest.raises(asyncio.CancelledError):
            async with q.transaction() as tx:
                tx.enqueue(b"x")
                raise asyncio.CancelledError
        await q.dequeue(timeout=0.02, group="other")
        await q.dequeue(timeout=0.02, group="empty")
        while q.queue.stats().in_flight:
            await asyncio.sleep(0.005)
        with pytest.raises(LeaseLost):
            async with q.transaction() as tx:
                tx.enqueue(b"x")
                tx.ack(message)
        assert (await q.stats()).total == 2
        with pytest.raises(LeaseExpired):
            await q.ack(message)

    for fsync in ("none", "always"):
        play(tmp_path / fsync, story, fsync=fsync)


def test_leaving_a_subscription_gives_the_message_back(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        await q.enqueue_batch([b"a", b"b"])
        with pytest.raises(KeyError):
            async for message in q.subscribe("g", timeout=0):
                if message.value == b"b":
                    raise KeyError
        stream = q.subscribe("h", timeout=0)
        assert (await anext(stream)).value == b"a"
        await stream.aclose()
        assert (await q.dequeue(group="h")).value == b"a"

    play(tmp_path / "q", story)


def test_close_wakes_waiting_tasks_and_tells_them(tmp_path: Path) -> None:
    async def story(q: AsyncQueue) -> None:
        waits = [
            q.dequeue(timeout=None),
            q.dequeue_batch(3, timeout=600),
            q.dequeue(600, group="g"),
        ]
        tasks = [asyncio.ensure_future(wait) for wait in waits]
        await until_waiting(q, 3)
        await q.close()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, QueueClosed)

    play(tmp_path / "q", story)


@pytest.mark.parametrize("fsync", ["none", "always"])
def test_every_verb_after_close_says_that_the_queue_is_closed(tmp_path: Path, fsync: str) -> None:
    async def story(q: AsyncQueue) -> None:
        await q.enqueue(b"a")
        message = await q.dequeue()
        await q.close()
        await q.close()
        for call in (
            lambda: q.enqueue(b"x"), lambda: q.enqueue_batch([b"x"]), lambda: q.dequeue(),
            lambda: q.dequeue(timeout=None), lambda: q.ack(message), lambda: q.nack(message),
            lambda: q.compact(), lambda: q.sync(), lambda: q.stats(), lambda: q.verify(),
            lambda: q.dead_letters(), lambda: q.redrive(), lambda: q.peek(), lambda: q.delayed(),
            lambda: q.cancel("d0"), lambda: q.purge_dead_letters(), lambda: q.purge(),
            lambda: q.groups(), lambda: q.checkpoints(),
        ):  # fmt: skip
            with pytest.raises(QueueClosed):
                await call()
        with pytest.raises(QueueClosed):
            async with q.transaction() as tx:
                tx.enqueue(b"x")
        with pytest.raises(QueueClosed):
            await anext(q.subscribe("g"))

    play(tmp_path / "q", story, fsync=fsync)


def test_a_queue_that_was_not_opened_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        queue = AsyncQueue.open(tmp_path / "q")
        with pytest.raises(QueueClosed, match="open the queue first"):
            await queue.enqueue(b"x")
        with pytest.raises(QueueClosed, match="open the queue first"):
            await queue.dequeue()
        await queue.close()
        with pytest.raises(ConfigError):
            AsyncQueue.open(tmp_path / "q", fsync="never")

    asyncio.run(main())
    assert not (tmp_path / "q").exists()


def test_start_and_close_work_without_a_context(tmp_path: Path) -> None:
    async def main() -> None:
        queue = await AsyncQueue.open(tmp_path / "q").start()
        assert await queue.start() is queue
        await queue.enqueue(b"a")
        with pytest.raises(DirectoryLocked):
            await AsyncQueue.open(tmp_path / "q").start()
        await queue.close()
        async with AsyncQueue.open(tmp_path / "q") as queue:
            assert (await queue.dequeue()).value == b"a"

    asyncio.run(main())


@pytest.mark.parametrize("fsync", ["none", "always"])
def test_nonsense_is_refused_as_in_the_queue(tmp_path: Path, fsync: str) -> None:
    async def story(q: AsyncQueue) -> None:
        for call in (
            lambda: q.enqueue("text"),
            lambda: q.enqueue(b"x", delay=float("nan")),
            lambda: q.enqueue_batch(b"abc"),
            lambda: q.dequeue(timeout=float("inf")),
            lambda: q.dequeue(timeout=-1),
            lambda: q.dequeue(timeout="1"),
            lambda: q.dequeue_batch(0),
            lambda: q.dequeue(group=5),
            lambda: q.ack(None),
            lambda: q.redrive(limit=-1),
        ):
            with pytest.raises(InvalidArgument):
                await call()
        assert (await q.stats()).total == 0

    play(tmp_path / "q", story, fsync=fsync)


def test_a_start_that_is_cancelled_leaves_the_directory_free(tmp_path: Path) -> None:
    async def main() -> None:
        queue = AsyncQueue.open(tmp_path / "q")
        task = asyncio.ensure_future(queue.start())
        while not (tmp_path / "q" / "lock").exists():
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(WAIT_S):
            await queue.close()
        async with AsyncQueue.open(tmp_path / "q") as again:
            await again.enqueue(b"a")

    asyncio.run(main())
