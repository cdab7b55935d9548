"""Shell: one worker process: `python -m raftq_bench.worker_main ROLE`.

The first line of its input has its settings, every further line an order. It answers each with a
line; the answer to the settings says that it is ready. It ends with its input.

    drain    leases and acks as fast as it can, on a cluster or on a bare node; or holds leases
    handle   a worker whose handler notes the age of each record
    members  any number of members of a stream group; notes what they get and when
    pace     sends records at a given pace, stamped with the time
    delay    sends delayed records
"""

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from operator import attrgetter
from struct import Struct
from typing import Any

from raftq.client.consumer.consumer import Consumer
from raftq.client.net.transport import run
from raftq.client.producer.producer import Producer
from raftq.client.queue.client import QueueClient
from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.worker import Worker
from raftq.client.wire.layout import LANE_COUNT
from raftq_bench.bare_queue import BareQueue
from raftq_bench.runner import make_values
from raftq_bench.workers import clock

STAMP = Struct("<d")
EMPTY_S = 0.2
TAKEN_MAX = 5_000
Answer = dict[str, Any]


class Role:
    """What the roles share; `begin` is called once, on the loop."""

    def __init__(self, settings: Answer) -> None:
        self.bootstrap: str = settings["bootstrap"]
        self.topic: str = settings["topic"]
        self.settings = settings
        self.stack = AsyncExitStack()

    async def begin(self) -> None: ...

    async def end(self) -> None:
        await self.stack.aclose()


class Drain(Role):
    async def begin(self) -> None:
        self._client = await self.stack.enter_async_context(
            QueueClient(
                self.bootstrap,
                group=self.settings.get("group", "drain"),
                topics=[self.topic],
                visibility_timeout=self.settings.get("visibility_timeout", 60.0),
            )
        )
        self._bare: BareQueue | None = None
        self._worked = 0.0  # seconds in all slices: a lane's gaps do not count the rest between
        self._served = [0.0] * LANE_COUNT
        self._gaps = [0.0] * LANE_COUNT

    async def drain(self, seconds: float, records: int, streams: int) -> Answer:
        """Runs `streams` at once. Each leases and acks in turn, as a worker does that handles
        one portion while the next is on its way."""
        lanes = [0] * LANE_COUNT
        cpu = time.process_time()
        began = clock()
        counts = await asyncio.gather(
            *(self._one_stream(began, seconds, records, lanes) for _ in range(streams))
        )
        self._worked += clock() - began
        for lane, served in enumerate(self._served):
            self._gaps[lane] = max(self._gaps[lane], self._worked - served)
        cpu = time.process_time() - cpu
        return {"count": sum(counts), "lanes": lanes, "gaps_s": self._gaps, "cpu_s": cpu}

    async def _one_stream(
        self, began: float, seconds: float, records: int, lanes: list[int]
    ) -> int:
        count = 0
        while clock() < began + seconds:
            messages = await self._client.lease(max_records=records, timeout=EMPTY_S)
            if not messages:
                continue
            await self._client.ack_many(messages)
            count += len(messages)
            worked = self._worked + clock() - began
            for lane, number in Counter(map(attrgetter("priority"), messages)).items():
                lanes[lane] += number
                self._gaps[lane] = max(self._gaps[lane], worked - self._served[lane])
                self._served[lane] = worked
        return count

    async def hold(self, count: int, records: int) -> Answer:
        """Leases this many and keeps them."""
        held = 0
        ends = clock() + 300
        while held < count and clock() < ends:
            held += len(await self._client.lease(max_records=records, timeout=1.0))
        return {"count": held}

    async def bare(self, seconds: float, records: int, port: int) -> Answer:
        if self._bare is None:
            self._bare = BareQueue(port, records)
            self.stack.callback(self._bare.close)
        cpu = time.process_time()
        count, _ = self._bare.slice(seconds)
        return {"count": count, "cpu_s": time.process_time() - cpu}


class Handle(Role):
    async def begin(self) -> None:
        self._ages: list[float] = []
        self._worker = Worker(
            self.bootstrap,
            group=self.settings.get("group", "handle"),
            topics=[self.topic],
            handler=self._handle,
            concurrency=self.settings.get("concurrency", 100),
        )
        self._running = asyncio.ensure_future(self._worker.run())

    async def _handle(self, message: LeasedRecord) -> None:
        self._ages.append(clock() - STAMP.unpack_from(message.value)[0])

    async def count(self) -> Answer:
        if self._running.done():
            self._running.result()
        return {"count": len(self._ages)}

    async def ages(self) -> Answer:
        """The ages of all records since the last call, in seconds."""
        ages, self._ages = self._ages, []
        return {"ages": ages}

    async def end(self) -> None:
        self._worker.stop()
        await self._running
        await super().end()


