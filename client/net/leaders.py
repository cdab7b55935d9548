"""Shell: asks the leaders of partitions, and follows them when they change.

An attempt that fails because the leader moved is repeated at the new one until time is over.
Requests about many partitions are sent once per leader. The answer for one partition does not wait
for the retries of others.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from raftq.client.common.errors import (
    NotLeader,
    RaftqError,
    UnknownCode,
    UnknownPartition,
)
from raftq.client.common.types import PartitionKey
from raftq.client.net.attempts import Attempts
from raftq.client.net.connection import Reply
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import Address, ClientOptions
from raftq.client.wire.messages import Request, WireMessage

PARTITIONS_MAX = 1_000  # in one request

R = TypeVar("R", bound=WireMessage)
A = TypeVar("A")
Answers = Iterable[tuple[PartitionKey, "str | RaftqError", A]]
"""The middle is an error or its code; "" means none."""


class Leaders:
    """The leaders of all partitions, behind one interface."""

    def __init__(self, routes: Routes, pool: Pool, options: ClientOptions) -> None:
        self._routes = routes
        self._pool = pool
        self._options = options

    async def ask(
        self,
        where: PartitionKey,
        request: Request[R],
        timeout_s: float,
        attempts: Attempts | None = None,
    ) -> Reply[R]:
        """Asks the leader of one partition."""
        attempts = attempts or Attempts(
            f"{type(request).__name__} for {where[0]}/{where[1]}", self._options, timeout_s
        )
        while True:
            try:
                connection = await self._pool.get(await self.find(where, attempts))
                return await connection.request(request, timeout_s=self._one_s(attempts))
            except RaftqError as error:
                self.learn(where, error)
                await attempts.failed(error)

    async def find(self, where: PartitionKey, attempts: Attempts) -> Address:
        """The address of the leader. Raises NotLeader if there is none at the moment."""
        topic, partition = where
        try:
            async with asyncio.timeout(attempts.left_s()):
                info = await self._routes.topic(topic)
        except TimeoutError:
            raise attempts.too_late() from None
        except RaftqError as error:
            error.retriable = False  # the routes were asked for long enough
            raise
        if partition >= len(info.partitions):
            raise UnknownPartition(
                f"topic {topic!r} has {len(info.partitions)} partitions, so no partition "
                f"{partition}"
            )
        found = self._routes.leader(topic, partition)
        if found is None:
            raise NotLeader(f"no leader is known for {topic}/{partition}")
        return found[1]

    def learn(self, where: PartitionKey, error: RaftqError) -> None:
        """Handles a refusal: the node may not be the leader any more."""
        if error.refresh_route:
            self._routes.hint(*where, error)
            self._routes.request_refresh()

    def _one_s(self, attempts: Attempts) -> float:
        return min(attempts.left_s(), self._options.request_ms / 1000)

    async def ask_each(
        self,
        keys: Sequence[PartitionKey],
        build: Callable[[list[PartitionKey]], Request[R]],
        read: "Callable[[R], Answers[A]]",
        timeout_s: float,
    ) -> dict[PartitionKey, A | RaftqError]:
        """An answer or an error for each of these partitions."""
        found: dict[PartitionKey, A | RaftqError] = {}
        left = list(dict.fromkeys(keys))
        if not left:
            return found
        attempts = Attempts(f"a request about {len(left)} partitions", self._options, timeout_s)
        unknown: dict[PartitionKey, None] = {}
        while True:
            errors = await self._round(left, build, read, attempts, found)
            for key, error in errors.items():
                if key in unknown:
                    error.outcome = "unknown"  # an earlier attempt may have taken effect
                elif error.outcome == "unknown":
                    unknown[key] = None
            left = [key for key in left if key not in found]
            if not left:
                return found
            for error in errors.values():
                attempts.note(error)
            try:
                await attempts.wait()
            except RaftqError as error:
                return found | dict.fromkeys(left, error)

    async def ask_once(
        self,
        keys: Sequence[PartitionKey],
        build: Callable[[list[PartitionKey]], Request[R]],
        read: "Callable[[R], Answers[A]]",
        timeout_s: float,
    ) -> dict[PartitionKey, A | RaftqError]:
        """As `ask_each`, without a second attempt."""
        found: dict[PartitionKey, A | RaftqError] = {}
        attempts = Attempts(f"a request about {len(keys)} partitions", self._options, timeout_s)
        errors = await self._round(list(keys), build, read, attempts, found)
        return {**errors, **found}

    async def _round(
        self,
        keys: list[PartitionKey],
        build: Callable[[list[PartitionKey]], Request[R]],
        read: "Callable[[R], Answers[A]]",
        attempts: Attempts,
        found: dict[PartitionKey, A | RaftqError],
    ) -> dict[PartitionKey, RaftqError]:
        """Makes one attempt at every leader. Final answers go to `found`; the rest is returned."""
        errors: dict[PartitionKey, RaftqError] = {}
        groups: dict[Address, list[PartitionKey]] = {}
        for key in keys:
            try:
                groups.setdefault(await self.find(key, attempts), []).append(key)
            except RaftqError as error:
                errors[key] = error

        async def one(address: Address, asked: list[PartitionKey]) -> None:
            try:
                connection = await self._pool.get(address)
                reply = await connection.request(build(asked), timeout_s=self._one_s(attempts))
            except RaftqError as error:
                errors.update(dict.fromkeys(asked, error))
                return
            for key, code, answer in read(reply.message):
                if isinstance(code, RaftqError):
                    errors[key] = code
                elif code:
                    errors[key] = error_of_code(code, key)
                else:
                    found[key] = answer

        cuts = [
            (address, asked[at : at + PARTITIONS_MAX])
            for address, asked in groups.items()
            for at in range(0, len(asked), PARTITIONS_MAX)
        ]
        await asyncio.gather(*[one(address, asked) for address, asked in cuts])
        for key, problem in errors.items():
            self.learn(key, problem)
            if not problem.retriable:
                found[key] = problem
        return errors


def error_of_code(code: str, where: PartitionKey) -> RaftqError:
    """The error for a code in a reply."""
    known = RaftqError.registry.get(code)
    name = f"{where[0]}/{where[1]}"
    if known is None:
        return UnknownCode(f"{name}: {code}").with_details(code=code)
    return known(f"{name}: the node answers {code}")
