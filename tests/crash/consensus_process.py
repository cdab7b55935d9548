"""One consensus node as a process, steered by lines on stdin; run by the tests beside it.

    work <tasks>    propose numbers for ever, each of the tasks one at a time
    quiet           end the work
    dump <path>     after a read barrier: the numbers in the order they were applied, 8 bytes each
    burst <count> <tasks>   propose so many, then say how long it took
    ticks           say how many commands were applied here

It says `ready`, `ok <number> <place>`, `unknown <number>`, `dumped`, `burst <seconds>`, `leader
<term>` and `fatal <error>`. It ends when stdin does, and with its parent, whatever happens.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from raftq.client.common.errors import RaftqError
from raftq.cluster.raft.config import ConsensusConfig, RaftLimits, RaftTimes
from raftq.cluster.raft.consensus import Consensus


class Numbers:
    """The replicated state: numbers in the order in which they came."""

    def __init__(self) -> None:
        self.data = bytearray()

    def apply(self, command: bytes, index: int) -> int:
        self.data += command[:8]
        return len(self.data) // 8

    def snapshot(self) -> bytes:
        return bytes(self.data)

    def restore(self, data: bytes) -> None:
        self.data = bytearray(data)


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


class Child:
    def __init__(self, settings: dict[str, Any]) -> None:
        self.numbers = Numbers()
        self.next = settings.pop("first_number")
        self.payload = bytes(settings.pop("payload"))
        self.working = False
        self.tasks: set[asyncio.Task[None]] = set()
        limits = RaftLimits(**settings.pop("limits"))
        times = RaftTimes(**settings.pop("times"))
        secret = bytes.fromhex(settings.pop("secret"))
        config = ConsensusConfig(secret=secret, limits=limits, times=times, **settings)
        self.consensus = Consensus(config, self.numbers, on_fatal=self.on_fatal)

    def on_fatal(self, error: BaseException) -> None:
        say("fatal", repr(error))
        os._exit(3)

    async def propose(self, number: int) -> None:
        """Until it is certain: an unknown outcome is tried again under the same id."""
        command_id = self.consensus.new_command_id()
        command = number.to_bytes(8, "big") + self.payload
        while True:
            try:
                place = await self.consensus.propose(command, 2.0, command_id)
            except RaftqError as error:
                if error.outcome == "unknown":
                    say("unknown", number)
            else:
                say("ok", number, place)
                return

    async def work(self) -> None:
        while self.working:
            self.next += 1
            await self.propose(self.next)

    async def burst(self, count: int, tasks: int) -> None:
        left = [count]

        async def some() -> None:
            while left[0] > 0:
                left[0] -= 1
                self.next += 1
                await self.consensus.propose(self.next.to_bytes(8, "big") + self.payload, 30.0)

        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.gather(*(some() for _ in range(tasks)))
        say("burst", loop.time() - start)

    async def dump(self, path: str) -> None:
        while True:
            try:
                await self.consensus.read_barrier(2.0)
                break
            except RaftqError:
                continue
        self.save(path)

    def save(self, path: str) -> None:
        Path(path).write_bytes(self.numbers.data)
        say("dumped")

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def watch_leader(self) -> None:
        leadership = seen = 0
        while True:
            await asyncio.sleep(0.002)
            # Role and term change one after the other, in another thread: only what is still so
            # at a second look belongs together.
            now = self.consensus.term if self.consensus.is_leader else 0
            if now and now == seen and now != leadership:
                leadership = now
                say("leader", leadership)
            seen = now

    async def run(self) -> None:
        await self.consensus.start()
        say("ready")
        self.spawn(self.watch_leader())
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            words = line.decode().split()
            if words[0] == "work":
                self.working = True
                for _ in range(int(words[1])):
                    self.spawn(self.work())
            elif words[0] == "quiet":
                self.working = False
            elif words[0] == "burst":
                self.spawn(self.burst(int(words[1]), int(words[2])))
            elif words[0] == "dump":
                self.spawn(self.dump(words[1]))
            elif words[0] == "ticks":
                say("ticks", len(self.numbers.data) // 8)
        os._exit(0)


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no process is left behind
    asyncio.run(Child(json.loads(sys.argv[1])).run())
