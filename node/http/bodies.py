"""Bodies as JSON or msgpack, bounded. (Pure.)

A body has bounded bytes when it comes here. Its values are bounded, too: a few megabytes of empty
lists would become a gigabyte of objects and block the event loop for a second. Whatever is wrong
with a body is a Refusal; nothing else leaves this module.
"""

import json
import re
from typing import Any, NoReturn

import msgpack

from raftq.node.http.errors import Refusal

JSON = "application/json"
MSGPACK = "application/msgpack"
MSGPACK_NAMES = frozenset({MSGPACK, "application/x-msgpack", "application/vnd.msgpack"})
VALUES_MAX = 400_000
ITEMS_MAX = 20_000  # of one array or map in msgpack, which allocates what an array claims to hold

# What begins or separates values; inside strings it means nothing, so strings are taken out before
# a body is refused for it.
_STRUCTURE = (b",", b"{", b"[")
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def wants_msgpack(accept: str, sent_msgpack: bool) -> bool:
    """What to answer in: what is asked for first, else the form of the request."""
    for part in accept.split(","):
        name = part.partition(";")[0].strip().lower()
        if name in MSGPACK_NAMES or name == JSON:
            return name != JSON
    return sent_msgpack


def decode_body(body: bytes, sent_msgpack: bool) -> Any:
    """The value in a body that has to be there."""
    if not body:
        raise Refusal("BAD_REQUEST", "a body is required")
    return decode_msgpack(body) if sent_msgpack else decode_json(body)


def decode_json(body: bytes) -> Any:
    """The value in a body; NaN, absurd numbers and absurd nesting are refused like bad syntax."""
    if sum(map(body.count, _STRUCTURE)) > VALUES_MAX:
        outside = _STRING.sub(b"", body)
        if sum(map(outside.count, _STRUCTURE)) > VALUES_MAX:
            raise Refusal("TOO_LARGE", f"the body has more than {VALUES_MAX} values")
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refusal("BAD_REQUEST", f"the body is not UTF-8: {error.reason}") from None
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise Refusal("BAD_REQUEST", "the body is nested too deeply") from None
    except json.JSONDecodeError as error:
        path = f"line {error.lineno} column {error.colno}"
        raise Refusal("BAD_REQUEST", f"the body is not JSON: {error.msg} at {path}") from None
    except ValueError as error:
        raise Refusal("BAD_REQUEST", f"the body has a number out of range: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False, check_circular=False)


class _TooMany(Exception):
    pass


class _Count:
    """Counts values while msgpack builds them, innermost first."""

    __slots__ = ("left",)

    def __init__(self) -> None:
        self.left = VALUES_MAX

    def take(self, items: Any) -> Any:
        self.left -= len(items) + 1
        if self.left < 0:
            raise _TooMany
        return items


def decode_msgpack(body: bytes) -> Any:
    """The value in a body; texts are str, binaries are bytes, extensions are refused."""
    count = _Count()
    try:
        return msgpack.unpackb(
            body,
            object_hook=count.take,
            list_hook=count.take,
            max_array_len=ITEMS_MAX,
            max_map_len=ITEMS_MAX,
            max_ext_len=0,
        )
    except _TooMany:
        raise Refusal("TOO_LARGE", f"the body has more than {VALUES_MAX} values") from None
    except Exception as error:
        # msgpack raises several unrelated types on bad input; all of them mean the same here.
        why = str(error) or type(error).__name__
        raise Refusal("BAD_REQUEST", f"the body is not msgpack: {why}") from None


def encode_json(value: Any) -> bytes:
    return _ENCODER.encode(value).encode("utf-8", "replace")


def encode_msgpack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value)
    return packed
