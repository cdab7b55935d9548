"""The queue client and the worker: leases, handlers, settlements."""
