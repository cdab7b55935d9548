"""Shell: a cluster of real processes that faults can disturb.

    client ──> proxy 0-to-N ──> node N <── proxy M-to-N (native) <── node M
                                       <── proxy M-to-N (raft)   <──

Every link has its own proxy in one toxiproxy. Nodes get a route to each other node, and clients get
the addresses of the client proxies, in the bootstrap and in the metadata. So only checks go past
the proxies, by `direct` and `http`. Without toxiproxy the nodes are linked directly, and
`abilities` says so.

The disk and the wall clock of a node can be disturbed by a control file
(`raftq.chaos.harness.node`).
"""

import asyncio
import logging
import os
import shutil
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Self, TypeVar

from raftq.chaos.harness.local_cluster import DISTURBED_COMMAND, LocalCluster, voter_count
from raftq.chaos.harness.local_files import LocalNode, Setting
from raftq.chaos.harness.local_ports import free_ports
from raftq.chaos.harness.node import VARIABLE, Disturbances, unsynced_path, write_control
from raftq.chaos.harness.operator import DirectOperator
from raftq.chaos.harness.power_cut import lose
from raftq.chaos.toxiproxy import MISSING, NoLinks, Toxiproxy, find_toxiproxy
from raftq.chaos.world import CLIENTS, CLOCK, TOXIPROXY, Links, Operator
from raftq.client.common.errors import InvalidArgument, RaftqError, RequestTimeout
from raftq.client.common.names import is_internal
from raftq.client.net.connection import Connection
from raftq.client.options import ConnectionOptions
from raftq.client.wire.messages import Metadata, MetadataReply
from raftq.node.config import LOOPBACK, Address

logger = logging.getLogger(__name__)

CONTROL = "control"
RESTART_S = 20.0
ASK_S = 1.0
_ASKING = ConnectionOptions(name="chaos", connect_ms=1_000, request_ms=1_000)

R = TypeVar("R")


