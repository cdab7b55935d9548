"""The queue in one process."""
