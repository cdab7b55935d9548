"""Connections to nodes, and who leads what."""
