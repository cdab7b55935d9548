"""Delivery, delays and copies as cores without I/O."""
