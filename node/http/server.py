"""The HTTP server of a node: from a request's head to the last byte of its answer. (Shell.)

Every request goes through `_handle`: find the route, read the body within its bounds, check it,
call the handler, write the answer. All of it is bounded in bytes and in time, and whatever goes
wrong is an answer as errors.py has it. An error nobody foresaw is logged with the request's id and
answered with INTERNAL; the caller gets the id, never a traceback.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib import metadata
from typing import Any

from aiohttp import web
from aiohttp.hdrs import METH_GET, METH_HEAD
from aiohttp.http import HttpVersion11

from raftq.client.common.errors import RaftqError
from raftq.node.http.bodies import (
    JSON,
    MSGPACK,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    is_msgpack,
    wants_msgpack,
)
from raftq.node.http.budget import Budget, Share
from raftq.node.http.clients import HttpClients
from raftq.node.http.context import Context
from raftq.node.http.dead import DeadHandlers, dead_routes
from raftq.node.http.delayed import DelayedHandlers, delayed_routes
from raftq.node.http.errors import Refusal, error_body, retry_after_s, status_of
from raftq.node.http.groups import GroupHandlers, group_routes
from raftq.node.http.health import Health, health_routes
from raftq.node.http.listener import HttpListener
from raftq.node.http.openapi import openapi_document
from raftq.node.http.options import HttpOptions
from raftq.node.http.paths import PARAMETERS
from raftq.node.http.queue_stats import QueueStatsHandlers, queue_stats_routes
from raftq.node.http.records import RecordHandlers, record_routes
from raftq.node.http.routes import Call, HttpReply, Route, Router
from raftq.node.http.settling import ReceiptHandlers, receipt_routes
from raftq.node.http.topics import TopicHandlers, topic_routes
from raftq.node.metrics.counters import NodeMetrics
from raftq.node.metrics.exposition import Exposition
from raftq.node.metrics.node_status import NodeFacts

logger = logging.getLogger(__name__)

UNMATCHED = "unmatched"
QUERY_FIELDS_MAX = 32
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
        self._router = Router(self._routes(facts))
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
    def routes(self) -> tuple[Route, ...]:
        return self._router.routes

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
        loop = asyncio.get_running_loop()
        began = loop.time()
        self._number += 1
        self._metrics.http_in_flight += 1
        exchange = _Exchange(request, f"{self._node_id:x}-{self._number:x}")
        try:
            response = await self._respond(exchange)
            try:
                await self._write(exchange, response)
            except ConnectionError as error:
                logger.debug("nobody takes an answer", extra={"problem": str(error)})
            self._metrics.answered(exchange.label, response.status, loop.time() - began)
            return response
        finally:
            self._metrics.http_in_flight -= 1
            if exchange.share is not None:
                exchange.share.close()

    async def _respond(self, exchange: "_Exchange") -> web.Response:
        """The answer, whatever happens."""
        try:
            exchange.share = self._budget.open()
            reply = await self._serve(exchange)
            body, content_type = exchange.encode(reply)
            exchange.hold(body)
            return exchange.answer(reply, body, content_type)
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
        request = exchange.request
        route, parts = self._router.find(request.method, request.rel_url.raw_path)
        exchange.label = route.name
        exchange.check_origin()
        path = {name: PARAMETERS[name].read_text(name, given) for name, given in parts.items()}
        query = route.query.read(exchange.query())
        body = None
        if route.body is not None:
            sent = await self._body(exchange)
            given = exchange.decode(sent) if sent or route.body.required else {}
            body = route.body.read(given)
        call = Call(path, query, body, exchange.binary, self._wall_ms(), exchange.gone)
        late = Refusal("REQUEST_TIMEOUT", "the cluster did not answer in time", unknown=True)
        async with _within(self._options.request_ms + route.wait_ms, late):
            return await route.handler(call)

    async def _body(self, exchange: "_Exchange") -> bytes:
        request, most = exchange.request, self._options.body_bytes_max
        exchange.check_encoding()
        length = request.content_length or 0
        if length > most:
            raise _too_large(most)
        assert exchange.share is not None
        exchange.share.hold(length)
        late = Refusal("BODY_TIMEOUT", "the body did not come in time")
        async with _within(self._options.body_ms, late):
            await exchange.invite()
            return await _read_body(request, exchange.share, most)

    async def _write(self, exchange: "_Exchange", response: web.Response) -> None:
        """Write the answer and wait until the caller has taken it."""
        request = exchange.request
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

    __slots__ = ("_content_msgpack", "binary", "label", "reads", "request", "request_id", "share")

    def __init__(self, request: web.BaseRequest, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.label = UNMATCHED
        self.reads = request.method in (METH_GET, METH_HEAD)
        self.share: Share | None = None
        self._content_msgpack = is_msgpack(request.headers.get("Content-Type", ""))
        self.binary = wants_msgpack(request.headers.get("Accept", ""), self._content_msgpack)

    def gone(self) -> bool:
        transport = self.request.transport
        return transport is None or transport.is_closing()

    def check_origin(self) -> None:
        """A page of another site must not make a browser change something here."""
        elsewhere = self.request.headers.get("Sec-Fetch-Site") == "cross-site"
        if elsewhere and not self.reads:
            raise Refusal("CROSS_ORIGIN", "requests of other sites' pages are refused")

    def hold(self, body: bytes) -> None:
        """Count an answer until it is sent. One that only reads can be had again, and is dropped
        when there is no room; what tells of a change is sent in any case."""
        assert self.share is not None
        try:
            self.share.hold(self.share.bytes + len(body))
        except Refusal:
            if self.reads and len(body) > ANSWER_BYTES_FREE:
                raise

    def check_encoding(self) -> None:
        encoding = self.request.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            text = f"content encoding {encoding[:40]!r} is not taken"
            raise Refusal("UNSUPPORTED_MEDIA_TYPE", text)

    def query(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for name, value in self.request.query.items():
            found.setdefault(name, []).append(value)
            if len(found) > QUERY_FIELDS_MAX:
                raise Refusal("BAD_REQUEST", "the query has too many fields")
        return found

    async def invite(self) -> None:
        """Tell a caller that asks first to send its body."""
        request = self.request
        expect = request.headers.get("Expect", "").lower()
        if expect == "100-continue" and request.version == HttpVersion11:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            # Only the answer itself counts as output.
            request.writer.output_size = 0

    def decode(self, body: bytes) -> Any:
        if not body:
            raise Refusal("BAD_REQUEST", "a body is required")
        return decode_msgpack(body) if self._content_msgpack else decode_json(body)

    def encode(self, reply: HttpReply) -> tuple[bytes, str]:
        if reply.content_type:
            return reply.payload, reply.content_type
        if self.binary:
            return encode_msgpack(reply.payload), MSGPACK
        return encode_json(reply.payload), JSON

    def answer(self, reply: HttpReply, body: bytes, content_type: str) -> web.Response:
        headers = {
            "Content-Type": content_type,
            "X-Request-Id": self.request_id,
            "Server": "raftq",
            **reply.headers,
        }
        return web.Response(body=body, status=reply.status, headers=headers)

    def refuse(self, error: Refusal | RaftqError) -> web.Response:
        reply = _refused(error)
        return self.answer(reply, *self.encode(reply))


def _refused(error: Refusal | RaftqError) -> HttpReply:
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers["Retry-After"] = str(wait_s)
    return HttpReply(error_body(error), status_of(error), headers=headers)


def _too_large(most: int) -> Refusal:
    return Refusal("TOO_LARGE", f"the body is over the limit of {most} bytes")


@asynccontextmanager
async def _within(limit_ms: int, late: Refusal) -> AsyncIterator[None]:
    """Give up with `late` when the time is over; a TimeoutError from inside stays one."""
    try:
        async with asyncio.timeout(limit_ms / 1000) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise late from None
        raise


async def _read_body(request: web.BaseRequest, share: Share, most: int) -> bytes:
    parts: list[bytes] = []
    total = 0
    try:
        async for part in request.content.iter_any():
            total += len(part)
            if total > most:
                raise _too_large(most)
            share.hold(total)
            parts.append(part)
    except web.RequestPayloadError as error:
        raise Refusal("BAD_REQUEST", f"the body cannot be read: {error}") from None
    return parts[0] if len(parts) == 1 else b"".join(parts)
