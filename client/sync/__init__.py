"""The blocking clients."""
