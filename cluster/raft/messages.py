"""The messages between Raft nodes: plain dicts, as pysyncobj has them, in msgpack. (Pure.)

    pre_vote          would you vote for me?     term (the next one), last_index, last_term, ready
    pre_vote_reply    term (own), for_term, granted
    request_vote      term, last_index, last_term, ready
    response_vote     term, granted
    append_entries    term, prev_index, prev_term, commit_index, entries [[term, command], ...]
    next_node_idx     the answer: term, success, index. Success: the log matches the leader's up to
                      `index`. Otherwise: try again from `index`, the beginning of another term
    install_snapshot  term, index, total, offset, data: a part of a snapshot's file
    snapshot_reply    term, index, offset: so much of it is here
    apply_command     commands [bytes, ...]: a follower hands them to the leader
    refuse_command    ids [bytes, ...]: this node is not the leader and has not taken them

Every field is checked before a message is believed: nothing but these types, and no number outside
of 64 bits, reaches the protocol. Nothing here can run code.
"""

from typing import Any

import msgpack

from raftq.client.common.errors import RemoteProtocolError

Message = dict[str, Any]

ENTRIES_MAX = 10_000
"""Entries in one message; commands handed on in one message."""

_NUMBER = "number"
_FLAG = "flag"
_BYTES = "bytes"
_LIST = "list"

_VOTE = {"term": _NUMBER, "last_index": _NUMBER, "last_term": _NUMBER, "ready": _FLAG}

_FIELDS: dict[str, dict[str, str]] = {
    "pre_vote": _VOTE,
    "pre_vote_reply": {"term": _NUMBER, "for_term": _NUMBER, "granted": _FLAG},
    "request_vote": _VOTE,
    "response_vote": {"term": _NUMBER, "granted": _FLAG},
    "append_entries": {
        "term": _NUMBER,
        "prev_index": _NUMBER,
        "prev_term": _NUMBER,
        "commit_index": _NUMBER,
        "entries": _LIST,
    },
    "next_node_idx": {"term": _NUMBER, "success": _FLAG, "index": _NUMBER},
    "install_snapshot": {
        "term": _NUMBER,
        "index": _NUMBER,
        "total": _NUMBER,
        "offset": _NUMBER,
        "data": _BYTES,
    },
    "snapshot_reply": {"term": _NUMBER, "index": _NUMBER, "offset": _NUMBER},
    "apply_command": {"commands": _LIST},
    "refuse_command": {"ids": _LIST},
}


def encode(message: Message) -> bytes:
    packed: bytes = msgpack.packb(message)
    return packed


def decode(data: bytes) -> Message:
    """The message, or RemoteProtocolError for whatever is not one."""
    try:
        message = msgpack.unpackb(data, strict_map_key=True, max_map_len=16)
    except Exception as error:  # msgpack's own, ValueError, UnicodeDecodeError, RecursionError
        raise RemoteProtocolError(f"not a message: {error!r}") from error
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise RemoteProtocolError("a message is a map with a type")
    fields = _FIELDS.get(message["type"])
    if fields is None or len(message) != len(fields) + 1:
        raise RemoteProtocolError(f"unknown message or wrong fields: {sorted(map(str, message))}")
    for name, kind in fields.items():
        if name not in message or not _is(message[name], kind):
            raise RemoteProtocolError(f"{message['type']}.{name} is not a {kind}")
    _check_list(message)
    return message


def _is(value: object, kind: str) -> bool:
    if kind == _FLAG:
        return type(value) is bool
    if kind == _BYTES:
        return type(value) is bytes
    if kind == _LIST:
        return type(value) is list and len(value) <= ENTRIES_MAX
    return type(value) is int and 0 <= value < 1 << 63


def _check_list(message: Message) -> None:
    if message["type"] == "append_entries":
        for entry in message["entries"]:
            if (
                type(entry) is not list
                or len(entry) != 2
                or type(entry[0]) is not int
                or not 0 <= entry[0] <= message["term"]
                or type(entry[1]) is not bytes
            ):
                raise RemoteProtocolError("append_entries.entries holds something else")
    for name in ("commands", "ids"):
        for one in message.get(name, ()):
            if type(one) is not bytes:
                raise RemoteProtocolError(f"{message['type']}.{name} holds something else")
