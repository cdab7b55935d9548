"""Copies of partitions: their logs, their roles, what leaders and followers say to each other."""
