"""Kinds of values: each checks what callers send and documents it, from the same limits. (Pure.)

A kind has a JSON schema and two readers: `read` for a value of a body, `read_text` for what stands
in a path or a query, where everything is text. A reader returns what the value means, or refuses it
with an INVALID_ARGUMENT that names the place.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from raftq.node.http.errors import invalid
from raftq.node.http.values import (
    DURATION_CHARACTERS_MAX,
    DURATION_MS_MAX,
    DURATION_PATTERN,
    format_duration,
    parse_duration,
    parse_time,
)

Schema = dict[str, Any]

NAME_CHARACTERS_MAX = 249
TEXT_CHARACTERS_MAX = 4096
SHOWN_CHARACTERS_MAX = 60
INTEGER_MAX = (1 << 63) - 1
DURATION_FORMAT = "raftq-duration"
EXAMPLE_MS = 10_000
_WHOLE_CHARACTERS_MAX = 20


def shown(name: str) -> str:
    return name if len(name) <= SHOWN_CHARACTERS_MAX else name[:SHOWN_CHARACTERS_MAX] + "..."


def kind_of(value: object) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


def encodable(given: str) -> bool:
    """JSON can name halves of characters, which no text is made of."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


class Kind:
    """Base of all kinds."""

    def schema(self) -> Schema:
        raise NotImplementedError

    def read(self, path: str, given: Any) -> Any:
        raise NotImplementedError

    def read_text(self, path: str, given: str) -> Any:
        return self.read(path, given)


@dataclass(frozen=True, slots=True)
class Whole(Kind):
    """A whole number, both ends included. JSON has one kind of numbers: 5.0 is whole, too."""

    low: int
    high: int

    def schema(self) -> Schema:
        return {"type": "integer", "minimum": self.low, "maximum": self.high}

    def read(self, path: str, given: Any) -> int:
        if type(given) is float and given.is_integer():
            given = int(given)
        if type(given) is not int:
            what = "a fraction" if type(given) is float else kind_of(given)
            raise invalid(path, f"must be a whole number, not {what}")
        if not self.low <= given <= self.high:
            raise invalid(path, f"must be in {self.low}..{self.high}")
        return given

    def read_text(self, path: str, given: str) -> int:
        digits = given[1:] if given.startswith("-") else given
        if not digits.isascii() or not digits.isdigit() or len(given) > _WHOLE_CHARACTERS_MAX:
            raise invalid(path, f"must be a whole number in {self.low}..{self.high}")
        return self.read(path, int(given))


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number, both ends included."""

    low: float
    high: float

    def schema(self) -> Schema:
        return {"type": "number", "minimum": self.low, "maximum": self.high}

    def read(self, path: str, given: Any) -> float:
        if type(given) not in (int, float):
            raise invalid(path, f"must be a number, not {kind_of(given)}")
        if not self.low <= given <= self.high:
            raise invalid(path, f"must be in {self.low}..{self.high}")
        value: float = given
        return value


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text of some characters; `pattern` has to match all of it."""

    most: int = TEXT_CHARACTERS_MAX
    pattern: str = ""
    least: int = 1

    def schema(self) -> Schema:
        schema: Schema = {"type": "string", "minLength": self.least, "maxLength": self.most}
        return {**schema, "pattern": f"^{self.pattern}$"} if self.pattern else schema

    def read(self, path: str, given: Any) -> str:
        if not isinstance(given, str):
            raise invalid(path, f"must be a string, not {kind_of(given)}")
        if not self.least <= len(given) <= self.most:
            raise invalid(path, f"must have {self.least} to {self.most} characters")
        if not given.isascii() and not encodable(given):
            raise invalid(path, "is not valid text")
        if self.pattern and not re.fullmatch(self.pattern, given, re.ASCII):
            raise invalid(path, f"must match {self.pattern}")
        return given

    read_text = read


@dataclass(frozen=True, slots=True)
class Choice(Kind):
    """One of some words."""

    words: tuple[str, ...]

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(self.words)}

    def read(self, path: str, given: Any) -> str:
        if not isinstance(given, str) or given not in self.words:
            raise invalid(path, f"must be one of {', '.join(self.words)}")
        return given


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """Yes or no. In a query `?verbose` and `?verbose=` mean yes."""

    def schema(self) -> Schema:
        words = [word for word in _FLAGS if word not in ("true", "false")]
        return {"anyOf": [{"type": "boolean"}, {"type": "string", "enum": words}]}

    def read(self, path: str, given: Any) -> bool:
        if type(given) is bool:
            return given
        found = _FLAGS.get(given) if isinstance(given, str) else None
        if found is None:
            raise invalid(path, "must be true or false")
        return found


