"""Coordinators of consumer groups."""