class ProxiedCluster:
    """A World of nodes 1..n. As a context manager it starts them, and ends everything."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        nodes: int = 3,
        *,
        seed: int = 0,
        settings: Mapping[str, Setting] | None = None,
        env: Mapping[str, str] | None = None,
        proxied: bool = True,
    ) -> None:
        """`settings` and `env` go to every node. Without `proxied` there is no toxiproxy."""
        self.rng = Random(seed)
        self._directory = Path(directory).absolute()
        self._program = find_toxiproxy() if proxied else None
        self._toxiproxy: Toxiproxy | None = None
        self._client_sides: dict[int, str] = {}
        self._asking = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftq-asking")
        self._control = str(self._directory / CONTROL)
        self.cluster = LocalCluster(
            self._directory,
            nodes,
            settings=settings,
            links=self._routes,
            env={VARIABLE: self._control, **(env or {})},
            command=DISTURBED_COMMAND,
        )
        self.operator: Operator = DirectOperator(self, self._asking)
        self._disks = {node_id: NodeDisk(self, self._control, node_id) for node_id in self.ids}
        if proxied and self._program is None:
            logger.warning("event=no_toxiproxy %s", MISSING)

    def __enter__(self) -> Self:
        Path(self._control).mkdir(parents=True, exist_ok=True)
        try:
            if self._program is not None:
                log = self._directory / "toxiproxy.log"
                self._toxiproxy = Toxiproxy(self._program, log, partial(free_ports, LOOPBACK))
            self.cluster.start()
            self.cluster.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends all processes. Heals the links first, so that nodes can hand over what they lead."""
        try:
            if self._toxiproxy is not None:
                self._toxiproxy.heal()
            self.cluster.close()
        finally:
            if self._toxiproxy is not None:
                self._toxiproxy.close()
            self._asking.shutdown()

    # Properties of a World.

    @property
    def ids(self) -> tuple[int, ...]:
        return self.cluster.ids

    @property
    def links(self) -> Links:
        return self._toxiproxy if self._toxiproxy is not None else NoLinks()

    @property
    def abilities(self) -> frozenset[str]:
        """Known before the start, too."""
        return frozenset({CLOCK} if self._program is None else {CLOCK, TOXIPROXY})

    @property
    def bootstrap(self) -> str:
        if self._toxiproxy is None:
            return self.cluster.bootstrap
        return ",".join(self._client_sides[node_id] for node_id in self.ids)

    def direct(self, node_id: int) -> str:
        return self.cluster.addresses(node_id).native

    def http(self, node_id: int) -> str:
        return self.cluster.addresses(node_id).http

    def directory(self, node_id: int) -> Path:
        return self._directory / f"node-{node_id}"

    def log(self, node_id: int) -> Path:
        """What the node has written to stderr."""
        return Path(self.cluster.files.log(node_id))

    def is_running(self, node_id: int) -> bool:
        return self.cluster.is_running(node_id)

    def died(self) -> list[tuple[int, str]]:
        """Nodes that ended by themselves since the last call, and how they ended."""
        return self.cluster.died()

    def leaders(self) -> dict[tuple[str, int], int]:
        newest: dict[tuple[str, int], tuple[int, int]] = {}
        for reply in self._ask_all():
            for topic in reply.topics:
                for partition in topic.partitions:
                    known = newest.get((topic.topic, partition.partition), (-1, 0))
                    answer = (partition.epoch, 0 if partition.leader is None else partition.leader)
                    newest[topic.topic, partition.partition] = max(known, answer)
        return {
            partition_key: leader
            for partition_key, (_, leader) in sorted(newest.items())
            if leader and not is_internal(partition_key[0])
        }

    def copies(self) -> dict[tuple[str, int], tuple[int, ...]]:
        return {
            (topic.topic, partition.partition): partition.replicas
            for reply in self._ask_all()
            for topic in reply.topics
            for partition in topic.partitions
        }

    def leader(self, topic: str, partition: int) -> int | None:
        return self.leaders().get((topic, partition))

    def controller(self) -> int | None:
        answers = Counter(one.controller for one in self._ask_all() if one.controller is not None)
        return answers.most_common(1)[0][0] if answers else None

    # Actions of a World.

    def kill(self, node_id: int) -> None:
        if self.is_running(node_id):
            self.cluster.kill(node_id)

    def pause(self, node_id: int) -> None:
        if self.is_running(node_id):
            self.cluster.pause(node_id)

    def resume(self, node_id: int) -> None:
        self.cluster.resume(node_id)

    def stop(self, node_id: int) -> None:
        if self.is_running(node_id):
            self.cluster.stop(node_id)

    def restart(self, node_id: int) -> None:
        """Starts a node. It serves only if a majority of voters runs; without one this does not
        wait."""
        if self.is_running(node_id):
            return
        voters = self.ids[: voter_count(len(self.ids))]
        others = sum(self.is_running(voter) for voter in voters if voter != node_id)
        majority = others + (node_id in voters) > len(voters) // 2
        try:
            self.cluster.restart(node_id, RESTART_S if majority else None)
        except RequestTimeout as error:
            logger.warning("node=%d was started, and does not serve yet: %s", node_id, error)

    def wait_ready(self, timeout: float = 30.0) -> None:
        """Waits until every started node serves."""
        self.cluster.wait_ready(timeout)

    def wipe(self, node_id: int) -> None:
        if self.is_running(node_id):
            raise InvalidArgument(f"node {node_id} runs: kill it before its data is wiped")
        shutil.rmtree(self.directory(node_id), ignore_errors=True)
        shutil.rmtree(unsynced_path(self._control, node_id), ignore_errors=True)

    def disk(self, node_id: int) -> "NodeDisk":
        return self._disks[node_id]

    def shift_clock(self, node_id: int, seconds: float) -> None:
        self._disks[node_id].set(clock_s=seconds)

    # Links.

    def _routes(self, nodes: Mapping[int, LocalNode]) -> dict[int, dict[str, Setting]]:
        """The settings of each node that lead each of its links through a proxy."""
        toxiproxy = self._toxiproxy
        if toxiproxy is None:
            return {}
        toxiproxy.forget_all()
        voters = self.ids[: voter_count(len(nodes))]
        found: dict[int, dict[str, Setting]] = {}
        for node_id, node in nodes.items():
            peers = self._through(
                toxiproxy, node_id, "native", {node: nodes[node].native for node in nodes}
            )
            seats = self._through(
                toxiproxy, node_id, "raft", {voter: nodes[voter].raft for voter in voters}
            )
            outside = toxiproxy.add((CLIENTS, node_id), "client", node.native)
            self._client_sides[node_id] = outside
            settings: dict[str, Setting] = {
                "voters": _table(seats),
                "peers": _table(peers),
                "advertised_host": LOOPBACK,
                "advertised_port": Address.parse(outside).port,
            }
            if node_id not in voters:
                settings["seeds"] = ",".join(peers[voter] for voter in voters)
            found[node_id] = settings
        return found

    def _through(
        self, toxiproxy: Toxiproxy, source: int, what: str, targets: Mapping[int, str]
    ) -> dict[int, str]:
        return {
            target: address if target == source else toxiproxy.add((source, target), what, address)
            for target, address in targets.items()
        }

    # Requests.

    def _ask_all(self) -> list[MetadataReply]:
        running = [self.direct(node_id) for node_id in self.ids if self.is_running(node_id)]
        return self._asked(_ask_each(running))

    def _asked(self, work: Coroutine[Any, Any, R]) -> R:
        """Runs a request in another thread: the caller's may already run a loop."""
        return self._asking.submit(asyncio.run, work).result()


