"""What may stand in a path, by the name of its parameter. (Pure.)"""

from raftq.node.http.kinds import INTEGER_MAX, NAME_CHARACTERS_MAX, Kind, Text, Whole

PARTITION_MAX = 0x7FFF_FFFF
TOPIC = Text(NAME_CHARACTERS_MAX, r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
NEW_TOPIC = Text(
    NAME_CHARACTERS_MAX, r"(?!\.{1,2}$)([A-Za-z0-9._-]{1,245}|[A-Za-z0-9._-]{1,245}\.dlq)"
)
"""So that NAME.dlq is a name, too."""
GROUP = Text(NAME_CHARACTERS_MAX, r"(?!__)[^\x00-\x1f\x7f]{1,249}")
PARTITION = Whole(0, PARTITION_MAX)
OFFSET = Whole(0, INTEGER_MAX)

PARAMETERS: dict[str, Kind] = {
    "topic": TOPIC,
    "group": GROUP,
    "partition": PARTITION,
    "offset": OFFSET,
}
