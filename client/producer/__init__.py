"""The producer: records into batches, batches to leaders, each exactly once and in order."""
