"""What a voter answers to nodes that are not voters: proposals, and what was decided. (Shell.)

    WatchMetadataReply, raw part    (index u64 | command), each as long as `lengths` says; or a dump

For the listener's table of handlers. Who may ask is the listener's business: these requests are for
nodes of the same cluster only. A proposal keeps the command id of its proposer through all tries
and all voters, so it is applied once.
"""

import struct
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from raftq.client.common.errors import ConsensusStopped, RemoteProtocolError, RequestError
from raftq.client.common.types import Buffer
from raftq.client.wire.node_messages import (
    Propose,
    ProposeReply,
    WatchMetadata,
    WatchMetadataReply,
)
from raftq.cluster.metadata.commands import decode_command
from raftq.cluster.metadata.log import MetadataLog, Watched

_INDEX = struct.Struct("<Q")
_read_result = msgspec.msgpack.Decoder(bool | int | dict[str, int] | list[int] | None).decode


class MetadataHandlers:
    """Answers with the metadata log of this node. A node that is not a voter refuses with
    ConsensusStopped."""

    def __init__(self, metadata: MetadataLog, node_id: int | None = None) -> None:
        self._metadata = metadata
        self._node_id = node_id

    async def propose(self, message: Propose, raw: memoryview, session: object) -> ProposeReply:
        self._check_voter()
        metadata = self._metadata
        command = decode_command(message.command)
        timeout_s = message.timeout_ms / 1000
        try:
            result = await metadata.propose(command, timeout_s, message.command_id or None)
        except RequestError as refusal:
            # The proposer should know as much as the state machine that refused.
            raise refusal.with_details(**refusal.details, metadata_index=metadata.index)  # noqa: B904 - the same error
        return ProposeReply(metadata.index, msgspec.msgpack.encode(result))

    async def watch(
        self, message: WatchMetadata, raw: memoryview, session: object
    ) -> tuple[WatchMetadataReply, Sequence[Buffer]]:
        self._check_voter()
        metadata = self._metadata
        known = (message.controller, message.term)
        wait_s = message.wait_ms / 1000 if known == (metadata.controller, metadata.term) else 0.0
        watched = await metadata.watch(message.index, wait_s)
        return encode_watched(watched, metadata.controller, metadata.term, metadata.voters)

    def _check_voter(self) -> None:
        if self._node_id is not None and self._node_id not in self._metadata.voters:
            raise ConsensusStopped(f"node {self._node_id} is no voter")


def encode_watched(
    watched: Watched, controller: int | None, term: int, voters: tuple[int, ...]
) -> tuple[WatchMetadataReply, Sequence[Buffer]]:
    led = (controller, term, voters)
    if watched.dump is not None:
        return WatchMetadataReply(watched.index, (), True, *led), (watched.dump,)
    pieces = [_INDEX.pack(index) + command for index, command in watched.commands]
    lengths = tuple(map(len, pieces))
    return WatchMetadataReply(watched.index, lengths, False, *led), pieces


def decode_watched(reply: WatchMetadataReply, raw: memoryview) -> Iterator[tuple[int, bytes]]:
    """The commands of a reply that is no dump, with their indexes, which only grow."""
    position = last = 0
    for length in reply.lengths:
        if length < _INDEX.size:
            raise RemoteProtocolError(f"a command of {length} bytes is none")
        (index,) = _INDEX.unpack_from(raw, position)
        if not last < index <= reply.index:
            raise RemoteProtocolError(
                f"command {index} after {last}, in what ends at {reply.index}"
            )
        yield index, bytes(raw[position + _INDEX.size : position + length])
        position += length
        last = index


def unpack_result(packed: bytes) -> Any:
    """The result in a ProposeReply, as the voter's own callers get it."""
    try:
        return _read_result(packed)
    except ValueError as error:
        raise RemoteProtocolError(f"not the result of a command: {error}") from error
