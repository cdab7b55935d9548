"""Bytes of what a queue stores: one encoder, and decoders with one error. (Pure.)"""

from collections.abc import Callable
from typing import TypeVar

import msgspec

from raftq.client.common.errors import CorruptFile

T = TypeVar("T")

encode_stored: Callable[[object], bytes] = msgspec.msgpack.Encoder().encode


def stored_decoder(decoder: "msgspec.msgpack.Decoder[T]", what: str) -> Callable[[bytes], T]:
    """A function that decodes bytes, or raises CorruptFile if they are not such a value."""
    decode = decoder.decode

    def checked(data: bytes) -> T:
        try:
            return decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise CorruptFile(f"bad {what}: {error!s:.100}") from error

    return checked
