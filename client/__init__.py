"""What applications import, and the wire contract that nodes share with them."""
