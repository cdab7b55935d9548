"""Names that every part of the system knows. (Pure.)"""

INTERNAL_PREFIX = "__"
"""Topics and groups of the system itself begin with it."""

DLQ_SUFFIX = ".dlq"
"""The dead letters of topic "orders" are records of topic "orders.dlq"."""

DLQ_HEADER = "x-dlq-"
"""The headers of a dead letter that say why it is one begin with it."""

DLQ_GROUP = "__dlq"
"""Dead letters that this group has settled are gone: sent back or forgotten."""

LANE_NAMES = ("critical", "high", "normal", "low", "background")
"""The priorities; a lane's number is its place here."""


def is_internal(name: str) -> bool:
    """Whether a topic or group belongs to the system itself."""
    return name.startswith(INTERNAL_PREFIX)


def letters_topic(topic: str) -> str:
    """The topic with the dead letters of `topic`, which may be that topic itself."""
    return topic if topic.endswith(DLQ_SUFFIX) else topic + DLQ_SUFFIX
