"""A controller's core under a script: what happens when, and what it asks for then. (Test fake.)"""

from random import Random
from typing import Any

from metadatamodel import register

from raftq.client.common.errors import RaftqError
from raftq.cluster.controller.core import Controller
from raftq.cluster.controller.events import (
    Changed,
    ControllerConfig,
    Effect,
    Event,
    HeartbeatCame,
    ProbeEnded,
    ProbeNode,
    Promoted,
    ProposalEnded,
    ProposeCommand,
    Tick,
)
from raftq.cluster.metadata.apply import apply
from raftq.cluster.metadata.commands import ChangeIsr, Command
from raftq.cluster.metadata.state import ClusterState


class Script:
    """A controller, its state and its clock. Proposals wait in `asked` until they are decided."""

    def __init__(self, nodes: int = 3, seed: int = 1, **config: int) -> None:
        self.state = ClusterState("c")
        self.index = 0
        self.now = 100.0
        self.core = Controller(ControllerConfig(**config), Random(seed))
        self.asked: list[Command] = []
        self.beating: set[int] = set()
        for node_id in range(1, nodes + 1):
            self.decide(register(node_id))

    def decide(self, command: Command) -> list[Effect]:
        """A command takes its place in the log, from wherever it came."""
        self.index += 1
        _, changes = apply(self.state, command, self.index)
        return self.step(Changed(changes, self.state))

    def step(self, event: Event) -> list[Effect]:
        effects = self.core.step(event, self.now)
        deadline = self.core.next_deadline()
        assert deadline is None or deadline > self.now, self.core.describe()
        self.asked += [one.command for one in effects if isinstance(one, ProposeCommand)]
        return effects

    def promote(self, *connected: int, rivals: tuple[int, ...] = ()) -> list[Effect]:
        return self.step(Promoted(self.state, connected, rivals))

    def grant(self, error: RaftqError | None = None) -> list[Effect]:
        """Decide the oldest proposal, or refuse it."""
        command = self.asked.pop(0)
        effects = [] if error is not None else self.decide(command)
        return effects + self.step(ProposalEnded(command, error))

    def beat(self, *nodes: int) -> list[Effect]:
        effects = []
        for node_id in nodes:
            node = self.state.nodes[node_id]
            effects += self.step(HeartbeatCame(node_id, node.incarnation))
        return effects

    def wait(self, seconds: float) -> list[tuple[float, Effect]]:
        """Let time pass as the shell does: a Tick at every deadline, beats twice a second."""
        found: list[tuple[float, Effect]] = []
        end, begin, beats = self.now + seconds, self.now, 0
        for _ in range(100_000):
            deadline = self.core.next_deadline() or end
            beat_at = begin + beats / 2
            self.now = min(deadline, beat_at, end)
            if self.now >= end:
                return found
            if self.now == beat_at:
                beats += 1
                effects = self.beat(*sorted(self.beating))
            else:
                effects = self.step(Tick())
            found += [(round(self.now - begin, 3), one) for one in effects]
        raise AssertionError(f"it spins: {self.core.describe()}")

    def live(self, seconds: float) -> None:
        """Let time pass, and decide whatever is asked for at once."""
        for _ in range(int(seconds * 10)):
            self.wait(0.1)
            while self.asked:
                self.grant()

    def catch_up(self) -> None:
        """Every leader takes in what its move waits for, where it is alive."""
        for topic, number, one in list(self.state.all_partitions()):
            adding = [node for node in one.adding if self.state.nodes[node].alive]
            if one.leader is not None and adding:
                members = (*one.isr, *adding)
                pairs = tuple((node, self.state.nodes[node].incarnation) for node in members)
                self.decide(
                    ChangeIsr(topic.topic_id, number, one.leader, one.epoch, one.version, pairs)
                )


class Answered(Script):
    """The same, where probes are answered at once, by the nodes that are `answering`."""

    answering: tuple[int, ...] = (1, 2, 3)

    def step(self, event: Event) -> list[Effect]:
        effects = super().step(event)
        for one in only(effects, ProbeNode):
            answer = one.incarnation if one.node_id in self.answering else None
            effects += super().step(ProbeEnded(one.node_id, answer, False, one.incarnation))
        return effects


def only(effects: list[Any], kind: type[Any]) -> list[Any]:
    return [one for one in effects if isinstance(one, kind)]
