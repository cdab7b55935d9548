"""The listener's memory: counted over all connections, shared in turns, waited for only so long."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from loops import Go

from raftq.client.net.connection import Connection
from raftq.client.wire.frames import PREFIX
from raftq.client.wire.messages import (
    Hello,
    Ping,
    Produce,
    ProduceReply,
    WireMessage,
    encode_message,
)
from raftq.node.config import ServerOptions
from raftq.node.native.budget import MemoryBudget
from raftq.node.native.session import Handler, Session
from raftq.node.native.tcp import TcpServer

MIB = 1024 * 1024


class Parked:
    """A handler whose requests wait until the test lets them go."""

    def __init__(self) -> None:
        self.waiting: list[asyncio.Future[Any]] = []
        self.arrived = asyncio.Event()

    def __call__(self, message: WireMessage, raw: memoryview, session: Session) -> Any:
        self.waiting.append(asyncio.get_running_loop().create_future())
        self.arrived.set()
        return self.waiting[-1]

    async def until(self, count: int) -> None:
        while len(self.waiting) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def release(self) -> None:
        waiting, self.waiting = self.waiting, []
        for future in waiting:
            future.set_result(ProduceReply((0,)))


def count(message: Produce, raw: memoryview, session: Session) -> ProduceReply:
    return ProduceReply((len(raw),))


@asynccontextmanager
async def serving(handler: Handler = count, **options: Any) -> AsyncIterator[TcpServer]:
    made = ServerOptions(**options)
    async with TcpServer({Produce: handler}, node_id=1, cluster_id="c", options=made) as server:
        await server.start()
        yield server


async def begin(server: TcpServer, size: int, sent: int) -> asyncio.StreamWriter:
    """Shake hands, announce a request of `size` bytes and send `sent` of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.writelines(encode_message(Hello(1, 1, "client"), 1))
    await reader.readexactly(PREFIX.size)
    part = b"".join(encode_message(Produce("t", 0), 2, [bytes(sent)]))
    length = int.from_bytes(part[:4], "little") - sent + size
    writer.write((length.to_bytes(4, "little") + part[4:])[:sent])
    await writer.drain()
    return writer


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never happened")


async def exchange(server: TcpServer, raw_bytes: int = 0) -> None:
    """Another caller is served as usual."""
    async with await Connection.open("127.0.0.1", server.port) as other:
        await other.request(Ping())
        if raw_bytes:
            reply = await other.request(Produce("t", 0), [bytes(raw_bytes)])
            assert reply.message.base_offsets == (raw_bytes,)


def test_memory_is_given_in_the_order_of_asking() -> None:
    budget: MemoryBudget[str] = MemoryBudget(100_000)
    assert budget.ask("a", 60_000)
    budget.whole("a", 60_000)
    budget.start(60_000)  # in flight: somebody will give it back
    assert not budget.ask("b", 50_000)
    assert not budget.ask("c", 10_000)  # would fit, but is later than b
    assert budget.next_waiting() is None
    budget.finish(60_000)
    assert budget.next_waiting() == "b"
    assert budget.next_waiting() == "c"
    assert budget.next_waiting() is None
    assert budget.ask("b", 50_000)
    assert budget.ask("c", 10_000)
    assert budget.used == 60_000


def test_one_goes_on_over_the_limit_when_only_it_could_free_memory() -> None:
    budget: MemoryBudget[str] = MemoryBudget(100_000)
    assert budget.ask("a", 50_000)
    assert budget.ask("b", 50_000)
    assert budget.ask("a", 50_000)  # alone
    assert not budget.ask("b", 50_000)
    assert budget.ask("a", 70_000)  # still the one
    assert budget.next_waiting() is None
    budget.whole("a", 170_000)
    assert budget.next_waiting() == "b"
    assert budget.ask("b", 50_000)
    assert budget.used == 100_000


def test_who_leaves_gives_everything_back() -> None:
    budget: MemoryBudget[str] = MemoryBudget(100_000)
    assert budget.ask("a", 90_000)
    assert budget.ask("b", 90_000)
    assert not budget.ask("c", 20_000)
    assert not budget.ask("d", 20_000)
    budget.leave("c", 0)
    budget.leave("b", 90_000)
    assert budget.next_waiting() == "d"
    budget.leave("d", 0)
    budget.leave("a", 90_000)
    assert budget.used == 0
    assert not budget.short


@pytest.mark.parametrize("seed", range(20))
def test_under_random_traffic_the_limit_holds_and_somebody_always_gets_on(seed: int) -> None:
    """Frames grow, become requests, end; whoever has to wait gets on as soon as all others did."""
    rng = random.Random(seed)
    limit, frame_max, step = 400_000, 300_000, 50_000
    budget: MemoryBudget[int] = MemoryBudget(limit)
    arriving: dict[int, int] = {}
    in_flight: list[int] = []
    done = 0

    def grow(one: int) -> None:
        arriving[one] = arriving.get(one, 0) + step
        if arriving[one] == frame_max or rng.random() < 0.1:
            size = arriving.pop(one)
            budget.whole(one, size)
            budget.start(size)
            in_flight.append(size)

    for _ in range(3_000):
        one = rng.randrange(8)
        if in_flight and rng.random() < 0.3:
            budget.finish(in_flight.pop(rng.randrange(len(in_flight))))
            done += 1
        elif not budget.waits(one) and budget.ask(one, step):
            grow(one)
        while (woken := budget.next_waiting()) is not None:
            assert budget.ask(woken, step)
            grow(woken)
        assert budget.used == sum(arriving.values()) + sum(in_flight)
        assert budget.used <= limit + frame_max
        assert in_flight or not all(budget.waits(each) for each in range(8))
    assert done > 100


