"""A network in memory: TCP connections over links that are slow, cut or silent. (Test fake.)

Every process runs on a machine; a link is an ordered pair of machine names, so it can be cut in one
direction only. Ports are unique in the whole network, whatever host name is used with them.

    link cut            what is on its way is held back, not lost, and arrives after the cut, as TCP
                        sends it again; a connection cannot be made until both directions work
    machine shut        whoever connects to it is refused, or gets no answer, and what others had
                        opened is reset; what it opens itself works
    process killed      its kernel lives: what was written still arrives, then the end of the stream
                        (or a reset, when it had not read everything); new connections are refused
    process paused      connections are made and bytes arrive, and nobody answers
    machine off         silence; once it is on again, whoever still sends gets a reset

Bytes of one connection arrive in order, in pieces of random sizes; different connections overtake
each other. A closed connection with unread bytes, or bytes for one that is gone, cause a reset.

Not simulated: TLS, half-open connections that the kernel gives up on, limits of backlogs.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

from simloop import Machine, Process, VirtualTimeLoop

KERNEL_BYTES = 128 * 1024  # of one direction: what is written and not read before a write waits
_TICK_S = 1e-6
_FIN = "fin"
_RST = "rst"

_Item = bytes | str


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """How links behave when nothing is wrong with them. Times are in seconds."""

    latency_min_s: float = 0.000_1
    latency_max_s: float = 0.001
    jitter_share: float = 0.05
    """How many pieces are late, by up to `jitter_s_max`."""
    jitter_s_max: float = 0.02
    split_share: float = 0.1
    """How many writes arrive in several pieces."""
    bytes_per_s: float = 50e6
    retransmit_s_max: float = 0.3
    """After a cut, for how long bytes may still be held."""


class SimServer:
    """What `create_server` returns: the part of asyncio.Server that is used."""

    def __init__(
        self,
        network: "SimNetwork",
        process: Process | None,
        factory: Callable[[], Any],
        address: tuple[str, int],
    ) -> None:
        self._network = network
        self.process = process
        self.factory = factory
        self.address = address
        self.sockets = (SimpleNamespace(getsockname=lambda: address),)

    def is_serving(self) -> bool:
        return self._network.listeners.get(self.address[1]) is self

    async def start_serving(self) -> None:
        """It listens from the beginning."""

    def close(self) -> None:
        if self.is_serving():
            del self._network.listeners[self.address[1]]

    async def wait_closed(self) -> None:
        """Nothing is left to wait for."""


class SimTransport(asyncio.Transport):
    """One end of a connection, and the direction away from it."""

    def __init__(
        self, network: "SimNetwork", process: Process | None, names: tuple[Any, Any]
    ) -> None:
        super().__init__({"sockname": names[0], "peername": names[1]})
        self._network = network
        self._loop = network.loop
        self.process = process
        self.machine = network.machine_of(process)
        self.context = network.loop.neutral if process is None else process.context.copy()
        self.peer: SimTransport
        self._protocol: Any = None
        self._buffered = False
        self.accepted = False  # the other end opened the connection
        self.gone = False  # nobody is behind this end any more
        self._closing = False
        self._eof_sent = False
        # Towards the peer.
        self._unread_bytes = 0  # written and not yet read at the other end
        self._way: deque[_Item] = deque()
        self._owed = 0
        self._last_arrival = 0.0
        self._generation = 0
        self._high, self._low = 64 * 1024, 16 * 1024
        self._write_paused = False
        # From the peer.
        self._received: deque[_Item] = deque()
        self._scheduled = False
        self._read_paused = False

    # What protocols call.

    def attach(self, protocol: Any) -> None:
        """Hand the connection to its protocol; from now on it gets what arrives."""
        self.set_protocol(protocol)
        protocol.connection_made(self)
        self._schedule_delivery()

    def set_protocol(self, protocol: Any) -> None:
        self._protocol = protocol
        self._buffered = isinstance(protocol, asyncio.BufferedProtocol)

    def get_protocol(self) -> Any:
        return self._protocol

    def write(self, data: Any) -> None:
        if self._eof_sent and not self.gone:
            raise RuntimeError("Cannot call write() after write_eof()")
        data = bytes(data)
        if self.gone or self._closing or not data:
            return
        self._unread_bytes += len(data)
        rng, shape = self._network.rng, self._network.shape
        while len(data) > 1 and rng.random() < shape.split_share:
            at = rng.randrange(1, len(data))
            self.send(data[:at])
            data = data[at:]
        self.send(data)
        if not self._write_paused and self.get_write_buffer_size() > self._high:
            self._write_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._eof_sent and not self.is_closing():
            self._eof_sent = True
            self.send(_FIN)

    def close(self) -> None:
        if self._closing or self.gone:
            return
        self._closing = True
        if not self.get_write_buffer_size():
            self._finish(None)

    def abort(self) -> None:
        if self.gone:
            return
        self._closing = True
        self._leave(_RST)
        self._call_connection_lost(None)

    def is_closing(self) -> bool:
        return self._closing or self.gone

    def pause_reading(self) -> None:
        self._read_paused = True

    def resume_reading(self) -> None:
        self._read_paused = False
        self._schedule_delivery()

    def is_reading(self) -> bool:
        return not self._read_paused and not self.is_closing()

    def get_write_buffer_size(self) -> int:
        return max(0, self._unread_bytes - self._network.kernel_bytes)

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        if high is None:
            high = 64 * 1024 if low is None else 4 * low
        self._high = high
        self._low = high // 4 if low is None else low

    # The way to the peer.

    def send(self, item: _Item) -> None:
        """Put bytes, an end or a reset on the way, behind what is there."""
        network = self._network
        delay = network.latency(self.machine.name, self.peer.machine.name)
        delay += len(item) / network.shape.bytes_per_s
        self._way.append(item)
        self._schedule(self._loop.time() + delay)

    def _schedule(self, at: float) -> None:
        # Strictly later than the one before: timers of the same time have no order.
        self._last_arrival = at = max(at, self._last_arrival + _TICK_S)
        self._loop.call_at(at, self._arrive, self._generation, context=self._loop.neutral)

    def _arrive(self, generation: int) -> None:
        """The next item on the way is there, unless the link is cut: then it is owed."""
        if generation != self._generation:
            return
        if self._network.reaches(self.machine, self.peer.machine):
            self._land(self._way.popleft())
        else:
            self._owed += 1
            self._network.note_stalled(self)

    def release(self, delay_s: float) -> None:
        """The link works again: what was held is sent once more."""
        owed, self._owed = self._owed, 0
        for _ in range(owed):
            self._schedule(self._loop.time() + delay_s)

    def _land(self, item: _Item) -> None:
        peer = self.peer
        names = f"{self.machine.name}>{peer.machine.name}"
        self._loop.trace(f"{names} {item if isinstance(item, str) else len(item)}")
        if peer.gone:
            if isinstance(item, bytes):
                peer.send(_RST)
            return
        peer._received.append(item)
        peer._schedule_delivery()

    # What arrives here.

    def _schedule_delivery(self) -> None:
        if not self._scheduled and self._received and self._protocol is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver, context=self.context)

    def _deliver(self) -> None:
        self._scheduled = False
        received = self._received
        while received and not self._read_paused and not self.is_closing():
            item = received.popleft()
            if isinstance(item, bytes):
                self.peer._was_read(len(item))
                self._feed(item)
            elif item == _RST:
                self._fail(ConnectionResetError(104, "Connection reset by peer"))
            elif not self._protocol.eof_received():
                self.close()

    def _feed(self, data: bytes) -> None:
        protocol = self._protocol
        if not self._buffered:
            protocol.data_received(data)
            return
        at = 0
        while at < len(data):
            if self._read_paused or self.is_closing():
                self._received.appendleft(data[at:])
                self.peer._was_read(at - len(data))
                return
            buffer = memoryview(protocol.get_buffer(-1)).cast("B")
            size = min(len(buffer), len(data) - at)
            buffer[:size] = data[at : at + size]
            at += size
            protocol.buffer_updated(size)

    def _was_read(self, size: int) -> None:
        self._unread_bytes -= size
        if self.gone:
            return
        left = self.get_write_buffer_size()
        if self._write_paused and left <= self._low:
            self._write_paused = False
            self._loop.call_soon(self._protocol.resume_writing, context=self.context)
        if self._closing and not left:
            self._finish(None)

    # The end.

    def _leave(self, mark: _Item) -> None:
        """Nobody is here any more; the peer is told."""
        if not self.gone:
            self.gone = True
            unread = any(isinstance(item, bytes) for item in self._received)
            self._received.clear()
            self.send(_RST if unread else mark)

    def _finish(self, error: Exception | None) -> None:
        self._leave(_FIN)
        self._call_connection_lost(error)

    def _fail(self, error: Exception) -> None:
        self._closing = self.gone = True
        self._received.clear()
        self._call_connection_lost(error)

    def _call_connection_lost(self, error: Exception | None) -> None:
        if self._protocol is not None:
            self._loop.call_soon(self._protocol.connection_lost, error, context=self.context)

    def die(self, powered: bool) -> None:
        """The process is gone, and without power everything it had sent and not delivered too."""
        if powered:
            self._leave(_FIN)
        else:
            self.gone = True
            self._received.clear()
            self._way.clear()
            self._owed = 0
            self._generation += 1

    @property
    def is_over(self) -> bool:
        return self.gone and self.peer.gone


class SimNetwork:
    """Links, listeners and connections. All randomness is from `rng`."""

    def __init__(
        self, loop: VirtualTimeLoop, rng: Random, shape: NetworkShape | None = None
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.shape = shape or NetworkShape()
        self.kernel_bytes = KERNEL_BYTES
        self.listeners: dict[int, SimServer] = {}
        self.cuts: dict[tuple[str, str], None] = {}
        self.slow: dict[tuple[str, str], float] = {}
        self.shut_machines: dict[str, bool] = {}
        """Whether each refuses; otherwise it gives no answer."""
        self._outside = Machine("outside")
        self._owners: dict[int, Machine] = {}
        self._port = 20_000
        self._source_port = 50_000
        self._latencies: dict[tuple[str, str], float] = {}
        self._sides: list[SimTransport] = []
        self._stalled: dict[SimTransport, None] = {}
        self._parked: list[Callable[[], None]] = []
        loop.network = self

    # Faults.

    def cut(self, source: str, target: str) -> None:
        """Nothing gets from `source` to `target` any more; the other direction is not touched."""
        self.cuts[source, target] = None

    def heal(self, source: str, target: str) -> None:
        if self.cuts.pop((source, target), 0) is None:
            self.wake()

    def shut(self, machine: str, refuses: bool) -> None:
        """Nobody else can connect to it any more; what it opens itself is not touched."""
        self.shut_machines[machine] = refuses
        for side in self._sides:
            if side.accepted and side.machine.name == machine != side.peer.machine.name:
                side.abort()

    def open_again(self, machine: str) -> None:
        if self.shut_machines.pop(machine, None) is not None:
            self.wake()

    def heal_all(self) -> None:
        self.cuts.clear()
        self.shut_machines.clear()
        self.slow.clear()
        self.wake()

    def reaches(self, source: Machine, target: Machine) -> bool:
        return target.powered and (source.name, target.name) not in self.cuts

    def process_died(self, process: Process) -> None:
        """Its sockets close, or fall silent when its machine has no power."""
        for listener in [one for one in self.listeners.values() if one.process is process]:
            listener.close()
        for side in self._sides:
            if side.process is process and not side.gone:
                side.die(process.machine.powered)

    def wake(self) -> None:
        """Something works again: whatever waited for it is tried again, in random time."""
        stalled, self._stalled = list(self._stalled), {}
        for side in stalled:
            side.release(self.rng.uniform(0, self.shape.retransmit_s_max))
        parked, self._parked = self._parked, []
        for retry in parked:
            self.loop.call_later(
                self.rng.uniform(0, self.shape.retransmit_s_max), retry, context=self.loop.neutral
            )

    # What transports and the loop ask for.

    def machine_of(self, process: Process | None) -> Machine:
        return self._outside if process is None else process.machine

    def note_stalled(self, side: SimTransport) -> None:
        self._stalled[side] = None

    def latency(self, source: str, target: str) -> float:
        shape, rng = self.shape, self.rng
        base = self._latencies.get((source, target))
        if base is None:
            base = rng.uniform(shape.latency_min_s, shape.latency_max_s)
            self._latencies[source, target] = base
        if rng.random() < shape.jitter_share:
            base += rng.uniform(0, shape.jitter_s_max)
        slow = self.slow.get((source, target))
        return base if slow is None else base + rng.uniform(0, slow)

    def listen(
        self, process: Process | None, factory: Callable[[], Any], address: tuple[str, int]
    ) -> SimServer:
        host, port = address
        if port == 0:
            self._port += 1
            port = self._port
        if port in self.listeners:
            raise OSError(98, f"Address already in use: {port}")
        server = SimServer(self, process, factory, (host, port))
        self.listeners[port] = server
        self._owners[port] = self.machine_of(process)
        return server

    async def connect(self, process: Process | None, address: tuple[str, int]) -> SimTransport:
        """A connection to whoever listens there; refused, or never made, when nobody can."""
        future: asyncio.Future[SimTransport] = self.loop.create_future()
        source, target = self.machine_of(process), self._owners.get(address[1])
        self._source_port += 1
        name = (source.name, self._source_port)

        def knock() -> None:
            if future.done() or (process is not None and process.dead):
                return
            shut = None
            if target is not None and target is not source:
                shut = self.shut_machines.get(target.name)
            if target is None or shut is True:
                future.set_exception(_refused(address))
            elif shut is False or not (
                self.reaches(source, target) and self.reaches(target, source)
            ):
                self._parked.append(knock)
            else:
                self._accept(process, address, name, future)

        there = source.name if target is None else target.name
        self.loop.call_later(self.latency(source.name, there), knock, context=self.loop.neutral)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().abort()
            raise

    def _accept(
        self,
        process: Process | None,
        address: tuple[str, int],
        name: tuple[str, int],
        future: "asyncio.Future[SimTransport]",
    ) -> None:
        listener = self.listeners.get(address[1])
        there = self._owners[address[1]].name
        delay = self.latency(there, name[0])
        if listener is None:
            self.loop.call_later(
                delay, _settle, future, _refused(address), context=self.loop.neutral
            )
            return
        near = SimTransport(self, process, (name, address))
        far = SimTransport(self, listener.process, (address, name))
        near.peer, far.peer = far, near
        far.accepted = True
        self._sides = [side for side in self._sides if not side.is_over]
        self._sides += [near, far]
        self.loop.trace(f"{name[0]}>{there} open")
        self.loop.call_soon(lambda: far.attach(listener.factory()), context=far.context)
        self.loop.call_later(delay, _settle, future, near, context=self.loop.neutral)


def _settle(future: "asyncio.Future[SimTransport]", result: SimTransport | OSError) -> None:
    if isinstance(result, OSError):
        if not future.done():
            future.set_exception(result)
    elif future.done():
        result.abort()  # whoever wanted it has given up
    else:
        future.set_result(result)


def _refused(address: tuple[str, int]) -> ConnectionRefusedError:
    return ConnectionRefusedError(111, f"Connect call failed {address}")
