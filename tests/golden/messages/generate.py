"""Writes the golden messages of this folder. Run with `--overwrite` to replace existing ones.

Each file has a list of objects with the class, its arguments in the order of the fields, and the
bytes. A golden message never changes: nodes of different versions talk to each other, and commands
and dumps stand on users' disks.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from msgspec import Meta, Struct
from msgspec.structs import asdict, fields

from raftq.client.wire import admin_messages, group_messages, messages, node_messages
from raftq.client.wire import queue_messages as queues
from raftq.client.wire.frames import PREFIX, PREFIX_BYTES
from raftq.cluster.metadata import commands
from raftq.cluster.metadata.apply import apply, dump
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.raft import messages as raft

FOLDER = Path(__file__).resolve().parent
WIRE = (messages, admin_messages, node_messages, group_messages, queues)
SIZES = [0, 1, 127, 128, 255, 256, 65_535, 65_536, 2**31 - 1, 2**32 - 1, 2**32, 2**63 - 1]
DETAILS = {"text": "é" * 40, "number": -129, "flag": True, "nothing": None}

# Messages whose fields depend on each other, with the number of bytes that follow them.
RELATED: dict[str, list[tuple[tuple[Any, ...], int]]] = {
    "Hello": [((1, 1, "client"), 0), ((1, 65_535, "node", "näme", b"\x00\xff" * 100), 0)],
    "FetchReply": [
        (((),), 0),
        (
            (
                (
                    messages.FetchedPartition("t", 0, "", 2**40, 128, 0, 300, 7),
                    messages.FetchedPartition("t" * 40, 2**31 - 1, "not_leader"),
                    messages.FetchedPartition("u", 1, "", 5, 0, 300, 70_000, 2**32 - 1),
                ),
                250,
            ),
            70_300,
        ),
    ],
    "LeaseReply": [
        (((),), 0),
        (
            (
                (
                    queues.LeasedPartition(
                        "t",
                        1,
                        "",
                        (
                            queues.LeasedRange(2**62, 0, 5, 1, 1_700_000_000_000),
                            queues.LeasedRange(1, 5, 6, 300, 2**40, 2**39),
                        ),
                        0,
                        9,
                        4,
                    ),
                    queues.LeasedPartition("t", 2, "not_leader"),
                ),
                1,
            ),
            9,
        ),
    ],
    "ReplicateReply": [
        ((), 0),
        (
            (
                (
                    node_messages.Replicated(1, 0, 3, "append", 500, 2, 0, 0, 300, "", 2, 2**33),
                    node_messages.Replicated(1, 1, 3, "truncate", offset=70_000),
                    node_messages.Replicated(2**40, 2, 3, "refuse", error="fenced_epoch"),
                ),
            ),
            300,
        ),
    ],
    "Replicate": [
        ((1, 0, 0), 0),
        (
            (
                3,
                2**45,
                200,
                (
                    node_messages.Subscription(1, 2, 3, 4, 5, 6),
                    node_messages.Subscription(1, 2, 3, 4, 5, 6, (1, 0, 2, 300), 1, True),
                ),
                (
                    node_messages.Progress(9, 8, 7, 6, 2**50, 2),
                    node_messages.Progress(1, 0, 0, 0, 0),
                ),
                (1, 0, 2, 2**40, 1, 0),
                65_536,
                250,
            ),
            0,
        ),
    ],
    "WatchMetadataReply": [
        ((5,), 0),
        ((2**40, (10, 300), False, 3, 70_000, (1, 2, 3)), 310),
        ((5, (), True, None, 2), 70_000),
    ],
    "DescribeCopiesReply": [
        ((), 0),
        (
            (
                (
                    admin_messages.CopyInfo(1, 0, ((3, 2**40, 128),)),
                    admin_messages.CopyInfo(300, 7, ((0, 0, 0), (1, 2, 3), (4, 5, 6))),
                ),
            ),
            0,
        ),
    ],
    "TellEnds": [
        ((1, 2, ()), 0),
        ((3, 2**41, ((1, 0, 5, 3, 2**40), (2, 1, 300, 1, 2, 3, 4, 5, 6))), 0),
    ],
}

STATE: list[commands.Command] = [
    commands.RegisterNode(1, "host-1", 7001, 8001, "10.0.0.1:9001", "rack-a", 5),
    commands.RegisterNode(2, "host-2", 7002, 0, "", "", 2**40),
    commands.RegisterNode(
        3, "höst-3", 7003, 8003, "10.0.0.3:9003", "rack-b", 7, "tail", None, True
    ),
    commands.CreateTopic("orders", 3, 2, {"retention_ms": 86_400_000, "fsync": "always"}),
    commands.CreateTopic("events", 1, 3, {}),
    commands.EnableQueues(1),
    commands.MoveReplicas("events", 0, (3, 1)),
    commands.InitNamedProducer("writer"),
    commands.InitNamedProducer("writer"),
    commands.AllocateProducerIds(1, 1000),
    commands.SetDraining(2, True, False, True),
    commands.FenceNode(1, 5),
    commands.FenceNode(3, 7),
    commands.RegisterNode(3, "höst-3", 7003, 8003, "10.0.0.3:9003", "rack-b", 9, "everything"),
]

RAFT: list[raft.RaftMessage] = [
    raft.PreVote(1, 2, 0, False),
    raft.PreVoteReply(2**40, 2**40 + 1, True),
    raft.RequestVote(300, 70_000, 299, True),
    raft.RequestVoteReply(300, False),
    raft.AppendEntries(5, 2**33, 4, 128, []),
    raft.AppendEntries(5, 1, 4, 1, [(4, b"\x01"), (5, b"x" * 300), (5, b"")]),
    raft.AppendReply(5, True, 65_535),
    raft.InstallSnapshot(5, 9, 2**20, 2**16, b"\x00\xff" * 200),
    raft.SnapshotReply(5, 9, 255),
    raft.ApplyCommands([b"one", b"", b"\x00" * 256]),
    raft.RefuseCommands([b"\x07" * 16]),
]


class Maker:
    """Makes values for annotations; each integer is of another width than the one before."""

    def __init__(self) -> None:
        self._at = 0

    def value(self, hint: Any, default: Any = None) -> Any:
        rule: Any = None
        while get_origin(hint) is Annotated:
            hint, rule = get_args(hint)[0], get_args(hint)[-1]
        origin, arguments = get_origin(hint), get_args(hint)
        if hint is bool:
            return True
        if hint is int:
            return self._number(rule)
        if hint is str:
            return "naïve" + "x" * min(rule.max_length - 5, 40)
        if hint is bytes:
            return b"\x00\xff" * min(rule.max_length // 2, 300)
        if origin is Literal:
            return next(one for one in arguments if one is not default)
        if origin is tuple:
            return (self.value(arguments[0]), self.value(arguments[0]))
        if isinstance(hint, type) and issubclass(hint, Struct):
            return self.instance(hint)
        if origin is Mapping:
            return dict(DETAILS)
        (inner,) = (one for one in arguments if one is not type(None))
        return self.value(inner)

    def _number(self, rule: Meta) -> int:
        fitting = [one for one in SIZES if rule.ge <= one <= rule.le]
        self._at += 1
        return fitting[self._at % len(fitting)]

    def instance(self, cls: type[Any], *, full: bool = True) -> Any:
        wanted = [one for one in fields(cls) if full or (one.required)]
        return cls(*(self.value(one.type, one.default) for one in wanted))


def samples(cls: type[Any]) -> Iterator[tuple[Any, int]]:
    """Objects of a class, with the number of bytes that follow each of them."""
    if cls.__name__ in RELATED:
        yield from ((cls(*arguments), size) for arguments, size in RELATED[cls.__name__])
        return
    maker = Maker()
    yield maker.instance(cls, full=False), 0
    if fields(cls):
        for _ in range(3):
            yield maker.instance(cls), 0


def plain(value: Any) -> Any:
    """As JSON."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, Mapping):
        return {"map": {name: plain(item) for name, item in value.items()}}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, Struct):
        given = [(getattr(value, one.name), one.default) for one in fields(value)]
        while given and (given[-1][0] is given[-1][1] or given[-1][0] == {}):
            given.pop()  # it has its default
        return {"class": type(value).__name__, "arguments": [plain(one) for one, _ in given]}
    return value


