"""The network of one Raft node: a listener and one connection per other node. (Shell.)

Of each pair the node with the greater id connects and the other accepts, so there is one way to
make their connection. An accepted one that proves its identity replaces the one before, whose
unread and unsent bytes are dropped. Who is not a voter, does not know the secret, or has other
voters in its settings, gets nothing; of other voters both sides tell once, not at every attempt.

Fits pysyncobj's `Transport` interface. Runs in the Raft thread; a lost connection, a refused peer
or a failing accept never raises out of here.
"""

import logging
import socket
from collections.abc import Callable, Mapping
from typing import Any

from raftq.client.common.errors import ConfigError, RemoteProtocolError
from raftq.cluster.raft.config import ConsensusConfig
from raftq.cluster.raft.connection import PING, Closed, OtherVoters, RaftConnection, RaftIdentity
from raftq.cluster.raft.library import POLL_EVENT_TYPE, Node, Transport
from raftq.cluster.raft.messages import RaftMessage, decode, encode
from raftq.cluster.raft.voters_file import NOT_YET, in_order, shown

logger = logging.getLogger(__name__)

_UNKNOWN_MAX = 64
"""Connections that have not proved who they are; above it the oldest is closed."""

_READ = POLL_EVENT_TYPE.READ | POLL_EVENT_TYPE.ERROR
_WRITE = _READ | POLL_EVENT_TYPE.WRITE


def listen(config: ConsensusConfig) -> socket.socket:
    address = config.bind_address or config.voters[config.node_id]
    host, _, port = address.rpartition(":")
    try:
        sock = socket.create_server((host, int(port)), backlog=64)
    except OSError as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error
    sock.setblocking(False)
    return sock


