"""The native protocol on TCP: the listener, its sessions and the handlers of requests."""
