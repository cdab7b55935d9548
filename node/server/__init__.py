"""The listeners of a node: the native protocol on TCP."""
