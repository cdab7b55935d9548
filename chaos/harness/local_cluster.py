"""Shell: a cluster of real processes on this machine.

`raftq cluster up`, the demo and tests use it. Each node is its own process with its own settings,
log and data below one directory. It can be killed, stopped, paused and started again by its id.

Invariants
- Only processes of this directory are ever signalled, by pid, after a check that the pid still
  belongs to that node.
- A node keeps its addresses for as long as the object lives, so that others find it again.
- `close` leaves no process behind: first SIGTERM, after `stop_s` SIGKILL.

It restarts nothing by itself. Calls block and must not come from two threads at once. With
`die_with_parent` a node ends with the thread that started it, so that thread must live on.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Self

from raftq.chaos.harness.local_files import LocalFiles, LocalNode, Setting
from raftq.chaos.harness.local_ports import free_ports, is_free
from raftq.client.common.errors import ConfigError, InternalError, InvalidArgument, RequestTimeout
from raftq.node.config import VOTERS_MAX, Address

NODES_MAX = 32
PORTS_APART = 100
START_TRIES_MAX = 5
KILL_S = 10.0
POLL_S = 0.02
COMMAND = (sys.executable, "-m", "raftq.node")
DISTURBED_COMMAND = (sys.executable, "-m", "raftq.chaos.harness")
"""The command of a node that obeys the harness; see `__main__.py` in this directory."""
_CLASH = "address already in use"

Links = Callable[[Mapping[int, LocalNode]], Mapping[int, Mapping[str, Setting]]]


@dataclass(slots=True)
class _Process:
    """The process of one node; `child` is None if another process started it."""

    child: "subprocess.Popen[bytes] | None" = None
    wanted: bool = False


class LocalCluster:
    """Nodes 1..n. As a context manager it starts them, waits until they serve, and ends them."""

    def __init__(  # noqa: PLR0913 - a public API
        self,
        directory: str | os.PathLike[str],
        nodes: int = 3,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        settings: Mapping[str, Setting] | None = None,
        links: Links | None = None,
        env: Mapping[str, str] | None = None,
        command: Sequence[str] = COMMAND,
        die_with_parent: bool = True,
        stop_s: float = 20.0,
    ) -> None:
        """Plans a cluster; nothing starts yet.

        `port` is the first native port; without it free ports are chosen. `settings` go to every
        node. `links` is called with all addresses before a node starts, and returns settings for
        each node: this is how proxies are put between nodes."""
        if not 1 <= nodes <= NODES_MAX:
            raise InvalidArgument(f"a local cluster has 1 to {NODES_MAX} nodes, not {nodes}")
        self.files = LocalFiles(os.path.abspath(os.fspath(directory)))
        self.nodes: dict[int, LocalNode] = {}
        self._count = nodes
        self._port = port
        self._host = host
        self._settings = dict(settings or {})
        self._links = links
        self._env = None if env is None else dict(env)
        self._command = tuple(command)
        self._die_with_parent = die_with_parent and sys.platform == "linux"
        self._stop_s = stop_s
        self._processes: dict[int, _Process] = {}
        self._starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-starter")
        self._pause = (
            threading.Event()
        )  # never set: its wait can be interrupted by a signal handler

    def __enter__(self) -> Self:
        try:
            self.start()
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def ids(self) -> tuple[int, ...]:
        return tuple(range(1, self._count + 1))

    @property
    def bootstrap(self) -> str:
        """The native addresses of all nodes, in the form that clients accept."""
        return ",".join(self.nodes[node_id].native for node_id in self.ids)

    def addresses(self, node_id: int) -> LocalNode:
        self._check_id(node_id)
        return self.nodes[node_id]

    def pid(self, node_id: int) -> int | None:
        """The pid of the running process; None if the node is down."""
        node = self.addresses(node_id)
        return node.pid if self.is_running(node_id) else None

    def is_running(self, node_id: int) -> bool:
        self._check_id(node_id)
        child = self._process(node_id).child
        if child is not None:
            return child.poll() is None
        return node_id in self.nodes and self.files.is_running(self.nodes[node_id])

    def start(self) -> None:
        """Starts every node and returns at once. A directory that was used before keeps its
        data."""
        os.makedirs(self.files.directory, exist_ok=True)
        self.files.make_secret()
        with self.files.lock():
            self.nodes = self._planned()
            self._write_files()
        for node_id in self.ids:
            self._spawn(node_id)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Waits until every started node serves. Chooses other ports if one was taken meanwhile."""
        ends_at = _now() + timeout
        for _ in range(START_TRIES_MAX):
            if all(
                self._wait_one(node_id, ends_at) for node_id in self.ids if self._wanted(node_id)
            ):
                return
            self._end(self._stop_s)
            with self.files.lock():
                self.nodes = self._with_new_ports()
                self._write_files()
            for node_id in self.ids:
                self._spawn(node_id)
        raise ConfigError(f"no free ports in {START_TRIES_MAX} tries")

    def kill(self, node_id: int) -> None:
        """Sends SIGKILL and waits until the process is gone."""
        self._check_running(node_id)
        self._process(node_id).wanted = False
        self._signal(node_id, signal.SIGKILL)
        self._wait_gone(node_id, self._stop_s)

    def stop(self, node_id: int, timeout: float | None = None) -> None:
        """Sends SIGTERM: the node hands over what it leads and stops. Raises if that takes too
        long."""
        self._check_running(node_id)
        self._process(node_id).wanted = False
        self._signal(node_id, signal.SIGTERM)
        self.resume(node_id)
        if not self._wait_gone(node_id, self._stop_s if timeout is None else timeout):
            raise RequestTimeout(f"node {node_id} does not stop")

    def pause(self, node_id: int) -> None:
        """Sends SIGSTOP: the process stops, and its connections stay open."""
        self._check_running(node_id)
        self._signal(node_id, signal.SIGSTOP)

    def resume(self, node_id: int) -> None:
        """Sends SIGCONT. Does nothing if the node was not paused."""
        self._signal(node_id, signal.SIGCONT)

    def restart(self, node_id: int, timeout: float | None = 30.0) -> None:
        """Starts a node that is down, with its settings and addresses, and waits until it serves.

        With a timeout of None it does not wait."""
        if self.is_running(node_id):
            raise InvalidArgument(f"node {node_id} runs already, as process {self.pid(node_id)}")
        self._spawn(node_id)
        if timeout is not None and not self._wait_one(node_id, _now() + timeout):
            raise InternalError(f"node {node_id}: {self._last_words(node_id)}")

    def died(self) -> list[tuple[int, str]]:
        """Nodes that ended by themselves since the last call, and how they ended."""
        found = []
        for node_id in self.ids:
            process = self._process(node_id)
            if process.wanted and not self.is_running(node_id):
                process.wanted = False
                found.append((node_id, self._how_it_ended(node_id)))
        return found

    def adopt(self) -> list[int]:
        """Takes over nodes that another process started again. Returns the ids of the new ones."""
        found = []
        try:
            nodes = self.files.read()
        except InvalidArgument:
            return []  # the file was removed, so no other process started anything
        for node_id, node in nodes.items():
            if node_id in self.nodes and node.pid != self.nodes[node_id].pid:
                if not self.files.is_running(node):
                    continue
                self.nodes[node_id] = node
                self._processes[node_id] = _Process(wanted=True)
                found.append(node_id)
        return found

    def close(self, timeout: float | None = None) -> None:
        """Ends every node: sends SIGTERM to all, then SIGKILL to those that still run."""
        self.adopt()
        self._end(self._stop_s if timeout is None else timeout)
        self._starter.shutdown()

    def _planned(self) -> dict[int, LocalNode]:
        """The nodes and their addresses: those of the last start if they are free."""
        known: dict[int, LocalNode] = {}
        if os.path.exists(self.files.cluster):
            known = self.files.read()
            running = [one.id for one in known.values() if self.files.is_running(one)]
            if running:
                raise InvalidArgument(f"{self.files.directory}: node {running[0]} runs already")
            if len(known) != self._count:
                raise InvalidArgument(
                    f"{self.files.directory} holds a cluster of {len(known)} nodes, "
                    f"not {self._count}"
                )
        if self._port is not None:
            return self._placed(self._port_rows(self._port))
        if known and all(self._can_listen(one) for one in known.values()):
            return {one.id: replace(one, pid=None) for one in known.values()}
        return self._with_new_ports()

    def _can_listen(self, node: LocalNode) -> bool:
        addresses = (Address.parse(one) for one in (node.native, node.http, node.raft))
        return node.host == self._host and all(
            is_free(address.host, address.port) for address in addresses
        )

    def _port_rows(self, port: int) -> list[tuple[int, int, int]]:
        if not 1 <= port <= 65535 - 2 * PORTS_APART - self._count:
            raise InvalidArgument(f"port {port} leaves no room for {self._count} nodes")
        rows = [(number, number + PORTS_APART, number + 2 * PORTS_APART)
                for number in range(port, port + self._count)]  # fmt: skip
        for taken in (one for row in rows for one in row if not is_free(self._host, one)):
            raise InvalidArgument(f"port {taken} on {self._host} is taken")
        return rows

    def _with_new_ports(self) -> dict[int, LocalNode]:
        if self._port is not None:
            raise ConfigError(f"a port from {self._port} on was taken while the nodes started")
        ports = free_ports(self._host, 3 * self._count)
        return self._placed(list(zip(ports[::3], ports[1::3], ports[2::3], strict=True)))

    def _placed(self, rows: list[tuple[int, int, int]]) -> dict[int, LocalNode]:
        placed = {}
        for node_id, row in zip(self.ids, rows, strict=True):
            native, http, raft = (str(Address(self._host, one)) for one in row)
            placed[node_id] = LocalNode(
                id=node_id, pid=None, host=self._host, native=native, http=http, raft=raft
            )
        return placed

    def _write_files(self) -> None:
        voters = voter_count(self._count)
        seats = ",".join(f"{node_id}={self.nodes[node_id].raft}" for node_id in self.ids[:voters])
        own = self._links(self.nodes) if self._links is not None else {}
        for node_id, node in self.nodes.items():
            settings: dict[str, Setting] = {
                "node_id": node_id,
                "data_dir": f"node-{node_id}",
                "secret_file": "secret",
                "native": node.native,
                "http": node.http,
                "raft": node.raft,
                "voters": seats,
            }
            if node_id > voters:
                settings["seeds"] = ",".join(
                    self.nodes[node_id].native for node_id in self.ids[:voters]
                )
            self.files.write_config(node, settings | self._settings | dict(own.get(node_id, {})))
        self.files.write(self.nodes)

    def _spawn(self, node_id: int) -> None:
        tie = ("--die-with", str(os.getpid())) if self._die_with_parent else ()
        command = (*self._command, *tie)
        # The kernel ends a tied process with the thread that started it, not with its process. So
        # one thread starts them all, and lives as long as this cluster.
        child = self._starter.submit(spawn_node, self.files, node_id, command, self._env).result()
        self._processes[node_id] = _Process(child=child, wanted=True)
        self.nodes[node_id] = replace(self.nodes[node_id], pid=child.pid)
        self.files.note_pid(node_id, child.pid)

    def _wait_one(self, node_id: int, ends_at: float) -> bool:
        """Returns False if the port was taken. Raises if the node ended otherwise or is late."""
        for _ in _until(ends_at, self._pause):
            facts = self.files.ready_facts(node_id)
            if facts is not None and facts.get("pid") == self.nodes[node_id].pid:
                return True
            if not self.is_running(node_id):
                if _CLASH in self._last_words(node_id).lower():
                    return False
                raise InternalError(
                    f"node {node_id} ended at its start: {self._last_words(node_id)}"
                )
        raise RequestTimeout(
            f"node {node_id} is not ready in time, see {self.files.log(node_id)}"
        ).with_outcome("failed")

    def _wanted(self, node_id: int) -> bool:
        return self._process(node_id).wanted

    def _process(self, node_id: int) -> _Process:
        return self._processes.setdefault(node_id, _Process())

    def _signal(self, node_id: int, number: int) -> None:
        pid = self.pid(node_id)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):  # it may end at this moment
                os.kill(pid, number)

    def _wait_gone(self, node_id: int, timeout: float) -> bool:
        child = self._process(node_id).child
        if child is not None:
            try:
                child.wait(timeout)
            except subprocess.TimeoutExpired:
                return False
            return True
        ends_at = _now() + timeout
        return any(not self.is_running(node_id) for _ in _until(ends_at, self._pause))

    def _end(self, stop_s: float) -> None:
        for number, patience in ((signal.SIGTERM, stop_s), (signal.SIGKILL, KILL_S)):
            left = [node for node in self.nodes if self.is_running(node)]
            for node_id in left:
                self._process(node_id).wanted = False
                self._signal(node_id, number)
                self._signal(node_id, signal.SIGCONT)  # so that a paused node can end
            ends_at = _now() + patience
            for node_id in left:
                self._wait_gone(node_id, max(0.0, ends_at - _now()))

    def _how_it_ended(self, node_id: int) -> str:
        child = self._process(node_id).child
        code = None if child is None else child.returncode
        if code is None:
            return "ended"
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def _last_words(self, node_id: int) -> str:
        return last_words(self.files, node_id) or self._how_it_ended(node_id)

    def _check_running(self, node_id: int) -> None:
        if not self.is_running(node_id):
            raise InvalidArgument(f"node {node_id} does not run")

    def _check_id(self, node_id: int) -> None:
        if node_id not in self.ids:
            raise InvalidArgument(f"there is no node {node_id}, only 1 to {self._count}")


