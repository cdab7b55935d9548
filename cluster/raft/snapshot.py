"""The snapshot of a node's replicated state: one file with a checksum. (Shell over `Disk`.)

    magic 8 | version u16 | 0 u16 | index u64 | term u64 | length u64 | crc u32 | body

Little-endian; the CRC32C covers all of it but itself. The same bytes are what a leader sends to a
node that is too far behind for its log. A file that fails its checks is an error: a node that
started empty instead would vote without knowing what it promised.
"""

import struct
from dataclasses import dataclass
from posixpath import join

from crc32c import crc32c

from raftq.client.common.disk import Disk
from raftq.client.common.errors import CorruptFile, UnknownFormat

_MAGIC = b"RAFTQSNP"
_VERSION = 1
_HEADER = struct.Struct("<8sHHQQQ")
_CRC = struct.Struct("<I")
_START = _HEADER.size + _CRC.size

BYTES_MAX = 1 << 30


@dataclass(frozen=True, slots=True)
class Snapshot:
    index: int
    """The last entry that is in it."""
    term: int
    body: bytes
    raw: bytes
    """The file."""


def encode(index: int, term: int, body: bytes) -> Snapshot:
    header = _HEADER.pack(_MAGIC, _VERSION, 0, index, term, len(body))
    raw = b"".join((header, _CRC.pack(crc32c(body, crc32c(header))), body))
    return Snapshot(index, term, body, raw)


def decode(raw: bytes, source: str) -> Snapshot:
    if len(raw) < _START:
        raise CorruptFile(f"{source}: a snapshot of {len(raw)} bytes")
    magic, version, _, index, term, length = _HEADER.unpack_from(raw)
    if magic != _MAGIC:
        raise CorruptFile(f"{source}: not a snapshot")
    if version > _VERSION:
        raise UnknownFormat(f"{source}: format {version}; this is {_VERSION}")
    (crc,) = _CRC.unpack_from(raw, _HEADER.size)
    body = raw[_START:]
    if length != len(body) or crc32c(body, crc32c(raw[: _HEADER.size])) != crc:
        raise CorruptFile(
            f"{source}: the snapshot fails its check. Move this directory away and let the node"
            " fetch its state from the others while a majority of them is healthy"
        )
    return Snapshot(index, term, body, raw)


class Snapshots:
    """The snapshot file of one node."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._path = join(directory, "snapshot")

    def exists(self) -> bool:
        return self._disk.exists(self._path)

    def load(self) -> Snapshot | None:
        temporary = self._path + ".tmp"
        if self._disk.exists(temporary):
            self._disk.remove(temporary)
        if not self._disk.exists(self._path):
            return None
        file = self._disk.open(self._path)
        try:
            if file.size > BYTES_MAX + _START:
                raise CorruptFile(f"{self._path}: {file.size} bytes are too many")
            return decode(file.read(0, file.size), self._path)
        finally:
            file.close()

    def save(self, snapshot: Snapshot) -> None:
        """Durable on return; after a crash the file is the old one or this one."""
        self._disk.write_file_atomic(self._path, snapshot.raw)
