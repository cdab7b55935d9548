"""How the columns of a batch become bytes and come back. (Pure.)

Packing refuses what does not fit the column (InvalidArgument); unpacking believes nothing it has
not checked (CorruptBatch). Numbers are little-endian, which is this module's only demand on the
machine. It does not know the order of columns in a batch; batch.py does.
"""

import sys
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from struct import Struct
from typing import Literal

from raftq.client.common.errors import CorruptBatch, InvalidArgument, TooLarge

if sys.byteorder != "little":
    raise ImportError("RaftQ's columns are little-endian and are used in place: not on this CPU")

PAIR = Struct("<II")
EQUAL_MAX = 4096  # so many items of one size are cut at once: the plan for it takes memory, too


def pack_numbers(kind: Literal["I", "q"], column: Sequence[int], count: int, name: str) -> bytes:
    """A column of u32 ("I") or i64 ("q"), one number per record."""
    check_length(column, count, name)
    try:
        return array(kind, column).tobytes()
    except (TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {error}") from error


def pack_ends(items: Sequence[bytes], name: str) -> tuple[bytes, int]:
    """count+1 offsets, the first 0, and the bytes all items have together."""
    try:
        ends = list(accumulate(map(len, items), initial=0))
        return array("I", ends).tobytes(), ends[-1]
    except TypeError as error:
        raise InvalidArgument(f"{name} must be bytes: {error}") from error
    except OverflowError as error:
        raise TooLarge(f"{name} of {ends[-1]} bytes do not fit in a batch") from error


def pack_validity(keys: Sequence[bytes | None]) -> bytes:
    """A bitmap, lowest bit first: bit i is set when record i has a key."""
    digits = "".join(["0" if key is None else "1" for key in reversed(keys)])
    return int(digits or "0", 2).to_bytes((len(keys) + 7) >> 3, "little")


def check_length(column: Sequence[object], count: int, name: str) -> None:
    if len(column) != count:
        raise InvalidArgument(f"{count} values but {len(column)} {name}")


def unpack_numbers(
    kind: Literal["I", "q"], body: bytes | memoryview, start: int, end: int
) -> list[int]:
    return memoryview(body)[start:end].cast(kind).tolist()


def unpack_ends(body: bytes | memoryview, at: int, count: int) -> list[int]:
    """The count+1 offsets at `at`, not yet checked."""
    if count == 1:
        return list(PAIR.unpack_from(body, at))
    return unpack_numbers("I", body, at, at + 4 * (count + 1))


def rise(ends: list[int], length: int) -> bool:
    """Sorted, from 0 to the section's length: slices cannot add up to more than the section."""
    return ends[0] == 0 and ends[-1] == length and sorted(ends) == ends


def common_size(body: bytes | memoryview, at: int, count: int, length: int) -> int:
    """The size of every item if the offsets at `at` say that all have the same; otherwise 0.

    Such offsets are compared as bytes, and need no other check: most topics have some of them.
    """
    if not 1 < count <= EQUAL_MAX:
        return 0
    size, rest = divmod(length, count)
    if rest or not size or PAIR.unpack_from(body, at)[1] != size:
        return 0
    return size if bytes(body[at : at + 4 * (count + 1)]) == _equal_ends(size, count) else 0


def unpack_equal(body: bytes | memoryview, start: int, size: int, count: int) -> list[bytes]:
    """Items of one size, cut by one call: twice as fast as slice by slice."""
    return list(_equal_slices(size, count).unpack_from(body, start))


def unpack_slices(body: bytes | memoryview, start: int, ends: list[int]) -> list[bytes]:
    """The items between the ends, each copied once."""
    length = ends[-1]
    if len(ends) == 2:
        return [bytes(body[start : start + length])]
    if not isinstance(body, bytes):
        # Slices of bytes are cheaper than bytes of slices, by more than this copy costs.
        body, start = bytes(body[start : start + length]), 0
    return [body[a:b] for a, b in pairwise([start + end for end in ends])]


@lru_cache(maxsize=256)
def _equal_ends(size: int, count: int) -> bytes:
    return array("I", range(0, size * count + 1, size)).tobytes()


@lru_cache(maxsize=256)
def _equal_slices(size: int, count: int) -> Struct:
    return Struct(f"{size}s" * count)


def check_validity(bitmap: bytes, count: int) -> None:
    """Bits past the last record must be 0."""
    if count & 7 and bitmap[-1] >> (count & 7):
        raise CorruptBatch("the bitmap of null keys has bits past the last record")


def mask(keys: list[bytes], bitmap: bytes) -> list[bytes | None]:
    """The keys, None where the bitmap says so."""
    count = len(keys)
    check_validity(bitmap, count)
    # One pass over the digits: shifting the number once per key would be quadratic.
    digits = f"{int.from_bytes(bitmap, 'little'):0{count}b}"[::-1]
    return [key if digit == "1" else None for key, digit in zip(keys, digits, strict=False)]


def increase(deltas: Sequence[int], span: int) -> bool:
    """Offsets inside a batch, at least one, go up from 0 or more and stay below its span."""
    return deltas[0] >= 0 and deltas[-1] < span and all(a < b for a, b in pairwise(deltas))
