"""The consumer: fetches ahead, polls, and its place in a group."""
