"""Who leads: terms, votes and elections of one Raft node. (Shell; clock and rng injected.)

    follower  --no word from a leader--> asks for pre-votes, still a follower, same term
    follower  --a majority would vote for it--> candidate of the next term
    candidate --votes of a majority--> leader        candidate --time out--> follower, pre-votes
    any       --a message of a later term--> follower of that term
    leader    --no word from a majority for `fallback_ms`--> follower
    leader    --asked to abdicate--> follower, and does not stand for `abdicate_ms`

A node that starts with an empty directory may be a voter that lost its disk, and with it what it
promised. Until a leader has brought it up to date it is not `ready`, and takes part in one kind of
election only, the one with which a new cluster begins: a node that is not ready stands when every
voter has said that its log is empty too, and whoever then votes for it or is elected is ready from
there on. So a new cluster begins when all its voters are there; whoever has heard the call for the
first votes is no obstacle when the first leader dies before it has told anyone of a commit; and
voters that lost their disks never begin a second cluster beside what is left of the first.

Invariants: the term never goes back; one vote per term, on disk before it is told to anyone; a
leader that is heard by a majority is not unseated by a node that does not hear it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from raftq.cluster.raft.applied import NO_OP_ENTRY, Applied, Applier
from raftq.cluster.raft.config import RaftLimits, RaftTimes
from raftq.cluster.raft.journal import FIRST_INDEX, RaftJournal
from raftq.cluster.raft.library import CANDIDATE, FOLLOWER, LEADER, Library, Node
from raftq.cluster.raft.messages import Message
from raftq.cluster.raft.proposals import RaftProposals
from raftq.cluster.raft.replication import Replication
from raftq.cluster.raft.snapshot import Snapshots

logger = logging.getLogger(__name__)


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


class Elector(Library):
    """The part of a node that takes part in elections; `RaftNode` is the whole."""

    def __init__(self, setup: RaftSetup) -> None:
        self.setup = setup
        self.journal = setup.journal
        self.proposals = RaftProposals()
        self._outbox: list[tuple[Node, Message]] = []
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

    def _postpone_election(self, now: float) -> None:
        times = self.setup.times
        spread = (times.election_ms_max - times.election_ms_min) / 1000
        wait = times.election_ms_min / 1000 + spread * self.setup.rng.random()
        self.election_deadline = now + wait

    def _leader_is_alive(self, now: float) -> bool:
        """Whether a leader was heard so lately that no election is called for."""
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
        self._broadcast(self._vote_message("pre_vote", self.term_now + 1))

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
        self._broadcast(self._vote_message("request_vote", self.term_now))

    def _vote_message(self, kind: str, term: int) -> Message:
        journal = self.journal
        return {
            "type": kind,
            "term": term,
            "last_index": journal.last_index,
            "last_term": journal.last_term,
            "ready": journal.may_vote,
        }

    def _is_majority(self, votes: dict[str, bool]) -> bool:
        return len(votes) * 2 > len(self.setup.others) + 1

    def _may_stand(self, pre_votes: dict[str, bool]) -> bool:
        if self.journal.may_vote:
            return self._is_majority(pre_votes)
        return len(pre_votes) == len(self.setup.others) + 1

    def _would_vote_for(self, message: Message) -> bool:
        journal = self.journal
        theirs = message["last_term"], message["last_index"]
        ours = journal.last_term, journal.last_index
        if not message["ready"]:
            # The beginning of a cluster. Nothing can have been decided while all logs are empty.
            return theirs == ours == (0, FIRST_INDEX)
        return journal.may_vote and theirs >= ours

    def _be_ready(self) -> None:
        if not self.journal.may_vote:
            self.journal.set_may_vote()

    def _on_pre_vote(self, node: Node, message: Message) -> None:
        now = self.setup.clock()
        granted = (
            message["term"] > self.term_now
            and not self._leader_is_alive(now)
            and self._would_vote_for(message)
        )
        reply = {"type": "pre_vote_reply", "term": self.term_now, "for_term": message["term"]}
        self._answer(node, {**reply, "granted": granted})

    def _on_pre_vote_reply(self, node: Node, message: Message) -> None:
        if message["term"] > self.term_now:
            self._become_follower(message["term"])
        elif (
            self._pre_votes is not None
            and message["granted"]
            and message["for_term"] == self.term_now + 1
        ):
            self._pre_votes[node.id] = True
            if self._may_stand(self._pre_votes):
                self._stand(self.setup.clock())

    def _on_request_vote(self, node: Node, message: Message) -> None:
        now = self.setup.clock()
        term = message["term"]
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
        self._answer(node, {"type": "response_vote", "term": self.term_now, "granted": granted})

    def _on_response_vote(self, node: Node, message: Message) -> None:
        if message["term"] > self.term_now:
            self._become_follower(message["term"])
        elif self.state == CANDIDATE and message["term"] == self.term_now and message["granted"]:
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

    def _send_now(self, node_id: str, message: Message) -> None:
        """For what promises nothing about this node's own disk."""
        self.transport.send(self.peers[node_id], message)

    def _answer(self, node: Node, message: Message) -> None:
        self._outbox.append((node, message))

    def _broadcast(self, message: Message) -> None:
        self._outbox += [(node, message) for node in self.peers.values()]
