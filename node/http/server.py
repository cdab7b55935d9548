"""The HTTP server of a node: from a request's head to the last byte of its answer. (Shell.)

Every request goes through `_handle`: find the route, read the body within its bounds, check it,
call the handler, write the answer. All of it is bounded in bytes and in time, and whatever goes
wrong is an answer as errors.py has it. An unexpected error is logged with the request's id and
answered with INTERNAL; the caller gets the id, never a traceback.

aiohttp parses HTTP and finds routes. Its `Application` is not used: it offers no place for our
limits on connections, nor for JSON answers to what is no HTTP (listener.py).
"""

import asyncio
import logging
from collections.abc import Callable
from importlib import metadata

from aiohttp import web
from aiohttp.hdrs import METH_GET, METH_HEAD
from aiohttp.http import HttpVersion11

from raftq.client.common.errors import RaftqError
from raftq.node.http.bodies import (
    JSON,
    MSGPACK,
    MSGPACK_NAMES,
    decode_body,
    encode_json,
    encode_msgpack,
    wants_msgpack,
)
from raftq.node.http.budget import Budget, Share
from raftq.node.http.clients import HttpClients
from raftq.node.http.context import Context
from raftq.node.http.dead import DeadHandlers, dead_routes
from raftq.node.http.delayed import DelayedHandlers, delayed_routes
from raftq.node.http.errors import Refusal
from raftq.node.http.groups import GroupHandlers, group_routes
from raftq.node.http.health import Health, health_routes
from raftq.node.http.listener import HttpListener
from raftq.node.http.openapi import openapi_document
from raftq.node.http.options import HttpOptions
from raftq.node.http.paths import PARAMETERS
from raftq.node.http.queue_stats import QueueStatsHandlers, queue_stats_routes
from raftq.node.http.records import RecordHandlers, record_routes
from raftq.node.http.routes import Call, HttpReply, Route, make_dispatcher, reply_with_error
from raftq.node.http.settling import ReceiptHandlers, receipt_routes
from raftq.node.http.topics import TopicHandlers, topic_routes
from raftq.node.metrics.counters import NodeMetrics
from raftq.node.metrics.exposition import Exposition
from raftq.node.metrics.node_status import NodeFacts

logger = logging.getLogger(__name__)

UNMATCHED = "unmatched"
ANSWER_BYTES_FREE = 64 * 1024
"""Smaller answers are sent even when there is no room for them."""


