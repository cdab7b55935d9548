"""A queue that is killed in the middle of its work, and the proof that nothing was lost."""