class Members(Role):
    """Members of a group. `seen` is by partition: when records came, and to which member."""

    async def begin(self) -> None:
        self._seen: dict[int, list[tuple[float, int]]] = {}
        self._consumers: dict[int, Consumer] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def join(self, first: int, count: int, over_s: float = 0.0) -> Answer:
        """Members `first`, `first` + 1, ... join, evenly spread over `over_s`."""
        began = clock()
        for at in range(count):
            await asyncio.sleep(max(0.0, began + over_s * at / count - clock()))
            self._tasks[first + at] = asyncio.ensure_future(self._be_member(first + at))
        return {"began": began, "ended": clock()}

    async def _be_member(self, number: int) -> None:
        async with Consumer(
            self.bootstrap,
            group=self.settings["group"],
            topics=[self.topic],
            session_ms=self.settings.get("session_ms", 30_000),
            heartbeat_ms=self.settings.get("heartbeat_ms", 3_000),
        ) as consumer:
            self._consumers[number] = consumer
            try:
                while True:
                    records = await consumer.poll(TAKEN_MAX, timeout=0.5)
                    now = clock()
                    for partition in dict.fromkeys([record.partition for record in records]):
                        self._seen.setdefault(partition, []).append((now, number))
            finally:
                del self._consumers[number]

    async def leave(self, number: int) -> Answer:
        task = self._tasks.pop(number)
        task.cancel()
        await asyncio.wait([task])
        return {"at": clock()}

    async def owned(self) -> Answer:
        """Partitions by member, and the time at which that was so."""
        for task in self._tasks.values():
            if task.done():
                task.result()
        found = {
            str(number): [partition for _, partition in consumer.assignment()]
            for number, consumer in sorted(self._consumers.items())
        }
        return {"owned": found, "at": clock()}

    async def seen(self) -> Answer:
        """All records since the last call."""
        seen, self._seen = self._seen, {}
        return {"seen": {str(partition): rows for partition, rows in seen.items()}}

    async def end(self) -> None:
        for number in list(self._tasks):
            await self.leave(number)
        await super().end()


class Pace(Role):
    async def begin(self) -> None:
        self._producer = await self.stack.enter_async_context(
            Producer(self.bootstrap, acks="all", linger_ms=self.settings.get("linger_ms", 0))
        )
        self._padding = make_values(1)[0][STAMP.size : self.settings.get("value_bytes", 1024)]
        self._going: asyncio.Task[None] | None = None

    async def send(self, seconds: float, rate: float, wall: bool = False) -> Answer:
        """Sends `rate` records a second for this long; `wall`: stamped with the wall clock, in
        ms."""
        now: Callable[[], float] = (lambda: time.time() * 1000) if wall else clock
        began, sent = clock(), 0
        late = 0.0
        while (elapsed := clock() - began) < seconds:
            due = int(elapsed * rate) - sent
            late = max(late, due / rate)
            for _ in range(due):
                await self._producer.send(self.topic, STAMP.pack(now()) + self._padding)
            sent += due
            await asyncio.sleep(0.001)
        await self._producer.flush()
        return {"count": sent, "late_s": late}

    async def begin_rounds(self, partitions: int, pause_s: float) -> Answer:
        """Sends one record to each partition, repeatedly, until the end."""
        self._going = asyncio.ensure_future(self._rounds(partitions, pause_s))
        return {}

    async def end(self) -> None:
        if self._going is not None:
            self._going.cancel()
            await asyncio.wait([self._going])
            if not self._going.cancelled():
                self._going.result()
        await super().end()

    async def _rounds(self, partitions: int, pause_s: float) -> None:
        value = STAMP.pack(0.0) + self._padding
        next_at = clock()
        while True:
            for partition in range(partitions):
                await self._producer.send(self.topic, value, partition=partition)
                next_at += pause_s / partitions
                await asyncio.sleep(max(0.0, next_at - clock()))


class Delay(Role):
    async def begin(self) -> None:
        self._producer = await self.stack.enter_async_context(Producer(self.bootstrap, acks="all"))

    async def fill(self, count: int, first_ms: float, rate: float, value_bytes: int) -> Answer:
        """Sends `count` records, due from `first_ms` on at `rate` a second."""
        send, pack = self._producer.send, STAMP.pack
        padding = make_values(1)[0][STAMP.size : value_bytes]
        began = clock()
        for at in range(count):
            due = first_ms + at * 1000 / rate
            await send(self.topic, pack(due) + padding, deliver_at=due / 1000)
        await self._producer.flush()
        return {"count": count, "seconds": clock() - began}


ROLES: dict[str, type[Role]] = {
    "drain": Drain,
    "handle": Handle,
    "members": Members,
    "pace": Pace,
    "delay": Delay,
}


async def serve(role_name: str) -> None:
    loop = asyncio.get_running_loop()

    async def next_line() -> str:
        return await loop.run_in_executor(None, sys.stdin.readline)

    role = ROLES[role_name](json.loads(await next_line()))
    await role.begin()
    say({"ready": True})
    try:
        while line := await next_line():
            order = json.loads(line)
            verb: Callable[..., Awaitable[Answer]] = getattr(role, order.pop("do"))
            say(await verb(**order))
    finally:
        await role.end()


def say(answer: Answer) -> None:
    try:
        print(json.dumps(answer), flush=True)
    except BrokenPipeError:
        sys.stderr.close()  # the figure has ended


if __name__ == "__main__":
    run(serve(sys.argv[1]))