class HttpServer:
    """REST, health and metrics of one node. Belongs to one event loop."""

    def __init__(
        self,
        facts: NodeFacts,
        clients: HttpClients,
        metrics: NodeMetrics,
        wall_ms: Callable[[], int],
        options: HttpOptions | None = None,
    ) -> None:
        self._options = options or HttpOptions()
        self._clients = clients
        self._metrics = metrics
        self._wall_ms = wall_ms
        self._node_id = facts.node_id
        self._number = 0
        self._budget = Budget(self._options.in_flight_max, self._options.in_flight_bytes_max)
        self.routes = self._routes(facts)
        self._dispatcher, self._known = make_dispatcher(self.routes)
        self._listener: HttpListener | None = None
        self._server: asyncio.Server | None = None

    def _routes(self, facts: NodeFacts) -> tuple[Route, ...]:
        version = metadata.version("raftq")
        context = Context(facts, self._clients, self._options)
        exposition = Exposition(facts, self._metrics, version)
        health = Health(context, exposition, version, facts.uptime_s)
        routes = (
            *health_routes(health),
            *topic_routes(TopicHandlers(context)),
            *record_routes(RecordHandlers(context)),
            *group_routes(GroupHandlers(context)),
            *receipt_routes(ReceiptHandlers(context)),
            *delayed_routes(DelayedHandlers(context)),
            *dead_routes(DeadHandlers(context)),
            *queue_stats_routes(QueueStatsHandlers(context)),
        )

        async def openapi(call: Call) -> HttpReply:
            return HttpReply(document)

        itself = Route(
            method="GET", path="/openapi.json", name="openapi", summary="This document",
            handler=openapi, answer={"type": "object", "additionalProperties": True},
        )  # fmt: skip
        document = openapi_document((*routes, itself), version)
        return (*routes, itself)

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def start(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        self._listener = HttpListener(self._handle, self._options)
        backlog = self._options.backlog
        self._server = await loop.create_server(self._listener, host, port, backlog=backlog)

    async def stop(self) -> None:
        """Take no more connections, let requests under way finish for a while, close the rest."""
        if self._server is not None and self._listener is not None:
            self._server.close()
            self._listener.pre_shutdown()
            await self._listener.shutdown(self._options.stop_ms / 1000)
            await self._server.wait_closed()
            self._server = None
        await self._clients.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """What every request goes through: its id, its share of the budget, errors, timing."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._number += 1
        self._metrics.http_in_flight += 1
        exchange = _Exchange(request, f"{self._node_id:x}-{self._number:x}")
        try:
            response = await self._respond(exchange)
            try:
                await self._write(request, response)
            except ConnectionError as error:
                logger.debug("the caller does not take its answer", extra={"problem": str(error)})
            self._metrics.answered(exchange.label, response.status, loop.time() - began)
            return response
        finally:
            self._metrics.http_in_flight -= 1
            if exchange.share is not None:
                exchange.share.close()

    async def _respond(self, exchange: "_Exchange") -> web.Response:
        """The answer, whatever happens."""
        try:
            exchange.share = Share(self._budget)
            reply = await self._serve(exchange)
            response = exchange.answer(reply)
            exchange.hold_answer(response)
            return response
        except (Refusal, RaftqError) as error:
            return exchange.refuse(error)
        except ConnectionError:
            raise
        except Exception:
            logger.exception(
                "an HTTP request failed",
                extra={"request_id": exchange.request_id, "route": exchange.label},
            )
            text = f"the node failed to handle the request; its log has {exchange.request_id}"
            return exchange.refuse(Refusal("INTERNAL", text, unknown=True))

    async def _serve(self, exchange: "_Exchange") -> HttpReply:
        """Find the route, read and check what it takes, and call its handler."""
        request = exchange.request
        match = await self._dispatcher.resolve(request)  # type: ignore[arg-type] # it takes any
        if match.http_exception is not None:
            raise _unmatched(match.http_exception)
        route = self._known[match.route]
        exchange.label = route.name
        if request.headers.get("Sec-Fetch-Site") == "cross-site" and not exchange.reads:
            # A page of another site must not make a browser change something here.
            raise Refusal("CROSS_ORIGIN", "requests of other sites' pages are refused")
        path = {name: PARAMETERS[name].read_text(name, given) for name, given in match.items()}
        query = (
            route.query.read(request.query) if request.query_string or route.query.fields else {}
        )
        body = None
        if route.body is not None:
            sent = await self._read_body(exchange)
            given = decode_body(sent, exchange.sent_msgpack) if sent or route.body.required else {}
            body = route.body.read(given)
        call = Call(path, query, body, exchange.binary, self._wall_ms(), exchange.gone)
        try:
            async with asyncio.timeout((self._options.request_ms + route.wait_ms) / 1000) as limit:
                return await route.handler(call)
        except TimeoutError:
            if limit.expired():
                text = "the cluster did not answer in time"
                raise Refusal("REQUEST_TIMEOUT", text, unknown=True) from None
            raise

    async def _read_body(self, exchange: "_Exchange") -> bytes:
        """The body, within its bounds of bytes and time."""
        request, share, most = exchange.request, exchange.share, self._options.body_bytes_max
        assert share is not None
        encoding = request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            text = f"content encoding {encoding[:40]!r} is not taken"
            raise Refusal("UNSUPPORTED_MEDIA_TYPE", text)
        parts: list[bytes] = []
        total = request.content_length or 0
        try:
            if total <= most:
                share.hold(total)
                total = 0
                async with asyncio.timeout(self._options.body_ms / 1000):
                    if "Expect" in request.headers:
                        await _invite(request)
                    async for part in request.content.iter_any():
                        total += len(part)
                        if total > most:
                            break
                        if total > share.bytes:
                            share.hold(total)
                        parts.append(part)
        except TimeoutError:
            raise Refusal("BODY_TIMEOUT", "the body did not come in time") from None
        except web.RequestPayloadError as error:
            raise Refusal("BAD_REQUEST", f"the body cannot be read: {error}") from None
        if total > most:
            raise Refusal("TOO_LARGE", f"the body is over the limit of {most} bytes")
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _write(self, request: web.BaseRequest, response: web.Response) -> None:
        """Write the answer and wait until the caller has taken it."""
        try:
            async with asyncio.timeout(self._options.write_ms / 1000):
                await response.prepare(request)
                await response.write_eof()
                await request.writer.drain()
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError("the caller does not read its answer") from None


class _Exchange:
    """One request and what is known about it so far."""

    __slots__ = ("binary", "label", "reads", "request", "request_id", "sent_msgpack", "share")

    def __init__(self, request: web.BaseRequest, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.label = UNMATCHED
        self.reads = request.method in (METH_GET, METH_HEAD)
        self.share: Share | None = None
        headers = request.headers
        content_type = headers.get("Content-Type", "").partition(";")[0]
        self.sent_msgpack = content_type.strip().lower() in MSGPACK_NAMES
        self.binary = wants_msgpack(headers.get("Accept", ""), self.sent_msgpack)

    def gone(self) -> bool:
        """Whether the caller has hung up."""
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def hold_answer(self, response: web.Response) -> None:
        """Count an answer until it is sent. One that only reads can be had again, and is dropped
        when there is no room; what tells of a change is sent in any case."""
        assert self.share is not None
        size = len(response.body) if isinstance(response.body, bytes) else 0
        try:
            self.share.hold(self.share.bytes + size)
        except Refusal:
            if self.reads and size > ANSWER_BYTES_FREE:
                raise

    def answer(self, reply: HttpReply) -> web.Response:
        body, content_type = reply.payload, reply.content_type
        if not content_type:
            content_type = MSGPACK if self.binary else JSON
            body = encode_msgpack(body) if self.binary else encode_json(body)
        headers = {
            "Content-Type": content_type,
            "X-Request-Id": self.request_id,
            "Server": "raftq",
            **reply.headers,
        }
        return web.Response(body=body, status=reply.status, headers=headers)

    def refuse(self, error: Refusal | RaftqError) -> web.Response:
        return self.answer(reply_with_error(error))


def _unmatched(problem: web.HTTPException) -> Refusal:
    if not isinstance(problem, web.HTTPMethodNotAllowed):
        return Refusal("NOT_FOUND", "nothing is served at this path")
    allowed = ", ".join(sorted(problem.allowed_methods - {METH_HEAD}))
    refusal = Refusal("METHOD_NOT_ALLOWED", f"this path takes {allowed}")
    refusal.headers["Allow"] = allowed
    return refusal


async def _invite(request: web.BaseRequest) -> None:
    """Let a caller that asks first send its body."""
    if request.headers["Expect"].lower() == "100-continue" and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        # Only the answer itself counts as output.
        request.writer.output_size = 0
