"""One Raft node: pysyncobj's SyncObj with its protocol overridden. (Shell; clock and rng injected.)

Everything happens in `step` and in the handling of messages, in one thread. What a message promises
is on disk before it leaves: answers and votes wait in `_outbox` for the one flush of a round; only
a leader's entries go out at once, since its own copy counts no earlier than it is durable.

Invariants: an entry is cut only where one of another term takes its place, and never at or below
the commit index; acknowledgements of another term count for nothing; `applied` advances by one per
entry, whatever callbacks do. A broken invariant raises, and its owner stops the node.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from raftq.client.common.errors import ConsensusBroken, CorruptFile, DiskFull
from raftq.cluster.raft import snapshot as snapshots
from raftq.cluster.raft.applied import Applier, id_of, is_command
from raftq.cluster.raft.election import Elector, RaftSetup
from raftq.cluster.raft.journal import FIRST_INDEX, RaftJournal
from raftq.cluster.raft.library import FOLLOWER, LEADER, Node
from raftq.cluster.raft.messages import ENTRIES_MAX, Message
from raftq.cluster.raft.proposals import Proposal
from raftq.cluster.raft.replication import LeaderView, Replication
from raftq.cluster.raft.snapshot import Snapshot, Snapshots

logger = logging.getLogger(__name__)

_STALL_RETRY = 0.5


def recover(journal: RaftJournal, files: Snapshots, applier: Applier) -> int:
    """Bring snapshot and journal together by index; the tail after the snapshot survives."""
    snapshot = files.load()
    if snapshot is None:
        if journal.base_index != FIRST_INDEX:
            raise CorruptFile(f"the log begins after {journal.base_index} without a snapshot")
        return FIRST_INDEX
    if journal.created or snapshot.index < journal.base_index:
        raise CorruptFile(
            f"the snapshot ends at {snapshot.index}, but the log begins after"
            f" {journal.base_index}: files are missing, or of different times"
        )
    applier.restore(snapshot.body)
    if journal.term < snapshot.term:
        journal.set_term(snapshot.term, None)
    if journal.term_at(snapshot.index) != snapshot.term:
        journal.reset(snapshot.index, snapshot.term)
    elif journal.commit_index < snapshot.index:
        journal.set_commit(snapshot.index)
    journal.flush()
    return snapshot.index


class RaftNode(Elector):
    """See the module's docstring."""

    def __init__(self, setup: RaftSetup) -> None:
        self.inbox: deque[Proposal] = deque()
        """Proposals from other threads."""
        self.stalled: DiskFull | None = None
        """Set while the disk is full: the node neither hears nor speaks until it can write."""
        self.abdication_asked = False
        """Set from another thread: this node should leave it to others to lead."""
        self._stepped_at = self._expire_at = self._stall_at = float("-inf")
        self._handlers: dict[str, Callable[[Node, Message], None]] = {
            "pre_vote": self._on_pre_vote,
            "pre_vote_reply": self._on_pre_vote_reply,
            "request_vote": self._on_request_vote,
            "response_vote": self._on_response_vote,
            "append_entries": self._on_append_entries,
            "next_node_idx": self._on_next_node_idx,
            "install_snapshot": self._on_install_snapshot,
            "snapshot_reply": self._on_snapshot_reply,
            "apply_command": self._on_apply_command,
            "refuse_command": self._on_refuse_command,
        }
        self._snapshot_index = recover(setup.journal, setup.snapshots, setup.applier)
        self.restored = self._snapshot_index > FIRST_INDEX
        """Whether it began with a snapshot."""
        super().__init__(setup)
        self.commit, self.applied = self.journal.commit_index, self._snapshot_index

    # One round.

    def _onTick(self, timeToWait: float = 0.0) -> None:
        # Input first: after a pause, a leader's word may be waiting while every timer has run out.
        self._poller.poll(timeToWait)
        self.step()

    def step(self) -> bool:
        """Everything that time and input ask for; True when there is more to do at once."""
        now = self.setup.clock()
        if now - self._stepped_at > self.setup.times.election_ms_min / 2000:
            self._postpone_election(now)  # it was this node that did not listen
        self._stepped_at = now
        self._take_inbox()
        if self.stalled is not None and not self._try_again(now):
            self.transport.tick(now)
            return False
        self._run_timers(now)
        self._abdicate(now)
        self._send_proposals()
        self._replicate(now)
        if self._flush(now):
            self._advance_commit()
            self._apply_committed()
            self._replicate(now)
            self._compact()
        if now >= self._expire_at:
            self._expire_at = now + self.setup.times.tick_ms / 1000
            self.proposals.expire(now)
        self.transport.tick(now)
        return self.applied < self.commit or bool(self.inbox)

    def wait_s(self) -> float:
        """How long nothing needs to be done unless something arrives.

        Never so long that `step` would take this node for one that did not listen.
        """
        now, times = self.setup.clock(), self.setup.times
        if self.proposals or self.stalled is not None or self.transport.unsettled:
            return times.tick_ms / 1000
        due = now + times.append_ms / 1000
        if self._replication is None:
            due = min(due, self.election_deadline)
        else:
            connected = [one for one, node in self.peers.items() if node in self.connected]
            due = min(due, self._replication.due_at(connected))
        return max(0.0, due - now)

    def _take_inbox(self) -> None:
        while self.inbox:
            proposal = self.inbox.popleft()
            known = self.setup.applier.known(proposal.command_id)
            self.proposals.add(proposal)
            if known is not None:
                self.proposals.applied(known)

    def _flush(self, now: float) -> bool:
        try:
            self.journal.flush()
        except DiskFull as error:
            self._stall(error, now)
            return False
        outbox, self._outbox = self._outbox, []
        for node, message in outbox:
            self.transport.send(node, message)
        return True

    def _stall(self, error: DiskFull, now: float) -> None:
        if self.stalled is None:
            logger.error("raft node=%s stalled: %s", self.setup.node_id, error)
        self.stalled = error
        self._stall_at = now + _STALL_RETRY
        self._outbox.clear()
        self._become_follower(None)

    def _try_again(self, now: float) -> bool:
        assert self.stalled is not None
        if now >= self._stall_at:
            try:
                self.journal.flush()
            except DiskFull as error:
                self._stall(error, now)
            else:
                logger.warning("raft node=%s goes on after a full disk", self.setup.node_id)
                self.stalled = None
                self._postpone_election(now)
                return True
        self.proposals.refuse_waiting(DiskFull(str(self.stalled)))
        self.proposals.expire(now)
        return False

    # Time.

    def _run_timers(self, now: float) -> None:
        if self._replication is not None:
            since = now - self.setup.times.fallback_ms / 1000
            if not self._replication.heard_by_majority(since):
                logger.warning("raft node=%s lost its majority", self.setup.node_id)
                self._become_follower(None)
                self._postpone_election(now)
        elif now >= self.election_deadline:
            self._postpone_election(now)
            self._ask_pre_votes(now)

    def _abdicate(self, now: float) -> None:
        if not self.abdication_asked:
            return
        self.abdication_asked = False
        if self._replication is not None:
            logger.warning("raft node=%s abdicates term=%d", self.setup.node_id, self.term_now)
            self._become_follower(None)
            self.election_deadline = now + self.setup.times.abdicate_ms / 1000

    # Messages.

    def _SyncObj__onMessageReceived(self, node: Node, message: Message) -> None:
        # The constructor hands this method to the transport before anything can arrive.
        if self.stalled is None and node.id in self.peers:
            self._handlers[message["type"]](self.peers[node.id], message)

    def _SyncObj__onNodeDisconnected(self, node: Node) -> None:
        self.connected.discard(node)
        if self._replication is not None:
            self._replication.lost(node.id)
        if node == self.leader:
            # A hint that it died: ask around soon. Who still hears it will not vote.
            now = self.setup.clock()
            self._leader_heard = float("-inf")
            # Not at once: the others should have noticed too when they are asked.
            soon = self.setup.times.election_ms_min / 1000 * self.setup.rng.uniform(0.1, 0.3)
            self.election_deadline = min(self.election_deadline, now + soon)
            self.proposals.resend()

    # The follower's side.

    def _follow(self, node: Node, term: int) -> bool:
        """Accept the sender as leader of its term; False (and an answer) when it is fenced."""
        if term < self.term_now:
            self._reply_index(node, False, self.journal.last_index + 1)
            return False
        if term == self.term_now and self.state == LEADER:
            raise ConsensusBroken(f"{node.id} and this node both lead term {term}")
        if term > self.term_now:
            self._become_follower(term)
        now = self.setup.clock()
        self.state = FOLLOWER
        self._pre_votes = None
        self._set_leader(node)
        # A vote not given is given to the leader: nobody else can lead this term any more.
        self._set_term(term, self.voted_for or node.id)
        self._leader_heard = now
        self._postpone_election(now)
        return True

    def _reply_index(self, node: Node, success: bool, index: int) -> None:
        reply = {"type": "next_node_idx", "term": self.term_now, "success": success}
        self._answer(node, {**reply, "index": index})

    def _on_append_entries(self, node: Node, message: Message) -> None:
        if not self._follow(node, message["term"]):
            return
        journal = self.journal
        prev, entries = message["prev_index"], message["entries"]
        match = prev + len(entries)
        if prev < journal.base_index:
            # What a snapshot covers is committed, so it is the same here.
            entries = entries[journal.base_index - prev :]
            prev = journal.base_index
        else:
            prev_term = journal.term_at(prev)
            if prev_term != message["prev_term"]:
                self._reply_index(node, False, self._first_of_term(prev, prev_term))
                return
        self._store(prev + 1, entries)
        commit = min(message["commit_index"], match)
        if commit > self.commit:
            self._set_commit(commit)
        known = match >= message["commit_index"]
        if known and journal.term_at(message["commit_index"]) == self.term_now:
            self._be_ready()
        self._reply_index(node, True, match)

    def _first_of_term(self, index: int, term: int | None) -> int:
        """Where the leader should try next: the beginning of the term that is in its way."""
        journal = self.journal
        if term is None:
            return journal.last_index + 1
        if index <= self.commit:
            raise ConsensusBroken(f"the leader's entry {index} differs from a committed one")
        while index > self.commit + 1 and journal.term_at(index - 1) == term:
            index -= 1
        return index

    def _store(self, index: int, entries: list[list[Any]]) -> None:
        """Add what is missing; cut only where an entry of another term stands."""
        journal = self.journal
        for position, (term, _) in enumerate(entries):
            known = journal.term_at(index + position)
            if known == term:
                continue
            if known is not None:
                journal.truncate(index + position)
            for offset in range(position, len(entries)):
                term, command = entries[offset]
                journal.append(command, index + offset, term)
            return

    def _on_install_snapshot(self, node: Node, message: Message) -> None:
        if not self._follow(node, message["term"]):
            return
        index, total, offset = message["index"], message["total"], message["offset"]
        if index <= self.commit:
            self._incoming = None
            self._reply_index(node, True, index)
            return
        if total > snapshots.BYTES_MAX:
            raise ConsensusBroken(f"a snapshot of {total} bytes cannot be taken")
        if self._incoming is None or self._incoming[:2] != (index, total):
            self._incoming = (index, total, bytearray())
        data = self._incoming[2]
        if offset == len(data):
            data += message["data"]
        if len(data) >= total:
            self._incoming = None
            try:
                self._install(snapshots.decode(bytes(data), f"snapshot from {node.id}"))
            except DiskFull as error:
                # Not answered, so the leader sends it again.
                logger.warning("raft node=%s cannot install: %s", self.setup.node_id, error)
                return
            self._reply_index(node, True, index)
        else:
            reply = {"type": "snapshot_reply", "term": self.term_now}
            self._answer(node, {**reply, "index": index, "offset": len(data)})

    def _install(self, snapshot: Snapshot) -> None:
        self.setup.snapshots.save(snapshot)
        self.journal.reset(snapshot.index, snapshot.term)
        self.setup.applier.restore(snapshot.body)
        self._snapshot_index = self.applied = snapshot.index
        self.commit = self.journal.commit_index
        self.setup.on_restored(snapshot.index)
        for command_id in self.proposals.open_ids():
            known = self.setup.applier.known(command_id)
            if known is not None:
                self.proposals.applied(known)

    # The leader's side.

    def _from_follower(self, node: Node, message: Message) -> Replication | None:
        if message["term"] > self.term_now:
            self._become_follower(message["term"])
        return self._replication if message["term"] == self.term_now else None

    def _on_next_node_idx(self, node: Node, message: Message) -> None:
        replication = self._from_follower(node, message)
        if replication is not None:
            replication.on_reply(node.id, message, self.setup.clock())

    def _on_snapshot_reply(self, node: Node, message: Message) -> None:
        replication = self._from_follower(node, message)
        if replication is not None:
            replication.on_snapshot_reply(node.id, message, self.setup.clock())

    def _replicate(self, now: float) -> None:
        if self._replication is not None:
            view = LeaderView(self.term_now, self.commit, now)
            for node_id, node in self.peers.items():
                if node in self.connected:
                    self._replication.replicate(node_id, view, self.transport.backlog(node))

    def _advance_commit(self) -> None:
        if self._replication is not None:
            index = self._replication.majority_match()
            # Only an entry of the own term says that a majority follows this leader.
            if index > self.commit and self.journal.term_at(index) == self.term_now:
                self._set_commit(index)

    def _set_commit(self, index: int) -> None:
        assert index > self.commit
        self.commit = index
        self.journal.set_commit(index)

    # Commands.

    def _send_proposals(self) -> None:
        if self._replication is not None:
            for proposal in self.proposals.take_waiting(ENTRIES_MAX):
                self.journal.append(proposal.entry, self.journal.last_index + 1, self.term_now)
        elif (
            self.leader in self.connected
            and self.transport.backlog(self.leader) < self.setup.limits.backlog_bytes
        ):
            self._hand_on(self.leader)

    def _hand_on(self, leader: Node) -> None:
        batch: list[bytes] = []
        size = 0
        for proposal in self.proposals.take_waiting(ENTRIES_MAX):
            batch.append(proposal.entry)
            size += len(proposal.entry)
            if size >= self.setup.limits.batch_bytes:
                self._answer(leader, {"type": "apply_command", "commands": batch})
                batch, size = [], 0
        if batch:
            self._answer(leader, {"type": "apply_command", "commands": batch})

    def _on_apply_command(self, node: Node, message: Message) -> None:
        commands = [one for one in message["commands"] if is_command(one)]
        if self._replication is None:
            ids = [id_of(one) for one in commands]
            self._answer(node, {"type": "refuse_command", "ids": ids})
            return
        for command in commands:
            self.journal.append(command, self.journal.last_index + 1, self.term_now)

    def _on_refuse_command(self, node: Node, message: Message) -> None:
        for command_id in message["ids"]:
            self.proposals.refused(command_id)

    def _apply_committed(self) -> None:
        end = min(self.commit, self.applied + self.setup.limits.apply_batch)
        base, entries, apply = (
            self.journal.base_index,
            self.journal.entries,
            self.setup.applier.apply,
        )
        while self.applied < end:
            index = self.applied + 1
            applied = apply(entries[index - base][0], index)
            # Advanced before anyone is told: what a callback does cannot apply it again.
            self.applied = index
            if applied is not None:
                self.proposals.applied(applied)
                self.setup.on_applied(applied)

    def _compact(self) -> None:
        journal, limits = self.journal, self.setup.limits
        if self.applied - journal.base_index < limits.compact_entries:
            return
        term = journal.term_at(self.applied)
        assert term is not None
        try:
            if self._snapshot_index < self.applied:
                body = self.setup.applier.snapshot()
                self.setup.snapshots.save(snapshots.encode(self.applied, term, body))
                self._snapshot_index = self.applied
            journal.compact(max(journal.base_index, self.applied - limits.keep_entries))
        except DiskFull as error:
            logger.warning("raft node=%s cannot compact: %s", self.setup.node_id, error)
