"""Messages of REST to records and back. (Pure.)

A thousand messages come in one request, so there are no objects per message: they become columns
(`Outgoing`), and records become dicts that are encoded at once. What is wrong with any message is
refused for the whole request before anything is published, and named like `messages[3].key`.

    encoding, key_encoding, headers_encoding    "base64" for the value, the key, all header values

In JSON, bytes that are UTF-8 are text and others base64 with the encoding named; in msgpack they
are always binaries, and both binaries and texts are taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raftq.client.common.errors import TooLarge
from raftq.client.common.names import LANE_NAMES
from raftq.client.common.types import Times
from raftq.client.queue.leased import LeasedRecord
from raftq.client.results import Record
from raftq.client.wire.layout import LANE_NORMAL
from raftq.client.wire.record import (
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Headers,
)
from raftq.node.http.errors import Refusal, invalid
from raftq.node.http.fields import INTEGER, STRING, TIME, NotBoth, answer, unknown_field
from raftq.node.http.kinds import (
    Choice,
    Duration,
    Kind,
    Schema,
    Time,
    Whole,
    encodable,
    kind_of,
    or_null,
    parsed,
    shown,
)
from raftq.node.http.paths import PARTITION
from raftq.node.http.values import (
    DURATION_MS_MAX,
    format_base64,
    format_time,
    parse_base64,
)

Readable = Record | LeasedRecord


_NUMBERS = {name: number for number, name in enumerate(LANE_NAMES)}
_NUMBERS |= {name.upper(): number for name, number in _NUMBERS.items()}
_PLAIN = frozenset({"key", "value"})
_HEADERS: Schema = {"type": "object", "additionalProperties": STRING}
_ENCODING: Schema = {"type": "string", "enum": ["text", "base64"]}
PRIORITY_NAME: Schema = {"type": "string", "enum": list(LANE_NAMES)}


class Priority(Kind):
    """A lane by name or number."""

    _number = Whole(0, len(LANE_NAMES) - 1)

    def schema(self) -> Schema:
        name = {"type": "string", "enum": list(_NUMBERS)}
        return {"anyOf": [name, self._number.schema()], "default": "normal"}

    def read(self, path: str, given: Any) -> int:
        if type(given) in (int, float):
            return self._number.read(path, given)
        number = _NUMBERS.get(given) if type(given) is str else None
        if number is None:
            raise invalid(path, f"must be one of {', '.join(LANE_NAMES)}, or 0..4")
        return number


# What a message may have besides what depends on an encoding; the column it goes to.
_COLUMNS: dict[str, tuple[Kind, str]] = {
    "partition": (PARTITION, "partitions"),
    "priority": (Priority(), "priorities"),
    "ttl": (Duration(1), "ttls_ms"),
    "delay": (Duration(), "delays_ms"),
    "deliverAt": (Time(), "deliver_at"),
}
_ENCODED = Choice(("text", "base64"))
_NOT_BOTH = NotBoth("delay", "deliverAt")

MESSAGE_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["value"],
    "properties": {
        "key": or_null(STRING),
        "value": STRING,
        "encoding": {**or_null(_ENCODED.schema()), "description": "of the value"},
        "key_encoding": or_null(_ENCODED.schema()),
        "headers": or_null(_HEADERS),
        "headers_encoding": {
            **or_null(_ENCODED.schema()),
            "description": "of the headers' values",
        },
        **{name: or_null(kind.schema()) for name, (kind, _) in _COLUMNS.items()},
    },
    "allOf": [_NOT_BOTH.schema()],
}
RECORD = {
    "offset": INTEGER,
    "timestamp": TIME,
    "key": or_null(STRING),
    "value": STRING,
    "encoding": _ENCODING,
    "key_encoding": _ENCODING,
    "priority": PRIORITY_NAME,
    "headers": _HEADERS,
    "headers_encoding": _ENCODING,
}
RECORD_SOMETIMES = ("encoding", "key_encoding", "headers_encoding")
RECORD_SCHEMA = answer(RECORD, RECORD_SOMETIMES)
KNOWN = frozenset(MESSAGE_SCHEMA["properties"])


@dataclass(slots=True)
class Outgoing:
    """Records to publish, as columns of equal length; a column that nobody uses is None."""

    values: list[bytes]
    keys: list[bytes | None] | None = None
    headers: list[Headers | None] | None = None
    partitions: list[int | None] | None = None
    priorities: list[int] | None = None
    ttls_ms: list[int | None] | None = None
    delays_ms: list[int | None] | None = None
    deliver_at: list[int | None] | None = None
    """Times in ms."""
    many: bool = field(default=False, compare=False)
    """Whether they came as `messages`, which is how errors name them."""

    def path(self, at: int, name: str) -> str:
        return f"messages[{at}].{name}" if self.many else name

    def times(self, now_ms: int) -> list[Times] | None:
        """When each record is due and when it ends; a record that is due already is not delayed."""
        if self.delays_ms is self.deliver_at is self.ttls_ms is None:
            return None
        nothing: list[int | None] = [None] * len(self.values)
        times: list[Times] = []
        rows = zip(
            self.delays_ms or nothing, self.deliver_at or nothing, self.ttls_ms or nothing,
            strict=True,
        )  # fmt: skip
        for at, (delay, due, ttl) in enumerate(rows):
            if due is not None and due - now_ms > DURATION_MS_MAX:
                raise invalid(self.path(at, "deliverAt"), "is more than 100 years away")
            due_ms = now_ms + delay if delay is not None else due or 0
            due_ms = due_ms if due_ms > now_ms else 0
            times.append((due_ms, 0 if ttl is None else (due_ms or now_ms) + ttl))
        return times


@dataclass(frozen=True, slots=True)
class Messages:
    """A body with `messages`, or one that is a message itself."""

    messages_max: int
    required: bool = True

    def schema(self) -> Schema:
        many = {"type": "array", "items": MESSAGE_SCHEMA, "minItems": 1}
        several: Schema = {
            "type": "object",
            "properties": {"messages": {**many, "maxItems": self.messages_max}},
            "required": ["messages"],
            "additionalProperties": False,
        }
        return {"oneOf": [several, MESSAGE_SCHEMA]}

    def read(self, body: object) -> Outgoing:
        """The columns."""
        if not isinstance(body, dict):
            raise Refusal("INVALID_ARGUMENT", f"the body must be an object, not {kind_of(body)}")
        if "messages" not in body:
            columns = _Columns(many=False)
            columns.take(0, body, "")
            return columns.done()
        if len(body) > 1:
            raise unknown_field(str(next(name for name in body if name != "messages")))
        messages = body["messages"]
        if not isinstance(messages, list):
            raise invalid("messages", f"must be an array, not {kind_of(messages)}")
        if not messages:
            raise invalid("messages", "must have at least one message")
        if len(messages) > self.messages_max:
            raise Refusal("TOO_LARGE", f"messages: more than {self.messages_max} in one request")
        columns = _Columns(many=True)
        for at, message in enumerate(messages):
            if type(message) is not dict:
                raise invalid(f"messages[{at}]", f"must be an object, not {kind_of(message)}")
            columns.take(at, message, f"messages[{at}].")
        return columns.done()


class _Columns:
    """Collects columns; one that is not plain begins with the first message that has it."""

    __slots__ = ("_extra", "_keyed", "_keys", "_many", "_values")

    def __init__(self, many: bool) -> None:
        self._many = many
        self._values: list[bytes] = []
        self._keys: list[bytes | None] = []
        self._keyed = False
        self._extra: dict[str, dict[int, Any]] = {}

    def take(self, at: int, message: dict[Any, Any], path: str) -> None:
        plain = message.keys() <= _PLAIN
        if not plain and not message.keys() <= KNOWN:
            unknown = next(name for name in message if name not in KNOWN)
            raise unknown_field(path + shown(str(unknown)))
        given = message.get("value")
        if given is None:
            raise invalid(f"{path}value", "is required")
        base64 = False if plain else _encoding(message, "encoding", path)
        value = _bytes(given, base64, path, "value")
        if len(value) > VALUE_BYTES_MAX:
            raise TooLarge(f"{path}value: {len(value)} bytes, at most {VALUE_BYTES_MAX}")
        self._values.append(value)
        key = message.get("key")
        if key is not None:
            base64 = False if plain else _encoding(message, "key_encoding", path)
            key = _bytes(key, base64, path, "key")
            if len(key) > KEY_BYTES_MAX:
                raise TooLarge(f"{path}key: {len(key)} bytes, at most {KEY_BYTES_MAX}")
            self._keyed = True
        self._keys.append(key)
        if not plain:
            self._take_rest(at, message, path)

    def _take_rest(self, at: int, message: dict[Any, Any], path: str) -> None:
        extra = self._extra
        base64 = _encoding(message, "headers_encoding", path)
        if (headers := message.get("headers")) is not None:
            extra.setdefault("headers", {})[at] = _headers(headers, base64, path)
        for name, (kind, column) in _COLUMNS.items():
            if (given := message.get(name)) is not None:
                extra.setdefault(column, {})[at] = kind.read(path + name, given)
        if message.get("delay") is not None and message.get("deliverAt") is not None:
            raise invalid(f"{path}deliverAt", "cannot be given together with delay")

    def done(self) -> Outgoing:
        columns = Outgoing(self._values, self._keys if self._keyed else None, many=self._many)
        count = len(self._values)
        for name, found in self._extra.items():
            missing = LANE_NORMAL if name == "priorities" else None
            setattr(columns, name, [found.get(at, missing) for at in range(count)])
        return columns


def _encoding(message: dict[Any, Any], name: str, path: str) -> bool:
    """Whether it is base64."""
    given = message.get(name)
    return given is not None and _ENCODED.read(path + name, given) == "base64"


def _bytes(given: Any, base64: bool, path: str, name: str) -> bytes:
    if type(given) is bytes:
        return given
    if type(given) is not str:
        raise invalid(path + name, f"must be a string, not {kind_of(given)}")
    if base64:
        data: bytes = parsed(parse_base64, given, path + name)
        return data
    try:
        return given.encode()
    except UnicodeEncodeError:
        raise invalid(path + name, "is not valid text") from None


def _headers(given: Any, base64: bool, path: str) -> Headers:
    if type(given) is not dict:
        raise invalid(f"{path}headers", f"must be an object, not {kind_of(given)}")
    found: Headers = {}
    size = 0
    for name, value in given.items():
        if type(name) is not str or not encodable(name):
            raise invalid(f"{path}headers", "names must be valid text")
        found[name] = _bytes(value, base64, path, f"headers.{shown(name)}")
        size += len(name.encode()) + len(found[name])
    if size > HEADERS_BYTES_MAX:
        raise TooLarge(f"{path}headers: {size} bytes, at most {HEADERS_BYTES_MAX}")
    return found


def write_records(records: Sequence[Readable], binary: bool) -> list[dict[str, Any]]:
    """The messages of an answer, for msgpack (`binary`) or JSON."""
    write = _binary if binary else _textual
    return [write(record) for record in records]


def _binary(record: Readable) -> dict[str, Any]:
    return {
        "offset": record.offset,
        "timestamp": format_time(record.timestamp),
        "key": record.key,
        "value": record.value,
        "priority": LANE_NAMES[record.priority],
        "headers": dict(record.headers),  # msgpack packs no other mapping
    }


def _textual(record: Readable) -> dict[str, Any]:
    key, headers = record.key, record.headers
    written: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": format_time(record.timestamp),
        "key": None,
        "value": "",
        "priority": LANE_NAMES[record.priority],
        "headers": {},
    }
    try:
        written["value"] = record.value.decode()
    except UnicodeDecodeError:
        written["value"] = format_base64(record.value)
        written["encoding"] = "base64"
    if key is not None:
        try:
            written["key"] = key.decode()
        except UnicodeDecodeError:
            written["key"] = format_base64(key)
            written["key_encoding"] = "base64"
    if headers:
        try:
            written["headers"] = {name: value.decode() for name, value in headers.items()}
        except UnicodeDecodeError:
            written["headers"] = {name: format_base64(one) for name, one in headers.items()}
            written["headers_encoding"] = "base64"
    return written
