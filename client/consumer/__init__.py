"""The consumer: it fetches ahead, serves polls, and is a member of a group."""
