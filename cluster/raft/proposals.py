"""The proposals of this node that have no answer yet. (Shell: it logs; time comes in as `now`.)

    waiting --taken by the own log or handed to the leader--> sent
    sent    --refused by the node it was handed to, or a new leader--> waiting
    waiting | sent --applied here, deadline, stop--> answered, exactly once

A proposal is answered from this node's own applied entries, by its id, so it does not matter which
leader appended it or how often it was sent. Once it has been sent, only an answer can show that it
was applied; without one its outcome is unknown.
"""

import logging
from collections.abc import Callable
from typing import Any

from raftq.client.common.errors import NoLeader, OutcomeUnknown, RaftqError
from raftq.cluster.raft.applied import Applied

logger = logging.getLogger(__name__)

Answer = Callable[[Any, RaftqError | None], None]
"""Called once with the result or the error."""


class Proposal:
    __slots__ = ("answer", "command_id", "deadline", "entry", "exposed", "sent")

    def __init__(self, command_id: bytes, entry: bytes, deadline: float, answer: Answer) -> None:
        self.command_id = command_id
        self.entry = entry
        self.deadline = deadline
        self.answer = answer
        self.sent = False
        self.exposed = 0
        """In how many places it was put where it may yet be applied from."""


class RaftProposals:
    """The open proposals by their ids, and which of them wait to be sent."""

    def __init__(self) -> None:
        self._open: dict[bytes, list[Proposal]] = {}
        self._waiting: list[Proposal] = []

    def __len__(self) -> int:
        return sum(map(len, self._open.values()))

    def add(self, proposal: Proposal) -> None:
        self._open.setdefault(proposal.command_id, []).append(proposal)
        self._waiting.append(proposal)

    def take_waiting(self, count_max: int) -> list[Proposal]:
        """Proposals to send now; they count as sent from here on."""
        taken = self._waiting[:count_max]
        del self._waiting[:count_max]
        taken = [proposal for proposal in taken if not proposal.sent and self._is_open(proposal)]
        for proposal in taken:
            proposal.sent = True
            proposal.exposed += 1
        return taken

    def resend(self) -> None:
        """The leader has changed: whatever was sent may be lost, so send it again."""
        for same in self._open.values():
            for proposal in same:
                if proposal.sent:
                    proposal.sent = False
                    self._waiting.append(proposal)

    def refused(self, command_id: bytes) -> None:
        """The node it was handed to says that it has not taken it."""
        for proposal in self._open.get(command_id, ()):
            if proposal.sent:
                proposal.sent = False
                proposal.exposed -= 1
                self._waiting.append(proposal)

    def applied(self, applied: Applied) -> None:
        for proposal in self._open.pop(applied.command_id, ()):
            _answer(proposal, applied.result, applied.error)

    def open_ids(self) -> list[bytes]:
        return list(self._open)

    def expire(self, now: float) -> None:
        late = [
            proposal
            for same in self._open.values()
            for proposal in same
            if proposal.deadline <= now
        ]
        for proposal in late:
            self._drop(proposal)
            if proposal.exposed:
                _answer(proposal, None, OutcomeUnknown("no answer in time; it may yet be applied"))
            else:
                _answer(proposal, None, NoLeader("no leader took the command in time"))

    def refuse_waiting(self, error: RaftqError) -> None:
        """Answer what was never sent; the rest may still turn out well."""
        for proposal in self._waiting:
            if self._is_open(proposal) and not proposal.exposed:
                self._drop(proposal)
                _answer(proposal, None, error)

    def stop(self, error: RaftqError) -> None:
        """Answer everything: nothing will be applied here any more."""
        everything = [proposal for same in self._open.values() for proposal in same]
        self._open.clear()
        self._waiting.clear()
        for proposal in everything:
            unknown = OutcomeUnknown(f"it may yet be applied elsewhere; {error}")
            _answer(proposal, None, unknown if proposal.exposed else error)

    def _is_open(self, proposal: Proposal) -> bool:
        return proposal in self._open.get(proposal.command_id, ())

    def _drop(self, proposal: Proposal) -> None:
        same = self._open[proposal.command_id]
        same.remove(proposal)
        if not same:
            del self._open[proposal.command_id]


def _answer(proposal: Proposal, result: Any, error: RaftqError | None) -> None:
    try:
        proposal.answer(result, error)
    except Exception:
        # The proposer is at fault; the replicated state must not suffer for it.
        logger.exception("raft the answer to command=%s failed", proposal.command_id.hex())
