"""The table of everything that is served, and aiohttp's router over it. (Pure.)

A route says what it takes and what it answers; the server checks requests by it and the OpenAPI
document is made of it, so neither can know a path, a field or a limit that the other does not.
Every path is served under `/v1` and at the root.
"""

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from raftq.client.common.errors import RaftqError
from raftq.node.http.errors import Refusal, error_body, retry_after_s, status_of
from raftq.node.http.fields import Body, Query
from raftq.node.http.kinds import Schema

VERSION_PREFIX = "/v1"
NO_QUERY = Query()


@dataclass(slots=True)
class Call:
    """A request whose path, query and body are checked, and read as what they mean."""

    path: dict[str, Any]
    query: dict[str, Any]
    body: Any
    binary: bool
    """Whether the answer goes out as msgpack."""
    now_ms: int
    gone: Callable[[], bool] = bool
    """Whether the caller has hung up."""


@dataclass(slots=True)
class HttpReply:
    """What to answer. With a `content_type` the payload is bytes and goes out as it is."""

    payload: Any
    status: int = 200
    content_type: str = ""
    headers: dict[str, str] = field(default_factory=dict)


def reply_with_error(error: RaftqError | Refusal, **more: Any) -> HttpReply:
    headers = dict(error.headers) if isinstance(error, Refusal) else {}
    wait_s = retry_after_s(error)
    if wait_s is not None:
        headers["Retry-After"] = str(wait_s)
    return HttpReply({**error_body(error), **more}, status_of(error), headers=headers)


def reply_with_results(results: list[dict[str, Any]], failed: list[RaftqError]) -> HttpReply:
    """200 when at least one of them succeeded; otherwise the status of the first error."""
    if len(failed) < len(results):
        return HttpReply({"results": results})
    return reply_with_error(failed[0], results=results)


Handler = Callable[[Call], Awaitable[HttpReply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One method at one path: what it takes, what it answers, and who handles it."""

    method: str
    path: str
    """Segments in braces are parameters."""
    name: str
    """Of the operation; also its label in metrics."""
    summary: str
    handler: Handler
    answer: Schema
    query: Query = NO_QUERY
    body: Body | None = None
    status: int = 200
    other: Mapping[int, Schema] = field(default_factory=dict)
    """Answers with another status that are no errors of the usual shape."""
    errors: tuple[int, ...] = ()
    """Statuses that it may answer besides 400, 413, 429 and 500."""
    content_type: str = ""
    """Of an answer that is neither JSON nor msgpack."""
    wait_ms: int = 0
    """For how long it may wait for something to happen, on top of its work."""

    @property
    def parameters(self) -> list[str]:
        return [part[1:-1] for part in self.path.split("/") if part.startswith("{")]


def make_dispatcher(routes: tuple[Route, ...]) -> tuple[web.UrlDispatcher, dict[object, Route]]:
    """aiohttp's router with all of them, each at the root and under its version, and the route
    behind each of its own."""
    dispatcher = web.UrlDispatcher()
    known: dict[object, Route] = {}
    for route in routes:
        path = re.sub(r"{(\w+)}", r"{\1:[^/]+}", route.path)
        methods = ("GET", "HEAD") if route.method == "GET" else (route.method,)
        for prefix in ("", VERSION_PREFIX):
            for method in methods:
                known[dispatcher.add_route(method, prefix + path, _served)] = route
    return dispatcher, known


async def _served(request: web.Request) -> web.StreamResponse:
    """A route of aiohttp needs a handler; this one is not called, as the server calls its own."""
    raise AssertionError("the server calls the handler of its route")
