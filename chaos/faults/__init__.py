"""Faults for a World, one small class each. `targets` chooses the nodes that they hit."""
