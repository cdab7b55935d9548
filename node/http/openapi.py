"""The OpenAPI document, made of the route table. (Pure.)"""

from http import HTTPStatus
from typing import Any

from raftq.node.http.bodies import JSON, MSGPACK
from raftq.node.http.fields import Field, schema_object
from raftq.node.http.kinds import Schema
from raftq.node.http.paths import PARAMETERS
from raftq.node.http.routes import Route

OPENAPI_VERSION = "3.1.0"
ERRORS_COMMON = (400, 405, 413, 429, 500)
ERRORS_RETRY = (429, 503)

ERROR_SCHEMA = schema_object(
    {
        "error": {"type": "string", "description": "a sentence for people"},
        "code": {"type": "string", "description": "a stable name for programs"},
        "retriable": {"type": "boolean"},
        "outcome": {
            "type": "string",
            "enum": ["unknown"],
            "description": "there when the request may have taken effect nevertheless",
        },
    },
    ("error", "code", "retriable"),
)
_DESCRIPTION = (
    "Every path is also served at the root. Durations are strings such as 1h30m or 250ms, times "
    "are RFC 3339 in UTC. application/msgpack is taken and given everywhere; keys, values and "
    "header values are binaries in it."
)


def openapi_document(routes: tuple[Route, ...], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    return {
        "openapi": OPENAPI_VERSION,
        "info": {"title": "RaftQ", "version": version, "description": _DESCRIPTION},
        "servers": [{"url": "/v1"}, {"url": "/"}],
        "paths": paths,
        "components": {"schemas": {"Error": ERROR_SCHEMA}},
    }


def _operation(route: Route) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "responses": _responses(route),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": PARAMETERS[name].schema()}
        for name in route.parameters
    ]
    parameters += [_query(one) for one in route.query.fields]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not None:
        content = _content(route.body.schema())
        operation["requestBody"] = {"required": route.body.required, "content": content}
    return operation


def _query(one: Field) -> dict[str, Any]:
    schema = one.kind.schema()
    if one.default is not None:
        schema["default"] = one.default
    parameter = {"name": one.name, "in": "query", "required": one.required, "schema": schema}
    return {**parameter, "description": one.description} if one.description else parameter


def _responses(route: Route) -> dict[str, Any]:
    if route.content_type:
        content: dict[str, Any] = {route.content_type.partition(";")[0]: {"schema": route.answer}}
    else:
        content = _content(route.answer)
    phrase = HTTPStatus(route.status).phrase
    responses: dict[str, Any] = {str(route.status): {"description": phrase, "content": content}}
    for status, schema in route.other.items():
        described = {"description": HTTPStatus(status).phrase, "content": _content(schema)}
        responses[str(status)] = described | _waiting(status)
    statuses = {*ERRORS_COMMON, *route.errors}
    if route.method != "GET":
        statuses |= {403}
    if route.body is not None:
        statuses |= {408, 415}
    for status in sorted(statuses):
        responses[str(status)] = _error(status)
    return responses


def _error(status: int) -> dict[str, Any]:
    response: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": _content({"$ref": "#/components/schemas/Error"}),
    }
    return response | _waiting(status)


def _waiting(status: int) -> dict[str, Any]:
    if status not in ERRORS_RETRY:
        return {}
    wait = {"description": "seconds", "schema": {"type": "integer"}}
    return {"headers": {"Retry-After": wait}}


def _content(schema: Schema) -> dict[str, Any]:
    return {JSON: {"schema": schema}, MSGPACK: {"schema": schema}}
