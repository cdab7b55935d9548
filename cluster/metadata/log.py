"""How the parts of a node read and change the replicated metadata. (Pure.)

`MetadataLog` has three implementations: `VoterMetadata` on the consensus of this process,
`ObserverMetadata` for nodes that are not voters, and that of the simulator. All of them hold the
event loop's copy of the state, which changes only between callbacks: code that reads it, decides
and acts without an await in between sees one consistent state.

The copy may be behind what the cluster has decided. Code that needs the current state calls
`propose`, which returns when the copy here has the change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raftq.cluster.metadata.apply import Change
from raftq.cluster.metadata.commands import Command
from raftq.cluster.metadata.state import ClusterState

Subscriber = Callable[[Sequence[Change]], None]
ControllerSubscriber = Callable[[int | None, int], None]
"""Called with the node id of the controller (None: not known) and the term."""

PROPOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What was applied after an index: the commands in order, or the whole state (`dump`)."""

    index: int
    """Everything up to this index is covered, also commands that left no trace."""
    commands: tuple[tuple[int, bytes], ...] = ()
    """(index, encoded command) of each."""
    dump: bytes | None = None


class MetadataLog(Protocol):
    """The replicated metadata, on one event loop."""

    @property
    def state(self) -> ClusterState:
        """The copy of this loop. Do not keep it across an await: a restored dump replaces it."""

    @property
    def index(self) -> int:
        """Everything decided up to this index is in `state`."""

    @property
    def controller(self) -> int | None:
        """The node that runs the controller, as far as it is known here."""

    @property
    def is_controller(self) -> bool:
        """Whether this node is the controller. May be out of date: a controller only proposes."""

    @property
    def term(self) -> int: ...

    @property
    def voters(self) -> tuple[int, ...]: ...

    def subscribe(self, callback: Subscriber) -> None:
        """Call `callback` on the loop after each applied batch. For a restored dump the changes
        cover everything there is and was."""

    def on_controller(self, callback: ControllerSubscriber) -> None:
        """Call `callback` on the loop when `controller` or `term` has changed."""

    def new_command_id(self) -> bytes:
        """Make an id for one command, to propose it again with after an unknown outcome."""

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        """Return the result of the command, which is then in `state`. Raises the error of a
        refusal.

        Retries inside, with the same command id, while there is no leader, too much load or no
        known outcome. When the time is over, it raises the last of these errors.
        """

    async def watch(self, index: int | None, wait_s: float) -> Watched:
        """Return what was applied after `index` (None: all of it, as a dump). Waits for
        something up to `wait_s`; then the answer is empty."""

    def abdicate(self) -> None:
        """Give up the role of the controller, if this node has it, for a while."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...
