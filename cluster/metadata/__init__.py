"""The replicated metadata: commands, state, how commands change it, and who has a copy."""
