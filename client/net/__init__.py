"""Connections to nodes, and the routes to leaders."""
