"""Shell: finds the coordinator of one group, and asks it.

Any node knows the coordinator. The answer is kept until the coordinator refuses or does not answer.
A refusal that names the new coordinator is believed at once.
"""

from typing import TypeVar

from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.net.attempts import Attempts
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, ClientOptions
from raftq.client.wire.group_messages import FindCoordinator
from raftq.client.wire.messages import Request, WireMessage

FIND_S = 2.0  # for one node to name the coordinator

R = TypeVar("R", bound=WireMessage)


class CoordinatorClient:
    """The coordinator of `group`."""

    def __init__(self, group: str, routes: Routes, pool: Pool, options: ClientOptions) -> None:
        self.group = group
        self._routes = routes
        self._pool = pool
        self._options = options
        self._address: Address | None = None

    async def ask(
        self, request: Request[R], timeout_s: float, attempts: Attempts | None = None
    ) -> R:
        """Asks until it answers or time is over."""
        attempts = attempts or Attempts(
            f"{type(request).__name__} for group {self.group!r}", self._options, timeout_s
        )
        while True:
            try:
                one_s = min(attempts.left_s(), self._options.request_ms / 1000)
                return await self.ask_once(request, one_s)
            except RaftqError as error:
                await attempts.failed(error)

    async def ask_once(self, request: Request[R], timeout_s: float) -> R:
        """Makes one attempt. The next one goes to the coordinator of that moment."""
        try:
            address = self._address or await self._find()
            self._address = address
            connection = await self._pool.get(address)
            return (await connection.request(request, timeout_s=timeout_s)).message
        except RaftqError as error:
            if error.refresh_route:
                self._address = self._named(error)
            raise

    def _named(self, error: RaftqError) -> Address | None:
        """The coordinator that a refusal names, if it is known and not the node that refused."""
        node = self._routes.nodes.get(leader) if (leader := _leader(error)) is not None else None
        named = None if node is None else (node.host, node.port)
        return None if named == self._address else named

    async def _find(self) -> Address:
        if not self._routes.nodes:
            await self._routes.refresh()
        problem: RaftqError = NotLeader(f"group {self.group!r} has no coordinator at the moment")
        for address in self._routes.addresses():
            try:
                connection = await self._pool.get(address)
                request = FindCoordinator(self.group)
                reply = (await connection.request(request, timeout_s=FIND_S)).message
            except RaftqError as error:
                if not error.retriable:
                    raise
                problem = error
                continue
            if reply.node_id is not None:
                return reply.host, reply.port
        raise problem


def _leader(error: RaftqError) -> int | None:
    leader = error.details.get("leader")
    return leader if isinstance(error, NotLeader) and isinstance(leader, int) else None
