"""Metadata, membership and the controller of a cluster. Holds no code yet."""
