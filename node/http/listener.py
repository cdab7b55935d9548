"""aiohttp's connections with our limits and our errors. (Shell.)

aiohttp parses HTTP and bounds heads, pipelining and idle connections. Added here: a bound on the
number of connections, and JSON instead of HTML for what is no HTTP.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from raftq.node.http.bodies import JSON, encode_json
from raftq.node.http.errors import Refusal, error_body
from raftq.node.http.options import HttpOptions

logger = logging.getLogger(__name__)

HEAD_LINE_BYTES_MAX = 8190
HEAD_LINES_MAX = 100
PROBLEM_CHARACTERS_MAX = 200

RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class HttpConnection(web.RequestHandler):
    """One connection."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Of requests that never reached a handler: bytes that are no HTTP, or our own mistake."""
        if status == 400:
            logger.debug("not HTTP", extra={"peer": request.remote, "problem": message})
            problem = " ".join(str(message or exc).split())[:PROBLEM_CHARACTERS_MAX]
            refusal = Refusal("BAD_REQUEST", f"not a valid HTTP request: {problem}")
        else:
            logger.error("an HTTP request failed outside its handler", exc_info=exc)
            refusal = Refusal("INTERNAL", "the node failed to handle the request")
        if request.writer.output_size > 0:
            raise ConnectionResetError("an answer is under way already")
        body = encode_json(error_body(refusal))
        response = web.Response(body=body, status=refusal.status, content_type=JSON)
        response.force_close()
        return response


class HttpListener(web.Server):
    """Makes connections, counts them, and closes new ones beyond the limit."""

    def __init__(self, handler: RequestHandler, options: HttpOptions) -> None:
        self._settings = {
            "keepalive_timeout": options.idle_ms / 1000,
            "lingering_time": options.linger_ms / 1000,
            "access_log": None,
            "auto_decompress": False,  # a small body can be a huge one, packed
            "max_line_size": HEAD_LINE_BYTES_MAX,
            "max_field_size": HEAD_LINE_BYTES_MAX,
            "max_headers": HEAD_LINES_MAX,
            "logger": logger,
        }
        super().__init__(handler)
        self._connections_max = options.connections_max
        self.refused = 0

    def __call__(self) -> HttpConnection:
        loop = asyncio.get_running_loop()
        return HttpConnection(self, loop=loop, **self._settings)  # type: ignore[arg-type]

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if len(self.connections) > self._connections_max:
            self.refused += 1
            transport.abort()
