"""Shell: the baseline of the cluster figures: a socket and a file, and nothing else.

`python -m raftq_bench.bare_socket DIRECTORY [PORT...]` is a process that receives frames of a fixed
size on a uvloop BufferedProtocol, writes them to files as the log does (same size, same
write-behind), forwards each to the processes at PORT, and answers with one byte when they have
answered. It checks, stamps and indexes nothing. It prints its port and ends with its input.

A connection begins with eight bytes, `<II`: the size of its frames and its kind:

    APPEND  frames come, one byte goes back for each
    READ    a byte comes, a frame goes back: pread from a file, which is in the page cache
    REST    deletes old files and syncs the others, then answers with a byte
"""

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from struct import Struct
from typing import Any, cast

from raftq.client.net.transport import run
from raftq_bench.bare import BareFiles
from raftq_bench.runner import MIB, Side

APPEND, READ, REST = range(3)
BEGINNING = Struct("<II")
READ_FILE_BYTES = 512 * MIB
WINDOW = 5  # as many frames in flight as a producer has
FRAME_BYTES_MAX = 64 * MIB


class _Follower(asyncio.Protocol):
    """The connection to a process that gets every frame, too; counts its answers."""

    def __init__(self, sink: "_Sink") -> None:
        self.sink = sink
        self.answers = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.answers += len(data)
        self.sink.answer()


class _Sink(asyncio.BufferedProtocol):
    """One connection."""

    def __init__(self, node: "_Node") -> None:
        self._node = node
        self._buffer = memoryview(bytearray(BEGINNING.size))
        self._filled = 0
        self._mode = -1
        self._followers: list[_Follower] = []
        self._taken = self._answered = 0
        self._position = self._size = 0
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=64 * MIB)

    def connection_lost(self, exc: Exception | None) -> None:
        for follower in self._followers:
            follower.transport.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._mode == READ:
            self._give(nbytes)
            return
        self._filled += nbytes
        if self._filled < len(self._buffer):
            return
        self._filled = 0
        if self._mode < 0:
            self._begin()
        else:
            self._take()

    def _begin(self) -> None:
        size, self._mode = BEGINNING.unpack(self._buffer)
        assert 0 < size <= FRAME_BYTES_MAX, "a frame of that size is not taken"
        if self._mode == REST:
            self._node.files.rest()
            self._transport.write(b"\0")
        elif self._mode == READ:
            self._buffer = memoryview(bytearray(64))
            self._size = size
            self._node.make_read_file()
        else:
            self._buffer = memoryview(bytearray(size))
            if self._node.followers:
                self._transport.pause_reading()
                self._node.spawn(self._reach_followers(size))

    async def _reach_followers(self, size: int) -> None:
        loop = asyncio.get_running_loop()
        for port in self._node.followers:
            _, follower = await loop.create_connection(lambda: _Follower(self), "127.0.0.1", port)
            follower.transport.write(BEGINNING.pack(size, APPEND))
            self._followers.append(follower)
        self._transport.resume_reading()

    def _take(self) -> None:
        frame = self._buffer
        if self._followers:
            # The buffer gets the next frame while this one is still on its way.
            self._buffer = memoryview(bytearray(len(frame)))
            for follower in self._followers:
                follower.transport.write(frame)
        self._node.files.append(cast(bytearray, frame))
        self._taken += 1
        self.answer()

    def answer(self) -> None:
        done = min((follower.answers for follower in self._followers), default=self._taken)
        done = min(done, self._taken)
        if done > self._answered:
            self._transport.write(b"\0" * (done - self._answered))
            self._answered = done

    def _give(self, count: int) -> None:
        for _ in range(count):
            if self._position + self._size > READ_FILE_BYTES:
                self._position = 0
            self._transport.write(os.pread(self._node.read_fd, self._size, self._position))
            self._position += self._size


class _Node:
    """What the connections of the process share."""

    def __init__(self, directory: Path, followers: Sequence[int]) -> None:
        self.directory = directory
        self.followers = followers
        self.files = BareFiles(directory / "frames")
        self.read_fd = -1
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def make_read_file(self) -> None:
        if self.read_fd < 0:
            flags = os.O_CREAT | os.O_RDWR | os.O_CLOEXEC
            self.read_fd = os.open(self.directory / "read", flags, 0o600)
            block = os.urandom(MIB)
            for _ in range(READ_FILE_BYTES // MIB):
                os.write(self.read_fd, block)

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Sink(self), "127.0.0.1", 0)
        print(server.sockets[0].getsockname()[1], flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
        server.close()


@contextmanager
def bare_nodes(directory: Path, count: int = 1) -> Iterator[int]:
    """Starts them; yields the port of the first, which forwards everything to the others."""
    started: list[subprocess.Popen[str]] = []
    ports: list[str] = []
    try:
        for number in reversed(range(count)):
            home = directory / f"bare-{number}"
            home.mkdir(parents=True)
            followers = ports if number == 0 else []
            command = [sys.executable, "-m", "raftq_bench.bare_socket", str(home), *followers]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None
            ports.append(process.stdout.readline().strip())
        yield int(ports[-1])
    finally:
        for process in reversed(started):
            process.communicate()


class BareClient(Side):
    """Frames to a bare node, `WINDOW` in flight, from a plain blocking socket.

    A frame counts as `worth` operations, as a batch does for the side it is compared with."""

    def __init__(self, port: int, frame: bytes, worth: int = 1, window: int = WINDOW) -> None:
        self._port = port
        self._frame = frame
        self._worth = worth
        self._window = window
        self._socket = self._open(APPEND)
        self.samples: list[float] = []

    def _open(self, mode: int) -> socket.socket:
        opened = socket.create_connection(("127.0.0.1", self._port))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.sendall(BEGINNING.pack(len(self._frame), mode))
        return opened

    def slice(self, seconds: float) -> tuple[int, float]:
        clock, link, frame = time.perf_counter, self._socket, self._frame
        sent = answered = 0
        start = last = clock()
        while last < start + seconds or answered < sent:
            while sent - answered < self._window and last < start + seconds:
                link.sendall(frame)
                sent += 1
            answered += len(link.recv(64))
            last = clock()
        return answered * self._worth, last - start

    def rest(self) -> None:
        with self._open(REST) as link:
            link.recv(1)

    def close(self) -> None:
        self._socket.close()


class BareLatency(BareClient):
    """One frame at a time; `samples` has the seconds of each."""

    def slice(self, seconds: float) -> tuple[int, float]:
        clock, link, frame = time.perf_counter, self._socket, self._frame
        start = last = clock()
        count = 0
        while last < start + seconds:
            before = last
            link.sendall(frame)
            link.recv(64)
            last = clock()
            self.samples.append(last - before)
            count += 1
        return count, last - start


class BareReader(BareClient):
    """Requests frames, a few ahead, and reads them into one buffer."""

    def _open(self, mode: int) -> socket.socket:
        return super()._open(READ if mode == APPEND else mode)

    def slice(self, seconds: float) -> tuple[int, float]:
        clock, link = time.perf_counter, self._socket
        buffer = memoryview(bytearray(len(self._frame)))
        asked = got = 0
        start = last = clock()
        while last < start + seconds or got < asked:
            while asked - got < self._window and last < start + seconds:
                link.sendall(b"\0")
                asked += 1
            filled = 0
            while filled < len(buffer):
                filled += link.recv_into(buffer[filled:])
            got += 1
            last = clock()
        return got * self._worth, last - start


if __name__ == "__main__":
    run(_Node(Path(sys.argv[1]), [int(port) for port in sys.argv[2:]]).serve())
