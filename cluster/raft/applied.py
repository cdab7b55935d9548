"""Applying committed entries to the state machine, each command exactly once. (Core.)

    entry    kind u8 | id 16 bytes | floor u64 | command

`id` names the command through all its retries. `floor` is a commit index that the proposer knew
before its first try: every copy of the command stands above it in the log. The table of recent ids
forgets its oldest, and remembers the index below which it has forgotten; a command whose floor is
below that index and whose id is not in the table might have been applied before, so it is not
applied: its outcome is unknown, and that is the answer on every replica.

Everything here depends on nothing but the sequence of entries, so all replicas agree, and the table
is part of the snapshot. A state machine may refuse a command by raising a RaftqError, which is a
result like another; any other exception means that this replica cannot go on.
"""

import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import msgspec

from raftq.client.common.errors import (
    ConsensusBroken,
    CorruptFile,
    InvalidArgument,
    OutcomeUnknown,
    RaftqError,
    UnknownFormat,
)

REGULAR, NO_OP, BARRIER = 0, 1, 4
"""Kinds of entries; 0 and 1 as in pysyncobj, whose 2 and 3 are never written here."""

ID_BYTES = 16
COMMAND_ID_BYTES = ID_BYTES + 8
NO_OP_ENTRY = bytes([NO_OP])

_ENVELOPE = struct.Struct("<B16sQ")
_FLOOR = struct.Struct("<Q")
_SNAPSHOT_VERSION = 1
_pack = msgspec.msgpack.Encoder().encode
_read_parts = msgspec.msgpack.Decoder(
    Annotated[list[msgspec.Raw], msgspec.Meta(min_length=1, max_length=64)]
).decode
_read_snapshot = msgspec.msgpack.Decoder(
    tuple[int, int, list[tuple[bytes, int, bytes]], bytes]
).decode


class StateMachine(Protocol):
    """What is replicated. Called from the Raft thread only; must be deterministic."""

    def apply(self, command: bytes, index: int) -> Any:
        """The result: bytes or what msgpack can write. RaftqError refuses the command."""

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes) -> None:
        """Replace the whole state."""


@dataclass(frozen=True, slots=True)
class Applied:
    """One command that took its place in the order; `error` is set when it was refused."""

    index: int
    command_id: bytes
    command: bytes
    result: Any
    error: RaftqError | None
    repeated: bool
    """The command had been applied before; this is its first result again."""


def make_command_id(name: bytes, floor: int) -> bytes:
    """What a proposer keeps for its retries: a random name, and a commit index that it knew."""
    assert len(name) == ID_BYTES
    return name + _FLOOR.pack(floor)


def split_command_id(whole: bytes) -> tuple[bytes, int]:
    if len(whole) != COMMAND_ID_BYTES:
        raise InvalidArgument(f"a command id has {COMMAND_ID_BYTES} bytes, not {len(whole)}")
    (floor,) = _FLOOR.unpack_from(whole, ID_BYTES)
    return whole[:ID_BYTES], floor


def envelope(kind: int, command_id: bytes, floor: int, command: bytes) -> bytes:
    assert len(command_id) == ID_BYTES
    return _ENVELOPE.pack(kind, command_id, floor) + command


def id_of(entry: bytes) -> bytes:
    return entry[1 : 1 + ID_BYTES]


def is_command(entry: bytes) -> bool:
    """Whether another node may have this entry appended."""
    return len(entry) >= _ENVELOPE.size and entry[0] in (REGULAR, BARRIER)


class Applier:
    """Applies entries to one state machine, and remembers the results of the latest commands."""

    def __init__(self, machine: StateMachine, ids_max: int, result_bytes_max: int) -> None:
        self._machine = machine
        self._ids_max = ids_max
        self._result_bytes_max = result_bytes_max
        self._recent: OrderedDict[bytes, tuple[int, bytes]] = OrderedDict()
        self._result_bytes = 0
        self._forgotten_index = 0

    def apply(self, entry: bytes, index: int) -> Applied | None:
        """None for what is not a command. ConsensusBroken when this replica cannot go on."""
        if not is_command(entry):
            if entry == NO_OP_ENTRY:
                return None
            raise ConsensusBroken(f"entry {index} is no command: {entry[:64]!r}")
        kind, command_id, floor = _ENVELOPE.unpack_from(entry)
        command = entry[_ENVELOPE.size :]
        if kind == BARRIER:
            return Applied(index, command_id, b"", None, None, True)
        known = self._recent.get(command_id)
        if known is not None:
            result, error = _unpack_result(known[1])
            return Applied(index, command_id, command, result, error, True)
        if floor < self._forgotten_index:
            late = OutcomeUnknown("the command is so old that a copy may have been applied before")
            return Applied(index, command_id, command, None, late, True)
        result, error, packed = self._call(command, index)
        self._remember(command_id, index, packed)
        return Applied(index, command_id, command, result, error, False)

    def _call(self, command: bytes, index: int) -> tuple[Any, RaftqError | None, bytes]:
        try:
            result = self._machine.apply(command, index)
            return result, None, _pack([result])
        except RaftqError as error:
            return None, error, _pack([type(error).code, str(error)])
        except Exception as error:
            raise ConsensusBroken(
                f"applying entry {index} failed with {error!r}; command: {command[:1000]!r}"
            ) from error

    def _remember(self, command_id: bytes, index: int, packed: bytes) -> None:
        recent = self._recent
        recent[command_id] = (index, packed)
        self._result_bytes += len(packed)
        while len(recent) > self._ids_max or (
            self._result_bytes > self._result_bytes_max and len(recent) > 1
        ):
            _, (self._forgotten_index, old) = recent.popitem(last=False)
            self._result_bytes -= len(old)

    def known(self, command_id: bytes) -> Applied | None:
        """The first result of a command applied lately."""
        found = self._recent.get(command_id)
        if found is None:
            return None
        result, error = _unpack_result(found[1])
        return Applied(found[0], command_id, b"", result, error, True)

    def snapshot(self) -> bytes:
        try:
            state = self._machine.snapshot()
        except Exception as error:
            raise ConsensusBroken(f"the state machine's snapshot failed: {error!r}") from error
        recent = [[key, index, packed] for key, (index, packed) in self._recent.items()]
        return _pack([_SNAPSHOT_VERSION, self._forgotten_index, recent, state])

    def restore(self, body: bytes) -> None:
        try:
            version = msgspec.msgpack.decode(_read_parts(body)[0], type=int)
            if version != _SNAPSHOT_VERSION:
                raise UnknownFormat(f"snapshot of format {version}; this is {_SNAPSHOT_VERSION}")
            _, forgotten, recent, state = _read_snapshot(body)
            table = OrderedDict((key, (index, packed)) for key, index, packed in recent)
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"the snapshot's content cannot be read: {error!r}") from error
        try:
            self._machine.restore(state)
        except Exception as error:
            raise ConsensusBroken(f"the state machine's restore failed: {error!r}") from error
        self._recent = table
        self._result_bytes = sum(len(packed) for _, packed in table.values())
        self._forgotten_index = forgotten


def _unpack_result(packed: bytes) -> tuple[Any, RaftqError | None]:
    parts = msgspec.msgpack.decode(packed)
    if len(parts) == 1:
        return parts[0], None
    code, text = parts
    return None, RaftqError.registry.get(code, RaftqError)(text)
