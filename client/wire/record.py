"""One record, decoded, its headers as bytes, and the limits on it. (Pure.)"""

from dataclasses import dataclass

import msgspec

from raftq.client.common.errors import CorruptBatch, InvalidArgument, TooLarge

VALUE_BYTES_MAX = 16 * 1024 * 1024
KEY_BYTES_MAX = 64 * 1024
HEADERS_BYTES_MAX = 64 * 1024

Headers = dict[str, bytes]
_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder(Headers).decode


@dataclass(slots=True)
class BatchRecord:
    """One decoded record."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes
    headers: Headers
    priority: int
    expires_at: int = 0


def check_record_limits(
    value: bytes, key: bytes | None, headers: Headers | None, value_bytes_max: int
) -> None:
    """Refuse a record over a limit, with an error that names it."""
    if len(value) > value_bytes_max:
        raise TooLarge(f"a value of {len(value)} bytes is over the limit of {value_bytes_max}")
    if key is not None and len(key) > KEY_BYTES_MAX:
        raise TooLarge(f"a key of {len(key)} bytes is over the limit of {KEY_BYTES_MAX}")
    if headers:
        pack_headers(headers)
        size = sum([len(name.encode()) + len(item) for name, item in headers.items()])
        if size > HEADERS_BYTES_MAX:
            raise TooLarge(f"headers of {size} bytes are over the limit of {HEADERS_BYTES_MAX}")


def pack_headers(headers: Headers | None) -> bytes:
    """A msgpack map; no headers are no bytes. What cannot be read back is refused."""
    if not headers:
        return b""
    for name, item in headers.items():
        if not isinstance(name, str) or not isinstance(item, bytes):
            raise InvalidArgument(f"headers map str names to bytes values, not {name!r}: {item!r}")
    try:
        return _pack(headers)
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a header name is not valid text: {error}") from error


def unpack_headers(packed: bytes) -> Headers:
    """The headers of one record, checked; bytes that are not such a map are a CorruptBatch."""
    if not packed:
        return {}
    try:
        return _unpack(packed)
    except (ValueError, RecursionError) as error:
        raise CorruptBatch(f"record headers are not a map of str to bytes: {error}") from error
