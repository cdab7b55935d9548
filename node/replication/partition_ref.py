"""Which partition a replica is of, and where its files are. (Pure.)"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartitionRef:
    """A partition, and the directory of its replica on this node."""

    topic: str
    topic_id: int
    number: int
    directory: str

    def __str__(self) -> str:
        return f"{self.topic}/{self.number}"
