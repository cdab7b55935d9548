"""The HTTP side of a node: REST, health and metrics. (Shell over pure parts.)"""
