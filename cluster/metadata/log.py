"""What everything in a node knows of the replicated metadata, and how it changes it. (Pure.)

`MetadataLog` has three implementations: `VoterMetadata` on the consensus of this process,
`ObserverMetadata` for nodes that are no voters, and the simulator's. All of them hold the event
loop's copy of the state, which changes only between callbacks: who looks at it, decides and acts
without an await in between sees one consistent state.

The copy may be behind what the cluster has decided. What must be current goes through `propose`,
which returns when the copy here has the change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raftq.cluster.metadata.apply import Change
from raftq.cluster.metadata.commands import Command
from raftq.cluster.metadata.state import ClusterState

Subscriber = Callable[[Sequence[Change]], None]
ControllerSubscriber = Callable[[int | None, int], None]
"""Called with the controller's node id (None: nobody known) and the term."""

PROPOSE_S = 5.0


@dataclass(frozen=True, slots=True)
class Watched:
    """What was applied after an index: the commands in order, or (`dump`) the whole state."""

    index: int
    """Everything up to here is covered, also by what left no trace."""
    commands: tuple[tuple[int, bytes], ...] = ()
    """(index, encoded command) each."""
    dump: bytes | None = None


class MetadataLog(Protocol):
    """See the module's docstring. Belongs to one event loop."""

    @property
    def state(self) -> ClusterState:
        """This loop's copy. Not to be kept across an await: a restored dump replaces it."""

    @property
    def index(self) -> int:
        """Everything decided up to this index is in `state`."""

    @property
    def controller(self) -> int | None:
        """The node that runs the controller, as far as it is known here."""

    @property
    def is_controller(self) -> bool:
        """Whether that is this node. May be out of date: what a controller does is proposed."""

    @property
    def term(self) -> int: ...

    @property
    def voters(self) -> tuple[int, ...]: ...

    def subscribe(self, callback: Subscriber) -> None:
        """Call it on the loop after each applied batch; for a restored dump the changes cover
        everything there is and was."""

    def on_controller(self, callback: ControllerSubscriber) -> None:
        """Call it on the loop when `controller` or `term` has changed."""

    def new_command_id(self) -> bytes:
        """A name for one command, to propose it again with after an unknown outcome."""

    async def propose(
        self, command: Command, timeout_s: float = PROPOSE_S, command_id: bytes | None = None
    ) -> Any:
        """The result of the command, which is then in `state`. Raises what it was refused with.

        Tries again inside, with the same command id, while there is no leader, too much at once or
        no known outcome; the last of these errors is raised when the time is over.
        """

    async def watch(self, index: int | None, wait_s: float) -> Watched:
        """What was applied after `index` (None: all of it, as a dump), waiting for something if
        there is nothing; after `wait_s` the answer is empty."""

    def abdicate(self) -> None:
        """Stop to be the controller, if this node is, and let another be it for a while."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...
