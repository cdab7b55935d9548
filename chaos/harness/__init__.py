"""What disturbs, breaks and runs real nodes on this machine. Never part of a production start."""
