"""What can be asked of the metadata: one Struct per kind, and their bytes. (Pure.)

    msgpack [version, kind, field, field, ...]      the fields in the order of the class

Commands that operators ask for are the requests themselves: their classes are in
client/wire/admin_messages.py, their numbers here are `command_kind`.

Commands stand in the Raft log for a long time and are read by every node, so a kind never changes
the number or the meaning of its fields: a change is a new kind, or a new version of all. What this
version cannot know is an UnknownFormat, and anything else that is wrong an InvalidArgument that
names the field. Whether a command makes sense in the present state is decided by metadata.py.

Results, as `apply` gives them and `propose` returns them:

    RegisterNode         None
    FenceNode            whether the node lost its lease by it (a bool)
    SetDraining          how many partitions the node still leads
    RemoveNode           None
    CreateTopic          {"topic_id", "partitions", "replication"}
    AlterTopic           None
    DeleteTopic          None
    AddPartitions        the number of partitions
    ChangeIsr            [epoch, version] of the partition afterwards
    ElectPreferred       how many partitions got another leader
    MoveReplicas         whether the move is finished already (a bool)
    AllocateProducerIds  the first id of the block
    InitNamedProducer    [producer id, producer epoch]
    EnableQueues         None
    Confirm              None
    TellEnds             how many of its rows count
    Recover              the nodes that are asked where their copies end
"""

import re
from collections.abc import Callable
from types import GenericAlias
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import msgspec
from msgspec import Meta

from raftq.client.common.errors import InvalidArgument, UnknownFormat
from raftq.client.wire.admin_messages import (
    AddPartitions,
    AlterTopic,
    Command,
    CreateTopic,
    DeleteTopic,
    MoveReplicas,
    RemoveNode,
)
from raftq.client.wire.messages import U16, U31, Name, NodeId, Offset
from raftq.client.wire.schema import Bad, Items, pack, reason

__all__ = [
    "AddPartitions", "AllocateProducerIds", "AlterTopic", "ChangeIsr", "Command", "Confirm",
    "CreateTopic", "DeleteTopic", "ElectPreferred", "EnableQueues", "FenceNode",
    "InitNamedProducer", "MoveReplicas", "Recover", "RegisterNode", "RemoveNode", "Resign",
    "SetDraining", "TellEnds",
]  # fmt: skip

COMMAND_VERSION = 2
COMMAND_BYTES_MAX = 4 * 1024 * 1024
PRODUCER_IDS_MAX = 1_000_000
"""In one block."""
REPLICAS_MAX = 64
"""In one list of a command; a topic may have fewer, see topic_config.py."""

TELLINGS_MAX = 10_000
"""In one command."""

Lost = Literal["nothing", "tail", "past", "everything"]
"""`tail`: what was not synced when the machine went down; `everything`: the disk is another one."""


class RegisterNode(Command, frozen=True):
    """A process says that it is there, and what its logs may have lost of what it acknowledged."""

    command_kind: ClassVar[int] = 1

    node_id: NodeId
    host: Name
    port: U16
    http_port: U16
    raft_address: Name
    rack: Name
    incarnation: Offset
    lost: Lost = "nothing"
    before: Offset | None = None
    """The incarnation that the data directory was registered as, if it was."""
    synced: bool = False
    """That one stopped cleanly: all that it wrote is on the disk."""
    silent: Offset | None = None
    """An incarnation that the metadata has as alive, and that does not answer at its address."""


class FenceNode(Command, frozen=True):
    """The controller takes a node's lease away; nothing happens when it has a newer incarnation."""

    command_kind: ClassVar[int] = 2

    node_id: NodeId
    incarnation: Offset


class SetDraining(Command, frozen=True):
    """Keeps leadership away from a node (or no longer); `decommissioning` also its replicas."""

    command_kind: ClassVar[int] = 3

    node_id: NodeId
    draining: bool
    decommissioning: bool = False
    force: bool = False


class ChangeIsr(Command, frozen=True):
    """A leader says who is in sync: pairs of node id and the incarnation that it spoke with.

    FencedEpoch when it does not lead in this epoch any more, the partition has another version, or
    a member that comes in is not alive as that incarnation.
    """

    command_kind: ClassVar[int] = 9

    topic_id: Offset
    partition: U31
    leader: NodeId
    epoch: Offset
    version: Offset
    isr: Annotated[tuple[tuple[Offset, Offset], ...], Meta(max_length=REPLICAS_MAX)]


class Resign(Command, frozen=True):
    """A leader that none of its followers reaches asks for another one; FencedEpoch when it does
    not lead in this epoch any more. The result: whether there is another one."""

    command_kind: ClassVar[int] = 15

    topic_id: Offset
    partition: U31
    leader: NodeId
    epoch: Offset


class ElectPreferred(Command, frozen=True):
    """Pairs of topic id and partition; those where it is not possible stay as they are."""

    command_kind: ClassVar[int] = 10

    partitions: Items[tuple[Offset, Offset]]


class AllocateProducerIds(Command, frozen=True):
    command_kind: ClassVar[int] = 12

    node_id: NodeId
    count: Annotated[int, Meta(ge=1, le=PRODUCER_IDS_MAX)]


