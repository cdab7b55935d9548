"""One authenticated connection between two Raft nodes, over a non-blocking socket. (Shell.)

    frame      length u32 | mac 16 | body         length counts mac and body; mac is 0 at first
    hello      connector: [version, cluster, from, to, nonce, voters]
    challenge  acceptor:  [nonce, proof, voters]  proof = HMAC(secret, "acceptor" + everything said)
    response   connector: [proof]                 proof = HMAC(secret, "connector" + the same)

Both prove that they know the secret, and neither sends it. Both then know for certain among which
voters the other one counts its majorities, and unless they are the same it ends here, for both
(OtherVoters): what the one has promised means nothing to the other. Afterwards every frame carries
a keyed BLAKE2 of its body and its number under a key of this connection only, one per direction: a
frame cannot be forged, repeated, left out or taken from another connection. The content is not
encrypted.

Bounds: before it is authenticated a connection may send frames of 2 KiB and has a few seconds; then
frames up to `frame_bytes`. A peer that breaks a rule loses its connection and nothing else.
"""

import hashlib
import hmac
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import msgspec

from raftq.client.common.errors import RemoteProtocolError

VERSION = 2
HANDSHAKE_FRAME_BYTES = 2048
"""Room for seven voters with the longest names."""
NONCE_BYTES = 32
_MAC_BYTES = 16
_LENGTH = struct.Struct("<I")
_NUMBER = struct.Struct("<Q")
_READ_BYTES = 1 << 18
_READS_PER_ROUND = 16
_pack = msgspec.msgpack.Encoder().encode
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_Voters = tuple[str, ...]
_read_hello = msgspec.msgpack.Decoder(tuple[int, str, str, str, _Nonce, _Voters]).decode
_read_challenge = msgspec.msgpack.Decoder(tuple[_Nonce, bytes, _Voters]).decode
_read_response = msgspec.msgpack.Decoder(tuple[bytes]).decode
PING = b""
"""The body of a frame that only says: still here."""


@dataclass(frozen=True, slots=True)
class RaftIdentity:
    node_id: str
    cluster: str
    secret: bytes
    frame_bytes: int
    voters: tuple[str, ...]
    """The ids of all voters, in order."""


class Closed(Exception):
    """The other side ended the connection, or the network did."""


class OtherVoters(Exception):
    """A node that knows the secret counts its majorities among other voters."""

    def __init__(self, peer: str, voters: tuple[str, ...]) -> None:
        super().__init__(f"node {peer} has other voters")
        self.peer = peer
        self.voters = voters