class NodeDisk:
    """The disk and the clock of one node, disturbed by its control file."""

    def __init__(self, world: "ProxiedCluster", control: str, node_id: int) -> None:
        self._world = world
        self._control = control
        self._node_id = node_id
        self._now = Disturbances()

    def set(self, **changes: Any) -> None:
        self._now = replace(self._now, **changes)
        write_control(self._control, self._node_id, self._now)

    def slow_sync(self, seconds: float) -> None:
        self.set(slow_sync_s=seconds)

    def fail_writes(self) -> None:
        self.set(fail_writes=True)

    def fail_syncs(self) -> None:
        self.set(fail_syncs=True)

    def fill(self) -> None:
        self.set(full=True)

    def free(self) -> None:
        self.set(full=False)

    def lose_unsynced(self) -> None:
        self._lose(None)

    def tear_unsynced(self) -> None:
        self._lose(self._world.rng)

    def heal(self) -> None:
        self.set(slow_sync_s=0.0, fail_writes=False, fail_syncs=False, full=False)

    def _lose(self, tear: Random | None) -> None:
        if self._world.is_running(self._node_id):
            raise InvalidArgument(f"node {self._node_id} runs: kill it before the power is cut")
        count = lose(unsynced_path(self._control, self._node_id), tear)
        logger.info("node=%d loses %d changes that were not synced", self._node_id, count)
        # The node must see that more than its process has ended.
        self.set(boot=f"chaos-{self._world.rng.getrandbits(64):016x}")


def _table(addresses: Mapping[int, str]) -> str:
    return ",".join(f"{one}={address}" for one, address in addresses.items())


async def _ask_each(addresses: Iterable[str]) -> list[MetadataReply]:
    """The answers of the nodes that answer in time."""
    answers = await asyncio.gather(*(_ask(address) for address in addresses))
    return [answer for answer in answers if answer is not None]


async def _ask(address: str) -> MetadataReply | None:
    where = Address.parse(address)
    try:
        async with asyncio.timeout(ASK_S):
            async with await Connection.open(where.host, where.port, _ASKING) as connection:
                return (await connection.request(Metadata())).message
    except (RaftqError, OSError, TimeoutError):
        return None