def test_announcing_big_requests_takes_no_memory_and_blocks_nobody(go: Go) -> None:
    async def main() -> None:
        async with serving(memory_bytes_max=8 * MIB) as server:
            writers = [await begin(server, 60 * MIB, sent=5_000) for _ in range(40)]
            await until(lambda: server.memory.used > 39 * 50_000)
            assert server.memory.used < 4 * MIB
            await exchange(server, 3 * MIB)
            for writer in writers:
                writer.transport.abort()
            await until(lambda: server.memory.used == 0)

    go(main())


def test_more_big_requests_at_once_than_memory_are_all_served(go: Go) -> None:
    """1. Thirty callers each have a part of a 1 MiB request received. 2. All send the rest."""

    async def main() -> None:
        most = 0

        def watch(message: Produce, raw: memoryview, session: Session) -> ProduceReply:
            nonlocal most
            most = max(most, server.memory.used)
            return ProduceReply((len(raw),))

        async with serving(watch, memory_bytes_max=4 * MIB) as server:
            writers = [await begin(server, MIB, sent=200_000) for _ in range(30)]
            await until(lambda: server.memory.short)
            whole = b"".join(encode_message(Produce("t", 0), 2, [bytes(MIB)]))
            for writer in writers:
                writer.write(whole[200_000:])
            served = 0

            def answered() -> bool:
                nonlocal served
                served = sum(session.frames for session in server._sessions)
                return served == 30

            await until(answered)
            await until(lambda: server.memory.used == 0)
            assert most <= 5 * MIB
            for writer in writers:
                writer.transport.abort()
            await until(lambda: server.connections == 0)

    go(main())


def test_requests_in_flight_hold_memory_and_small_ones_pass_by(go: Go) -> None:
    """1. Parked requests take all memory. 2. Another big one waits, a small one does not. 3. It is
    read when they are done."""

    async def main() -> None:
        parked = Parked()
        async with (
            serving(parked, memory_bytes_max=2 * MIB + 100_000) as server,
            await Connection.open("127.0.0.1", server.port) as first,
            await Connection.open("127.0.0.1", server.port) as second,
        ):
            futures = [first.submit(Produce("t", 0), [bytes(MIB)]) for _ in range(2)]
            await parked.until(2)
            assert server.memory.used > 2 * MIB
            futures.append(second.submit(Produce("t", 0), [bytes(MIB)]))
            for _ in range(5):
                await exchange(server)
            assert len(parked.waiting) == 2
            parked.release()
            await parked.until(1)
            parked.release()
            await asyncio.gather(*futures)
            assert server.memory.used == 0

    go(main())


def test_a_request_over_the_whole_budget_is_served_alone(go: Go) -> None:
    async def main() -> None:
        async with serving(memory_bytes_max=100_000) as server:
            await exchange(server, 5 * MIB)
            assert server.memory.used == 0

    go(main())


def test_a_caller_that_does_not_get_on_with_its_request_is_cut(go: Go) -> None:
    async def main() -> None:
        async with serving(frame_stall_ms=60) as server:
            writer = await begin(server, MIB, sent=5_000)
            while server.connections:
                writer.write(b"x")  # a byte now and then is not getting on
                await asyncio.sleep(0.005)
            assert server.memory.used == 0
            writer.transport.abort()

    go(main())


def test_those_who_hold_memory_that_others_wait_for_are_cut_and_the_others_served(go: Go) -> None:
    """1. Slow senders hold all memory, one of them over the limit. 2. Another waits behind them.
    3. They are cut, and it is served."""

    async def main() -> None:
        async with serving(memory_bytes_max=MIB, frame_stall_ms=100) as server:
            writers = [await begin(server, 4 * MIB, sent=600_000) for _ in range(4)]
            await until(lambda: server.memory.short)
            await exchange(server, 2 * MIB)
            await until(lambda: server.connections == 0)
            assert server.memory.used == 0
            for writer in writers:
                writer.transport.abort()

    go(main())


def test_a_caller_who_went_while_it_waited_for_memory_takes_none(go: Go) -> None:
    """Nothing is read from it meanwhile, so its end is seen when its turn comes."""

    async def main() -> None:
        parked = Parked()
        async with serving(parked, memory_bytes_max=MIB) as server:
            first = await Connection.open("127.0.0.1", server.port)
            future = first.submit(Produce("t", 0), [bytes(MIB)])
            await parked.until(1)
            second = await begin(server, MIB, sent=100_000)
            await until(lambda: server.memory._waiting != {})
            second.transport.abort()
            await exchange(server)
            parked.release()
            await future
            await until(lambda: server.connections == 1)
            assert server.memory.used == 0
            await first.close()

    go(main())


def test_small_requests_in_flight_are_few_when_memory_is_short(go: Go) -> None:
    async def main() -> None:
        parked = Parked()
        async with (
            serving(parked, memory_bytes_max=20_000) as server,
            await Connection.open("127.0.0.1", server.port) as connection,
        ):
            futures = [connection.submit(Produce("t", 0), [bytes(1_000)]) for _ in range(100)]
            served = 0
            while served < 100:
                await parked.until(1)
                await exchange(server)
                assert len(parked.waiting) <= 20
                served += len(parked.waiting)
                parked.release()
            await asyncio.gather(*futures)

    go(main())
