"""Writes docs/CONFIGURATION.md from the dataclasses of settings, or checks that it is up to date.

    python .ci/make_configuration.py            write it
    python .ci/make_configuration.py --check    exit code 1 when it would change

The text of a setting is the string under its field. Values come from the class itself.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "CONFIGURATION.md"
HIDDEN = {"wall_ms", "rng"}  # for simulations
HEADER = "| setting | type | default | meaning |\n|---|---|---|---|\n"
UNITS = (
    ("bytes", ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))),
    ("ms", ((86_400_000, "days"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))),
)

START = """# Configuration

This page is generated from the code by `make docs`; change the text under a field of the named
class instead. Durations are in milliseconds where a name ends in `_ms` (or contains `_ms_`), sizes
in bytes where it ends in `_bytes` (or contains `_bytes_`). Other durations are in seconds. Invalid
settings are refused at the start, all at once.

## A node

Settings come from a TOML file (`raftq node --config FILE`), then from the environment, then from
arguments; the later source wins, setting by setting. A setting of a part has its name in front:
`storage.scrub_bytes_s` in an argument (`--set storage.scrub_bytes_s=0`),
`RAFTQ_STORAGE__SCRUB_BYTES_S` in the environment, and a table in the file:

```toml
node_id = 1
data_dir = "data"
secret_file = "secret"
native = "10.0.0.1:7070"
raft = "10.0.0.1:7000"
voters = { 1 = "10.0.0.1:7000", 2 = "10.0.0.2:7000", 3 = "10.0.0.3:7000" }

[storage]
scrub_bytes_s = 0
```

"""
TOPICS = """## A topic

Given at the creation (`raftq topic create orders --config min_insync=2`,
`Admin.create_topic(config={...})`) or later (`raftq topic alter orders --config
retention_ms=3600000`; `NAME=` takes a setting back to its default).

| setting | default | allowed | meaning |
|---|---|---|---|
"""
CLIENTS = """## Clients

Keyword arguments of the class; blocking and asyncio clients have the same ones. Every client also
has the settings of the first table.

"""
EMBEDDED = """## The embedded queue

Keyword arguments of `Queue.open` and `AsyncQueue.open`.

