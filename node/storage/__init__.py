"""Segmented logs on disk: append, read, recover, truncate, retain, compact, scrub."""
