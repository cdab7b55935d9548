"""The admin client: topics, nodes, groups, dead letters, delayed records, recovery."""
