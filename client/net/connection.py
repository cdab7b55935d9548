"""Shell: one connection to a node, with many requests in flight.

    open ──Hello──> ready ──close(), loss, or a broken frame──> closed

Requests are written in the order of the calls. Replies may come in any order and find their request
by correlation id. A request is a future, not a task:

    queued ──room──> sent ──reply──> done
      │                └──deadline──> abandoned: RequestTimeout, outcome unknown
      └──deadline──> RequestTimeout, outcome failed

At most `in_flight_max` requests and `in_flight_bytes_max` bytes are sent and unanswered. Later ones
wait in a queue of `queued_max`; more are refused with Throttled. The queue also holds requests
while the node does not read. When the connection ends, the outcome of every sent request is
unknown, and every other request has failed.

With `ping_ms` a silent node is sent a ping, and given up if it stays silent for as long again. So a
connection on which no request waits also learns that its node is gone.

Buffers of the raw part belong to the connection until the request is done: they are not copied. Not
done here: reconnecting, retrying, choosing the node.
"""

import asyncio
import ssl
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar, cast

from raftq.client.common.errors import (
    ConnectFailed,
    ConnectionLost,
    Outcome,
    ProtocolError,
    RemoteProtocolError,
    RequestTimeout,
    Throttled,
    TransportError,
)
from raftq.client.common.types import Buffer
from raftq.client.net.transport import Write, fragment_writer, loop_buffers, loop_scratch
from raftq.client.options import ConnectionOptions
from raftq.client.wire.frames import Frame, FrameDecoder
from raftq.client.wire.messages import (
    ErrorReply,
    Hello,
    HelloReply,
    Ping,
    Request,
    WireMessage,
    decode_message,
    encode_message,
    reply_kinds,
)

CORRELATION_ID_MAX = 0xFFFF_FFFF
CLOSE_S_MAX = 1.0

R = TypeVar("R", bound=WireMessage)


def node_name(node_id: int) -> str:
    """The name of a node in its connections to other nodes, with the role "node"."""
    return f"node-{node_id}"


@dataclass(slots=True)
class Reply(Generic[R]):
    """The answer to a request: its message, and the batches that followed it."""

    message: R
    raw: memoryview


class _Pending:
    """A request between the call and its end."""

    __slots__ = ("deadline", "fragments", "future", "id", "reply_kind", "size")

    def __init__(
        self,
        future: "asyncio.Future[Any]",
        fragments: list[Buffer],
        reply_kind: int,
        deadline: float,
        correlation_id: int,
    ) -> None:
        self.future = future
        self.fragments = fragments
        self.reply_kind = reply_kind
        self.deadline = deadline
        self.size = len(fragments[0]) if len(fragments) == 1 else sum(map(len, fragments))
        self.id = correlation_id


