"""Shell: the files of a local cluster: which node runs where.

    DIR/cluster.json   every node with its pid and addresses; always replaced as a whole
    DIR/cluster.lock   held while cluster.json is read, changed and written again
    DIR/secret         the cluster's secret, readable by its owner only
    DIR/node-N.toml    settings of node N, N.log its stderr, N.ready its addresses once it serves
    DIR/node-N/        its data

Several processes use them: the process that started the cluster, and the commands that kill or
restart a node of it. A pid counts as a node only while its command line names that node's settings.
So a pid that the kernel has given to another process is never signalled.
"""

import contextlib
import fcntl
import json
import os
import secrets
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from raftq.client.common.errors import ConfigError, InvalidArgument
from raftq.node.process import write_atomically

CLUSTER_FILE = "cluster.json"
FILE_BYTES_MAX = 1024 * 1024
Setting = int | str | bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalNode:
    """One node as in cluster.json. `pid` is None if it was never started."""

    id: int
    pid: int | None
    host: str
    native: str
    http: str
    raft: str


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """Paths and contents of one local cluster's directory."""

    directory: str

    def config(self, node_id: int) -> str:
        return os.path.join(self.directory, f"node-{node_id}.toml")

    def log(self, node_id: int) -> str:
        return os.path.join(self.directory, f"node-{node_id}.log")

    def ready(self, node_id: int) -> str:
        return os.path.join(self.directory, f"node-{node_id}.ready")

    @property
    def cluster(self) -> str:
        return os.path.join(self.directory, CLUSTER_FILE)

    @property
    def secret(self) -> str:
        return os.path.join(self.directory, "secret")

    def read(self) -> dict[int, LocalNode]:
        """The nodes by id. Raises InvalidArgument if there is no cluster or its file is damaged."""
        try:
            with open(self.cluster, "rb") as file:
                content = file.read(FILE_BYTES_MAX)
        except FileNotFoundError:
            raise InvalidArgument(f"{self.directory} has no {CLUSTER_FILE}: no cluster") from None
        except NotADirectoryError:
            raise InvalidArgument(f"{self.directory} is not a directory") from None
        try:
            nodes = [_node(load) for load in json.loads(content)["nodes"]]
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgument(f"{self.cluster} is damaged: {error!r}") from None
        return {node.id: node for node in nodes}

    def node(self, node_id: int) -> LocalNode:
        nodes = self.read()
        if node_id not in nodes:
            known = ", ".join(str(node) for node in sorted(nodes))
            raise InvalidArgument(f"there is no node {node_id} in {self.directory}, only {known}")
        return nodes[node_id]

    def write(self, nodes: Mapping[int, LocalNode]) -> None:
        rows = [asdict(nodes[node]) for node in sorted(nodes)]
        write_atomically(self.cluster, json.dumps({"nodes": rows}, indent=1) + "\n")

    def note_pid(self, node_id: int, pid: int) -> None:
        """Changes one node and keeps what other processes wrote meanwhile."""
        with self.lock():
            nodes = self.read()
            nodes[node_id] = replace(nodes[node_id], pid=pid)
            self.write(nodes)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        with open(os.path.join(self.directory, "cluster.lock"), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def make_secret(self) -> None:
        """Writes a new secret, unless the directory has one."""
        try:
            descriptor = os.open(self.secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(secrets.token_hex(32) + "\n")

    def write_config(self, node: LocalNode, settings: Mapping[str, Setting]) -> None:
        """Writes the settings. Dotted names are TOML, and JSON strings, numbers and flags are,
        too."""
        lines = [f"{name} = {_toml(value)}\n" for name, value in settings.items()]
        write_atomically(self.config(node.id), "".join(lines))

    def ready_facts(self, node_id: int) -> dict[str, Any] | None:
        """What the node wrote when it was ready; None before that."""
        try:
            with open(self.ready(node_id), "rb") as file:
                facts = json.loads(file.read(FILE_BYTES_MAX))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise ConfigError(f"{self.ready(node_id)} is damaged: {error}") from None
        return facts if isinstance(facts, dict) else None

    def log_tail(self, node_id: int, bytes_max: int = 4096) -> str:
        try:
            with open(self.log(node_id), "rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - bytes_max))
                return file.read(bytes_max).decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def is_running(self, node: LocalNode) -> bool:
        """Whether the pid is alive and belongs to this node, not to another process."""
        return node.pid is not None and self.config(node.id) in command_line(node.pid)


def command_line(pid: int) -> list[str]:
    """The arguments of a running process; empty if there is none or it has ended."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return [part for part in os.fsdecode(file.read()).split("\0") if part]
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        if os.path.isdir("/proc/self"):
            return []
    shown = subprocess.run(
        ["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    return shown.stdout.split()


def _node(row: Any) -> LocalNode:
    node = LocalNode(**row)
    whole = [node.id] if node.pid is None else [node.id, node.pid]
    if any(type(one) is not int or one < 1 for one in whole):
        raise ValueError("a node id or pid is not a positive number")
    if not all(isinstance(one, str) for one in (node.host, node.native, node.http, node.raft)):
        raise ValueError("an address is not text")
    return node


def _toml(value: Setting) -> str:
    return json.dumps(value, ensure_ascii=False)