class InitNamedProducer(Command, frozen=True):
    """A named producer keeps its id and gets an epoch that fences its older instances."""

    command_kind: ClassVar[int] = 13

    name: Name


class EnableQueues(Command, frozen=True):
    """Gives every partition of a topic its ledger and its delays; nothing happens when it has them.

    By id: a topic that was deleted and created anew meanwhile is another one.
    """

    command_kind: ClassVar[int] = 14

    topic_id: Offset


class Confirm(Command, frozen=True):
    """Changes nothing: its proposer has seen all that was decided before it."""

    command_kind: ClassVar[int] = 18


class TellEnds(Command, frozen=True):
    """A node says where its copies end of partitions that wait for it (recovery.py). Each row:

        topic id, partition, version since which it is asked, (last epoch, end offset) per log

    FencedEpoch when the node is not alive as this incarnation.
    """

    command_kind: ClassVar[int] = 16

    node_id: NodeId
    incarnation: Offset
    rows: Annotated[tuple[tuple[Offset, ...], ...], Meta(max_length=TELLINGS_MAX)]

    def check_fields(self) -> None:
        for at, row in enumerate(self.rows):
            if len(row) < 5 or len(row) % 2 == 0:
                raise Bad(f".rows[{at}]: {len(row)} numbers are not a partition and pairs of ends")


class Recover(Command, frozen=True):
    """An operator gives up the members of an isr that are not alive: the longest of the copies that
    are is to lead. FencedEpoch when the partition has another version than was decided about."""

    command_kind: ClassVar[int] = 17

    topic_id: Offset
    partition: U31
    version: Offset


class _Form(NamedTuple):
    """How one kind of command is read."""

    cls: type[Command]
    names: tuple[str, ...]
    read: Callable[[bytes], tuple[Any, ...]]


def _form(cls: type[Command]) -> _Form:
    found = msgspec.structs.fields(cls)
    row: Any = GenericAlias(tuple, (int, int, *(field.type for field in found)))
    names = tuple(field.name for field in found)
    return _Form(cls, names, msgspec.msgpack.Decoder(row).decode)


_CLASSES: tuple[type[Command], ...] = (
    RegisterNode,
    FenceNode,
    SetDraining,
    RemoveNode,
    CreateTopic,
    AlterTopic,
    DeleteTopic,
    AddPartitions,
    ChangeIsr,
    Resign,
    ElectPreferred,
    MoveReplicas,
    AllocateProducerIds,
    InitNamedProducer,
    EnableQueues,
    Confirm,
    TellEnds,
    Recover,
)
_FORMS = {cls.command_kind: _form(cls) for cls in _CLASSES}
assert len(_FORMS) == len(_CLASSES), "two commands have the same kind"

_read_parts = msgspec.msgpack.Decoder(Annotated[list[msgspec.Raw], Meta(max_length=64)]).decode
_read_kind: Callable[[bytes], Any] = msgspec.msgpack.Decoder(int | str).decode


def command_classes() -> tuple[type[Command], ...]:
    return _CLASSES


def encode_command(command: Command) -> bytes:
    """InvalidArgument when a field breaks its rule: the bytes are read back to find that."""
    name = type(command).__name__
    try:
        values = msgspec.structs.astuple(command)
        packed = pack((COMMAND_VERSION, command.command_kind, *values))
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"{name}: {error}") from error
    if len(packed) > COMMAND_BYTES_MAX:
        raise InvalidArgument(f"{name} of {len(packed)} bytes is too large")
    _read(_FORMS[command.command_kind], packed)
    return packed


def decode_command(data: bytes) -> Command:
    """The command, every field checked; the module's docstring says what is raised."""
    if len(data) > COMMAND_BYTES_MAX:
        raise InvalidArgument(f"a command of {len(data)} bytes is too large")
    try:
        head, tail, *rest = _read_parts(data)
        version, kind = msgspec.msgpack.decode(head, type=int), _read_kind(tail)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("the command is not a list of version, kind and fields") from error
    if version != COMMAND_VERSION:
        raise UnknownFormat(f"command of version {version}; this node knows {COMMAND_VERSION}")
    form = _FORMS.get(kind)
    if form is None:
        raise UnknownFormat(f"command kind {kind!r:.40} is not known here")
    if len(rest) != len(form.names):
        raise InvalidArgument(
            f"{form.cls.__name__}: {len(rest)} fields in place of {len(form.names)}"
        )
    return _read(form, data)


def _read(form: _Form, data: bytes) -> Command:
    name = form.cls.__name__
    try:
        command = form.cls(*form.read(data)[2:])
        command.check_fields()
    except Bad as error:
        raise InvalidArgument(f"{name}{error}") from None
    except (ValueError, RecursionError) as error:
        # The path begins with the place of the field in the list.
        text = re.sub(r"`\$\[(\d+)\]", lambda at: f"`$.{form.names[int(at[1]) - 2]}", str(error))
        raise InvalidArgument(reason(name, text)) from error
    return command
