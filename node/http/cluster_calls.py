"""Asking leaders and coordinators on behalf of HTTP callers. (Shell.)

One client for all callers, with one connection to each node. What concerns many partitions is asked
with a bound on how much is under way.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.net.attempts import Attempts
from raftq.client.net.client import Client
from raftq.client.net.connection import Reply
from raftq.client.net.coordinator import CoordinatorClient
from raftq.client.net.leaders import Answers, Leaders, error_of_code
from raftq.client.options import Address, Bootstrap, ClientOptions
from raftq.client.wire.messages import Request, WireMessage
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.queue_gateway import PartitionName

GROUPS_MAX = 1_000
"""Whose coordinators are remembered."""
WIDE = 64
"""Partitions that are asked at a time when all of them are."""
CLIENT_CHARACTERS_MAX = 200

R = TypeVar("R", bound=WireMessage)
A = TypeVar("A")


class ClusterCalls(Client):
    """See the module's docstring."""

    def __init__(self, bootstrap: Bootstrap, options: ClientOptions, timeout_s: float) -> None:
        super().__init__(bootstrap, options, "HTTP gateway")
        self._options = options
        self._timeout_s = timeout_s
        self._coordinators: OrderedDict[str, CoordinatorClient] = OrderedDict()
        self.leaders: Leaders

    def _on_start(self) -> None:
        self.leaders = Leaders(self._routes, self._pool, self._options)

    def new_member_id(self, client_id: str) -> str:
        """Chosen here, so that a join that is repeated does not make two members."""
        name = client_id[:CLIENT_CHARACTERS_MAX] or "http"
        return f"{name}-{self._options.rng.getrandbits(64):016x}"

    async def coordinate(self, group: str, request: Request[R]) -> R:
        """Ask the coordinator of a group."""
        self._ensure_started()
        found = self._coordinators.get(group)
        if found is None:
            found = CoordinatorClient(group, self._routes, self._pool, self._options)
            self._coordinators[group] = found
            if len(self._coordinators) > GROUPS_MAX:
                self._coordinators.popitem(last=False)
        self._coordinators.move_to_end(group)
        return await found.ask(request, self._timeout_s)

    async def lead(
        self, where: PartitionName, request: Request[R], timeout_s: float | None = None
    ) -> Reply[R]:
        """Ask the leader of a partition."""
        return (await self.lead_knowing(where, request, timeout_s))[0]

    async def lead_knowing(
        self, where: PartitionName, request: Request[R], timeout_s: float | None = None
    ) -> tuple[Reply[R], bool]:
        """The same, and whether an earlier attempt may have taken effect."""
        self._ensure_started()
        what = f"{type(request).__name__} for {where[0]}/{where[1]}"
        attempts = Attempts(what, self._options, timeout_s or self._timeout_s)
        reply = await self.leaders.ask(where, request, attempts.timeout_s, attempts)
        return reply, attempts.unknown

    async def by_leader(self, names: Iterable[PartitionName]) -> dict[Address, list[PartitionName]]:
        """Partitions by where their leaders listen; those without one are left out. NotLeader when
        that leaves none."""
        self._ensure_started()
        attempts = Attempts("finding leaders", self._options, self._timeout_s)
        found: dict[Address, list[PartitionName]] = {}
        problem: RaftqError | None = None
        for name in names:
            try:
                found.setdefault(await self.leaders.find(name, attempts), []).append(name)
            except NotLeader as error:
                problem = error
        if problem is not None:
            self._routes.request_refresh()
            if not found:
                raise problem
        return found

    async def request(
        self, address: Address, request: Request[R], timeout_s: float | None = None
    ) -> Reply[R]:
        """Ask one node, once."""
        self._ensure_started()
        connection = await self._pool.get(address)
        return await connection.request(request, timeout_s=timeout_s)

    async def each_partition(
        self,
        topics: Sequence[TopicState],
        build: Callable[[PartitionName], Request[R]],
        timeout_s: float | None = None,
    ) -> dict[PartitionName, Reply[R] | RaftqError]:
        """Ask the leader of every partition of these topics."""
        names = [(one.name, at) for one in topics for at in range(len(one.partitions))]
        found: dict[PartitionName, Reply[R] | RaftqError] = {}
        left = iter(names)

        async def work() -> None:
            for name in left:
                try:
                    found[name] = await self.lead(name, build(name), timeout_s)
                except RaftqError as error:
                    found[name] = error

        self._ensure_started()
        workers = [self._tasks.spawn(work()) for _ in range(min(WIDE, len(names)))]
        try:
            if workers:
                await asyncio.wait(workers)
        finally:
            for one in workers:
                one.cancel()
        return {name: found[name] for name in names if name in found}

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that no caller waits for."""
        self._ensure_started()
        self._tasks.spawn(work)

    def learn(self, where: PartitionName, error: RaftqError) -> None:
        """A leader has refused: perhaps it is none any more."""
        self.leaders.learn(where, error)

    async def nodes(self) -> list[Address]:
        """Where the nodes that live listen."""
        self._ensure_started()
        await self._routes.refresh()
        return [(one.host, one.port) for one in self._routes.nodes.values() if one.alive]

    async def ask_each(
        self,
        names: list[PartitionName],
        build: Callable[[list[PartitionName]], Request[R]],
        read: Callable[[R], Answers[A]],
    ) -> dict[PartitionName, A | RaftqError]:
        """One request per leader about its partitions; an answer or an error for each."""
        self._ensure_started()
        return await self.leaders.ask_each(names, build, read, self._timeout_s)


def error_of(code: str, where: PartitionName) -> RaftqError:
    """The error behind a code in a reply."""
    return error_of_code(code, where)
