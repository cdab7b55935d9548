"""Queues over the cluster: the service that owns the ledger and the delays of a led partition."""
