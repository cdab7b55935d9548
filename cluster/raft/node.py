"""One Raft node: pysyncobj's SyncObj with its protocol overridden. (Shell; clock and rng injected.)

Everything happens in `step` and in the handling of messages, in one thread. What a message promises
is on disk before it leaves: answers and votes wait in `_outbox` for the one flush of a round; only
a leader's entries go out at once, since its own copy counts no earlier than it is durable.

    follower  --no word from a leader--> asks for pre-votes, still a follower, same term
    follower  --a majority would vote for it--> candidate of the next term
    candidate --votes of a majority--> leader        candidate --time out--> follower, pre-votes
    any       --a message of a later term--> follower of that term
    leader    --no word from a majority for `fallback_ms`--> follower
    leader    --asked to abdicate--> follower, and does not stand for `abdicate_ms`

A node that starts with an empty directory may be a voter that lost its disk, and its promises with
it. Until a leader has brought it up to date it is not `ready`. It takes part in one kind of
election only, the one with which a new cluster begins: a node that is not ready stands when every
voter has said that its log is empty too. The voters of that election and its leader are ready from
then on. So a new cluster begins when all its voters are there. The first leader may die before any
other node knows of a commit: nodes that voted for it can elect another one. And voters that lost
their disks never begin a second cluster beside the rest of the first.

Invariants: the term never goes back; a node votes once per term, and the vote is on disk before a
message carries it; a node that does not hear a leader does not unseat it while a majority hears it;
an entry is cut only where an entry of another term takes its place, and never at or below the
commit index; acknowledgements of another term do not count; `applied` grows by one per entry,
whatever callbacks do. A broken invariant raises, and its owner stops the node.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from raftq.client.common.errors import ConsensusBroken, CorruptFile, DiskFull
from raftq.cluster.raft import snapshot as snapshots
from raftq.cluster.raft.applied import NO_OP_ENTRY, Applied, Applier, id_of, is_command
from raftq.cluster.raft.config import RaftLimits, RaftTimes
from raftq.cluster.raft.journal import FIRST_INDEX, RaftJournal
from raftq.cluster.raft.library import CANDIDATE, FOLLOWER, LEADER, Library, Node
from raftq.cluster.raft.messages import (
    ENTRIES_MAX,
    AppendEntries,
    AppendReply,
    ApplyCommands,
    InstallSnapshot,
    PreVote,
    PreVoteReply,
    RaftMessage,
    RefuseCommands,
    RequestVote,
    RequestVoteReply,
    SnapshotReply,
)
from raftq.cluster.raft.proposals import Proposal, RaftProposals
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


@dataclass(slots=True)
class RaftSetup:
    """What a node is made of."""

    node_id: str
    others: list[str]
    times: RaftTimes
    limits: RaftLimits
    journal: RaftJournal
    snapshots: Snapshots
    applier: Applier
    transport: Any
    """Called with (node, self_node, other_nodes), as pysyncobj calls a transport class."""
    clock: Callable[[], float]
    rng: Random
    on_applied: Callable[[Applied], None] = field(default=lambda applied: None)
    on_restored: Callable[[int], None] = field(default=lambda index: None)


class RaftNode(Library):
    """A voter: it elects and is elected, replicates its log or another's, and applies what is
    committed."""

    def __init__(self, setup: RaftSetup) -> None:
        self.inbox: deque[Proposal] = deque()
        """Proposals from other threads."""
        self.stalled: DiskFull | None = None
        """Set while the disk is full: the node neither hears nor speaks until it can write."""
        self.abdication_asked = False
        """Set from another thread: this node should leave it to others to lead."""
        self._stepped_at = self._expire_at = self._stall_at = float("-inf")
        self._handlers: dict[type[RaftMessage], Callable[[Node, Any], None]] = {
            PreVote: self._on_pre_vote,
            PreVoteReply: self._on_pre_vote_reply,
            RequestVote: self._on_request_vote,
            RequestVoteReply: self._on_request_vote_reply,
            AppendEntries: self._on_append_entries,
            AppendReply: self._on_append_reply,
            InstallSnapshot: self._on_install_snapshot,
            SnapshotReply: self._on_snapshot_reply,
            ApplyCommands: self._on_apply_commands,
            RefuseCommands: self._on_refuse_commands,
        }
        self._snapshot_index = recover(setup.journal, setup.snapshots, setup.applier)
        self.restored = self._snapshot_index > FIRST_INDEX
        """Whether it began with a snapshot."""
        self.setup = setup
        self.journal = setup.journal
        self.proposals = RaftProposals()
        self._outbox: list[tuple[Node, RaftMessage]] = []
        self._replication: Replication | None = None
        self._votes: dict[str, bool] = {}
        self._pre_votes: dict[str, bool] | None = None
        self._incoming: tuple[int, int, bytearray] | None = None
        self._leader_heard = float("-inf")
        self._said_waiting = False
        super().__init__(setup.node_id, setup.others, setup.times, setup.transport)
        self.log = self.journal
        self.term_now, self.voted_for = self.journal.term, self.journal.vote
        self.peers = {node.id: node for node in sorted(self.others, key=lambda one: str(one.id))}
        self._postpone_election(setup.clock())
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

    # Elections.

    def _postpone_election(self, now: float) -> None:
        times = self.setup.times
        spread = (times.election_ms_max - times.election_ms_min) / 1000
        wait = times.election_ms_min / 1000 + spread * self.setup.rng.random()
        self.election_deadline = now + wait

    def _leader_is_alive(self, now: float) -> bool:
        """Whether a leader spoke so lately that no election is needed."""
        lately = now - self.setup.times.election_ms_min / 1000
        if self._replication is not None:
            return self._replication.heard_by_majority(lately)
        return self.leader is not None and self._leader_heard > lately

    def _ask_pre_votes(self, now: float) -> None:
        self._become_follower(None)
        self._pre_votes = {self.setup.node_id: True}
        if self._may_stand(self._pre_votes):
            self._stand(now)
            return
        if not self.journal.may_vote and not self._said_waiting:
            self._said_waiting = True
            logger.info(
                "raft node=%s knows nothing yet: it waits for a leader, or for all of %s to begin",
                self.setup.node_id,
                ", ".join(sorted(self.setup.others)),
            )
        self._ask_votes(PreVote, self.term_now + 1)

    def _stand(self, now: float) -> None:
        self._pre_votes = None
        self.state = CANDIDATE
        self._set_term(self.term_now + 1, self.setup.node_id)
        # Two that stood at the same instant try again soon, and hardly at the same instant again;
        # who stands was granted pre-votes, so there is no leader whom that could disturb.
        soon = self.setup.times.election_ms_min / 1000 * self.setup.rng.uniform(0.2, 0.6)
        self.election_deadline = now + soon
        self._votes = {self.setup.node_id: True}
        if self._is_majority(self._votes):
            self._become_leader()
            return
        self._ask_votes(RequestVote, self.term_now)

    def _ask_votes(self, kind: type[PreVote | RequestVote], term: int) -> None:
        journal = self.journal
        message = kind(term, journal.last_index, journal.last_term, journal.may_vote)
        self._outbox += [(node, message) for node in self.peers.values()]

    def _is_majority(self, votes: dict[str, bool]) -> bool:
        return len(votes) * 2 > len(self.setup.others) + 1

    def _may_stand(self, pre_votes: dict[str, bool]) -> bool:
        if self.journal.may_vote:
            return self._is_majority(pre_votes)
        return len(pre_votes) == len(self.setup.others) + 1

    def _would_vote_for(self, message: PreVote | RequestVote) -> bool:
        journal = self.journal
        theirs = message.last_term, message.last_index
        ours = journal.last_term, journal.last_index
        if not message.ready:
            # The beginning of a cluster. Nothing can have been decided while all logs are empty.
            return theirs == ours == (0, FIRST_INDEX)
        return journal.may_vote and theirs >= ours

    def _be_ready(self) -> None:
        if not self.journal.may_vote:
            self.journal.set_may_vote()

    def _on_pre_vote(self, node: Node, message: PreVote) -> None:
        now = self.setup.clock()
        granted = (
            message.term > self.term_now
            and not self._leader_is_alive(now)
            and self._would_vote_for(message)
        )
        self._answer(node, PreVoteReply(self.term_now, message.term, granted))

    def _on_pre_vote_reply(self, node: Node, message: PreVoteReply) -> None:
        if message.term > self.term_now:
            self._become_follower(message.term)
        elif (
            self._pre_votes is not None
            and message.granted
            and message.for_term == self.term_now + 1
        ):
            self._pre_votes[node.id] = True
            if self._may_stand(self._pre_votes):
                self._stand(self.setup.clock())

    def _on_request_vote(self, node: Node, message: RequestVote) -> None:
        now = self.setup.clock()
        term = message.term
        if term > self.term_now:
            if self._leader_is_alive(now):
                return  # it has not heard what we hear; its term must not unseat a leader
            self._become_follower(term)
        granted = (
            term == self.term_now
            and self.state == FOLLOWER
            and self.voted_for in (None, node.id)
            and self._would_vote_for(message)
        )
        if granted:
            self._be_ready()
            self._set_term(term, node.id)
            self._postpone_election(now)
        self._answer(node, RequestVoteReply(self.term_now, granted))

    def _on_request_vote_reply(self, node: Node, message: RequestVoteReply) -> None:
        if message.term > self.term_now:
            self._become_follower(message.term)
        elif self.state == CANDIDATE and message.term == self.term_now and message.granted:
            self._votes[node.id] = True
            if self._is_majority(self._votes):
                self._become_leader()

    def _become_leader(self) -> None:
        setup, now = self.setup, self.setup.clock()
        logger.info("raft node=%s leads term=%d", setup.node_id, self.term_now)
        self.state = LEADER
        self._be_ready()
        period = setup.times.append_ms / 1000
        self._replication = Replication(
            self.journal, setup.limits, period, self._send_now, setup.snapshots.load
        )
        self._replication.begin(list(self.peers), now)
        self.journal.append(NO_OP_ENTRY, self.journal.last_index + 1, self.term_now)
        self._set_leader(self.selfNode)

    def _become_follower(self, term: int | None) -> None:
        """Of a later term, or (None) of this one without a leader."""
        if term is not None:
            self._set_term(term, None)
        self.state = FOLLOWER
        self._replication = None
        self._pre_votes = None
        self._set_leader(None)

    def _set_leader(self, leader: Node | None) -> None:
        if leader != self.leader:
            self.leader = leader
            self._incoming = None
            self.proposals.resend()

    def _set_term(self, term: int, vote: str | None) -> None:
        if (term, vote) != (self.term_now, self.voted_for):
            self.term_now, self.voted_for = term, vote
            self.journal.set_term(term, vote)

    def _send_now(self, node_id: str, message: RaftMessage) -> None:
        """For what promises nothing about this node's own disk."""
        self.transport.send(self.peers[node_id], message)

    def _answer(self, node: Node, message: RaftMessage) -> None:
        self._outbox.append((node, message))

    # Messages.

    def _SyncObj__onMessageReceived(self, node: Node, message: RaftMessage) -> None:
        # The constructor hands this method to the transport before anything can arrive.
        if self.stalled is None and node.id in self.peers:
            self._handlers[type(message)](self.peers[node.id], message)

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
        # A vote not given is given to the leader: no other node can lead this term any more.
        self._set_term(term, self.voted_for or node.id)
        self._leader_heard = now
        self._postpone_election(now)
        return True

    def _reply_index(self, node: Node, success: bool, index: int) -> None:
        self._answer(node, AppendReply(self.term_now, success, index))

    def _on_append_entries(self, node: Node, message: AppendEntries) -> None:
        if not self._follow(node, message.term):
            return
        journal = self.journal
        prev, entries = message.prev_index, message.entries
        match = prev + len(entries)
        if prev < journal.base_index:
            # What a snapshot covers is committed, so it is the same here.
            entries = entries[journal.base_index - prev :]
            prev = journal.base_index
        else:
            prev_term = journal.term_at(prev)
            if prev_term != message.prev_term:
                self._reply_index(node, False, self._first_of_term(prev, prev_term))
                return
        self._store(prev + 1, entries)
        commit = min(message.commit_index, match)
        if commit > self.commit:
            self._set_commit(commit)
        known = match >= message.commit_index
        if known and journal.term_at(message.commit_index) == self.term_now:
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

    def _store(self, index: int, entries: list[tuple[int, bytes]]) -> None:
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

    def _on_install_snapshot(self, node: Node, message: InstallSnapshot) -> None:
        if not self._follow(node, message.term):
            return
        index, total, offset = message.index, message.total, message.offset
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
            data += message.data
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
            self._answer(node, SnapshotReply(self.term_now, index, len(data)))

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

    def _from_follower(self, message: AppendReply | SnapshotReply) -> Replication | None:
        if message.term > self.term_now:
            self._become_follower(message.term)
        return self._replication if message.term == self.term_now else None

    def _on_append_reply(self, node: Node, message: AppendReply) -> None:
        replication = self._from_follower(message)
        if replication is not None:
            replication.on_reply(node.id, message, self.setup.clock())

    def _on_snapshot_reply(self, node: Node, message: SnapshotReply) -> None:
        replication = self._from_follower(message)
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
                self._answer(leader, ApplyCommands(batch))
                batch, size = [], 0
        if batch:
            self._answer(leader, ApplyCommands(batch))

    def _on_apply_commands(self, node: Node, message: ApplyCommands) -> None:
        commands = [command for command in message.commands if is_command(command)]
        if self._replication is None:
            ids = [id_of(command) for command in commands]
            self._answer(node, RefuseCommands(ids))
            return
        for command in commands:
            self.journal.append(command, self.journal.last_index + 1, self.term_now)

    def _on_refuse_commands(self, node: Node, message: RefuseCommands) -> None:
        for command_id in message.ids:
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
            # Advanced before the callbacks: what a callback does cannot apply it again.
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
