"""Which nodes still send fetch requests to this one. (Core.)

A follower that has everything reports nothing about a partition, but it sends requests all the
time. A node that is alive according to the controller and sends no requests cannot reach this node.
Clients may not reach it either, and nothing in its partitions would show that.
"""

from collections.abc import Iterable

from raftq.node.replication.replica import NEVER


class FollowerLiveness:
    """When each node last sent a request, and who has sent none for `timeout_s`."""

    __slots__ = ("_me", "_requested_at", "_timeout_s", "unreachable")

    def __init__(self, me: int, timeout_s: float) -> None:
        self._me = me
        self._timeout_s = timeout_s
        self._requested_at: dict[int, float] = {}
        self.unreachable: frozenset[int] = frozenset()

    def note_request(self, node: int, now: float) -> None:
        """Note a request of a follower. Followers send requests all the time, also without news."""
        self._requested_at[node] = now

    def update(self, alive: Iterable[int], now: float) -> bool:
        """Find the unreachable nodes among those alive, and report whether they are others than
        before."""
        since = now - self._timeout_s
        requested_at = self._requested_at
        before = self.unreachable
        self.unreachable = frozenset(
            node for node in alive if node != self._me and requested_at.get(node, NEVER) < since
        )
        return self.unreachable != before