class Connection(asyncio.BufferedProtocol):
    """One connection: `async with await Connection.open(host, port) as connection: ...`.

    The methods of BufferedProtocol are for the event loop only."""

    def __init__(self, options: ConnectionOptions) -> None:
        self.options = options
        self.hello: HelloReply | None = None
        self._loop = asyncio.get_running_loop()
        self._decoder = FrameDecoder(
            reply_kinds(),
            options.frame_bytes_max,
            scratch=loop_scratch(self._loop),
            buffers=loop_buffers(self._loop),
        )
        self._frame_bytes_max = options.frame_bytes_max
        self._transport: asyncio.Transport | None = None
        self._write: Write
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._lost: str | None = None  # why no request can be sent any more
        self._cause: BaseException | None = None
        self._paused = False
        self._last_id = 0
        self._queued: deque[_Pending] = deque()
        self._sent: dict[int, _Pending] = {}
        self._sent_bytes = 0
        self._abandoned: dict[int, None] = {}
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = float("inf")
        self._received = False  # data came since the last beat
        self._pinged = False
        self._beating: asyncio.TimerHandle | None = None

    @classmethod
    async def open(
        cls,
        host: str,
        port: int,
        options: ConnectionOptions | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Connects and shakes hands. Raises ConnectFailed if no node answers in time."""
        options = options or ConnectionOptions()
        loop = asyncio.get_running_loop()
        where = f"{host}:{port}"
        connection: Self | None = None
        try:
            async with asyncio.timeout(options.connect_ms / 1000):
                _, connection = await loop.create_connection(
                    lambda: cls(options), host, port, ssl=tls
                )
                await connection._shake_hands()
        except TimeoutError as error:
            _abort(connection)
            raise ConnectFailed(f"{where}: no answer in {options.connect_ms} ms") from error
        except TransportError as error:
            _abort(connection)
            raise ConnectFailed(f"{where}: {error}") from error
        except OSError as error:
            _abort(connection)
            raise ConnectFailed(f"{where}: {error}") from error
        except BaseException:
            _abort(connection)
            raise
        return connection

    async def _shake_hands(self) -> None:
        options = self.options
        hello = Hello(
            options.version_min,
            options.version_max,
            options.role,
            options.name,
            options.cluster_proof,
        )
        answer = (await self.request(hello)).message
        if not options.version_min <= answer.version <= options.version_max:
            raise RemoteProtocolError(f"the node chose version {answer.version}, unasked")
        self.hello = answer
        self._frame_bytes_max = min(options.frame_bytes_max, answer.frame_bytes_max)
        if options.ping_ms:
            self._beating = self._loop.call_later(options.ping_ms / 1000, self._beat)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def closed(self) -> bool:
        """Whether requests can no longer be sent."""
        return self._lost is not None

    @property
    def in_flight(self) -> int:
        """Requests sent and not yet answered."""
        return len(self._sent)

    @property
    def queued(self) -> int:
        """Requests that wait for room."""
        return len(self._queued)

    async def request(
        self, message: Request[R], raw: Sequence[Buffer] = (), timeout_s: float | None = None
    ) -> Reply[R]:
        """Sends a request and waits for its reply. Raises an ErrorReply as its error."""
        return await self.submit(message, raw, timeout_s)

    def submit(
        self, message: Request[R], raw: Sequence[Buffer] = (), timeout_s: float | None = None
    ) -> "asyncio.Future[Reply[R]]":
        """Sends a request now, or as soon as there is room, without waiting for its reply."""
        if self._lost is not None:
            raise self._loss("failed")
        if len(self._queued) >= self.options.queued_max:
            raise Throttled(f"{len(self._queued)} requests already wait for this connection")
        self._last_id = correlation_id = self._next_id()
        fragments = encode_message(message, correlation_id, raw, self._frame_bytes_max)
        seconds = self.options.request_ms / 1000 if timeout_s is None else timeout_s
        future: asyncio.Future[Reply[R]] = self._loop.create_future()
        deadline = self._loop.time() + seconds
        pending = _Pending(future, fragments, message.kind + 1, deadline, correlation_id)
        if self._queued or not self._has_room(pending):
            self._queued.append(pending)
        else:
            self._send(pending)
        if deadline < self._alarm_at:
            self._set_alarm(deadline)
        return future

    async def close(self) -> None:
        """Ends the connection. Open requests end with ConnectionLost."""
        self.end()
        done, _ = await asyncio.wait((self._ended,), timeout=CLOSE_S_MAX)
        if not done:
            _abort(self)
            await self._ended

    def end(self) -> None:
        """As `close`, without waiting until the socket is closed."""
        self._lose("the connection was closed by its owner")

    def _next_id(self) -> int:
        one = self._last_id
        while True:
            one = one + 1 if one < CORRELATION_ID_MAX else 1
            if one not in self._sent and one not in self._abandoned:
                return one

    def _has_room(self, pending: _Pending) -> bool:
        if self._paused:
            return False
        if not self._sent:
            return True
        options = self.options
        return (
            len(self._sent) < options.in_flight_max
            and self._sent_bytes + pending.size <= options.in_flight_bytes_max
        )

    def _send(self, pending: _Pending) -> None:
        self._sent[pending.id] = pending
        self._sent_bytes += pending.size
        fragments, pending.fragments = pending.fragments, []
        if len(fragments) == 1:
            assert self._transport is not None
            self._transport.write(fragments[0])
        else:
            self._write(fragments)

    def _pump(self) -> None:
        """Sends queued requests while there is room."""
        queued = self._queued
        while queued and self._lost is None:
            if queued[0].future.done():
                queued.popleft()
            elif self._has_room(queued[0]):
                self._send(queued.popleft())
            else:
                return

    def _loss(self, outcome: Outcome) -> ConnectionLost:
        error = ConnectionLost(self._lost)
        error.__cause__ = self._cause
        return error.with_outcome(outcome)

    def _end_all(self, requests: Iterable[_Pending], outcome: Outcome) -> None:
        for pending in requests:
            if not pending.future.done():
                pending.future.set_exception(self._loss(outcome))

    def _lose(self, reason: str, cause: BaseException | None = None) -> None:
        """Ends the connection: every open request gets its error."""
        if self._lost is not None:
            return
        self._lost, self._cause = reason, cause
        for timer in (self._alarm, self._beating):
            if timer is not None:
                timer.cancel()
        self._alarm = self._beating = None
        self._end_all(self._sent.values(), "unknown")
        self._end_all(self._queued, "failed")
        self._sent.clear()
        self._queued.clear()
        self._abandoned.clear()
        self._sent_bytes = 0
        if self._transport is not None:
            self._transport.close()

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self._loop.call_at(at, self._ring)

    def _ring(self) -> None:
        """Ends requests whose deadline has passed.

        One timer serves all. It is set to the earliest deadline, and that request may be done by
        then."""
        now = self._loop.time()
        for pending in [call for call in self._queued if call.deadline <= now]:
            self._queued.remove(pending)
            _time_out(pending, "sent")
        for pending in [call for call in self._sent.values() if call.deadline <= now]:
            del self._sent[pending.id]
            self._sent_bytes -= pending.size
            self._abandoned[pending.id] = None
            _time_out(pending, "answered")
        self._alarm, self._alarm_at = None, float("inf")
        if len(self._abandoned) > self.options.abandoned_max:
            self._lose(f"the node owes {len(self._abandoned)} replies")
            _abort(self)
            return
        self._pump()
        deadlines = [call.deadline for call in (*self._queued, *self._sent.values())]
        if deadlines:
            self._set_alarm(min(deadlines))

    def _beat(self) -> None:
        """Sends a ping if nothing came, and gives up if nothing comes after that."""
        seconds = self.options.ping_ms / 1000
        if self._received:
            self._received = self._pinged = False
        elif self._pinged:
            self._lose(f"the node was silent for {2 * self.options.ping_ms} ms")
            _abort(self)
            return
        else:
            self._pinged = True
            correlation_id = self._last_id = self._next_id()
            # A ping does not wait for room: it must find out whether the node still reads.
            future: asyncio.Future[Any] = self._loop.create_future()
            future.add_done_callback(_look_at)
            fragments = encode_message(Ping(), correlation_id)
            self._send(_Pending(future, fragments, Ping.kind + 1, float("inf"), correlation_id))
        self._beating = self._loop.call_later(seconds, self._beat)

    def _take(self, frame: Frame) -> None:
        message = decode_message(frame)
        pending = self._sent.get(frame.correlation_id)
        if pending is None:
            self._take_unexpected(frame.correlation_id, message)
            return
        refused = type(message) is ErrorReply
        if frame.kind != pending.reply_kind and not refused:
            raise RemoteProtocolError(f"{type(message).__name__} answers another kind of request")
        del self._sent[pending.id]
        self._sent_bytes -= pending.size
        future = pending.future
        if future.done():
            return  # the caller was cancelled
        if refused:
            future.set_exception(cast(ErrorReply, message).to_error())
        else:
            future.set_result(Reply(message, frame.raw))

    def _take_unexpected(self, correlation_id: int, message: WireMessage) -> None:
        if correlation_id in self._abandoned:
            del self._abandoned[correlation_id]
        elif correlation_id == 0 and isinstance(message, ErrorReply):
            self._lose(f"the node closed the connection: {message.message}", message.to_error())
        else:
            raise RemoteProtocolError(
                f"{type(message).__name__} answers request {correlation_id}, which is not open"
            )

    # Methods that the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclass of asyncio's, though they have all its methods.
        self._transport = cast(asyncio.Transport, transport)
        self._write = fragment_writer(self._transport)

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        self._received = True
        decoder = self._decoder
        decoder.received(nbytes)
        try:
            while self._lost is None and (frame := decoder.next_frame()) is not None:
                self._take(frame)
        except ProtocolError as error:
            self._lose(f"the node broke the protocol: {error}", error)
            _abort(self)
        if self._queued:
            self._pump()

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False
        self._pump()

    def eof_received(self) -> None:
        self._lose("the node closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection broke: {exc}" if exc else "the connection is closed", exc)
        self._decoder.clear()
        if not self._ended.done():
            self._ended.set_result(None)


def _look_at(future: "asyncio.Future[Any]") -> None:
    """Fetches the exception of a ping, so that asyncio does not log it as never retrieved."""
    if not future.cancelled():
        future.exception()


def _time_out(pending: _Pending, what: str) -> None:
    if not pending.future.done():
        error = RequestTimeout(f"the request was not {what} in time")
        pending.future.set_exception(error.with_outcome("failed" if what == "sent" else "unknown"))


def _abort(connection: Connection | None) -> None:
    if connection is not None and connection._transport is not None:
        connection._lose("the connection was given up")
        connection._transport.abort()
