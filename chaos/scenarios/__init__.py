"""Data: all scenarios, in the order of the list of faults. Each module has those of one kind."""

from raftq.chaos.scenario import Scenario
from raftq.chaos.scenarios.clients import CLIENTS
from raftq.chaos.scenarios.combined import COMBINED
from raftq.chaos.scenarios.disks import DISKS
from raftq.chaos.scenarios.links import LINKS
from raftq.chaos.scenarios.operators import OPERATORS
from raftq.chaos.scenarios.processes import PROCESSES

__all__ = ["SCENARIOS"]

SCENARIOS: tuple[Scenario, ...] = (*PROCESSES, *LINKS, *DISKS, *CLIENTS, *OPERATORS, *COMBINED)
