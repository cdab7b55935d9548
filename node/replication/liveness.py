"""Which nodes still ask this one for what they follow. (Core.)

A follower that has everything says nothing about a partition, but it asks for news all the time.
One that is alive, as the controller knows, and asks for nothing cannot get here; then clients may
not get here, either, and whoever leads finds no sign of that in its partitions.
"""

from collections.abc import Iterable

from raftq.node.replication.replica import NEVER


class FollowerLiveness:
    """When each node was last heard, and who has not been heard for `silence_s`."""

    __slots__ = ("_heard_at", "_me", "_silence_s", "silent")

    def __init__(self, me: int, silence_s: float) -> None:
        self._me = me
        self._silence_s = silence_s
        self._heard_at: dict[int, float] = {}
        self.silent: frozenset[int] = frozenset()

    def heard(self, node: int, now: float) -> None:
        self._heard_at[node] = now

    def changed(self, alive: Iterable[int], now: float) -> bool:
        """Look again, among the living; whether others are silent than before."""
        since = now - self._silence_s
        heard_at = self._heard_at
        before = self.silent
        self.silent = frozenset(
            node for node in alive if node != self._me and heard_at.get(node, NEVER) < since
        )
        return self.silent != before
