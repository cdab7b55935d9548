"""Runs clusters under faults and judges them by what their clients saw."""
