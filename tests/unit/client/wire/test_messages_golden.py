"""The golden messages of tests/golden/messages: encoded to the same bytes, decoded to the same."""

import importlib.util
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raftq.client.wire.frames import Frame
from raftq.client.wire.messages import (
    class_of,
    decode_message,
    reply_kinds,
    request_kinds,
)
from raftq.cluster.metadata import commands
from raftq.cluster.metadata.apply import apply, dump, load
from raftq.cluster.metadata.commands import command_classes, decode_command, encode_command
from raftq.cluster.metadata.state import ClusterState
from raftq.cluster.raft import messages as raft_messages

FOLDER = Path(__file__).resolve().parents[3] / "golden" / "messages"


def rows(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((FOLDER / f"{name}.json").read_text())
    return found


def ids(row: dict[str, Any]) -> str:
    return str(row.get("class") or row.get("message", {}).get("type"))


@cache
def generator() -> Any:
    spec = importlib.util.spec_from_file_location("golden_messages", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("row", rows("wire"), ids=ids)
def test_a_message_has_its_golden_bytes(row: dict[str, Any]) -> None:
    message, packed = generator().back(row), bytes.fromhex(row["packed"])
    assert generator().header(message, row["raw_bytes"]) == packed
    assert message.kind == row["kind"]
    raw = memoryview(bytes(row["raw_bytes"]))
    assert decode_message(Frame(row["kind"], 1, packed, raw)) == message


@pytest.mark.parametrize("row", rows("commands"), ids=ids)
def test_a_command_has_its_golden_bytes(row: dict[str, Any]) -> None:
    command, packed = generator().back(row, (commands,)), bytes.fromhex(row["packed"])
    assert encode_command(command) == packed
    assert decode_command(packed) == command


@pytest.mark.parametrize("row", rows("raft"), ids=ids)
def test_a_raft_message_has_its_golden_bytes(row: dict[str, Any]) -> None:
    packed = bytes.fromhex(row["packed"])
    message = raft_messages.decode(packed)
    assert generator().content(message) == row["message"]
    assert raft_messages.encode(message) == packed


@pytest.mark.parametrize("row", rows("dumps"))
def test_a_dump_has_its_golden_bytes(row: dict[str, Any]) -> None:
    state = ClusterState("a-cluster" if row["state"] else "")
    for index, command in enumerate(row["state"], 1):
        apply(state, generator().back(command, (commands,)), index)
    packed = bytes.fromhex(row["packed"])
    assert dump(state) == packed
    assert load(packed) == state
    assert dump(load(packed)) == packed


def test_every_message_and_command_has_golden_bytes() -> None:
    known = {row["class"] for row in rows("wire")}
    assert known == {class_of(kind).__name__ for kind in request_kinds() | reply_kinds()}
    assert {row["class"] for row in rows("commands")} == {one.__name__ for one in command_classes()}
