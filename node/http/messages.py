"""Messages of REST to records and back. (Pure.)

A thousand messages come in one request, so there are no objects per message: they become columns
(`Outgoing`), and records become dicts that are encoded at once. What is wrong with any message is
refused for the whole request before anything is published, and named like `messages[3].key`.

    encoding, key_encoding, headers_encoding    "base64" for the value, the key, all header values

In JSON, bytes that are UTF-8 are text and others base64 with the encoding named; in msgpack they
are always binaries, and both binaries and texts are taken.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from raftq.client.wire.errors import TooLarge
from raftq.client.wire.layout import LANE_NORMAL
from raftq.client.wire.record import (
    HEADERS_BYTES_MAX,
    KEY_BYTES_MAX,
    VALUE_BYTES_MAX,
    Headers,
)
from raftq.node.http.errors import Refusal, invalid
from raftq.node.http.fields import Schema, encodable, kind_of, shown, unknown_field
from raftq.node.http.gateway import Outgoing, Readable
from raftq.node.http.values import (
    format_base64,
    format_time,
    parse_base64,
    parse_duration,
    parse_time,
)

PRIORITIES = ("critical", "high", "normal", "low", "background")
PARTITION_MAX = 0x7FFF_FFFF

_NUMBERS = {name: number for number, name in enumerate(PRIORITIES)}
_PLAIN = frozenset({"key", "value"})
_TEXT: Schema = {"type": "string"}
_ENCODING: Schema = {"type": "string", "enum": ["text", "base64"], "default": "text"}
_DURATION: Schema = {"type": "string", "example": "1h30m"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_PRIORITY: Schema = {"type": "string", "enum": list(PRIORITIES), "default": "normal"}
_HEADERS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}

MESSAGE_SCHEMA: Schema = {
    "type": "object",
    "additionalProperties": False,
    "required": ["value"],
    "properties": {
        "key": {**_TEXT, "nullable": True},
        "value": _TEXT,
        "encoding": {**_ENCODING, "description": "of the value"},
        "key_encoding": _ENCODING,
        "headers": _HEADERS,
        "headers_encoding": {**_ENCODING, "description": "of the headers' values"},
        "partition": {"type": "integer", "minimum": 0},
        "priority": {"oneOf": [_PRIORITY, {"type": "integer", "minimum": 0, "maximum": 4}]},
        "delay": {**_DURATION, "description": "not with deliverAt"},
        "deliverAt": _TIME,
        "ttl": _DURATION,
    },
}
RECORD_SCHEMA: Schema = {
    "type": "object",
    "required": ["offset", "timestamp", "key", "value", "priority", "headers"],
    "properties": {
        "offset": {"type": "integer"},
        "timestamp": _TIME,
        "key": {**_TEXT, "nullable": True},
        "value": _TEXT,
        "encoding": _ENCODING,
        "key_encoding": _ENCODING,
        "priority": _PRIORITY,
        "headers": _HEADERS,
        "headers_encoding": _ENCODING,
    },
}
KNOWN = frozenset(MESSAGE_SCHEMA["properties"])


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishRules:
    """What the reader of messages has to know."""

    messages_max: int
    supports_ttl: bool
    supports_delay: bool
    now_ms: int


def read_messages(body: object, rules: PublishRules) -> Outgoing:
    """The columns of a body with `messages`, or of one that is a message itself."""
    if not isinstance(body, dict):
        raise Refusal("INVALID_ARGUMENT", f"the body must be an object, not {kind_of(body)}")
    if "messages" not in body:
        return _Columns(rules).read_one(body)
    if len(body) > 1:
        raise unknown_field(str(next(name for name in body if name != "messages")))
    messages = body["messages"]
    if not isinstance(messages, list):
        raise invalid("messages", f"must be an array, not {kind_of(messages)}")
    if not messages:
        raise invalid("messages", "must have at least one message")
    if len(messages) > rules.messages_max:
        raise Refusal("TOO_LARGE", f"messages: more than {rules.messages_max} in one request")
    return _Columns(rules).read_all(messages)


class _Columns:
    """Collects columns; one that is not plain begins with the first message that has it."""

    __slots__ = ("_extra", "_keyed", "_keys", "_rules", "_values")

    def __init__(self, rules: PublishRules) -> None:
        self._rules = rules
        self._values: list[bytes] = []
        self._keys: list[bytes | None] = []
        self._keyed = False
        self._extra: dict[str, dict[int, Any]] = {}

    def read_one(self, message: dict[Any, Any]) -> Outgoing:
        self._take(0, message, "")
        return self._columns()

    def read_all(self, messages: list[Any]) -> Outgoing:
        take = self._take
        for at, message in enumerate(messages):
            if type(message) is not dict:
                raise invalid(f"messages[{at}]", f"must be an object, not {kind_of(message)}")
            take(at, message, f"messages[{at}].")
        return self._columns()

    def _take(self, at: int, message: dict[Any, Any], place: str) -> None:
        plain = message.keys() <= _PLAIN
        if not plain and not message.keys() <= KNOWN:
            unknown = next(name for name in message if name not in KNOWN)
            raise unknown_field(place + shown(str(unknown)))
        given = message.get("value")
        if given is None:
            raise invalid(f"{place}value", "is required")
        base64 = False if plain else _encoding(message, "encoding", place)
        value = _bytes(given, base64, place, "value")
        if len(value) > VALUE_BYTES_MAX:
            raise TooLarge(f"{place}value: {len(value)} bytes, at most {VALUE_BYTES_MAX}")
        self._values.append(value)
        key = message.get("key")
        if key is not None:
            base64 = False if plain else _encoding(message, "key_encoding", place)
            key = _bytes(key, base64, place, "key")
            if len(key) > KEY_BYTES_MAX:
                raise TooLarge(f"{place}key: {len(key)} bytes, at most {KEY_BYTES_MAX}")
            self._keyed = True
        self._keys.append(key)
        if not plain:
            self._take_rest(at, message, place)

    def _take_rest(self, at: int, message: dict[Any, Any], place: str) -> None:
        extra = self._extra
        base64 = _encoding(message, "headers_encoding", place)
        if (headers := message.get("headers")) is not None:
            extra.setdefault("headers", {})[at] = _headers(headers, base64, place)
        if (partition := message.get("partition")) is not None:
            extra.setdefault("partitions", {})[at] = _partition(partition, place)
        if (priority := message.get("priority")) is not None:
            extra.setdefault("priorities", {})[at] = _priority(priority, place)
        if (ttl := message.get("ttl")) is not None:
            extra.setdefault("ttls_ms", {})[at] = self._ttl(ttl, f"{place}ttl")
        if delay := self._delay(message, place):
            extra.setdefault("delays_ms", {})[at] = delay

    def _ttl(self, given: Any, place: str) -> int:
        ttl_ms: int = _parsed(parse_duration, given, place)
        if ttl_ms == 0:
            raise invalid(place, "must be more than nothing")
        if not self._rules.supports_ttl:
            raise Refusal("NOT_SUPPORTED", f"{place}: this version has no ttl of messages")
        return ttl_ms

    def _delay(self, message: dict[Any, Any], place: str) -> int:
        """Milliseconds from now; zero and the past are now."""
        delay, deliver_at = message.get("delay"), message.get("deliverAt")
        name, delay_ms = "delay", 0
        if delay is not None and deliver_at is not None:
            raise invalid(f"{place}deliverAt", "cannot be given together with delay")
        if delay is not None:
            delay_ms = _parsed(parse_duration, delay, f"{place}delay")
        elif deliver_at is not None:
            name = "deliverAt"
            delay_ms = _parsed(parse_time, deliver_at, f"{place}deliverAt") - self._rules.now_ms
        if delay_ms > 0 and not self._rules.supports_delay:
            raise Refusal("NOT_SUPPORTED", f"{place}{name}: this version has no delayed messages")
        return max(0, delay_ms)

    def _columns(self) -> Outgoing:
        columns = Outgoing(self._values, self._keys if self._keyed else None)
        count = len(self._values)
        for name, found in self._extra.items():
            missing = LANE_NORMAL if name == "priorities" else None
            setattr(columns, name, [found.get(at, missing) for at in range(count)])
        return columns


def _encoding(message: dict[Any, Any], name: str, place: str) -> bool:
    """Whether it is base64."""
    given = message.get(name)
    if given is None or given == "text":
        return False
    if given != "base64":
        raise invalid(place + name, 'must be "base64" or "text"')
    return True


def _bytes(given: Any, base64: bool, place: str, name: str) -> bytes:
    if type(given) is bytes:
        return given
    if type(given) is not str:
        raise invalid(place + name, f"must be a string, not {kind_of(given)}")
    if base64:
        data: bytes = _parsed(parse_base64, given, place + name)
        return data
    try:
        return given.encode()
    except UnicodeEncodeError:
        raise invalid(place + name, "is not valid text") from None


def _headers(given: Any, base64: bool, place: str) -> Headers:
    if type(given) is not dict:
        raise invalid(f"{place}headers", f"must be an object, not {kind_of(given)}")
    found: Headers = {}
    size = 0
    for name, value in given.items():
        if type(name) is not str or not encodable(name):
            raise invalid(f"{place}headers", "names must be valid text")
        found[name] = _bytes(value, base64, place, f"headers.{shown(name)}")
        size += len(name.encode()) + len(found[name])
    if size > HEADERS_BYTES_MAX:
        raise TooLarge(f"{place}headers: {size} bytes, at most {HEADERS_BYTES_MAX}")
    return found


def _partition(given: Any, place: str) -> int:
    if type(given) is not int:
        raise invalid(f"{place}partition", f"must be a whole number, not {kind_of(given)}")
    if not 0 <= given <= PARTITION_MAX:
        raise invalid(f"{place}partition", f"must be in 0..{PARTITION_MAX}")
    return given


def _priority(given: Any, place: str) -> int:
    if type(given) is str:
        number = _NUMBERS.get(given.lower())
        if number is not None:
            return number
    elif type(given) is int and 0 <= given < len(PRIORITIES):
        return given
    raise invalid(f"{place}priority", f"must be one of {', '.join(PRIORITIES)}, or 0..4")


def _parsed(parse: Callable[[str], Any], given: Any, place: str) -> Any:
    if type(given) is not str:
        raise invalid(place, f"must be a string, not {kind_of(given)}")
    try:
        return parse(given)
    except ValueError as error:
        raise invalid(place, str(error)) from None


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
        "priority": PRIORITIES[record.priority],
        "headers": dict(record.headers),  # msgpack packs no other mapping
    }


def _textual(record: Readable) -> dict[str, Any]:
    key, headers = record.key, record.headers
    written: dict[str, Any] = {
        "offset": record.offset,
        "timestamp": format_time(record.timestamp),
        "key": None,
        "value": "",
        "priority": PRIORITIES[record.priority],
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