def voter_count(nodes: int) -> int:
    """The number of voters. It is odd: the last node of an even number is only an observer."""
    return min(nodes - 1 + nodes % 2, VOTERS_MAX)


def kill_node(directory: str, node_id: int) -> int:
    """Sends SIGKILL to a node of a cluster that another process runs. Returns its pid."""
    files = LocalFiles(os.path.abspath(directory))
    node = files.node(node_id)
    if node.pid is None or not files.is_running(node):
        raise InvalidArgument(f"node {node_id} does not run")
    os.kill(node.pid, signal.SIGKILL)
    if any(not files.is_running(node) for _ in _until(_now() + KILL_S, threading.Event())):
        return node.pid
    raise RequestTimeout(f"process {node.pid} of node {node_id} does not end")


def restart_node(directory: str, node_id: int, timeout: float = 30.0) -> LocalNode:
    """Starts a node that is down. The node outlives this process."""
    files = LocalFiles(os.path.abspath(directory))
    node = files.node(node_id)
    with files.lock():
        nodes = files.read()
        node = nodes.get(node_id, node)
        if files.is_running(node):
            raise InvalidArgument(f"node {node_id} runs already, as process {node.pid}")
        child = spawn_node(files, node_id, COMMAND)
        node = nodes[node_id] = replace(node, pid=child.pid)
        files.write(nodes)
    for _ in _until(_now() + timeout, threading.Event()):
        facts = files.ready_facts(node_id)
        if facts is not None and facts.get("pid") == child.pid:
            child.returncode = 0  # it outlives this process, which does not wait for it
            return node
        if child.poll() is not None:
            raise InternalError(f"node {node_id} ended at its start: {last_words(files, node_id)}")
    raise RequestTimeout(f"node {node_id} is not ready in time, see {files.log(node_id)}")


def spawn_node(
    files: LocalFiles, node_id: int, command: Sequence[str], env: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """Starts the process of one node. The terminal's signals do not reach it; its stderr goes to
    its log."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(files.ready(node_id))
    own = ("--config", files.config(node_id), "--ready-file", files.ready(node_id))
    # Settings in the caller's own environment would reach every node.
    usual = {name: text for name, text in os.environ.items() if not name.startswith("RAFTQ_")}
    with open(files.log(node_id), "ab") as log:
        return subprocess.Popen(
            [*command, *own],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=usual | dict(env or {}),
            start_new_session=True,
        )


def last_words(files: LocalFiles, node_id: int) -> str:
    """The last line of a node's log, which says why it ended."""
    lines = files.log_tail(node_id).strip().splitlines()
    return lines[-1] if lines else ""


def _now() -> float:
    return time.perf_counter()


def _until(ends_at: float, pause: threading.Event) -> Iterator[None]:
    """Yields once, and then repeatedly until the time is over."""
    yield
    while _now() < ends_at:
        pause.wait(POLL_S)
        yield
