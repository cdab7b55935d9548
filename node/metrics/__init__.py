"""What a node counts, and the text that Prometheus reads."""
