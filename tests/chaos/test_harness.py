"""The harness itself: toxiproxy before a plain server, and real nodes behind it under faults."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from raftq import aio
from raftq.chaos.faults.changes import MoveAway
from raftq.chaos.faults.disk import BadDisk, PowerCut
from raftq.chaos.faults.files import BitFlip
from raftq.chaos.faults.network import Isolate
from raftq.chaos.faults.streams import Slicer
from raftq.chaos.harness.local_ports import free_ports
from raftq.chaos.harness.world import ProxiedCluster
from raftq.chaos.toxiproxy import HOST, MISSING, Toxiproxy, find_toxiproxy
from raftq.chaos.world import CLOCK, TOXIPROXY, World
from raftq.client.common.errors import ConfigError, InvalidArgument, RaftqError, UnknownTopic

TOPIC = "t"
PAIR = (1, 2)

needs_links = pytest.mark.skipif(
    find_toxiproxy() is None, reason=f"NO TOXIPROXY, so nothing is known here: {MISSING}"
)


def within(seconds: float, condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends_at, "not in time"
        time.sleep(0.05)


# A plain server behind toxiproxy.


class Echo:
    """Sends back what it gets, one connection per thread."""

    def __init__(self) -> None:
        self._listener = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._listener.getsockname()[1]}"
        self.heard = b""
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            self._open.append(sock)
            self._threads.append(threading.Thread(target=self._serve, args=(sock,)))
            self._threads[-1].start()

    def _serve(self, sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(4096):
                    self.heard += data
                    sock.sendall(data)
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for sock in self._open:
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue
        for thread in self._threads:
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    made = Echo()
    yield made
    made.close()


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Toxiproxy]:
    program = find_toxiproxy()
    assert program is not None
    made = Toxiproxy(program, tmp_path / "toxiproxy.log", partial(free_ports, HOST))
    yield made
    made.close()


def connect(address: str) -> socket.socket:
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=2)
    sock.settimeout(0.3)
    return sock


def answer(sock: socket.socket, data: bytes) -> bytes:
    """What comes back in a while, b"" for an end."""
    sock.sendall(data)
    got = b""
    try:
        while len(got) < len(data) and (part := sock.recv(4096)):
            got += part
    except TimeoutError:
        return b"silence"
    return got


@needs_links
def test_a_cut_link_is_silent_and_a_healed_one_answers_new_connections(
    links: Toxiproxy, echo: Echo
) -> None:
    way = links.add(PAIR, "native", echo.address)
    other = links.add((2, 1), "native", echo.address)
    with connect(way) as sock, connect(other) as untouched:
        assert answer(sock, b"hello") == b"hello"
        links.cut([PAIR])
        assert answer(sock, b"hello") == b"silence"
        assert answer(untouched, b"hello") == b"hello"
        with connect(way) as late:
            assert answer(late, b"hello") == b"silence"
        links.heal([PAIR])
        with connect(way) as new:
            assert answer(new, b"hello") == b"hello"


@needs_links
def test_what_is_done_to_a_pair_is_done_to_all_its_ways(links: Toxiproxy, echo: Echo) -> None:
    ways = [links.add(PAIR, what, echo.address) for what in ("native", "raft")]
    links.refuse([PAIR])
    for way in ways:
        with pytest.raises(ConnectionRefusedError):
            connect(way)
    links.heal()
    for way in ways:
        with connect(way) as sock:
            assert answer(sock, b"hello") == b"hello"
    links.refuse([PAIR])
    links.heal([PAIR])
    with connect(ways[0]) as sock:
        assert answer(sock, b"hello") == b"hello"


@needs_links
def test_one_direction_can_be_stopped_alone(links: Toxiproxy, echo: Echo) -> None:
    way = links.add(PAIR, "native", echo.address)
    links.toxic([PAIR], "timeout", upstream=False, timeout=0)
    with connect(way) as sock:
        assert answer(sock, b"hello") == b"silence"
    assert echo.heard == b"hello"
    links.heal([PAIR])
    links.toxic([PAIR], "timeout", upstream=True, timeout=0)
    with connect(way) as sock:
        assert answer(sock, b"hello") == b"silence"
    assert echo.heard == b"hello"
    links.heal([PAIR])
    links.toxic([PAIR], "limit_data", upstream=True, bytes=3)
    with connect(way) as sock:
        assert answer(sock, b"again") in (b"aga", b"")
    within(2, lambda: echo.heard == b"helloaga")


@needs_links
def test_disturbances_add_up_and_unknown_ones_are_refused(links: Toxiproxy, echo: Echo) -> None:
    way = links.add(PAIR, "native", echo.address)
    links.toxic([PAIR], "latency", latency=100, jitter=0)
    links.toxic([PAIR], "latency", latency=100, jitter=0)
    links.toxic([PAIR], "slicer", upstream=True, average_size=1, size_variation=0, delay=0)
    with connect(way) as sock:
        began = time.monotonic()
        assert answer(sock, b"hello") == b"hello"
        assert time.monotonic() - began >= 0.2
    with pytest.raises(InvalidArgument, match="no toxic"):
        links.toxic([PAIR], "gremlins")
    with pytest.raises(InvalidArgument, match="no link"):
        links.cut([(7, 8)])


@needs_links
def test_the_server_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from functools import partial\n"
        "from pathlib import Path\n"
        "from raftq.chaos.toxiproxy import HOST, Toxiproxy, find_toxiproxy\n"
        "from raftq.chaos.harness.local_ports import free_ports\n"
        "one = Toxiproxy(find_toxiproxy(), Path(sys.argv[1]), partial(free_ports, HOST))\n"
        "print(one._process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "log")], stdout=subprocess.PIPE
    )
    try:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.path.exists(f"/proc/{pid}")
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    within(5, lambda: not _is_alive(pid))


def _is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


# Real nodes.


async def produce(bootstrap: str, values: list[bytes]) -> None:
    async with aio.Producer(bootstrap, linger_ms=0) as producer:
        sent = [await producer.send(TOPIC, value, partition=0) for value in values]
        await producer.flush()
        for one in sent:
            await one


async def create(bootstrap: str, **config: str | int) -> None:
    async with aio.Admin(bootstrap) as admin:
        await admin.create_topic(TOPIC, partitions=1, replication=3, config=config)


async def read(bootstrap: str, count: int) -> list[bytes]:
    async with aio.Consumer(bootstrap) as consumer:
        await consumer.assign([(TOPIC, 0)])
        await consumer.seek(TOPIC, 0, to="earliest")
        found: list[bytes] = []
        while len(found) < count:
            records = await consumer.poll(max_records=1000, timeout=20.0)
            assert records, f"only {len(found)} of {count} records came"
            found += [one.value for one in records]
        return found


def in_sync(world: World) -> bool:
    async def ask() -> bool:
        async with aio.Admin(world.bootstrap) as admin:
            described = await admin.describe_topic(TOPIC)
            return all(len(one.isr) == 3 for one in described.partitions)

    return asyncio.run(ask())


@pytest.mark.full
@needs_links
def test_links_of_real_nodes_are_behind_proxies_and_an_isolated_leader_is_replaced(
    tmp_path: Path,
) -> None:
    """1. Clients learn only addresses of proxies, from the bootstrap and from the metadata.
    2. Without the client links no client gets through, and nodes do not notice.
    3. A leader that is cut off is replaced, healed it follows, and nothing is lost.
    4. Byte by byte everything still arrives.
    """
    with ProxiedCluster(tmp_path / "cluster", seed=1) as world:
        assert world.abilities >= {TOXIPROXY, CLOCK}
        direct = {world.direct(one) for one in world.ids}
        assert not direct & set(world.bootstrap.split(","))

        async def told() -> set[str]:
            async with aio.Admin(world.bootstrap, bootstrap_ms=1000, timeout_ms=1000) as admin:
                return {f"{one.host}:{one.port}" for one in await admin.nodes()}

        assert asyncio.run(told()) == set(world.bootstrap.split(","))
        asyncio.run(create(world.bootstrap))
        values = [b"%d" % number for number in range(100)]
        asyncio.run(produce(world.bootstrap, values))

        world.links.refuse([(0, one) for one in world.ids])
        with pytest.raises(RaftqError):
            asyncio.run(told())
        assert len(world.leaders()) == 1
        world.links.heal()

        old = world.leader(TOPIC, 0)
        assert old is not None
        fault = Isolate("leader", TOPIC)
        assert str(old) in fault.inject(world)
        within(15, lambda: world.leader(TOPIC, 0) not in (None, old))
        assert world.controller() is not None
        asyncio.run(produce(world.bootstrap, [b"meanwhile"]))
        fault.heal(world)
        within(15, lambda: in_sync(world))

        slicer = Slicer()
        slicer.inject(world)
        asyncio.run(produce(world.bootstrap, [b"in pieces"]))
        slicer.heal(world)
        everything = [*values, b"meanwhile", b"in pieces"]
        assert asyncio.run(read(world.bootstrap, len(everything))) == everything
        assert world.died() == []


@pytest.mark.full
def test_disks_and_clocks_of_real_nodes_can_be_disturbed(tmp_path: Path) -> None:
    """1. Power is cut at all nodes: what was acknowledged with fsync is there, and each node knows.
    2. A bit of a segment flips on a node that is down: it is repaired.
    3. A full disk refuses writes and takes them again when there is room.
    4. A node comes back empty after its disk was wiped.
    """
    with ProxiedCluster(tmp_path / "cluster", seed=2, proxied=False) as world:
        assert TOXIPROXY not in world.abilities
        with pytest.raises(ConfigError, match="toxiproxy"):
            world.links.cut([(1, 2)])
        asyncio.run(create(world.bootstrap, fsync="always", segment_bytes=4096))
        values = [b"%0200d" % number for number in range(100)]
        for first in range(0, len(values), 10):
            asyncio.run(produce(world.bootstrap, values[first : first + 10]))
        with pytest.raises(InvalidArgument, match="runs"):
            world.disk(1).lose_unsynced()

        cut = PowerCut(None)
        cut.inject(world)
        assert not any(world.is_running(one) for one in world.ids)
        cut.heal(world)
        world.wait_ready()
        assert all("lost=tail" in world.log(one).read_text() for one in world.ids)
        assert asyncio.run(read(world.bootstrap, len(values))) == values

        flip = BitFlip("follower", kind="old segment")
        assert "bit" in flip.inject(world)
        flip.heal(world)
        within(20, lambda: in_sync(world))

        full = BadDisk("leader", TOPIC, trouble="full")
        full.inject(world)
        # Well before its lease can end: after that another node leads, and takes the record.
        with pytest.raises((RaftqError, TimeoutError)):
            asyncio.run(asyncio.wait_for(produce(world.bootstrap, [b"x" * 1000]), 1))
        full.heal(world)
        asyncio.run(produce(world.bootstrap, [b"room again"]))

        world.shift_clock(1, 3600)
        world.shift_clock(1, 0)
        victim = world.ids[-1]
        world.kill(victim)
        world.wipe(victim)
        assert not world.directory(victim).exists()
        world.restart(victim)
        assert world.is_running(victim)
        within(20, lambda: in_sync(world))


@pytest.mark.full
def test_an_operator_of_real_nodes_changes_topics_and_sees_it_at_once(tmp_path: Path) -> None:
    """1. A topic is made, moved away from its leader, and the metadata comes to rest.
    2. Its settings and partitions change, and a node that is down does not matter.
    3. It is deleted.
    """
    with ProxiedCluster(tmp_path / "cluster", nodes=3, seed=3, proxied=False) as world:
        operator = world.operator
        operator.create(TOPIC, 2, 3)
        within(10, lambda: all(one.leader for one in operator.partitions().values()))
        assert set(operator.partitions()) == {(TOPIC, 0), (TOPIC, 1)}
        before = operator.partitions()[TOPIC, 0]
        within(10, lambda: set(operator.partitions()[TOPIC, 0].isr) == {1, 2, 3})

        MoveAway(TOPIC, back=False).inject(world)
        after = operator.partitions()[TOPIC, 0]
        assert before.leader not in after.replicas
        assert set(after.isr) == set(after.replicas) == {1, 2, 3} - {before.leader}

        def rests() -> bool:
            index = operator.metadata_index()
            time.sleep(1)
            return operator.metadata_index() == index

        within(15, rests)
        world.kill(world.controller() or 1)
        within(15, lambda: world.controller() is not None)
        operator.alter(TOPIC, {"fsync": "always"})
        assert operator.settings(TOPIC)["fsync"] == "always"
        operator.grow(TOPIC, 3)
        assert len(operator.partitions()) == 3
        operator.delete(TOPIC)
        assert not operator.partitions()
        with pytest.raises(UnknownTopic):
            operator.settings(TOPIC)
