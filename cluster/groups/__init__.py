"""Consumer groups: members, assignments, rebalances. Cores without I/O."""
