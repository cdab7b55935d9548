"""Types that every package uses. (Pure.)"""

Buffer = bytes | bytearray | memoryview
PartitionKey = tuple[str, int]
"""A topic and the number of one of its partitions."""
Times = tuple[int, int]
"""When a record is due and when it ends, in ms since the epoch. 0 means at once, and never."""
