"""The table of everything that is served, and how a path finds its row. (Pure.)

A route says what it takes and what it answers; the server checks requests by it and the OpenAPI
document is made of it, so neither can know a path, a field or a limit that the other does not.
Every path is served under `/v1` and at the root.
"""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from raftq.node.http.errors import Refusal
from raftq.node.http.fields import Body, Query
from raftq.node.http.kinds import Schema

VERSION_PREFIX = "v1"
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


Handler = Callable[[Call], Awaitable[HttpReply]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
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


class Router:
    """Finds routes by method and path."""

    def __init__(self, routes: tuple[Route, ...]) -> None:
        self.routes = routes
        self._plain: dict[tuple[str, ...], dict[str, Route]] = {}
        self._patterns: list[tuple[tuple[str, ...], dict[str, Route]]] = []
        for route in routes:
            self._add(route)

    def _add(self, route: Route) -> None:
        parts = tuple(route.path.strip("/").split("/"))
        if not route.parameters:
            methods = self._plain.setdefault(parts, {})
        else:
            found = [methods for pattern, methods in self._patterns if pattern == parts]
            methods = found[0] if found else {}
            if not found:
                self._patterns.append((parts, methods))
        assert route.method not in methods, f"{route.method} {route.path} is there twice"
        methods[route.method] = route

    def find(self, method: str, raw_path: str) -> tuple[Route, dict[str, str]]:
        """The route and the parameters of its path; a Refusal when there is none."""
        parts = tuple(raw_path[1:].split("/"))
        if parts[0] == VERSION_PREFIX:
            parts = parts[1:]
        methods, parameters = self._match(parts)
        if methods is None:
            raise Refusal("NOT_FOUND", "nothing is served at this path")
        route = methods.get("GET" if method == "HEAD" else method)
        if route is None:
            allowed = ", ".join(sorted(methods))
            refusal = Refusal("METHOD_NOT_ALLOWED", f"this path takes {allowed}")
            refusal.headers["Allow"] = allowed
            raise refusal
        return route, parameters

    def _match(self, parts: tuple[str, ...]) -> tuple[Mapping[str, Route] | None, dict[str, str]]:
        methods = self._plain.get(parts)
        if methods is not None:
            return methods, {}
        for pattern, methods in self._patterns:
            if len(pattern) == len(parts):
                found = _parameters(pattern, parts)
                if found is not None:
                    return methods, found
        return None, {}


def _parameters(pattern: tuple[str, ...], parts: tuple[str, ...]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for wanted, part in zip(pattern, parts, strict=True):
        if wanted.startswith("{"):
            if not part:
                return None
            found[wanted[1:-1]] = unquote(part)
        elif wanted != part:
            return None
    return found
