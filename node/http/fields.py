"""Fields of bodies, queries and paths: one declaration both checks and documents them. (Pure.)

A field that is wrong, missing or not known is an INVALID_ARGUMENT that names it. `null` means that
a field is not given. Defaults are written as a caller would write them. Messages to publish are
many and have a faster reader (messages.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from multidict import MultiMapping

from raftq.node.http.errors import Refusal, invalid
from raftq.node.http.kinds import Kind, Schema, kind_of, or_null, shown

QUERY_FIELDS_MAX = 32


@dataclass(frozen=True, slots=True)
class Field:
    """One field: its name, its kind, and what it is when nothing is given."""

    name: str
    kind: Kind
    description: str = ""
    required: bool = False
    default: Any = None

    def documented(self) -> Schema:
        """Its schema in a body."""
        schema = self.kind.schema()
        extra: Schema = {"description": self.description} if self.description else {}
        if self.default is not None:
            extra["default"] = self.default
        return {**(schema if self.required else or_null(schema)), **extra}

    def read(self, given: Any) -> Any:
        if given is None:
            return self._missing()
        return self.kind.read(self.name, given)

    def read_text(self, given: str | None) -> Any:
        if given is None:
            return self._missing()
        return self.kind.read_text(self.name, given)

    def _missing(self) -> Any:
        if self.required:
            raise invalid(self.name, "is required")
        return None if self.default is None else self.kind.read(self.name, self.default)


class Rule(Protocol):
    """What holds between fields of a body."""

    def schema(self) -> Schema: ...

    def check(self, body: Mapping[str, Any]) -> None: ...


def _given(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


@dataclass(frozen=True, slots=True)
class OneOf:
    """Exactly one of these fields is given."""

    names: tuple[str, ...]

    def schema(self) -> Schema:
        return {"oneOf": [_given(name) for name in self.names]}

    def check(self, body: Mapping[str, Any]) -> None:
        given = [name for name in self.names if body.get(name) is not None]
        if not given:
            raise invalid(self.names[0], "is required")
        if len(given) > 1:
            raise invalid(given[1], f"cannot be given together with {given[0]}")


@dataclass(frozen=True, slots=True)
class NotBoth:
    """At most one of two fields is given."""

    first: str
    second: str

    def schema(self) -> Schema:
        return {"not": {"allOf": [_given(self.first), _given(self.second)]}}

    def check(self, body: Mapping[str, Any]) -> None:
        if body.get(self.first) is not None and body.get(self.second) is not None:
            raise invalid(self.second, f"cannot be given together with {self.first}")


class Body(Protocol):
    """What a route takes: its schema, and how it is read."""

    @property
    def required(self) -> bool: ...

    def schema(self) -> Schema: ...

    def read(self, body: object) -> Any: ...


@dataclass(frozen=True, slots=True)
class Fields:
    """A body that is an object with these fields and no others."""

    fields: tuple[Field, ...]
    rules: tuple[Rule, ...] = ()

    @property
    def required(self) -> bool:
        """Whether a body has to be there at all; one that is not counts as {}."""
        return any(one.required for one in self.fields) or bool(self.rules)

    def schema(self) -> Schema:
        required = tuple(one.name for one in self.fields if one.required)
        schema = schema_object({one.name: one.documented() for one in self.fields}, required)
        schema["additionalProperties"] = False
        return {**schema, "allOf": [one.schema() for one in self.rules]} if self.rules else schema

    def read(self, body: object) -> dict[str, Any]:
        """The value of every field, defaults filled in."""
        if not isinstance(body, dict):
            raise Refusal("INVALID_ARGUMENT", f"the body must be an object, not {kind_of(body)}")
        known = {one.name for one in self.fields}
        unknown = [name for name in body if name not in known]
        if unknown:
            raise unknown_field(str(unknown[0]))
        for rule in self.rules:
            rule.check(body)
        return {one.name: one.read(body.get(one.name)) for one in self.fields}


@dataclass(frozen=True, slots=True)
class Query:
    """What may follow the question mark, each once."""

    fields: tuple[Field, ...] = ()
    rules: tuple[Rule, ...] = ()

    def read(self, query: MultiMapping[str]) -> dict[str, Any]:
        """The value of every field, defaults filled in."""
        if len(query) > QUERY_FIELDS_MAX:
            raise Refusal("BAD_REQUEST", "the query has too many fields")
        known = {one.name for one in self.fields}
        given: dict[str, str] = {}
        for name, value in query.items():
            if name not in known:
                raise unknown_field(name)
            if name in given:
                raise invalid(shown(name), "is given more than once")
            given[name] = value
        for rule in self.rules:
            rule.check(given)
        return {one.name: one.read_text(given.get(one.name)) for one in self.fields}


def unknown_field(name: str) -> Refusal:
    return invalid(shown(name), "is not a known field")


# ---- schemas of answers


STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
BOOLEAN: Schema = {"type": "boolean"}
TIME: Schema = {"type": "string", "format": "date-time"}


def schema_object(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return schema


def answer(properties: Mapping[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """Of an object that has all of these but, sometimes, the optional ones."""
    return schema_object(properties, tuple(name for name in properties if name not in optional))


def array_of(schema: Schema) -> Schema:
    return {"type": "array", "items": schema}


def map_of(schema: Schema) -> Schema:
    return {"type": "object", "additionalProperties": schema}
