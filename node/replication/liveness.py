"""Which nodes still ask this one for what they follow. (Core.)

A follower that has everything says nothing about a partition, but it asks for news all the time.
One that is alive, as the controller knows, and asks for nothing cannot get here; then clients may
not get here, either, and whoever leads finds no sign of that in its partitions.
"""

from collections.abc import Iterable

from raftq.node.replication.replica import NEVER


class FollowerLiveness:
    """When each node was last heard, and who has not been heard for `timeout_s`."""

    __slots__ = ("_me", "_requested_at", "_timeout_s", "unreachable")

    def __init__(self, me: int, timeout_s: float) -> None:
        self._me = me
        self._timeout_s = timeout_s
        self._requested_at: dict[int, float] = {}
        self.unreachable: frozenset[int] = frozenset()

    def note_request(self, node: int, now: float) -> None:
        self._requested_at[node] = now

    def update(self, alive: Iterable[int], now: float) -> bool:
        """Look again, among the living; whether others are silent than before."""
        since = now - self._timeout_s
        requested_at = self._requested_at
        before = self.unreachable
        self.unreachable = frozenset(
            node for node in alive if node != self._me and requested_at.get(node, NEVER) < since
        )
        return self.unreachable != before
