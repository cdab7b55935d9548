"""Shell: the native listener. It accepts connections and watches over them; session.py serves them.

    async with TcpServer(handlers, node_id=1, cluster_id="c") as server:
        await server.start("127.0.0.1", 7070)
        ...
        await server.drain(10.0)

One timer checks all connections from time to time and ends those over a limit: no Hello within
`handshake_ms`, nothing asked for `idle_ms`, replies unread for `write_stall_ms`, a big request that
makes no progress for `frame_stall_ms`. So no request pays for a timer or a look at the clock. A
limit may be exceeded by two checks: half of the shortest limit, and at most ten seconds.

There are no requests without a reply: a Produce with acks "none" is answered as soon as it is read.
The reply costs its caller nothing to ignore, bounds what is in flight, and carries the errors that
tell a producer to look for another leader.

Tasks of handlers that wait belong to the server's task group; leaving `async with` cancels them.
"""

import asyncio
import logging
import ssl
from collections.abc import Callable, Coroutine, Mapping
from types import TracebackType
from typing import Any, Self

from raftq.client.common.errors import ConnectionLost, NodeStopping, RemoteProtocolError, Throttled
from raftq.client.wire.frames import SCRATCH_BYTES
from raftq.client.wire.messages import Hello, HelloReply, Ping, PingReply, WireMessage
from raftq.node.config import ServerOptions
from raftq.node.native.budget import MemoryBudget
from raftq.node.native.session import NO_FRAME, Handler, Observer, Session

logger = logging.getLogger(__name__)

LOOK_S_MAX = 5.0
CLOSE_S_MAX = 2.0
STALL_BYTES = 64 * 1024


def _answer_ping(message: Ping, raw: memoryview, session: Session) -> PingReply:
    return PingReply()


def _look_away(message: WireMessage, began: float, error: BaseException | None) -> None:
    """Count nothing."""


