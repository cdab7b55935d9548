"""A leader's view of its followers, and what to send to each of them. (Core: `now` comes in.)

    probing   --a success--> streaming   (probing: one message at a time, until the logs meet)
    streaming --a rejection, a lost connection--> probing
    probing   --the follower needs entries that are compacted--> snapshot
    snapshot  --its last part confirmed, or a success--> streaming

Invariants per follower: match < next; match never goes back on one connection; a rejection only
lowers `next`, and never to `match` or below. After a lost connection nothing is taken for granted:
the follower may come back without its disk. What was committed stays committed.
"""

from collections.abc import Callable
from dataclasses import dataclass

from raftq.cluster.raft.config import RaftLimits
from raftq.cluster.raft.journal import RaftJournal
from raftq.cluster.raft.messages import (
    ENTRIES_MAX,
    AppendEntries,
    AppendReply,
    InstallSnapshot,
    RaftMessage,
    SnapshotReply,
)
from raftq.cluster.raft.snapshot import Snapshot

Send = Callable[[str, RaftMessage], None]


@dataclass(slots=True)
class RaftProgress:
    next: int
    heard_at: float
    match: int = 0
    probing: bool = True
    sent_at: float = float("-inf")
    sent_commit: int = 0
    snapshot: Snapshot | None = None
    offset: int = 0
    chunk_at: float = float("-inf")


@dataclass(frozen=True, slots=True)
class LeaderView:
    """What a leader knows of itself at this moment."""

    term: int
    commit: int
    now: float


class Replication:
    """Exists only while this node leads; a new leadership begins with a new one."""

    def __init__(
        self,
        journal: RaftJournal,
        limits: RaftLimits,
        period: float,
        send: Send,
        load_snapshot: Callable[[], Snapshot | None],
    ) -> None:
        self._journal = journal
        self._limits = limits
        self._period = period
        self._send = send
        self._load_snapshot = load_snapshot
        self.followers: dict[str, RaftProgress] = {}

    def begin(self, others: list[str], now: float) -> None:
        after = self._journal.last_index + 1
        self.followers = {node_id: RaftProgress(next=after, heard_at=now) for node_id in others}

    def lost(self, node: str) -> None:
        """The connection ended: what was on it may be gone."""
        progress = self.followers[node]
        progress.probing = True
        progress.next = max(progress.match + 1, min(progress.next, self._journal.last_index + 1))
        progress.match = 0
        progress.sent_at = progress.chunk_at = float("-inf")
        progress.snapshot = None

    def majority_match(self) -> int:
        """The highest index that a majority, this node included, has on disk."""
        found = sorted([follower.match for follower in self.followers.values()] + [self._durable()])
        return found[(len(found) - 1) // 2]

    def _durable(self) -> int:
        return self._journal.durable_index

    def heard_by_majority(self, since: float) -> bool:
        heard = sum(follower.heard_at >= since for follower in self.followers.values())
        return (heard + 1) * 2 > len(self.followers) + 1

    # Sending.

    def due_at(self, nodes: list[str]) -> float:
        """When one of these is to hear from the leader, whether there is news or not."""
        followers = self.followers
        last = [max(followers[node_id].sent_at, followers[node_id].chunk_at) for node_id in nodes]
        return min(last, default=float("inf")) + self._period

    def replicate(self, node: str, view: LeaderView, backlog: int) -> None:
        progress = self.followers[node]
        if progress.snapshot is None and progress.next <= self._journal.base_index:
            progress.snapshot = self._load_snapshot()
            progress.offset = 0
            progress.chunk_at = float("-inf")
        if progress.snapshot is not None:
            self._send_chunk(node, progress, view)
            return
        due = view.now >= progress.sent_at + self._period or progress.sent_commit < view.commit
        if progress.probing:
            if view.now >= progress.sent_at + self._period:
                self._append(node, progress, view)
            return
        last = self._journal.last_index
        while progress.next <= last and backlog < self._limits.backlog_bytes:
            count, size = self._append(node, progress, view)
            progress.next += count
            backlog += size
            due = False
        if due:
            self._append(node, progress, view, empty=True)

    def _append(
        self, node: str, progress: RaftProgress, view: LeaderView, empty: bool = False
    ) -> tuple[int, int]:
        journal = self._journal
        prev = min(progress.next, journal.last_index + 1) - 1
        prev_term = journal.term_at(prev)
        assert prev_term is not None, f"entry {prev} before {progress.next} is not in the log"
        entries = []
        if not empty and prev < journal.last_index:
            entries = journal.slice(prev + 1, self._limits.batch_bytes, ENTRIES_MAX)
        self._send(
            node,
            AppendEntries(
                view.term,
                prev,
                prev_term,
                view.commit,
                [(term, command) for command, _, term in entries],
            ),
        )
        progress.sent_at = view.now
        progress.sent_commit = view.commit
        return len(entries), sum(len(entry[0]) for entry in entries)

    def _send_chunk(self, node: str, progress: RaftProgress, view: LeaderView) -> None:
        """The next part when the last one was confirmed; the same again after a while."""
        snapshot = progress.snapshot
        assert snapshot is not None
        if view.now < progress.chunk_at + self._period:
            return
        end = progress.offset + self._limits.chunk_bytes
        self._send(
            node,
            InstallSnapshot(
                view.term,
                snapshot.index,
                len(snapshot.raw),
                progress.offset,
                snapshot.raw[progress.offset : end],
            ),
        )
        progress.chunk_at = progress.sent_at = view.now

    # Answers.

    def on_reply(self, node: str, message: AppendReply, now: float) -> None:
        progress = self.followers[node]
        progress.heard_at = now
        if message.success:
            match = message.index
            assert match <= self._journal.last_index, f"{node} has {match}, more than the leader"
            progress.match = max(progress.match, match)
            progress.next = max(progress.next, progress.match + 1)
            if progress.snapshot is None or match >= progress.snapshot.index:
                progress.snapshot = None
                progress.probing = False
            return
        target = max(progress.match + 1, min(progress.next, message.index))
        if progress.probing and target >= progress.next:
            return  # of a message that was on its way before the probe: it says nothing new
        progress.next = target
        progress.probing = True
        progress.sent_at = float("-inf")

    def on_snapshot_reply(self, node: str, message: SnapshotReply, now: float) -> None:
        progress = self.followers[node]
        progress.heard_at = now
        snapshot = progress.snapshot
        if snapshot is None or snapshot.index != message.index:
            return
        progress.offset = min(message.offset, len(snapshot.raw))
        progress.chunk_at = float("-inf")
