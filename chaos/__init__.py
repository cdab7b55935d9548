"""Fault injection and history checkers for clusters. Holds no code yet."""
