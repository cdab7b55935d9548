"""The transport on real sockets, polled by hand: one connection per pair, nothing forged."""

import socket
from pathlib import Path

import pytest
from consensus_work import SECRET, End, opened, until
from pysyncobj.poller import createPoller

from raftq.cluster.raft.connection import RaftConnection, RaftIdentity


@pytest.fixture
def voters() -> dict[str, str]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    names = {
        one: f"127.0.0.1:{sock.getsockname()[1]}" for one, sock in zip("abc", socks, strict=True)
    }
    for sock in socks:
        sock.close()
    return names


def test_messages_arrive_in_order_and_both_sides_know_each_other(voters: dict[str, str]) -> None:
    a, b = End("a", voters), End("b", voters)
    with opened(a, b):
        assert not a.say("b", 1), "nobody is there yet"
        until(lambda: ("up", "b") in a.events and ("up", "a") in b.events, a, b)
        for term in range(1, 200):
            assert a.say("b", term)
            assert b.say("a", term)
        until(lambda: ("b", 199) in a.events and ("a", 199) in b.events, a, b)
        assert a.events == [("up", "b"), *(("b", term) for term in range(1, 200))]
        assert b.events == [("up", "a"), *(("a", term) for term in range(1, 200))]


def test_a_new_connection_of_a_node_replaces_the_old_one_and_its_data(
    voters: dict[str, str],
) -> None:
    a, b = End("a", voters), End("b", voters)
    with opened(a, b):
        until(lambda: ("up", "b") in a.events and ("up", "a") in b.events, a, b)
        b.say("a", 1)  # on the wire, not yet read
        b.listener.close()
        again = End("b", voters)
        with opened(again):
            stale = a.transport._live["b"]
            a._poller.unsubscribe(stale.fileno())  # the old data comes late
            until(lambda: ("up", "a") in again.events, a, again)
            until(lambda: a.events.count(("up", "b")) == 2, a, again)
            again.say("a", 2)
            until(lambda: ("b", 2) in a.events, a, again)
            assert a.events == [("up", "b"), ("down", "b"), ("up", "b"), ("b", 2)]
            assert stale.fileno() < 0
            a._poller = createPoller("poll")
        b._poller = createPoller("poll")
        b.transport._poller = b._poller
        b.listener = b.transport._listener = socket.socket()


def test_a_silent_connection_is_closed_and_pings_keep_an_idle_one(voters: dict[str, str]) -> None:
    a, b = End("a", voters), End("b", voters)
    with opened(a, b):
        until(lambda: ("up", "b") in a.events and ("up", "a") in b.events, a, b)
        for _ in range(100):
            for end in (a, b):
                end.now += 0.1
                end.turn()
        assert a.events == [("up", "b")]
        for _ in range(50):
            a.now += 0.1
            a.turn()
        assert a.events == [("up", "b"), ("down", "b")]


def test_who_has_the_secret_but_is_no_voter_is_refused(voters: dict[str, str]) -> None:
    a = End("a", voters)
    stranger = End("z", {"a": voters["a"], "y": "127.0.0.1:1", "z": voters["c"]})
    with opened(a, stranger):
        for _ in range(100):
            a.turn()
            stranger.now += 0.01
            stranger.turn()
        assert a.events == []


class Pair:
    """Two connections over a socket pair; `wire` holds what b has sent and a has not read."""

    def __init__(self) -> None:
        self.left, ours = socket.socketpair()
        theirs, self.right = socket.socketpair()
        for sock in (self.left, ours, theirs, self.right):
            sock.setblocking(False)
        self.a = RaftConnection(
            ours, RaftIdentity("a", "raftq", SECRET, 1 << 20, ("a", "b", "c")), None, 0.0
        )
        self.b = RaftConnection(
            theirs, RaftIdentity("b", "raftq", SECRET, 1 << 20, ("a", "b", "c")), "a", 0.0
        )
        self.heard: list[bytes] = []
        self.b.write()
        for _ in range(4):
            self.left.sendall(self.drain(self.right))
            self.a.read(0.0, self.heard.append)
            self.right.sendall(self.drain(self.left))
            self.b.read(0.0, self.heard.append)
        assert (self.a.peer, self.b.peer) == ("b", "a")

    def drain(self, sock: socket.socket) -> bytes:
        try:
            return sock.recv(1 << 20)
        except BlockingIOError:
            return b""

    def close(self) -> None:
        for one in (self.a, self.b, self.left, self.right):
            one.close()


def sent_by_b(pair: Pair, *bodies: bytes) -> list[bytes]:
    found = []
    for body in bodies:
        pair.b.send(body, 0.0)
        found.append(pair.drain(pair.right))
    return found


@pytest.mark.parametrize("forgery", ["flip", "repeat", "skip", "swap", "reflect"])
def test_a_frame_that_was_changed_repeated_or_left_out_ends_the_connection(forgery: str) -> None:
    pair = Pair()
    try:
        first, second = sent_by_b(pair, b"first", b"second")
        wire = {
            "flip": first[:-1] + bytes([first[-1] ^ 1]),
            "repeat": first + first,
            "skip": second,
            "swap": second + first,
            "reflect": b"",
        }[forgery]
        if forgery == "reflect":
            pair.a.send(b"mine", 0.0)
            wire = pair.drain(pair.left)
        pair.left.sendall(wire)
        with pytest.raises(Exception, match="authentication"):
            pair.a.read(0.0, pair.heard.append)
        assert pair.heard in ([], [b"first"])
    finally:
        pair.close()


def test_frames_in_pieces_of_one_byte_are_put_together() -> None:
    pair = Pair()
    try:
        for byte in b"".join(sent_by_b(pair, b"first", b"x" * 300)):
            pair.left.sendall(bytes([byte]))
            pair.a.read(0.0, pair.heard.append)
        assert pair.heard == [b"first", b"x" * 300]
    finally:
        pair.close()


def test_a_node_that_does_not_know_the_secret_is_told_nothing(
    voters: dict[str, str], tmp_path: Path
) -> None:
    a, b = End("a", voters), End("b", voters, secret=b"another secret here")
    with opened(a, b):
        for _ in range(100):
            for end in (a, b):
                end.now += 0.01
                end.turn()
        assert a.events == b.events == []
