"""A fake operator: it notes every change, and a move arrives after a few looks."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from raftq.chaos.world import PartitionView
from raftq.client.common.errors import Detail, UnknownTopic

Key = tuple[str, int]
LOOKS = 2


class FakeOperator:
    """An Operator without a cluster. Nodes in `gone()` are not in sync and do not lead.

    `story` has every change."""

    def __init__(
        self, partitions: Mapping[Key, PartitionView], gone: Callable[[], set[int]]
    ) -> None:
        self.known = dict(partitions)
        self.config: dict[str, dict[str, Detail]] = {
            name: {"fsync": "always", "retention_ms": 7} for name, _ in partitions
        }
        self.story: list[str] = []
        self.index = 0
        self._gone = gone
        self._under_way: dict[Key, tuple[int, tuple[int, ...]]] = {}

    def partitions(self) -> dict[Key, PartitionView]:
        for key, (looks, target) in list(self._under_way.items()):
            self._under_way[key] = (looks - 1, target)
            if looks <= 1:
                del self._under_way[key]
                self.known[key] = replace(self.known[key], replicas=target, moves=False)
        return {key: self._now(view) for key, view in self.known.items()}

    def _now(self, view: PartitionView) -> PartitionView:
        gone = self._gone()
        isr = tuple(node for node in view.replicas if node not in gone)
        leader = view.leader if view.leader in isr else next(iter(isr), None)
        return replace(view, isr=isr, leader=leader)

    def settings(self, topic: str) -> Mapping[str, Detail]:
        if topic not in self.config:
            raise UnknownTopic(topic)
        return self.config[topic]

    def metadata_index(self) -> int:
        return self.index

    def move(self, topic: str, partition: int, replicas: Iterable[int]) -> None:
        target, key = tuple(replicas), (topic, partition)
        self._note(f"move {topic}/{partition} to {target}")
        assert len(set(target)) == len(target)
        self._under_way[key] = (LOOKS, target)
        self.known[key] = replace(self.known[key], moves=True)

    def alter(self, topic: str, settings: Mapping[str, Detail]) -> None:
        self._note(f"alter {topic}")
        self.config[topic] = {**self.settings(topic), **settings}

    def grow(self, topic: str, total: int) -> None:
        self._note(f"grow {topic} to {total}")
        for number in range(total):
            self.known.setdefault((topic, number), PartitionView(1, (1, 2, 3), (1, 2, 3)))

    def create(self, topic: str, partitions: int, copies: int) -> None:
        assert topic not in self.config
        self._note(f"create {topic}")
        self.config[topic] = {}
        for number in range(partitions):
            nodes = tuple(range(1, copies + 1))
            self.known[topic, number] = PartitionView(1, nodes, nodes)

    def delete(self, topic: str) -> None:
        self._note(f"delete {topic}")
        del self.config[topic]
        self.known = {key: view for key, view in self.known.items() if key[0] != topic}

    def _note(self, text: str) -> None:
        self.index += 1
        self.story.append(text)