class TcpServer:
    """Serves the native protocol. `handlers` maps each request class to its handler.

    `admit` sees the Hello and may refuse a caller by raising a RaftqError, which `Connection.open`
    then raises there. `on_leave` is called for every admitted caller whose connection ended,
    `observe` for every request that was answered.
    """

    def __init__(  # noqa: PLR0913 - a public API
        self,
        handlers: Mapping[type[WireMessage], Handler],
        *,
        node_id: int,
        cluster_id: str,
        incarnation: int = 0,
        options: ServerOptions | None = None,
        admit: Callable[[Hello], None] | None = None,
        on_leave: Callable[[Session], None] | None = None,
        observe: Observer | None = None,
    ) -> None:
        self.options = options or ServerOptions()
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))  # what sessions read into, in turns
        self.memory: MemoryBudget[Session] = MemoryBudget(self.options.memory_bytes_max)
        self.handlers: Mapping[type[WireMessage], Handler] = {Ping: _answer_ping, **handlers}
        self.draining = False
        self.port = 0
        self._identity = (node_id, cluster_id)
        self._incarnation = incarnation
        self._admit = admit
        self._on_leave = on_leave
        self.observe: Observer = observe or _look_away
        self._waking = False
        self._group = asyncio.TaskGroup()
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._sessions: dict[Session, None] = {}
        self._listener: asyncio.Server | None = None
        self._look: asyncio.TimerHandle | None = None
        self._changed: asyncio.Event = asyncio.Event()
        self.clock: Callable[[], float]
        self._loop: asyncio.AbstractEventLoop

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self.clock = self._loop.time
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            await self.close()
        finally:
            await self._group.__aexit__(kind, error, trace)

    @property
    def connections(self) -> int:
        return len(self._sessions)

    async def start(
        self, host: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen. With port 0 the kernel chooses one, which is then in `port`."""
        assert self._listener is None, "the server has been started"
        self._listener = await self._loop.create_server(
            lambda: Session(self), host, port, ssl=tls, backlog=self.options.backlog
        )
        self.port = self._listener.sockets[0].getsockname()[1]
        self._schedule_look()
        logger.info("listening host=%s port=%d tls=%s", host, self.port, tls is not None)

    async def drain(self, timeout_s: float) -> bool:
        """Accept no new connections and requests, finish those in flight, then close.

        Returns whether all of them were finished in time.
        """
        self.draining = True
        if self._listener is not None:
            self._listener.close()
        finished = True
        try:
            async with asyncio.timeout(timeout_s):
                while any(session.in_flight for session in self._sessions):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            finished = False
        await self.close()
        return finished

    async def close(self) -> None:
        """Stop listening, cancel what is in flight, send what is answered, and end all
        connections."""
        self.draining = True
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._listener is not None:
            self._listener.close()
        for task in list(self._tasks):
            task.cancel()
        for session in list(self._sessions):
            session.leave()
        try:
            async with asyncio.timeout(CLOSE_S_MAX):
                await self._all_gone()
        except TimeoutError:
            for session in list(self._sessions):
                session.cut("the node has stopped")
            await self._all_gone()
        if self._listener is not None:
            await self._listener.wait_closed()

    async def _all_gone(self) -> None:
        while self._sessions:
            self._changed.clear()
            await self._changed.wait()

    # Calls from sessions.

    def greet(self, hello: Hello, version: int) -> HelloReply:
        if self.draining:
            raise NodeStopping("the node is stopping")
        if self._admit is not None:
            self._admit(hello)
        return HelloReply(version, *self._identity, self.options.frame_bytes_max, self._incarnation)

    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Future[Any]":
        task = self._group.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def finished(self) -> None:
        self._changed.set()

    def joined(self, session: Session) -> None:
        self._sessions[session] = None
        session.since = self._loop.time()
        session.touched = False
        if len(self._sessions) > self.options.connections_max:
            session.part(Throttled(f"more than {self.options.connections_max} connections"))

    def left(self, session: Session) -> None:
        self._sessions.pop(session, None)
        self._changed.set()
        if self._on_leave is not None and session.hello is not None:
            self._on_leave(session)

    def memory_freed(self) -> None:
        """Let connections that wait for memory go on, once the caller of this is done."""
        if not self._waking and self.memory.short:
            self._waking = True
            self._loop.call_soon(self._wake)

    def _wake(self) -> None:
        self._waking = False
        while (session := self.memory.next_waiting()) is not None:
            session.go_on()

    # Connections over a limit.

    def _schedule_look(self) -> None:
        options = self.options
        shortest = min(
            options.handshake_ms, options.idle_ms, options.write_stall_ms, options.linger_ms,
            options.frame_stall_ms,
        )  # fmt: skip
        self._look = self._loop.call_later(min(shortest / 4000, LOOK_S_MAX), self._look_around)

    def _look_around(self) -> None:
        now = self._loop.time()
        for session in list(self._sessions):
            if session.receiving:
                self._judge_frame(session, now)
            else:
                session.frame_mark = NO_FRAME
            if session.touched:
                session.touched = False
                session.since = now
            else:
                self._judge(session, (now - session.since) * 1000)
        self._schedule_look()

    def _judge_frame(self, session: Session, now: float) -> None:
        """Cut a caller that sends its big frame too slowly."""
        frames, arrived, since = session.frame_mark
        got_on = session.receiving - arrived >= STALL_BYTES and not self.memory.short
        if frames != session.frames or not arrived or got_on:
            session.frame_mark = (session.frames, session.receiving, now)
        elif (now - since) * 1000 >= self.options.frame_stall_ms:
            session.cut(f"a request of which {session.receiving} bytes came did not get on")

    def _judge(self, session: Session, quiet_ms: float) -> None:
        """End a connection on which nothing has happened for too long."""
        options = self.options
        if session.leaving:
            if quiet_ms >= options.linger_ms:
                session.cut("it was asked to leave")
        elif session.stalled:
            if quiet_ms >= options.write_stall_ms:
                session.cut("its replies are not read")
        elif session.hello is None:
            if quiet_ms >= options.handshake_ms:
                session.part(RemoteProtocolError(f"no Hello within {options.handshake_ms} ms"))
        elif not session.in_flight and quiet_ms >= options.idle_ms:
            session.part(ConnectionLost(f"nothing was asked for {options.idle_ms} ms"))
