"""What can be asked of the metadata: one frozen dataclass per kind, and their bytes. (Pure.)

    msgpack [version, kind, field, field, ...]      the fields in the order of the dataclass

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
    TellEnds             how many of the tellings count
    Recover              the nodes that are asked where their copies end
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import msgpack

from raftq.client.common.errors import Detail, InvalidArgument, UnknownFormat
from raftq.client.wire.messages import U16, U31, Name, NodeId, Offset
from raftq.client.wire.schema import ITEMS_MAX, Bad, Most, Range, Struct

COMMAND_VERSION = 2
COMMAND_BYTES_MAX = 4 * 1024 * 1024
PRODUCER_IDS_MAX = 1_000_000
"""In one block."""
REPLICAS_MAX = 64
"""In one list of a command; a topic may have fewer, see topic_config.py."""

TELLINGS_MAX = 10_000
"""In one command."""

Settings = Annotated[Mapping[str, Detail], Most(64)]
Lost = Literal["nothing", "tail", "past", "everything"]
"""`tail`: what was not synced when the machine went down; `everything`: the disk is another one."""


class Command:
    """Base of all commands."""

    __slots__ = ()
    kind: ClassVar[int] = -1

    def check(self) -> None:
        """Raise Bad for what the types of the fields do not say."""


C = TypeVar("C", bound=Command)

_classes: dict[int, type[Command]] = {}
_structs: dict[int, Struct[Any]] = {}
_names: dict[int, tuple[str, ...]] = {}


def _command(cls: type[C]) -> type[C]:
    kind = cls.kind
    assert 0 < kind <= 0xFF, cls
    assert kind not in _classes, cls
    _classes[kind] = cls
    _structs[kind] = Struct(cls)
    _names[kind] = tuple(one.name for one in fields(cls))  # type: ignore[arg-type]
    return cls


def command_classes() -> tuple[type[Command], ...]:
    return tuple(_classes.values())


def encode_command(command: Command) -> bytes:
    """InvalidArgument when a field breaks its rule."""
    kind = command.kind
    try:
        plain = _structs[kind].write(command)
        command.check()
        # All of them, also those that have their default: the place tells which field it is.
        values = [plain.get(name, getattr(command, name)) for name in _names[kind]]
        packed: bytes = msgpack.packb([COMMAND_VERSION, kind, *values])
    except Bad as error:
        raise InvalidArgument(f"{type(command).__name__}{error}") from None
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidArgument(f"{type(command).__name__}: {error}") from error
    if len(packed) > COMMAND_BYTES_MAX:
        raise InvalidArgument(f"{type(command).__name__} of {len(packed)} bytes is too large")
    return packed


def decode_command(data: bytes) -> Command:
    """The command, every field checked; see the module's docstring for what is raised."""
    if len(data) > COMMAND_BYTES_MAX:
        raise InvalidArgument(f"a command of {len(data)} bytes is too large")
    try:
        value = msgpack.unpackb(data, max_array_len=min(len(data), ITEMS_MAX), max_ext_len=0)
    except Exception as error:
        # msgpack raises several unrelated types on bad input; all of them mean the same here.
        raise InvalidArgument(f"the command is not msgpack: {type(error).__name__}") from error
    if type(value) is not list or len(value) < 2 or type(value[0]) is not int:
        raise InvalidArgument("the command is not a list of version, kind and fields")
    version, kind, *rest = value
    if version != COMMAND_VERSION:
        raise UnknownFormat(f"command of version {version}; this node knows {COMMAND_VERSION}")
    if type(kind) is not int or kind not in _classes:
        raise UnknownFormat(f"command kind {str(kind)[:40]} is not known here")
    names = _names[kind]
    if len(rest) != len(names):
        raise InvalidArgument(
            f"{_classes[kind].__name__}: {len(rest)} fields in place of {len(names)}"
        )
    try:
        command: Command = _structs[kind].read(dict(zip(names, rest, strict=True)))
        command.check()
    except Bad as error:
        raise InvalidArgument(f"{_classes[kind].__name__}{error}") from None
    return command


def _check_pairs(name: str, items: tuple[tuple[int, ...], ...]) -> None:
    for at, item in enumerate(items):
        if len(item) != 2:
            raise Bad(f".{name}[{at}]: {len(item)} numbers in place of 2")


@_command
@dataclass(frozen=True, slots=True)
class RegisterNode(Command):
    """A process says that it is there, and what its logs may have lost of what it acknowledged."""

    kind: ClassVar[int] = 1

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


@_command
@dataclass(frozen=True, slots=True)
class FenceNode(Command):
    """The controller takes a node's lease away; nothing happens when it has a newer incarnation."""

    kind: ClassVar[int] = 2

    node_id: NodeId
    incarnation: Offset


