"""Shell: links through a real toxiproxy-server, driven by toxiproxy-python.

One process holds every proxy of a cluster. It ends with `close`, and also when the process that
started it ends in any way. Every proxy belongs to a pair of nodes. A pair may have several (native
and Raft); a fault of the pair applies to all of them.

`make tools` builds the server. Without it there are no links, and every call to `NoLinks` says so.
"""

import contextlib
import ctypes
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module, util
from itertools import count
from pathlib import Path
from typing import Any

from raftq.chaos.world import Pair
from raftq.client.common.errors import ConfigError, InternalError, InvalidArgument

logger = logging.getLogger(__name__)

NAME = "toxiproxy-server"
HOST = "127.0.0.1"
TOOLS = Path(__file__).resolve().parent.parent / ".tools" / "bin"
MISSING = (
    f"no links between nodes can be disturbed: {NAME} is neither in .tools/bin nor in PATH, "
    "or the extra raftq[chaos] is not installed; `make tools` gets both"
)
PORT_TRIES_MAX = 10
START_S = 10.0
CALL_S = 20.0
POLL_S = 0.02
KINDS = ("latency", "bandwidth", "slow_close", "timeout", "reset_peer", "slicer", "limit_data")
_PR_SET_PDEATHSIG = 1
_api = threading.Lock()  # toxiproxy-python keeps the server's address in a class


def find_toxiproxy() -> str | None:
    """The path of the server's program; None if it or its driver is missing."""
    if util.find_spec("toxiproxy") is None:
        return None
    own = TOOLS / NAME
    return str(own) if own.exists() else shutil.which(NAME)


class NoLinks:
    """The links of a world without proxies."""

    def cut(self, pairs: Iterable[Pair]) -> None:
        raise ConfigError(MISSING)

    def refuse(self, pairs: Iterable[Pair]) -> None:
        raise ConfigError(MISSING)

    def toxic(
        self, pairs: Iterable[Pair], kind: str, upstream: bool = False, **attributes: int
    ) -> None:
        raise ConfigError(MISSING)

    def heal(self, pairs: Iterable[Pair] | None = None) -> None:
        """Does nothing: no link was disturbed."""


class Toxiproxy:
    """A server process and the links through it. `ports` returns free ports."""

    def __init__(self, program: str, log: Path, ports: Callable[[int], list[int]]) -> None:
        self._ports = ports
        self._proxies: dict[Pair, list[Any]] = {}
        self._toxics: dict[str, list[str]] = {}
        self._names = count(1)
        self._client = import_module("toxiproxy").Toxiproxy()
        self._address = import_module("toxiproxy.api").APIConsumer
        # The kernel ends a tied process with the thread that started it: this thread lives on.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-toxiproxy")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start(program, log)
        except BaseException:
            self.close()
            raise

    def _start(self, program: str, log: Path) -> None:
        for _ in range(PORT_TRIES_MAX):
            (self._port,) = self._ports(1)
            self._process = self._thread.submit(_spawn, program, self._port, log).result()
            if self._answers():
                return
            self._end()
        raise InternalError(f"{program} does not start, see {log}")

    def _answers(self) -> bool:
        assert self._process is not None
        pause = threading.Event()
        for _ in range(int(START_S / POLL_S)):
            if self._process.poll() is not None:
                return False
            pause.wait(POLL_S)
            # Another process may take the port a moment before. Then the server ends.
            if self._call(self._client.running):
                pause.wait(POLL_S)
                return self._process.poll() is None
        return False

    def add(self, pair: Pair, what: str, target: str) -> str:
        """Adds a way from one node to an address of another. Returns the address of the proxy."""
        name = f"{what}-{pair[0]}-to-{pair[1]}-{next(self._names)}"
        for _ in range(PORT_TRIES_MAX):
            listen = f"{HOST}:{self._ports(1)[0]}"
            try:
                proxy = self._call(self._client.create, target, name, listen)
            except KeyError:
                continue  # the answer was an error: another process took the port
            self._proxies.setdefault(pair, []).append(proxy)
            return listen
        raise InternalError(f"toxiproxy cannot listen for {name}")

    def forget_all(self) -> None:
        """Removes every proxy."""
        self._call(self._client.destroy_all)
        self._proxies.clear()

    def cut(self, pairs: Iterable[Pair]) -> None:
        wanted = list(pairs)
        for upstream in (True, False):
            self.toxic(wanted, "timeout", upstream, timeout=0)

    def refuse(self, pairs: Iterable[Pair]) -> None:
        for proxy in self._of(pairs):
            self._call(proxy.disable)

    def toxic(
        self, pairs: Iterable[Pair], kind: str, upstream: bool = False, **attributes: int
    ) -> None:
        if kind not in KINDS:
            raise InvalidArgument(f"there is no toxic {kind!r}, only {', '.join(KINDS)}")
        stream = "upstream" if upstream else "downstream"
        for proxy in self._of(pairs):
            name = f"{kind}-{next(self._names)}"
            self._toxics.setdefault(proxy.name, []).append(name)
            self._call(proxy.add_toxic, type=kind, stream=stream, name=name, attributes=attributes)

    def heal(self, pairs: Iterable[Pair] | None = None) -> None:
        if pairs is None:
            self._call(self._client.reset)
            self._toxics.clear()
            for proxy in self._of(self._proxies):
                proxy.enabled = True  # the library does not check
            return
        for proxy in self._of(pairs):
            for name in self._toxics.pop(proxy.name, []):
                self._call(proxy.destroy_toxic, name)
            if not proxy.enabled:
                self._call(proxy.enable)

    def close(self) -> None:
        self._end()
        self._thread.shutdown()

    def _of(self, pairs: Iterable[Pair]) -> list[Any]:
        wanted = list(pairs)
        unknown = [pair for pair in wanted if pair not in self._proxies]
        if unknown:
            raise InvalidArgument(f"there is no link {unknown[0]}")
        return [proxy for pair in wanted for proxy in self._proxies[pair]]

    def _call(self, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Calls the library in its thread and with a timeout: it waits for answers without an
        end."""

        def call() -> Any:
            with _api:
                self._address.host, self._address.port = HOST, self._port
                return work(*args, **named)

        future: Future[Any] = self._thread.submit(call)
        return future.result(CALL_S)

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


def _spawn(program: str, port: int, log: Path) -> "subprocess.Popen[bytes]":
    with log.open("ab") as file:
        return subprocess.Popen(
            [program, "-host", HOST, "-port", str(port)],
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ | {"LOG_LEVEL": "info"},
            start_new_session=True,
            preexec_fn=_tie if sys.platform == "linux" else None,
        )


_libc = ctypes.CDLL(None)


def _tie() -> None:
    """Runs in the child: the kernel kills it when the thread that started it ends."""
    with contextlib.suppress(AttributeError):
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
