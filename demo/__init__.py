"""Kills a queue in the middle of its work, and proves that nothing is lost."""
