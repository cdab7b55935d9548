"""Shell: the baseline of the queue figures: the data that a lease and an ack must move at least.

A lease is a small frame that is written to all files and a big one that is read. An ack is another
small frame that is written to all files.
"""

import socket
import time

from raftq_bench.bare_socket import APPEND, BEGINNING, READ
from raftq_bench.runner import VALUE_BYTES

NOTE_BYTES = 64


class BareQueue:
    """Leases and acks by turns against a bare node."""

    def __init__(self, port: int, records: int) -> None:
        self._records = records
        self._buffer = memoryview(bytearray(records * VALUE_BYTES))
        self._notes = _open(port, NOTE_BYTES, APPEND)
        self._data = _open(port, len(self._buffer), READ)

    def slice(self, seconds: float) -> tuple[int, float]:
        clock = time.perf_counter
        count = 0
        start = last = clock()
        while last < start + seconds:
            self._note()
            self._read()
            self._note()
            count += self._records
            last = clock()
        return count, last - start

    def _note(self) -> None:
        self._notes.sendall(b"\1" * NOTE_BYTES)
        self._notes.recv(1)

    def _read(self) -> None:
        self._data.sendall(b"\0")
        filled = 0
        while filled < len(self._buffer):
            filled += self._data.recv_into(self._buffer[filled:])

    def close(self) -> None:
        self._notes.close()
        self._data.close()


def _open(port: int, size: int, mode: int) -> socket.socket:
    link = socket.create_connection(("127.0.0.1", port))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(BEGINNING.pack(size, mode))
    return link