@_command
@dataclass(frozen=True, slots=True)
class SetDraining(Command):
    """Keeps leadership away from a node (or no longer); `decommissioning` also its replicas."""

    kind: ClassVar[int] = 3

    node_id: NodeId
    draining: bool
    decommissioning: bool = False
    force: bool = False


@_command
@dataclass(frozen=True, slots=True)
class RemoveNode(Command):
    kind: ClassVar[int] = 4

    node_id: NodeId


@_command
@dataclass(frozen=True, slots=True)
class CreateTopic(Command):
    """0 partitions or replicas: the default."""

    kind: ClassVar[int] = 5

    name: Name
    partitions: U31 = 0
    replication: U31 = 0
    config: Settings = field(default_factory=dict)


@_command
@dataclass(frozen=True, slots=True)
class AlterTopic(Command):
    """Changes these settings and leaves the others; None takes a setting back to its default."""

    kind: ClassVar[int] = 6

    name: Name
    config: Settings


@_command
@dataclass(frozen=True, slots=True)
class DeleteTopic(Command):
    kind: ClassVar[int] = 7

    name: Name


@_command
@dataclass(frozen=True, slots=True)
class AddPartitions(Command):
    """`total` is the number of partitions afterwards."""

    kind: ClassVar[int] = 8

    name: Name
    total: U31


@_command
@dataclass(frozen=True, slots=True)
class ChangeIsr(Command):
    """A leader says who is in sync: pairs of node id and the incarnation that it spoke with.

    FencedEpoch when it does not lead in this epoch any more, the partition has another version, or
    a member that comes in is not alive as that incarnation.
    """

    kind: ClassVar[int] = 9

    topic_id: Offset
    partition: U31
    leader: NodeId
    epoch: Offset
    version: Offset
    isr: Annotated[tuple[tuple[Offset, Offset], ...], Most(REPLICAS_MAX)]

    def check(self) -> None:
        _check_pairs("isr", self.isr)


@_command
@dataclass(frozen=True, slots=True)
class Resign(Command):
    """A leader that none of its followers reaches asks for another one; FencedEpoch when it does
    not lead in this epoch any more. The result: whether there is another one."""

    kind: ClassVar[int] = 15

    topic_id: Offset
    partition: U31
    leader: NodeId
    epoch: Offset


@_command
@dataclass(frozen=True, slots=True)
class ElectPreferred(Command):
    """Pairs of topic id and partition; those where it is not possible stay as they are."""

    kind: ClassVar[int] = 10

    partitions: Annotated[tuple[tuple[Offset, Offset], ...], Most(ITEMS_MAX)]

    def check(self) -> None:
        _check_pairs("partitions", self.partitions)


@_command
@dataclass(frozen=True, slots=True)
class MoveReplicas(Command):
    """Begins a move to these nodes, the preferred leader first; in place of one under way."""

    kind: ClassVar[int] = 11

    name: Name
    partition: U31
    replicas: Annotated[tuple[NodeId, ...], Most(REPLICAS_MAX)]


@_command
@dataclass(frozen=True, slots=True)
class AllocateProducerIds(Command):
    kind: ClassVar[int] = 12

    node_id: NodeId
    count: Annotated[int, Range(1, PRODUCER_IDS_MAX)]


@_command
@dataclass(frozen=True, slots=True)
class InitNamedProducer(Command):
    """A named producer keeps its id and gets an epoch that fences its older instances."""

    kind: ClassVar[int] = 13

    name: Name


@_command
@dataclass(frozen=True, slots=True)
class EnableQueues(Command):
    """Gives every partition of a topic its ledger and its delays; nothing happens when it has them.

    By id: a topic that was deleted and created anew meanwhile is another one.
    """

    kind: ClassVar[int] = 14

    topic_id: Offset


@_command
@dataclass(frozen=True, slots=True)
class Confirm(Command):
    """Changes nothing: whoever proposed it has seen all that was decided before it."""

    kind: ClassVar[int] = 18


@_command
@dataclass(frozen=True, slots=True)
class TellEnds(Command):
    """A node says where its copies end of partitions that wait for it (recovery.py). Each row:

        topic id, partition, version since which it is asked, (last epoch, end offset) per log

    FencedEpoch when the node is not alive as this incarnation.
    """

    kind: ClassVar[int] = 16

    node_id: NodeId
    incarnation: Offset
    rows: Annotated[tuple[tuple[Offset, ...], ...], Most(TELLINGS_MAX)]

    def check(self) -> None:
        for at, row in enumerate(self.rows):
            if len(row) < 5 or len(row) % 2 == 0:
                raise Bad(f".rows[{at}]: {len(row)} numbers are no partition and pairs of ends")


@_command
@dataclass(frozen=True, slots=True)
class Recover(Command):
    """An operator gives up the members of an isr that are not alive: the longest of the copies that
    are is to lead. FencedEpoch when the partition has another version than was decided about."""

    kind: ClassVar[int] = 17

    topic_id: Offset
    partition: U31
    version: Offset
