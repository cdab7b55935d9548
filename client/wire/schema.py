"""Message headers: from a msgspec Struct to checked msgpack and back. (Pure.)

A header is a msgpack map of field names. The rules stand in the annotations:

    Annotated[int, Meta(ge=low, le=high)]      an integer in low..high (a bool is not one)
    Annotated[str, Meta(max_length=n)]         text of at most n characters; also bytes
    bool, Literal["a", "b"], X | None          themselves
    Items[X]                                   a list of at most ITEMS_MAX
    Annotated[tuple[X, ...], Meta(max_length=n)]   a shorter one
    Details                                    facts for programs: short names, plain values
    another WireStruct                         a map inside the map

Compatible in both directions: fields that are not known are ignored, and a field with a default may
be missing; a field that has its default is not sent. So a new field always has a default, and no
field or default ever changes its meaning. Everything else that deviates is a ProtocolError that
names the field: a LocalProtocolError while encoding, a RemoteProtocolError while decoding.
"""

from collections.abc import Mapping
from typing import Annotated, Generic, TypeVar

import msgspec
from msgspec import Meta

from raftq.client.common.errors import LocalProtocolError, RemoteProtocolError

ITEMS_MAX = 8192
TEXT_MAX = 4096

T = TypeVar("T")
Items = Annotated[tuple[T, ...], Meta(max_length=ITEMS_MAX)]
Details = Mapping[
    Annotated[str, Meta(max_length=64)],
    int | bool | Annotated[str, Meta(max_length=TEXT_MAX)] | None,
]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be sent")


pack = msgspec.msgpack.Encoder(enc_hook=_plain).encode


class Bad(Exception):
    """Fields contradict each other; the message begins with the path to the field."""


class WireStruct(msgspec.Struct, frozen=True, omit_defaults=True):
    """Base of what is sent as a map."""


def no_details() -> dict[str, int | bool | str | None]:
    """The default of a map. It is not `dict` itself: then msgspec leaves out an empty map, and the
    bytes of a message never change."""
    return {}


def reason(name: str, error: Exception | str) -> str:
    """What msgspec found wrong in an object of this name, the path to the field first."""
    text, found, path = str(error).partition(" - at `")
    return f"{path.replace('`', '').replace('$', name, 1) if found else name}: {text}"


class Codec(Generic[T]):
    """Reads and writes the headers of one class."""

    __slots__ = ("_name", "_read")

    def __init__(self, cls: type[T]) -> None:
        self._name = cls.__name__
        self._read = msgspec.msgpack.Decoder(cls).decode

    def encode(self, value: T) -> bytes:
        """The header's bytes. It is read back, because msgspec checks values only as it reads: what
        the other side would refuse, with the connection and all that waits on it, is refused here
        as a LocalProtocolError."""
        try:
            header = pack(value)
            self._read(header)
        except (ValueError, TypeError, OverflowError) as error:
            raise LocalProtocolError(reason(self._name, error)) from error
        return header

    def decode(self, header: bytes) -> T:
        """The object, every field checked; a deviation is a RemoteProtocolError."""
        try:
            return self._read(header)
        except (ValueError, RecursionError) as error:
            raise RemoteProtocolError(reason(self._name, error)) from error
