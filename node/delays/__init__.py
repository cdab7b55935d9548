"""Delayed records: a timer wheel and the schedule kept over the delays log, without I/O."""
