"""Clients that end in every awkward way: the loop ends right afterwards, and nothing is left open,
nothing complains, nobody waits for ever. Unclosed sockets and lost tasks are warnings, and warnings
are errors here."""

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from fake_cluster import fake_cluster

from raftq.aio import Admin, Consumer, Producer
from raftq.client.common.errors import QueueClosed, RaftqError, RequestTimeout
from raftq.client.net.transport import new_event_loop, run
from raftq.client.wire.messages import Produce

LOOPS = [asyncio.new_event_loop, new_event_loop]


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    """A cluster on another thread's loop, so that the clients' loop may end at any moment. Topic
    "silent" never answers."""
    ready = threading.Event()
    found: list[Any] = []

    def silence(request: Produce, node_id: int) -> Any:
        return asyncio.Event().wait() if request.topic == "silent" else None

    async def serve() -> None:
        async with fake_cluster(2) as cluster:
            cluster.add_topic("t", 2)
            cluster.add_topic("silent", 1)
            cluster.before = silence
            stop = asyncio.Event()
            found.extend((cluster.bootstrap, asyncio.get_running_loop(), stop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=run, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    yield found[0]
    found[1].call_soon_threadsafe(found[2].set)
    thread.join()


@pytest.fixture
def loop_ends(request: Any) -> Iterator[Callable[[Coroutine[Any, Any, None]], None]]:
    """Runs something and ends the loop at once; what it forgot is found by the collector."""
    complaints: list[Any] = []

    def run_it(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.get_loop().set_exception_handler(lambda _, what: complaints.append(what))
            runner.run(main)
        gc.collect()
        assert not complaints

    yield run_it
    gc.collect()


on_both_loops = pytest.mark.parametrize("loop_ends", LOOPS, indirect=True, ids=["plain", "fast"])


@on_both_loops
def test_a_body_that_fails_ends_its_clients(loop_ends: Any, bootstrap: str) -> None:
    async def body() -> None:
        async with (
            Producer(bootstrap) as producer,
            Consumer(bootstrap) as consumer,
            Admin(bootstrap) as admin,
        ):
            await producer.send("t", b"x")
            await consumer.assign([("t", 0)])
            await consumer.poll(timeout=0.05)
            await admin.nodes()
            raise KeyError

    async def main() -> None:
        with pytest.raises(KeyError):
            await body()

    loop_ends(main())


@on_both_loops
def test_a_cancelled_body_ends_its_clients(loop_ends: Any, bootstrap: str) -> None:
    async def body(reached: asyncio.Event) -> None:
        async with Producer(bootstrap) as producer, Consumer(bootstrap) as consumer:
            await consumer.assign([("t", 0)])
            await producer.send("t", b"x")
            reached.set()
            await asyncio.Event().wait()

    async def main() -> None:
        reached = asyncio.Event()
        task = asyncio.ensure_future(body(reached))
        await reached.wait()
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()

    loop_ends(main())


@on_both_loops
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_a_close_that_is_cancelled_still_closes(loop_ends: Any, bootstrap: str, turns: int) -> None:
    async def main() -> None:
        producer, consumer = Producer(bootstrap), Consumer(bootstrap)
        delivery = await producer.send("silent", b"x")
        await producer._sender._routes.refresh()
        await consumer.assign([("t", 0)])
        await consumer.poll(timeout=0.05)
        closing = [asyncio.ensure_future(one.close()) for one in (producer, consumer)]
        await asyncio.sleep(0)
        for task in closing:
            task.cancel()
        for _ in range(turns):
            await asyncio.sleep(0)
            for task in closing:
                task.cancel()
        await asyncio.wait(closing)
        with pytest.raises(QueueClosed):
            await delivery
        with pytest.raises(QueueClosed):
            await producer.send("t", b"x")

    loop_ends(main())


@on_both_loops
def test_whoever_waits_for_a_client_that_closes_learns_of_it(loop_ends: Any) -> None:
    """The socket takes connections and never answers."""

    async def main() -> None:
        producer, admin = Producer(f"127.0.0.1:{port}"), Admin(f"127.0.0.1:{port}")
        waiting = [
            asyncio.ensure_future(producer.send("t", b"x")),
            asyncio.ensure_future(admin.nodes()),
        ]
        await asyncio.wait(waiting, timeout=0.05)
        async with asyncio.timeout(2):
            await producer.close()
            await admin.close()
            for task in waiting:
                with pytest.raises(RaftqError):
                    await task

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        port = listening.getsockname()[1]
        loop_ends(main())


@on_both_loops
def test_two_that_close_at_once_both_come_back(loop_ends: Any, bootstrap: str) -> None:
    async def main() -> None:
        producer = Producer(bootstrap)
        delivery = await producer.send("silent", b"x")
        first = asyncio.ensure_future(producer.close(0.1))
        second = asyncio.ensure_future(producer.close(0.1))
        await asyncio.wait([first, second], timeout=3)
        assert isinstance(first.exception(), RequestTimeout)
        assert second.exception() is None
        error = delivery.exception()
        assert isinstance(error, QueueClosed)
        assert error.outcome == "unknown"

    loop_ends(main())


def test_a_client_whose_loop_has_ended_can_be_closed(bootstrap: str) -> None:
    async def main() -> None:
        await producer.start()
        await consumer.start()

    producer, consumer = Producer(bootstrap), Consumer(bootstrap)
    asyncio.run(main())
    asyncio.run(producer.close())
    asyncio.run(consumer.close())
