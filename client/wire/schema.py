"""Message headers: from dataclass to checked msgpack and back. (Pure.)

A header is a msgpack map of field names. The rules come from the dataclass's annotations:

    Annotated[int, Range(low, high)]       an integer in low..high (a bool is not one)
    Annotated[str, Most(n)]                text of at most n characters; also bytes
    bool, Literal["a", "b"], X | None      themselves
    Annotated[tuple[X, ...], Most(n)]      a list of at most n
    Annotated[Mapping[str, Detail], Most(n)]  facts for programs: short names, plain values
    another dataclass                      a map inside the map

Compatible in both directions: fields that are not known are ignored, and a field with a default may
be missing; one that has its default is not sent. So a new field always has a default, and no field
or default ever changes its meaning. Everything else that deviates is a ProtocolError that names the
field: a LocalProtocolError while encoding, a RemoteProtocolError while decoding.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Generic,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
)
from typing import get_type_hints as type_hints

import msgpack

from raftq.client.common.errors import LocalProtocolError, RemoteProtocolError

# msgpack allocates a list as long as it claims to be, at every depth, before it reads the items:
# this bounds what a hostile header can make it reserve.
ITEMS_MAX = 8192
TEXT_MAX = 4096

T = TypeVar("T")
Check = Callable[[Any], Any]


class Range(NamedTuple):
    """The integers that a field may hold, both ends included."""

    low: int
    high: int


class Most(NamedTuple):
    """The most characters, bytes or items that a field may hold."""

    limit: int


class Bad(Exception):
    """A value breaks its rule; the message grows the path to the field on its way up."""


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool | int):
        return str(value)[:40]
    if isinstance(value, str):
        return repr(value[:40])
    return f"a {type(value).__name__}"


def _integer(limits: Range) -> Check:
    low, high = limits

    def check(value: Any) -> Any:
        if type(value) is not int or not low <= value <= high:
            raise Bad(f": {_shown(value)} is not an integer in {low}..{high}")
        return value

    return check


def _sized(kind: type[str] | type[bytes], most: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not kind:
            raise Bad(f": {_shown(value)} is not {kind.__name__}")
        if len(value) > most:
            raise Bad(f": {kind.__name__} of length {len(value)} is over the limit of {most}")
        return value

    return check


def _boolean(value: Any) -> Any:
    if type(value) is not bool:
        raise Bad(f": {_shown(value)} is not a bool")
    return value


def _choice(choices: tuple[Any, ...]) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not str or value not in choices:
            raise Bad(f": {_shown(value)} is not one of {', '.join(map(repr, choices))}")
        return value

    return check


def _optional(inner: Check) -> Check:
    def check(value: Any) -> Any:
        return None if value is None else inner(value)

    return check


def _items(inner: Check, most: int) -> Check:
    def check(value: Any) -> Any:
        if type(value) is not list and type(value) is not tuple:
            raise Bad(f": {_shown(value)} is not a list")
        if len(value) > most:
            raise Bad(f": a list of {len(value)} is over the limit of {most}")
        checked: list[Any] = []
        try:
            for item in value:
                checked.append(inner(item))  # noqa: PERF401  # its length tells which item is bad
        except Bad as error:
            raise Bad(f"[{len(checked)}]{error}") from None
        return tuple(checked)

    return check


def _details(most: int) -> Check:
    name_check = _sized(str, 64)

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise Bad(f": {_shown(value)} is not a map")
        if len(value) > most:
            raise Bad(f": a map of {len(value)} is over the limit of {most}")
        for name, item in value.items():
            name_check(name)
            plain = item is None or type(item) in (bool, int)
            if not plain and not (type(item) is str and len(item) <= TEXT_MAX):
                raise Bad(f"[{name!r}]: {_shown(item)} is not a plain value")
        return dict(value)

    return check


# A packer begins with a buffer of 256 KiB, and making one for each header makes the C library get
# and give back pages all the time: half of the cost of a big request. Each is used by one thread at
# a time: taking from a list and adding to it are atomic.
_packers: list[Any] = []


def _pack(plain: dict[str, Any]) -> bytes:
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer()
    packed: bytes = packer.pack(plain)
    _packers.append(packer)  # not one that has raised: what it holds then is unsaid
    return packed


class Struct(Generic[T]):
    """How one dataclass is read from a map and written to one."""

    __slots__ = ("_cls", "_readers", "_writers")

    def __init__(self, cls: type[T]) -> None:
        hints = type_hints(cls, include_extras=True)
        self._cls = cls
        self._readers: list[tuple[str, Check, Any, Any]] = []
        self._writers: list[tuple[str, Check, Any]] = []
        for one in fields(cls):  # type: ignore[arg-type]
            read, write = _checks(hints[one.name])
            self._readers.append((one.name, read, one.default, one.default_factory))
            self._writers.append((one.name, write, one.default))

    def read(self, value: Any) -> T:
        if type(value) is not dict:
            raise Bad(f": {_shown(value)} is not a map")
        values = []
        get = value.get
        for name, check, default, factory in self._readers:
            item = get(name, MISSING)
            if item is not MISSING:
                try:
                    values.append(check(item))
                except Bad as error:
                    raise Bad(f".{name}{error}") from None
            elif default is not MISSING:
                values.append(default)
            elif factory is not MISSING:
                values.append(factory())
            else:
                raise Bad(f".{name}: missing")
        return self._cls(*values)

    def write(self, value: Any) -> dict[str, Any]:
        if type(value) is not self._cls:
            raise Bad(f": {_shown(value)} is not a {self._cls.__name__}")
        plain = {}
        for name, check, default in self._writers:
            one = getattr(value, name)
            if one is default:
                continue
            try:
                plain[name] = check(one)
            except Bad as error:
                raise Bad(f".{name}{error}") from None
        return plain

    def encode(self, value: T) -> bytes:
        """The header's bytes; a value that breaks a rule is a LocalProtocolError."""
        try:
            packed = _pack(self.write(value))
        except Bad as error:
            raise LocalProtocolError(f"{self._cls.__name__}{error}") from None
        except (UnicodeEncodeError, OverflowError) as error:
            raise LocalProtocolError(f"{self._cls.__name__}: {error}") from error
        return packed

    def decode(self, header: bytes) -> T:
        """The dataclass, every field checked; a deviation is a RemoteProtocolError."""
        try:
            items_max = min(len(header), ITEMS_MAX)
            value = msgpack.unpackb(header, max_array_len=items_max, max_ext_len=0)
        except Exception as error:
            # msgpack raises several unrelated types on bad input; all of them mean the same here.
            raise RemoteProtocolError(
                f"{self._cls.__name__}: the header is not msgpack: {type(error).__name__} {error}"
            ) from error
        try:
            return self.read(value)
        except Bad as error:
            raise RemoteProtocolError(f"{self._cls.__name__}{error}") from None