class RaftConnection:
    """Frames over one socket. `peer` is set when the handshake is done, and not before."""

    def __init__(self, sock: socket.socket, me: RaftIdentity, peer: str | None, now: float) -> None:
        self._sock = sock
        self._me = me
        self._expected = self.target = peer
        self.watched: bool | None = None
        """What the poller was asked for: room to write or not, or nothing yet."""
        self._in = bytearray()
        self._out = bytearray()
        self._said = b""
        self._acceptor = b""
        self._voters: tuple[str, ...] = ()
        self._keys: tuple[bytes, bytes] | None = None
        self._sent = self._received = 0
        self.peer: str | None = None
        self.opened_at = self.heard_at = self.spoke_at = now
        if peer is not None:
            hello = [VERSION, me.cluster, me.node_id, peer, os.urandom(NONCE_BYTES), me.voters]
            self._said = _pack(hello)
            self._frame(self._said)

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def backlog(self) -> int:
        return len(self._out)

    def close(self) -> None:
        self._in.clear()
        self._out.clear()
        self._sock.close()

    # Sending.

    def send(self, body: bytes, now: float) -> None:
        """Only after the handshake. Raises Closed."""
        assert self._keys is not None
        mac = hashlib.blake2b(
            _NUMBER.pack(self._sent) + body, digest_size=_MAC_BYTES, key=self._keys[0]
        )
        self._sent += 1
        self._out += _LENGTH.pack(_MAC_BYTES + len(body)) + mac.digest()
        self._out += body
        self.spoke_at = now
        self.write()

    def _frame(self, body: bytes) -> None:
        self._out += _LENGTH.pack(_MAC_BYTES + len(body)) + bytes(_MAC_BYTES) + body

    def write(self) -> None:
        """Hand over what the socket takes now. Raises Closed."""
        try:
            while self._out:
                count = self._sock.send(memoryview(self._out)[: 1 << 20])
                del self._out[:count]
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            raise Closed(str(error)) from error

    # Receiving.

    def read(self, now: float, deliver: Callable[[bytes], None]) -> None:
        """Take what has arrived, and `deliver` each body. Raises Closed, RemoteProtocolError, and
        OtherVoters at the end of the handshake."""
        ended = None
        for _ in range(_READS_PER_ROUND):
            try:
                data = self._sock.recv(_READ_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                raise Closed(str(error)) from error
            if not data:
                ended = Closed("the other side closed the connection")
                break
            self._in += data
            self.heard_at = now
            if len(self._in) > self._me.frame_bytes:
                break
        self._take_frames(deliver)
        if ended is not None:
            raise ended

    def _take_frames(self, deliver: Callable[[bytes], None]) -> None:
        position, data = 0, self._in
        while len(data) - position >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, position)
            limit = self._me.frame_bytes if self._keys else HANDSHAKE_FRAME_BYTES
            if not _MAC_BYTES <= length <= limit:
                raise RemoteProtocolError(f"a frame of {length} bytes; allowed are {limit}")
            start = position + _LENGTH.size
            if len(data) < start + length:
                break
            mac = bytes(data[start : start + _MAC_BYTES])
            body = bytes(data[start + _MAC_BYTES : start + length])
            position = start + length
            if self._keys is None:
                self._shake_hands(body)
            else:
                self._check(mac, body)
                if body != PING:
                    deliver(body)
                if self._sock.fileno() < 0:
                    return  # closed while delivering: what is left of it is void
        del data[:position]

    def _check(self, mac: bytes, body: bytes) -> None:
        assert self._keys is not None
        wanted = hashlib.blake2b(
            _NUMBER.pack(self._received) + body, digest_size=_MAC_BYTES, key=self._keys[1]
        )
        if not hmac.compare_digest(wanted.digest(), mac):
            raise RemoteProtocolError("a frame fails its authentication")
        self._received += 1

    # The handshake.

    def _shake_hands(self, body: bytes) -> None:
        try:
            if self._expected is None:
                self._on_hello(body)
            elif self._said:
                self._on_challenge(body)
            else:
                self._on_response(body)
        except ValueError as error:
            raise RemoteProtocolError(f"not this step of the handshake: {error}") from error

    def _on_hello(self, body: bytes) -> None:
        me = self._me
        version, cluster, sender, target, _, voters = _read_hello(body)
        if version != VERSION:
            raise RemoteProtocolError(f"not a hello of version {VERSION}")
        if cluster != me.cluster or target != me.node_id:
            raise RemoteProtocolError("a hello for another node or cluster")
        own = os.urandom(NONCE_BYTES)
        self._expected = sender
        self._voters = voters
        self._acceptor = body + own + _pack(me.voters)
        self._frame(_pack([own, self._proof(b"acceptor", self._acceptor), me.voters]))
        self.write()

    def _on_challenge(self, body: bytes) -> None:
        nonce, proof, self._voters = _read_challenge(body)
        said = self._said + nonce + _pack(self._voters)
        self._verify(b"acceptor", said, proof)
        # Even if it ends here: the other side shall know who it was that has other voters.
        self._frame(_pack([self._proof(b"connector", said)]))
        self.write()
        self._agree(said, b"connector", b"acceptor")

    def _on_response(self, body: bytes) -> None:
        (proof,) = _read_response(body)
        self._verify(b"connector", self._acceptor, proof)
        self._agree(self._acceptor, b"acceptor", b"connector")

    def _agree(self, said: bytes, mine: bytes, theirs: bytes) -> None:
        assert self._expected is not None
        if self._voters != self._me.voters:
            raise OtherVoters(self._expected, self._voters)
        self._keys = (self._proof(b"key " + mine, said), self._proof(b"key " + theirs, said))
        self.peer = self._expected

    def _proof(self, role: bytes, said: bytes) -> bytes:
        return hmac.digest(self._me.secret, role + b"\0" + said, "sha256")

    def _verify(self, role: bytes, said: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self._proof(role, said), proof):
            raise RemoteProtocolError("the other side does not know the cluster's secret")
