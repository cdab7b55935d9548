"""Runs, disturbs and breaks real nodes on this machine. A production start never imports it."""
