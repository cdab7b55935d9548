"""Which topics exist for groups, and which of them a member wants. (Pure.)

A member names topics, or gives a pattern that whole names have to match, or both. Internal topics
are for no group. Dead-letter topics are only for members that name them: a pattern written for
`orders.*` does not want what was given up of `orders`.
"""

from collections.abc import Iterable, Mapping, Sequence

from raftq.client.common.names import DLQ_SUFFIX, is_internal
from raftq.cluster.groups.patterns import Pattern


class TopicCounts:
    """The topics at one moment, with their numbers of partitions."""

    def __init__(self, counts: Mapping[str, int]) -> None:
        self.counts = {name: counts[name] for name in sorted(counts) if not is_internal(name)}
        self._matching: dict[str, dict[str, None]] = {}

    def wanted(self, topics: Sequence[str], pattern: str) -> list[str]:
        """Return the topics that exist, in order."""
        found = {topic for topic in topics if topic in self.counts}
        if pattern:
            if pattern not in self._matching:
                self._matching[pattern] = _matching(pattern, self.counts)
            found.update(self._matching[pattern])
        return sorted(found)

    def differences(self, counts: Mapping[str, int]) -> "TopicCounts":
        """Return the topics whose number of partitions differs, or that exist only here or only
        there."""
        before = self.counts
        names = [name for name in before if counts.get(name) != before[name]]
        names += [name for name in counts if name not in before]
        return TopicCounts({name: counts.get(name, 0) for name in names})

    def updated(self, counts: Mapping[str, int]) -> "TopicCounts":
        """Return the topics at another moment. Names that were checked before are not checked
        again."""
        after = TopicCounts(counts)
        added = [name for name in after.counts if name not in self.counts]
        for pattern, names in self._matching.items():
            kept = {name: None for name in names if name in after.counts}
            after._matching[pattern] = {**kept, **_matching(pattern, added)}
        return after


def _matching(pattern: str, names: Iterable[str]) -> dict[str, None]:
    matches = Pattern(pattern).matches
    return {name: None for name in names if not name.endswith(DLQ_SUFFIX) and matches(name)}
