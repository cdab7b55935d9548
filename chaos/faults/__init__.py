"""Faults that can be injected into a World, one small class each; `targets` says whom they hit."""