def _checks(hint: Any) -> tuple[Check, Check]:
    """The checks of one annotation, for reading and for writing."""
    rule: Any = None
    if get_origin(hint) is Annotated:
        hint, rule = get_args(hint)
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType, Literal):
        if origin is Literal:
            check = _choice(arguments)
            return check, check
        (inner,) = (one for one in arguments if one is not NoneType)
        read, write = _checks(Annotated[inner, rule] if rule else inner)
        return _optional(read), _optional(write)
    if origin is tuple:
        most = min(rule.limit, ITEMS_MAX) if rule else ITEMS_MAX
        read, write = _checks(arguments[0])
        return _items(read, most), _items(write, most)
    if is_dataclass(hint):
        struct = Struct(hint)  # type: ignore[arg-type]
        return struct.read, struct.write
    check = _scalar(hint, origin, rule)
    return check, check


def _scalar(hint: Any, origin: Any, rule: Any) -> Check:
    if hint is bool:
        return _boolean
    if hint is int and isinstance(rule, Range):
        return _integer(rule)
    if hint in (str, bytes) and isinstance(rule, Most):
        return _sized(hint, rule.limit)
    if origin is Mapping and isinstance(rule, Most):
        return _details(rule.limit)
    raise TypeError(f"a message field cannot be {hint} with the rule {rule}")
