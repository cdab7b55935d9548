"""The messages between Raft nodes: msgpack maps with a `type`. (Pure.)

Every field is checked before a message is believed: nothing but these types, and no number outside
of 63 bits, reaches the protocol. A message with fields that are not known here is refused. Nothing
here can run code.
"""

from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from raftq.client.common.errors import RemoteProtocolError

ENTRIES_MAX = 10_000
"""Entries in one message; commands handed on in one message."""

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Entries = Annotated[list[tuple[Number, bytes]], Meta(max_length=ENTRIES_MAX)]
Pieces = Annotated[list[bytes], Meta(max_length=ENTRIES_MAX)]


class RaftMessage(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Base of what Raft nodes say to each other."""


class VoteMessage(RaftMessage, frozen=True):
    """Base of the two requests of a candidate."""

    term: Number
    last_index: Number
    last_term: Number
    ready: bool


class PreVote(VoteMessage, frozen=True, tag="pre_vote"):
    """Asks for the promise of a vote in `term`, the next one."""


class PreVoteReply(RaftMessage, frozen=True, tag="pre_vote_reply"):
    term: Number
    """Of the node that answers."""
    for_term: Number
    granted: bool


class RequestVote(VoteMessage, frozen=True, tag="request_vote"):
    """Asks for a vote in `term`."""


class RequestVoteReply(RaftMessage, frozen=True, tag="response_vote"):
    term: Number
    granted: bool


class AppendEntries(RaftMessage, frozen=True, tag="append_entries"):
    """A leader's entries after `prev_index`, each with its term."""

    term: Number
    prev_index: Number
    prev_term: Number
    commit_index: Number
    entries: Entries


class AppendReply(RaftMessage, frozen=True, tag="next_node_idx"):
    """With `success` the log matches the leader's up to `index`. Without it, the leader tries again
    from `index`, the beginning of another term."""

    term: Number
    success: bool
    index: Number


class InstallSnapshot(RaftMessage, frozen=True, tag="install_snapshot"):
    """The part of a snapshot's file that begins at `offset`; the file has `total` bytes."""

    term: Number
    index: Number
    total: Number
    offset: Number
    data: bytes


class SnapshotReply(RaftMessage, frozen=True, tag="snapshot_reply"):
    """The first `offset` bytes of the snapshot's file have arrived."""

    term: Number
    index: Number
    offset: Number


class ApplyCommands(RaftMessage, frozen=True, tag="apply_command"):
    """A follower hands commands to the leader."""

    commands: Pieces


class RefuseCommands(RaftMessage, frozen=True, tag="refuse_command"):
    """This node is not the leader and has not taken the commands with these ids."""

    ids: Pieces


encode = msgspec.msgpack.Encoder().encode

_read: Callable[[bytes], RaftMessage] = msgspec.msgpack.Decoder(
    PreVote
    | PreVoteReply
    | RequestVote
    | RequestVoteReply
    | AppendEntries
    | AppendReply
    | InstallSnapshot
    | SnapshotReply
    | ApplyCommands
    | RefuseCommands
).decode


def decode(data: bytes) -> RaftMessage:
    """The message, or RemoteProtocolError for whatever is not one."""
    try:
        message = _read(data)
    except (ValueError, RecursionError) as error:
        raise RemoteProtocolError(f"not a message: {error}") from error
    if isinstance(message, AppendEntries) and any(
        term > message.term for term, _ in message.entries
    ):
        raise RemoteProtocolError("append_entries.entries: an entry of a later term")
    return message
