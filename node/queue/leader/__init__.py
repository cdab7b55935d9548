"""The queue of a partition that this node leads: ledger, leases, delays, dead letters."""
