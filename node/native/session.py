"""Shell: one connection of the native listener, from its first byte to its last.

    greeting ──Hello──> serving ──reason to end──> leaving ──> gone
        └──no or bad Hello, handshake_ms──────────────┘

A request goes to its handler as soon as it is whole; replies go out as they are ready, in any
order. Nothing is read while the connection is at its limit of requests in flight, while the caller
does not read its replies, or while a big request waits for memory (see budget.py). Frames that have
arrived by then stay undecoded in the decoder. The raw part of a request is writable memory that its
handler may keep and change.

A malformed frame ends this connection and nothing else: the reason is sent (correlation id 0), the
sending side is shut, and further bytes are discarded for `linger_ms`, because closing at once
would make the kernel drop the reason. Requests of a connection that is gone are cancelled.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, cast

from raftq.client.common.errors import (
    InternalError,
    InvalidArgument,
    NodeStopping,
    ProtocolError,
    RaftqError,
    RemoteProtocolError,
    UnsupportedVersion,
)
from raftq.client.common.types import Buffer
from raftq.client.net.transport import Write, fragment_writer
from raftq.client.wire.frames import JOIN_BYTES_MAX, FrameDecoder
from raftq.client.wire.messages import (
    ErrorReply,
    Hello,
    HelloReply,
    WireMessage,
    decode_message,
    encode_message,
    request_kinds,
)
from raftq.node.config import ServerOptions
from raftq.node.native.budget import MemoryBudget

logger = logging.getLogger(__name__)

# A message, or a message and the batches that follow it.
Answer = WireMessage | tuple[WireMessage, Sequence[Buffer]]
# Called with the request, its raw part and the session. A plain handler answers at once; one that
# has to wait returns a future, or is a coroutine function, which costs a task per request.
Handler = Callable[[Any, memoryview, "Session"], Answer | Awaitable[Answer]]
# Called for every request that was answered: the request, its time of arrival on the clock of the
# loop, and the error if it was refused. Not called for requests that were given up.
Observer = Callable[[WireMessage, float, BaseException | None], None]


# What the listener last saw of a big frame: its number, the bytes that had arrived, and when.
NO_FRAME = (0, 0, 0.0)

_NODE_NAME = re.compile(r"node-([0-9]{1,10})", re.ASCII)


class Owner(Protocol):
    """What a session needs from its listener."""

    options: ServerOptions
    handlers: Mapping[type[WireMessage], Handler]
    draining: bool
    scratch: memoryview
    memory: MemoryBudget["Session"]
    clock: Callable[[], float]
    observe: Observer

    def greet(self, hello: Hello, version: int) -> HelloReply: ...
    def spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Future[Any]": ...
    def joined(self, session: "Session") -> None: ...
    def left(self, session: "Session") -> None: ...
    def finished(self) -> None: ...
    def memory_freed(self) -> None: ...


class Session(asyncio.BufferedProtocol):
    """One connection. Its public attributes are for handlers and for the listener."""

    __slots__ = (
        "_decoder", "_held", "_in_flight", "_in_flight_bytes", "_memory", "_options", "_out",
        "_out_bytes", "_owner", "_receiving_bytes", "_serving", "_transport", "_write",
        "_writing_paused", "frame_mark", "frames", "hello", "leaving", "node_id", "peer", "since",
        "touched",
    )  # fmt: skip

    def __init__(self, owner: Owner) -> None:
        self._owner = owner
        self._options = options = owner.options
        self._memory = owner.memory
        self._decoder = FrameDecoder(
            request_kinds(),
            options.handshake_bytes_max,
            scratch=owner.scratch,
            allow=self._may_take,
        )
        self._transport: asyncio.Transport
        self._write: Write
        self._in_flight: dict[int, asyncio.Future[Any]] = {}
        self._in_flight_bytes = 0
        self._receiving_bytes = 0  # taken from the budget for a frame that is not whole
        self._out: list[Buffer] = []  # replies of the requests that are being served right now
        self._out_bytes = 0
        self._serving = False
        self._held = False  # reading is paused
        self._writing_paused = False
        self.hello: Hello | None = None
        self.node_id: int | None = None
        """The node id of a caller with the role "node"; None for others."""
        self.leaving = False
        self.peer = "?"
        self.touched = True  # something happened since the listener last looked
        self.since = 0.0  # when the listener last saw it touched
        self.frames = 0  # big frames received
        self.frame_mark = NO_FRAME

    @property
    def in_flight(self) -> int:
        """Requests without an answer."""
        return len(self._in_flight)

    @property
    def stalled(self) -> bool:
        """Whether the caller leaves too many replies unread."""
        return self._writing_paused

    @property
    def receiving(self) -> int:
        """The bytes of a big frame that is not whole, as far as the caller could send it."""
        return 0 if self._held else self._decoder.receiving

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, though they have all its methods.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=self._options.write_bytes_high)
        self._write = fragment_writer(self._transport)
        self.peer = str(transport.get_extra_info("peername"))
        self._owner.joined(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self.leaving:
            return self._owner.scratch
        return self._decoder.get_buffer(self._memory.window)

    def buffer_updated(self, nbytes: int) -> None:
        if not self.leaving:
            self._decoder.received(nbytes)
            self._serve()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self.touched = True
        self._steer()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self.touched = True
        self._serve()

    def connection_lost(self, exc: Exception | None) -> None:
        self.leaving = True
        for future in list(self._in_flight.values()):
            future.cancel()
        self._decoder.clear()
        self._memory.leave(self, self._receiving_bytes)
        self._receiving_bytes = 0
        self._owner.memory_freed()
        self._owner.left(self)

    # Memory.

    def _may_take(self, count: int) -> bool:
        taken = self._memory.ask(self, count)
        if taken:
            self._receiving_bytes += count
        return taken

    def go_on(self) -> None:
        """Go on: there is memory for the frame that waited for it."""
        self.touched = True
        self._serve()

    # Requests.

    def _is_full(self) -> bool:
        options = self._options
        return (
            self._writing_paused
            or self.leaving
            or len(self._in_flight) >= options.in_flight_max
            or self._in_flight_bytes >= options.in_flight_bytes_max
            or self._memory.is_full(self._in_flight_bytes)
        )

    def _steer(self) -> None:
        """Read if, and only if, there is room for another request."""
        held = not self.leaving and (self._decoder.starved or self._is_full())
        if held != self._held and not self._transport.is_closing():
            self._held = held
            if held:
                self._transport.pause_reading()
            else:
                self._transport.resume_reading()

    def _serve(self) -> None:
        """Handle every whole request that has arrived, as far as there is room."""
        if self._serving or self.leaving:
            return
        self._serving = True
        decoder = self._decoder
        try:
            while not self._is_full():
                frame = decoder.next_frame()
                if frame is None:
                    break
                if self._receiving_bytes:
                    self._account_whole()
                self._handle(decode_message(frame), frame.correlation_id, frame.raw, frame.size)
            else:
                decoder.keep()
        except ProtocolError as error:
            self.part(error)
        finally:
            self._serving = False
            self._flush()
        self._steer()

    def _account_whole(self) -> None:
        self.frames += 1
        self._memory.whole(self, self._receiving_bytes)
        self._receiving_bytes = 0
        if self._memory.short:
            self._owner.memory_freed()

    def _handle(self, message: WireMessage, request_id: int, raw: memoryview, size: int) -> None:
        self.touched = True
        if request_id == 0 or request_id in self._in_flight:
            raise RemoteProtocolError(f"correlation id {request_id} is not free")
        if self.hello is None:
            self._greet(message, request_id)
            return
        owner = self._owner
        handler = owner.handlers.get(type(message))
        began = owner.clock()
        try:
            if owner.draining:
                raise NodeStopping("the node is stopping")
            if handler is None:
                raise InvalidArgument(f"this node does not serve {type(message).__name__}")
            answer = handler(message, raw, self)
        except Exception as error:
            self._refuse(request_id, message, error)
            owner.observe(message, began, error)
            return
        if type(answer) is tuple or isinstance(answer, WireMessage):
            self._answer(request_id, message, answer)
            owner.observe(message, began, None)
            return
        waiting = cast(Awaitable[Answer], answer)
        future = waiting if asyncio.isfuture(waiting) else owner.spawn(_outcome(waiting))
        self._in_flight[request_id] = future
        self._in_flight_bytes += size
        self._memory.start(size)
        future.add_done_callback(partial(self._finish, request_id, message, size, began))

    def _greet(self, message: WireMessage, request_id: int) -> None:
        if not isinstance(message, Hello):
            raise RemoteProtocolError(f"{type(message).__name__} before Hello")
        options = self._options
        version = min(message.version_max, options.version_max)
        try:
            if version < max(message.version_min, options.version_min):
                raise UnsupportedVersion(
                    f"this node speaks protocol versions {options.version_min} to "
                    f"{options.version_max}, the caller {message.version_min} to "
                    f"{message.version_max}"
                )
            reply = self._owner.greet(message, version)
        except RaftqError as error:
            self.part(error, request_id)
            return
        self.hello = message
        if message.role == "node" and (name := _NODE_NAME.fullmatch(message.name)) is not None:
            self.node_id = int(name[1])
        self._decoder.frame_bytes_max = options.frame_bytes_max
        self._answer(request_id, message, reply)

    def _finish(
        self,
        request_id: int,
        message: WireMessage,
        size: int,
        began: float,
        future: "asyncio.Future[Any]",
    ) -> None:
        """Answer a request that had to wait. The answer goes first: its caller may run on
        another core while the rest is done here."""
        del self._in_flight[request_id]
        error: BaseException | None = None
        if future.cancelled():
            # Only its own listener or a stopping node cancels a request.
            self._refuse(request_id, message, NodeStopping("the request was given up"))
        else:
            error = future.exception()
            if error is None:
                result = future.result()
                error = result if isinstance(result, BaseException) else None
            if error is None:
                self._answer(request_id, message, result)
            else:
                self._refuse(request_id, message, error)
            self._owner.observe(message, began, error)
        self._in_flight_bytes -= size
        self.touched = True
        owner, memory = self._owner, self._memory
        if memory.short:
            owner.memory_freed()
        memory.finish(size)
        owner.finished()
        if self._held:
            self._serve()

    # Replies.

    def _answer(self, request_id: int, request: WireMessage, answer: Answer) -> None:
        if self.leaving or self._transport.is_closing():
            return
        try:
            reply, raw = answer if isinstance(answer, tuple) else (answer, ())
            if reply.kind != request.kind + 1:
                raise TypeError(f"{type(reply).__name__} does not answer {type(request).__name__}")
            fragments = encode_message(reply, request_id, raw, self._options.frame_bytes_max)
        except Exception as error:
            self._refuse(request_id, request, error)
            return
        self._put(fragments)

    def _refuse(self, request_id: int, request: WireMessage, error: BaseException) -> None:
        """Answer with an error. An error that no handler should raise is logged and reported as
        internal."""
        if not isinstance(error, RaftqError) or isinstance(error, ProtocolError):
            logger.error(
                "request=%s peer=%s failed", type(request).__name__, self.peer, exc_info=error
            )
            error = InternalError(f"{type(request).__name__}: the node failed to handle this")
        if not self.leaving and not self._transport.is_closing():
            self._put(encode_message(ErrorReply.from_error(error), request_id))

    def _put(self, fragments: list[Buffer]) -> None:
        """Write a reply. The replies to requests that were read together are sent together."""
        self._out += fragments
        self._out_bytes += sum(map(len, fragments))
        if not self._serving or self._out_bytes > self._options.write_bytes_high:
            self._flush()

    def _flush(self) -> None:
        out = self._out
        if not out:
            return
        if self._transport.is_closing():
            out.clear()
            return
        if self._out_bytes <= 16 * JOIN_BYTES_MAX:
            self._transport.write(b"".join(out) if len(out) > 1 else out[0])
        else:
            self._write(out)
        self._out, self._out_bytes = [], 0
        if self._writing_paused:
            unsent = self._transport.get_write_buffer_size()
            if unsent > self._options.write_bytes_max:
                self.cut(f"{unsent} bytes of replies are not read")

    # The end.

    def part(self, error: RaftqError, request_id: int = 0) -> None:
        """Send the reason to the caller, and end the connection."""
        if self.leaving or self._transport.is_closing():
            return
        logger.info("peer=%s refused code=%s reason=%s", self.peer, error.code, error)
        self._put(encode_message(ErrorReply.from_error(error), request_id))
        self._flush()
        self.leaving = self.touched = True
        if self._transport.is_closing():
            return
        if self._held:
            self._held = False
            self._transport.resume_reading()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        else:
            self._transport.close()

    def leave(self) -> None:
        """Close once everything that was answered is sent."""
        self.leaving = True
        self._transport.close()

    def cut(self, reason: str) -> None:
        """End the connection at once."""
        if not self._transport.is_closing() or self._transport.get_write_buffer_size():
            logger.info("peer=%s cut reason=%s", self.peer, reason)
        self.leaving = True
        self._transport.abort()


async def _outcome(work: Awaitable[Any]) -> Any:
    """Return the result of a handler, or its error as a value: an error must not end the task
    group."""
    try:
        return await work
    except Exception as error:
        return error
