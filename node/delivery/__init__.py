"""Queue delivery: lanes, leases, retries and settlements of each group, as cores without I/O."""
