"""The bottom layer: what every package may use."""
