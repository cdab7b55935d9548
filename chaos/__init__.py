"""Judging clusters under faults, from what their clients saw."""
