"""Queues: the cores, the queue of a partition that this node leads, and the embedded queue."""