"""


class Part(NamedTuple):
    """One table: its heading, the class of its settings, and what stands before their names."""

    heading: str
    module: str
    name: str
    prefix: str = ""


NODE = (
    Part("### The node itself", "raftq.node.config", "NodeConfig"),
    Part("### `storage`: disk and memory", "raftq.node.config", "StorageConfig", "storage."),
    Part("### `replication`: followers", "raftq.node.config", "ReplicationConfig", "replication."),
    Part("### `server`: the native listener", "raftq.node.config", "ServerOptions", "server."),
    Part(
        "### `controller`: when nodes count as dead, when leaders and replicas move",
        "raftq.cluster.controller.events",
        "ControllerConfig",
        "controller.",
    ),
    Part("### `raft_times`: consensus", "raftq.cluster.raft.config", "RaftTimes", "raft_times."),
)
CLIENT = (
    Part("### Every client", "raftq.client.options", "ClientOptions"),
    Part("### `Producer`", "raftq.client.options", "ProducerOptions"),
    Part("### `Consumer`", "raftq.client.options", "ConsumerOptions"),
    Part("### `Admin`", "raftq.client.options", "AdminOptions"),
    Part("### `QueueClient`", "raftq.client.queue.options", "QueueOptions"),
    Part("### `Worker`: also all of `QueueClient`", "raftq.client.queue.options", "WorkerOptions"),
)
QUEUE = Part("", "raftq.node.queue.embedded.options", "EmbeddedOptions")


def page() -> str:
    text = START + "".join(map(table, NODE)) + TOPICS + topic_rows() + "\n"
    text += CLIENTS + "".join(map(table, CLIENT)) + EMBEDDED + table(QUEUE)
    return text.rstrip() + "\n"


def table(part: Part) -> str:
    """The fields that the class itself declares; those of its parts have tables of their own."""
    kind = getattr(importlib.import_module(part.module), part.name)
    defaults = {one.name: one for one in dataclasses.fields(kind)}
    rows = ""
    for name, annotation, meaning in declared(kind):
        value = default_of(defaults[name])
        if name in HIDDEN or (dataclasses.is_dataclass(value) and not is_address(value)):
            continue
        shown = cell(value_text(name, value))
        rows += f"| `{part.prefix}{name}` | `{cell(annotation)}` | {shown} | {cell(meaning)} |\n"
    source = f"`{part.name}` in `{part.module.removeprefix('raftq.').replace('.', '/')}.py`"
    return f"{part.heading}\n\n{source}:\n\n{HEADER}{rows}\n".lstrip()


def declared(kind: type) -> Iterator[tuple[str, str, str]]:
    """(name, type, text under it) of each field in the source of the class."""
    tree = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(tree, ast.ClassDef)
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                text = inspect.cleandoc(str(after.value.value))
            yield node.target.id, ast.unparse(node.annotation), text


def default_of(one: "dataclasses.Field[Any]") -> object:
    if one.default_factory is not dataclasses.MISSING:
        return one.default_factory()
    return one.default


def is_address(value: object) -> bool:
    return type(value).__name__ == "Address"


def value_text(name: str, value: object) -> str:
    if value is dataclasses.MISSING:
        return "required"
    if is_address(value):
        return f"`{value}`"
    if type(value) is not int:
        return "none" if value in ((), {}) else f"`{value!r}`"
    return with_unit(name, value)


def with_unit(name: str, value: int) -> str:
    for word, units in UNITS:
        for size, unit in units:
            if word in name.split("_") and value >= size and value % size == 0:
                return f"`{value}` ({value // size} {unit})"
    return f"`{value}`"


def topic_rows() -> str:
    module = importlib.import_module("raftq.cluster.metadata.topic_config")
    described = described_topics(inspect.getdoc(module) or "")
    missing = set(module.SETTINGS) ^ set(described)
    assert not missing, f"the table in topic_config.py and its settings differ: {missing}"
    rows = ""
    for name, (default, meaning) in described.items():
        if name in module.NUMBERS:
            _, least, most, unlimited = module.NUMBERS[name]
            top = "" if most == module.NUMBER_MAX else f" to {with_unit(name, most)}"
            allowed = with_unit(name, least) + (top or " or more") + (", `-1`" if unlimited else "")
        else:
            allowed = ", ".join(f"`{one}`" for one in module.CHOICES[name])
        rows += f"| `{name}` | {cell(default)} | {allowed} | {cell(meaning)} |\n"
    return rows


def described_topics(text: str) -> dict[str, tuple[str, str]]:
    """The three columns of the table in the module's docstring: {name: (default, meaning)}."""
    lines = text.splitlines()
    (first,) = [
        n for n, line in enumerate(lines) if re.match(r"\s+name\s+default\s+meaning$", line)
    ]
    columns = [lines[first].index(word) for word in ("name", "default", "meaning")]
    found: dict[str, list[str]] = {}
    for line in lines[first + 1 :]:
        if not line.startswith(" "):
            break
        name, default, meaning = (
            line[start:end].strip()
            for start, end in zip(columns, [*columns[1:], None], strict=True)
        )
        row = found.setdefault(name or list(found)[-1], ["", ""])
        row[0] = f"{row[0]} {default}".strip()
        row[1] = f"{row[1]} {meaning}".strip()
    return {name: (default, meaning) for name, (default, meaning) in found.items()}


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> int:
    if sys.argv[1:] != ["--check"]:
        PAGE.write_text(page())
    elif page() != (PAGE.read_text() if PAGE.exists() else ""):
        print("docs/CONFIGURATION.md is out of date: run `make docs`", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
