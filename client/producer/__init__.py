"""The producer: it makes batches of records and sends them to leaders, each once and in order."""
