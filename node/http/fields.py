"""Fields of bodies and queries: one description both checks them and documents them. (Pure.)

A field that is wrong, missing or not known is an INVALID_ARGUMENT that names it. `null` means that
a field is not given. Messages to publish are many and have a faster reader (messages.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from raftq.client.wire.errors import Detail
from raftq.node.http.errors import Refusal, invalid
from raftq.node.http.values import parse_time

Schema = dict[str, Any]
Reader = Callable[[str, Any], Any]

NAME_CHARACTERS_MAX = 255
TEXT_CHARACTERS_MAX = 4096
SETTINGS_MAX = 64
SHOWN_CHARACTERS_MAX = 60


@dataclass(frozen=True, slots=True)
class Field:
    """`read` takes the field's name and what was given, and returns what it means."""

    name: str
    schema: Schema
    read: Reader
    description: str = ""
    required: bool = False
    default: Any = None

    def documented(self) -> Schema:
        extra: Schema = {"description": self.description} if self.description else {}
        if self.default is not None:
            extra["default"] = self.default
        return {**self.schema, **extra}


def read_body(spec: tuple[Field, ...], body: object) -> dict[str, Any]:
    """The value of every field of the spec, defaults filled in."""
    if not isinstance(body, dict):
        raise Refusal("INVALID_ARGUMENT", f"the body must be an object, not {kind_of(body)}")
    known = {one.name for one in spec}
    unknown = [name for name in body if name not in known]
    if unknown:
        raise unknown_field(str(unknown[0]))
    return {one.name: _read(one, body.get(one.name)) for one in spec}


def read_query(spec: tuple[Field, ...], query: Mapping[str, list[str]]) -> dict[str, Any]:
    """The same for what follows the question mark, where everything is text and given once."""
    known = {one.name for one in spec}
    for name, values in query.items():
        if name not in known:
            raise unknown_field(name)
        if len(values) > 1:
            raise invalid(shown(name), "is given more than once")
    return {one.name: _read(one, query.get(one.name, [None])[0]) for one in spec}


def _read(one: Field, given: Any) -> Any:
    if given is None:
        if one.required:
            raise invalid(one.name, "is required")
        return one.default
    return one.read(one.name, given)


def unknown_field(name: str) -> Refusal:
    return invalid(shown(name), "is not a known field")


def shown(name: str) -> str:
    return name if len(name) <= SHOWN_CHARACTERS_MAX else name[:SHOWN_CHARACTERS_MAX] + "..."


def kind_of(value: object) -> str:
    """What JSON calls it."""
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    names |= {int: "a number", float: "a number", type(None): "null", bytes: "bytes"}
    return names.get(type(value), type(value).__name__)


# ---- readers of bodies


def whole(low: int, high: int) -> Reader:
    def read(name: str, given: Any) -> int:
        if type(given) is not int:
            raise invalid(name, f"must be a whole number, not {kind_of(given)}")
        if not low <= given <= high:
            raise invalid(name, f"must be in {low}..{high}")
        return given

    return read


def number(low: float, high: float) -> Reader:
    def read(name: str, given: Any) -> float:
        if type(given) not in (int, float):
            raise invalid(name, f"must be a number, not {kind_of(given)}")
        if not low <= given <= high:
            raise invalid(name, f"must be in {low}..{high}")
        value: float = given
        return value

    return read


def text(characters_max: int = TEXT_CHARACTERS_MAX) -> Reader:
    def read(name: str, given: Any) -> str:
        if not isinstance(given, str):
            raise invalid(name, f"must be a string, not {kind_of(given)}")
        if not 0 < len(given) <= characters_max:
            raise invalid(name, f"must have 1 to {characters_max} characters")
        if not encodable(given):
            raise invalid(name, "is not valid text")
        return given

    return read


def encodable(given: str) -> bool:
    """JSON can name halves of characters, which no text is made of."""
    try:
        given.encode()
    except UnicodeEncodeError:
        return False
    return True


def settings(name: str, given: Any) -> dict[str, Detail]:
    """Names with plain values, as they go over the wire."""
    if not isinstance(given, dict):
        raise invalid(name, f"must be an object, not {kind_of(given)}")
    if len(given) > SETTINGS_MAX:
        raise invalid(name, f"must have at most {SETTINGS_MAX} settings")
    read_name, read_text = text(NAME_CHARACTERS_MAX), text()
    found: dict[str, Detail] = {}
    for key, value in given.items():
        place = f"{name}.{shown(read_name(name, key))}"
        if isinstance(value, str):
            found[key] = read_text(place, value)
        elif type(value) is int:
            found[key] = whole(-(1 << 63), (1 << 63) - 1)(place, value)
        elif value is None or type(value) is bool:
            found[key] = value
        else:
            raise invalid(place, f"must be a string, whole number or boolean, not {kind_of(value)}")
    return found


# ---- readers of queries


def query_whole(low: int, high: int) -> Reader:
    def read(name: str, given: str) -> int:
        if not given.isascii() or not given.isdigit() or len(given) > 19:
            raise invalid(name, f"must be a whole number in {low}..{high}")
        value = int(given)
        if not low <= value <= high:
            raise invalid(name, f"must be in {low}..{high}")
        return value

    return read


def query_flag(name: str, given: str) -> bool:
    """`?verbose` and `?verbose=` mean yes."""
    flags = {
        "": True,
        "1": True,
        "true": True,
        "yes": True,
        "0": False,
        "false": False,
        "no": False,
    }
    found = flags.get(given.lower())
    if found is None:
        raise invalid(name, "must be true or false")
    return found


def query_time(name: str, given: str) -> int:
    try:
        return parse_time(given)
    except ValueError as error:
        raise invalid(name, str(error)) from None


# ---- schemas


def schema_object(properties: Mapping[str, Schema], required: tuple[str, ...] = ()) -> Schema:
    schema: Schema = {"type": "object", "properties": dict(properties)}
    if required:
        schema["required"] = list(required)
    return schema


def schema_of(spec: tuple[Field, ...]) -> Schema:
    """Of a body that has these fields and no others."""
    required = tuple(one.name for one in spec if one.required)
    schema = schema_object({one.name: one.documented() for one in spec}, required)
    return {**schema, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Shape:
    """A body that is read elsewhere, with its schema."""

    schema: Schema = field(default_factory=dict)
