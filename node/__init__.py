"""What runs on every node: storage, replication, queues, groups, and the queue that a process
embeds."""
