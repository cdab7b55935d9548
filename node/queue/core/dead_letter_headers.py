"""Dead letters as records: the headers they carry, and back. (Pure.)

A dead letter keeps the key, value, headers and lane of the record it copies. The facts of the
record's death are in extra headers: times in ms since 1970, numbers as decimal text. A redriven
record loses these headers and gets one that says where it was.
"""

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.common.names import DLQ_HEADER
from raftq.client.wire.record import HEADERS_BYTES_MAX, BatchRecord, Headers, pack_headers
from raftq.node.queue.core.copy_ledger import Death, Target

REDRIVEN_FROM = "x-redriven-from"
FACT_BYTES_MAX = 4096
SHORT_BYTES = 64
UNREADABLE = "the record could not be read when its copy was made"


def matches(which: LetterFilter, record: BatchRecord) -> bool:
    """Whether a filter selects this dead letter."""
    headers = record.headers
    return (
        which.since_ms <= record.timestamp <= which.until_ms
        and (which.key is None or record.key == which.key)
        and (not which.group or headers.get(DLQ_HEADER + "group") == which.group.encode())
        and (not which.reason or headers.get(DLQ_HEADER + "reason") == _cut(which.reason))
    )


def dead_headers(headers: Headers, offset: int, death: Death, source: Target) -> Headers:
    """The headers of the copy of a record that died: its own and the facts of its death."""
    facts = {
        "reason": death.reason,
        "topic": source[0],
        "partition": str(source[1]),
        "offset": str(offset),
        "group": death.group,
        "attempts": str(death.attempt),
        "first-delivery": str(int(death.first * 1000)),
        "last-delivery": str(int(death.last * 1000)),
        "error": death.error,
    }
    added = {DLQ_HEADER + name: _cut(fact) for name, fact in facts.items()}
    return _fit(headers, added)


def redriven_headers(record: BatchRecord, source: Target) -> Headers:
    """The headers of a letter that goes back to its origin."""
    kept = {name: item for name, item in record.headers.items() if not name.startswith(DLQ_HEADER)}
    return _fit(kept, {REDRIVEN_FROM: f"{source[0]}/{source[1]}/{record.offset}".encode()})


def origin(record: BatchRecord) -> Target | None:
    """The topic and partition of the record that died; None if the headers do not have them."""
    topic = record.headers.get(DLQ_HEADER + "topic")
    number = record.headers.get(DLQ_HEADER + "partition")
    if topic is None or number is None or not number.isdigit() or len(number) > 9:
        return None
    try:
        return topic.decode(), int(number)
    except UnicodeDecodeError:
        return None


def _cut(fact: str) -> bytes:
    return fact.encode("utf-8", "replace")[:FACT_BYTES_MAX]


def _fit(headers: Headers, added: Headers) -> Headers:
    """Both together. If that is too long, the record's own headers are dropped first."""
    both = headers | added
    if len(pack_headers(both)) <= HEADERS_BYTES_MAX:
        return both
    added = {name: item[:SHORT_BYTES] if name.endswith("error") else item
             for name, item in added.items()}  # fmt: skip
    kept = {name: item for name, item in headers.items() if name not in added}
    while kept and len(pack_headers(kept | added)) > HEADERS_BYTES_MAX:
        del kept[max(kept, key=lambda name: len(name) + len(kept[name]))]
    return kept | added