def back(value: Any, modules: tuple[Any, ...] = WIRE) -> Any:
    """The object again, of a class in one of these modules."""
    if isinstance(value, list):
        return tuple(back(item, modules) for item in value)
    if not isinstance(value, dict):
        return value
    if "bytes" in value:
        return bytes.fromhex(value["bytes"])
    if "map" in value:
        return {name: back(item, modules) for name, item in value["map"].items()}
    (cls,) = {getattr(one, value["class"]) for one in modules if hasattr(one, value["class"])}
    return cls(*back(value["arguments"], modules))


def content(message: raft.RaftMessage) -> dict[str, Any]:
    """A message between Raft nodes as JSON."""
    fields = {name: plain(value) for name, value in asdict(message).items()}
    return {"type": message.__struct_config__.tag, **fields}


def header(message: messages.WireMessage, raw_bytes: int) -> bytes:
    """The bytes of a message without the frame's prefix and without what follows."""
    front = b"".join(messages.encode_message(message, 1, [bytes(raw_bytes)] if raw_bytes else []))
    return front[PREFIX_BYTES : PREFIX_BYTES + PREFIX.unpack_from(front)[4]]


def wire_rows() -> Iterator[dict[str, Any]]:
    for kind in sorted(messages.request_kinds() | messages.reply_kinds()):
        for message, raw_bytes in samples(messages.class_of(kind)):
            packed = header(message, raw_bytes).hex()
            yield {"kind": kind, **plain(message), "raw_bytes": raw_bytes, "packed": packed}


def command_rows() -> Iterator[dict[str, Any]]:
    for cls in commands.command_classes():
        for command, _ in samples(cls):
            yield {**plain(command), "packed": commands.encode_command(command).hex()}


def raft_rows() -> Iterator[dict[str, Any]]:
    for message in RAFT:
        yield {"message": content(message), "packed": raft.encode(message).hex()}


def dump_rows() -> Iterator[dict[str, Any]]:
    state = ClusterState("a-cluster")
    for index, command in enumerate(STATE, 1):
        apply(state, command, index)
    yield {"packed": dump(ClusterState("")).hex(), "state": []}
    yield {"packed": dump(state).hex(), "state": [plain(command) for command in STATE]}


FILES = {"wire": wire_rows, "commands": command_rows, "raft": raft_rows, "dumps": dump_rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--overwrite", action="store_true", help="replace files that exist")
    overwrite = parser.parse_args().overwrite
    if any(FOLDER.glob("*.json")) and not overwrite:
        sys.exit("golden messages exist; nothing was written (see --overwrite)")
    for name, rows in FILES.items():
        lines = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows())
        (FOLDER / f"{name}.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
