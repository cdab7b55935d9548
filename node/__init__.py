"""Runs on every node: storage, delivery, delays, and the queue that embeds them in one process."""