class RaftTransport(Transport):  # type: ignore[misc]
    """Keeps one connection to each other voter, and gives and takes their messages."""

    def __init__(
        self,
        owner: Any,
        config: ConsensusConfig,
        listener: socket.socket,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(owner, owner.selfNode, owner.otherNodes)
        self._poller = owner._poller
        self._clock = clock
        self._times = config.times
        self._me = RaftIdentity(
            config.node_id,
            config.cluster,
            config.secret,
            config.limits.frame_bytes,
            in_order(config.voters),
        )
        self._nodes: dict[str, Node] = {node.id: node for node in owner.otherNodes}
        self._addresses: Mapping[str, str] = config.voters
        self._live: dict[str, RaftConnection] = {}
        self._unknown: dict[int, RaftConnection] = {}
        """By file descriptor: handshakes under way, in both directions."""
        self._tried_at: dict[str, float] = {}
        self._told: dict[str, tuple[str, ...]] = {}
        """The other voters of nodes that were refused for them."""
        self._listener = listener
        self._poller.subscribe(listener.fileno(), self._on_accept, _READ)

    # What Raft asks for.

    def send(self, node: Node, message: RaftMessage) -> bool:
        connection = self._live.get(node.id)
        if connection is None:
            return False
        try:
            connection.send(encode(message), self._clock())
        except Closed as error:
            self._drop(connection, error)
            return False
        self._watch(connection)
        return True

    def backlog(self, node: Node) -> int:
        connection = self._live.get(node.id)
        return 0 if connection is None else connection.backlog

    @property
    def unsettled(self) -> bool:
        """Whether some other node is not connected, or someone has not said who it is."""
        return bool(self._unknown) or len(self._live) < len(self._nodes)

    def tick(self, now: float) -> None:
        silent = now - self._times.connection_ms / 1000
        for connection in [*self._live.values(), *self._unknown.values()]:
            since = connection.heard_at if connection.peer else connection.opened_at
            if since < silent:
                self._drop(connection, Closed("nothing was heard for too long"))
            elif connection.peer and connection.spoke_at < now - self._times.election_ms_max / 1000:
                self._ping(connection, now)
        retry = now - self._times.reconnect_ms / 1000
        for node_id in self._nodes:
            if node_id < self._me.node_id and self._tried_at.get(node_id, retry) <= retry:
                self._connect(node_id, now)

    def destroy(self) -> None:
        self._poller.unsubscribe(self._listener.fileno())
        self._listener.close()
        self.setOnNodeDisconnectedCallback(None)
        for connection in [*self._live.values(), *self._unknown.values()]:
            self._drop(connection, Closed("this node stops"))

    # Connections.

    def _connect(self, node_id: str, now: float) -> None:
        if node_id in self._live:
            return
        self._tried_at[node_id] = now
        for old in list(self._unknown.values()):
            if old.target == node_id:
                return
        host, _, port = self._addresses[node_id].rpartition(":")
        try:
            family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[
                0
            ]
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            logger.warning("raft cannot find node=%s: %s", node_id, error)
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        error_number = sock.connect_ex(address)
        connection = RaftConnection(sock, self._me, node_id, now)
        logger.debug("raft connects to node=%s errno=%d", node_id, error_number)
        self._begin(connection)

    def _on_accept(self, descr: int, events: int) -> None:
        try:
            sock, _ = self._listener.accept()
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except OSError as error:
            # Too many open files, or a client that is gone: the next one may well be served.
            logger.warning("raft accept failed: %s", error)
            return
        if len(self._unknown) >= _UNKNOWN_MAX:
            oldest = next(iter(self._unknown.values()))
            self._drop(oldest, Closed("too many connections that do not say who they are"))
        self._begin(RaftConnection(sock, self._me, None, self._clock()))

    def _begin(self, connection: RaftConnection) -> None:
        self._unknown[connection.fileno()] = connection
        self._watch(connection)

    def _watch(self, connection: RaftConnection) -> None:
        """Ask the poller for room to write only while there is something to write."""
        wanted = bool(connection.backlog)
        if connection.watched is not wanted and connection.fileno() >= 0:
            connection.watched = wanted
            self._poller.subscribe(
                connection.fileno(),
                lambda descr, events: self._on_ready(connection, events),
                _WRITE if wanted else _READ,
            )

    def _on_ready(self, connection: RaftConnection, events: int) -> None:
        if connection.fileno() < 0:
            return  # closed by an earlier event of the same round
        before = connection.peer
        try:
            if events & POLL_EVENT_TYPE.WRITE:
                connection.write()
            if events & (POLL_EVENT_TYPE.READ | POLL_EVENT_TYPE.ERROR):
                connection.read(self._clock(), lambda body: self._deliver(connection, body))
            if connection.peer is not None and before is None:
                self._adopt(connection)
        except OtherVoters as error:
            self._tell(error)
            self._drop(connection, error)
            return
        except (Closed, RemoteProtocolError) as error:
            self._drop(connection, error)
            return
        self._watch(connection)

    def _tell(self, error: OtherVoters) -> None:
        if self._told.get(error.peer) == error.voters:
            return
        if len(self._told) >= _UNKNOWN_MAX:
            self._told.clear()
        self._told[error.peer] = error.voters
        logger.error(
            "raft node=%s refuses peer node=%s for its voters: it has %s, here they are %s; %s",
            self._me.node_id, error.peer, shown(error.voters), shown(self._me.voters), NOT_YET,
        )  # fmt: skip

    def _adopt(self, connection: RaftConnection) -> None:
        """The handshake is done: this is the connection to that node from now on."""
        node_id = connection.peer
        if self._live.get(node_id or "") is connection or connection.fileno() < 0:
            return
        node = self._nodes.get(node_id or "")
        if node is None or node_id is None:
            raise RemoteProtocolError(f"{node_id!r} is no voter")
        self._unknown.pop(connection.fileno(), None)
        old = self._live.get(node_id)
        if old is not None:
            self._drop(old, Closed("replaced by a new connection"))
        self._live[node_id] = connection
        self._told.pop(node_id, None)
        self._onNodeConnected(node)

    def _deliver(self, connection: RaftConnection, body: bytes) -> None:
        self._adopt(connection)
        if connection.peer is not None and self._live.get(connection.peer) is connection:
            self._onMessageReceived(self._nodes[connection.peer], decode(body))

    def _ping(self, connection: RaftConnection, now: float) -> None:
        try:
            connection.send(PING, now)
        except Closed as error:
            self._drop(connection, error)
        else:
            self._watch(connection)

    def _drop(self, connection: RaftConnection, reason: Exception) -> None:
        descr = connection.fileno()
        if descr < 0:
            return
        self._poller.unsubscribe(descr)
        self._unknown.pop(descr, None)
        connection.close()
        if isinstance(reason, RemoteProtocolError):
            logger.warning("raft refuses peer=%s: %s", connection.peer, reason)
        node_id = connection.peer
        if node_id is not None and self._live.get(node_id) is connection:
            del self._live[node_id]
            self._onNodeDisconnected(self._nodes[node_id])