_FLAGS = {
    "": True, "1": True, "true": True, "True": True, "yes": True,
    "0": False, "false": False, "False": False, "no": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Duration(Kind):
    """A string such as "1h30m"; means milliseconds."""

    least_ms: int = 0
    most_ms: int = DURATION_MS_MAX

    def schema(self) -> Schema:
        return {
            "type": "string",
            "format": DURATION_FORMAT,
            "pattern": f"^({DURATION_PATTERN}|0)$",
            "maxLength": DURATION_CHARACTERS_MAX,
            "example": format_duration(min(max(EXAMPLE_MS, self.least_ms), self.most_ms) / 1000),
        }

    def read(self, path: str, given: Any) -> int:
        ms: int = parsed(parse_duration, given, path)
        if ms < self.least_ms:
            raise invalid(path, f"must be at least {self.least_ms}ms")
        if ms > self.most_ms:
            raise invalid(path, f"must be at most {self.most_ms}ms")
        return ms


@dataclass(frozen=True, slots=True)
class Time(Kind):
    """A time of RFC 3339; means milliseconds since 1970."""

    def schema(self) -> Schema:
        return {"type": "string", "format": "date-time"}

    def read(self, path: str, given: Any) -> int:
        ms: int = parsed(parse_time, given, path)
        return ms


@dataclass(frozen=True, slots=True)
class Listed(Kind):
    """An array of one kind."""

    each: Kind
    most: int
    least: int = 1

    def schema(self) -> Schema:
        items = self.each.schema()
        return {"type": "array", "items": items, "minItems": self.least, "maxItems": self.most}

    def read(self, path: str, given: Any) -> list[Any]:
        if not isinstance(given, list):
            raise invalid(path, f"must be an array, not {kind_of(given)}")
        if not self.least <= len(given) <= self.most:
            raise invalid(path, f"must have {self.least} to {self.most} items")
        return [self.each.read(f"{path}[{at}]", one) for at, one in enumerate(given)]


@dataclass(frozen=True, slots=True)
class Table(Kind):
    """An object with any names of one kind, and values of another."""

    names: Kind
    each: Kind
    most: int
    least: int = 1

    def schema(self) -> Schema:
        return {
            "type": "object",
            "propertyNames": _as_text(self.names.schema()),
            "additionalProperties": self.each.schema(),
            "minProperties": self.least,
            "maxProperties": self.most,
        }

    def read(self, path: str, given: Any) -> dict[Any, Any]:
        if not isinstance(given, dict):
            raise invalid(path, f"must be an object, not {kind_of(given)}")
        if not self.least <= len(given) <= self.most:
            raise invalid(path, f"must have {self.least} to {self.most} fields")
        found: dict[Any, Any] = {}
        for name, value in given.items():
            if not isinstance(name, str):
                raise invalid(path, "names must be strings")
            key = self.names.read_text(f"{path}.{shown(name)}", name)
            if key in found:
                raise invalid(f"{path}.{shown(name)}", "is there twice")
            found[key] = self.each.read(f"{path}.{shown(name)}", value)
        return found


def _as_text(schema: Schema) -> Schema:
    """Of names, which are always text: that of a number is its digits."""
    if schema.get("type") != "integer":
        return schema
    return {"type": "string", "pattern": f"^[0-9]{{1,{len(str(schema['maximum'])) - 1}}}$"}


@dataclass(frozen=True, slots=True)
class Limit(Kind):
    """A whole number, or -1 for none."""

    number: Whole

    def schema(self) -> Schema:
        return {"anyOf": [self.number.schema(), {"const": -1}]}

    def read(self, path: str, given: Any) -> int:
        return -1 if type(given) in (int, float) and given == -1 else self.number.read(path, given)


@dataclass(frozen=True, slots=True)
class Named(Kind):
    """An object of which some names are known, each with its kind; null is the default."""

    kinds: Mapping[str, Kind]

    def schema(self) -> Schema:
        return {
            "type": "object",
            "properties": {name: or_null(kind.schema()) for name, kind in self.kinds.items()},
            "additionalProperties": False,
        }

    def read(self, path: str, given: Any) -> dict[str, Any]:
        if not isinstance(given, dict):
            raise invalid(path, f"must be an object, not {kind_of(given)}")
        found: dict[str, Any] = {}
        for name, value in given.items():
            kind = self.kinds.get(name) if isinstance(name, str) else None
            where = f"{path}.{shown(str(name))}"
            if kind is None:
                raise invalid(where, "is not a known setting")
            found[name] = None if value is None else kind.read(where, value)
        return found


def parsed(parse: Callable[[str], Any], given: Any, path: str) -> Any:
    if type(given) is not str:
        raise invalid(path, f"must be a string, not {kind_of(given)}")
    try:
        return parse(given)
    except ValueError as error:
        raise invalid(path, str(error)) from None
