"""The Raft log of one node on disk, with its term and vote. (Shell: writes through `Disk`.)

    header  magic 8 | version u16 | 0 u16 | crc u32 | synced u64 | crc u32 | 0 u32    32 bytes
    group   magic u32 | length u32 | crc u32 | body                                   one write
    body    'S' base_index u64, base_term u64       the log begins after this entry; first of a file
            'T' term u64, length u8, vote           the current term and whom this node voted for
            'E' index u64, term u64, length u32, command
            'X' index u64                           entries from this index on are cut
            'C' index u64                           commit index known at the time; a hint
            'V' u8                                  whether this node may vote

Everything little-endian. A group is written and synced before the next one is begun, and its CRC32C
covers its position, so what a reader finds says what happened: a bad group with nothing valid after
it is the tail of an interrupted write and is cut; a bad group followed by a valid one, or below the
`synced` mark (written after each sync, itself not synced: only ever too low), is damage, and the
node must not run on it. The file is only appended to; compaction writes a new one and renames it.

Invariants: `entries[0]` is the base, an entry that a snapshot covers; indexes are dense; nothing is
durable before `flush` returned; after a failed sync every later flush fails too. A full disk
refuses a change as a whole: it stays pending, and nothing of it is in the file.
"""

import struct
from contextlib import suppress
from posixpath import join
from typing import Any, overload

from crc32c import crc32c

from raftq.client.common.disk import Disk, File
from raftq.client.common.errors import (
    ConsensusBroken,
    CorruptFile,
    DiskFull,
    StorageError,
    StorageFailed,
    UnknownFormat,
)

Entry = tuple[bytes, int, int]
"""(command, index, term), in the order that pysyncobj uses."""

FIRST_INDEX = 1
"""The index of the entry that every empty log begins with (term 0)."""

_MAGIC = b"RAFTQJNL"
_VERSION = 1
_HEADER = struct.Struct("<8sHHI")
_MARK = struct.Struct("<QI")
_HEADER_BYTES = 32
_GROUP = struct.Struct("<4sII")
_GROUP_MAGIC = b"RQJG"
_GROUP_BYTES_MAX = 1 << 30
_REWRITE_GROUP_BYTES = 4 << 20
_POSITION = struct.Struct("<QI")
_ENTRY = struct.Struct("<cQQI")
_PAIR = struct.Struct("<cQQ")
_ONE = struct.Struct("<cQ")
_TERM = struct.Struct("<cQB")
_FLAG = struct.Struct("<cB")


def _mark(position: int) -> bytes:
    raw = struct.pack("<Q", position)
    return raw + struct.pack("<I", crc32c(raw))


def _header(position: int) -> bytes:
    raw = _HEADER.pack(_MAGIC, _VERSION, 0, 0)[:12]
    return raw + struct.pack("<I", crc32c(raw)) + _mark(position) + bytes(4)


def _group(position: int, body: bytes) -> bytes:
    crc = crc32c(body, crc32c(_POSITION.pack(position, len(body))))
    return _GROUP.pack(_GROUP_MAGIC, len(body), crc) + body


class RaftJournal:
    """The log, term and vote of one node. Also has the few methods by which pysyncobj reads its
    log."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self._disk = disk
        self._directory = directory
        self._path = join(directory, "journal")
        self._file: File | None = None
        self._pending: list[bytes] = []
        self._failed: str | None = None
        self.entries: list[Entry] = [(b"", FIRST_INDEX, 0)]
        self.term = 0
        self.vote: str | None = None
        self.commit_index = FIRST_INDEX
        self.durable_index = FIRST_INDEX
        self.may_vote = False
        self.created = False
        self.cut_bytes = 0
        """Bytes of a torn tail that opening removed."""

    @classmethod
    def open(cls, disk: Disk, directory: str) -> "RaftJournal":
        journal = cls(disk, directory)
        disk.make_directory(directory)
        if disk.exists(journal._path + ".tmp"):
            disk.remove(journal._path + ".tmp")
        try:
            if disk.exists(journal._path):
                journal._load()
            else:
                journal.created = True
                journal._rewrite()
        except StorageError:
            journal.close()
            raise
        return journal

    # What Raft reads.

    @property
    def base_index(self) -> int:
        return self.entries[0][1]

    @property
    def last_index(self) -> int:
        return self.entries[-1][1]

    @property
    def last_term(self) -> int:
        return self.entries[-1][2]

    @property
    def blank(self) -> bool:
        """Whether nothing was ever promised or taken from anyone."""
        return not self.may_vote and self.term == 0 and self.last_index == FIRST_INDEX

    def term_at(self, index: int) -> int | None:
        position = index - self.entries[0][1]
        return self.entries[position][2] if 0 <= position < len(self.entries) else None

    def slice(self, index: int, bytes_max: int, count_max: int) -> list[Entry]:
        """Entries from `index` on: at least one if there is one, at most about `bytes_max`."""
        position = index - self.entries[0][1]
        assert position > 0, f"entry {index} is not after the base {self.base_index}"
        found = self.entries[position : position + count_max]
        size = 0
        for count, entry in enumerate(found):
            size += len(entry[0])
            if size > bytes_max and count:
                return found[:count]
        return found

    # What Raft writes; nothing of it is durable before `flush`.

    def append(self, command: bytes, index: int, term: int) -> None:
        assert index == self.entries[-1][1] + 1, f"entry {index} after {self.last_index}"
        self.entries.append((command, index, term))
        self._pending.append(_ENTRY.pack(b"E", index, term, len(command)))
        self._pending.append(command)

    def truncate(self, index: int) -> None:
        """Cut the entries from `index` on."""
        if index <= self.commit_index or index <= self.base_index:
            raise ConsensusBroken(
                f"asked to cut entry {index}, but everything up to {self.commit_index} is committed"
            )
        del self.entries[index - self.entries[0][1] :]
        self.durable_index = min(self.durable_index, index - 1)
        self._pending.append(_ONE.pack(b"X", index))

    def set_term(self, term: int, vote: str | None) -> None:
        assert term >= self.term, f"the term went back from {self.term} to {term}"
        self.term = term
        self.vote = vote
        raw = (vote or "").encode()
        self._pending.append(_TERM.pack(b"T", term, len(raw)) + raw)

    def set_may_vote(self) -> None:
        self.may_vote = True
        self._pending.append(_FLAG.pack(b"V", 1))

    def set_commit(self, index: int) -> None:
        """Remember it; it goes to disk with whatever is written next."""
        assert self.commit_index <= index <= self.last_index
        self.commit_index = index

    @property
    def dirty(self) -> bool:
        return bool(self._pending)

    def flush(self) -> None:
        """One write and one sync for everything pending; DiskFull keeps it pending."""
        if self._failed is not None:
            raise StorageFailed(self._failed)
        if not self._pending:
            return
        file = self._file
        assert file is not None, "the journal is closed"
        body = b"".join([*self._pending, _ONE.pack(b"C", self.commit_index)])
        try:
            file.append([_group(file.size, body)])
        except DiskFull:
            raise  # with nothing of it in the file
        except StorageError as error:
            raise self._broken(error) from error
        try:
            file.sync()
        except StorageError as error:
            raise self._broken(error) from error
        # It is there, and must not be written again, whatever becomes of the mark.
        self._pending.clear()
        self.durable_index = self.last_index
        try:
            file.write_at(_HEADER.size, _mark(file.size))
        except DiskFull:
            return  # a mark may be too low
        except StorageError as error:
            raise self._broken(error) from error

    def _broken(self, error: StorageError) -> StorageFailed:
        """What is in the file is not known any more: only opening it again can tell."""
        self._failed = f"the journal failed before and must be reopened: {error}"
        return StorageFailed(str(error))

    def compact(self, base_index: int) -> None:
        """Forget the entries below `base_index`; a snapshot at or above it is on disk already."""
        assert self.base_index <= base_index <= self.commit_index
        if base_index == self.base_index:
            return
        kept = self.entries[base_index - self.base_index :]
        # The base keeps index and term only: its command is in the snapshot.
        self._replace([(b"", base_index, kept[0][2]), *kept[1:]], self.commit_index)

    def reset(self, index: int, term: int) -> None:
        """A snapshot of another node takes the place of the whole log, or of its beginning."""
        kept: list[Entry] = []
        if self.term_at(index) == term:
            kept = self.entries[index - self.base_index + 1 :]
        self._replace([(b"", index, term), *kept], max(index, self.commit_index if kept else 0))

    def _replace(self, entries: list[Entry], commit_index: int) -> None:
        before = self.entries, self.commit_index
        self.entries, self.commit_index = entries, commit_index
        try:
            self._rewrite()
        except BaseException:
            self.entries, self.commit_index = before
            raise

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    # Files.

    def _rewrite(self) -> None:
        """The whole state into a new file, which then takes the place of the old one."""
        if self._failed is not None:
            raise StorageFailed(self._failed)
        temporary = self._path + ".tmp"
        file = self._disk.open(temporary, create=True)
        try:
            file.truncate(0)
            self._write_all(file)
        except StorageError:
            self._discard(file, temporary)
            raise
        try:
            self._disk.rename(temporary, self._path)
        except DiskFull:
            self._discard(file, temporary)
            raise
        except StorageError as error:
            file.close()
            raise self._broken(error) from error
        try:
            self._disk.sync_directory(self._directory)
        except StorageError as error:
            # Which of the two files a crash would leave is not known any more.
            file.close()
            raise self._broken(error) from error
        if self._file is not None:
            self._file.close()
        self._file = file
        self._pending.clear()
        self.durable_index = self.last_index

    def _discard(self, file: File, temporary: str) -> None:
        """Give a full disk its bytes back. Where that fails, the next try overwrites them."""
        file.close()
        with suppress(StorageError):
            self._disk.remove(temporary)

    def _write_all(self, file: File) -> None:
        _, base_index, base_term = self.entries[0]
        vote = (self.vote or "").encode()
        parts = [
            _PAIR.pack(b"S", base_index, base_term),
            _TERM.pack(b"T", self.term, len(vote)) + vote,
            _FLAG.pack(b"V", self.may_vote),
        ]
        size = 0
        file.append([_header(0)])
        for command, index, term in self.entries[1:]:
            parts += (_ENTRY.pack(b"E", index, term, len(command)), command)
            size += len(command) + _ENTRY.size
            if size > _REWRITE_GROUP_BYTES:
                file.append([_group(file.size, b"".join(parts))])
                parts, size = [], 0
        parts.append(_ONE.pack(b"C", self.commit_index))
        file.append([_group(file.size, b"".join(parts))])
        file.write_at(_HEADER.size, _mark(file.size))
        file.sync()

    def _load(self) -> None:
        self._file = file = self._disk.open(self._path)
        position, synced = _HEADER_BYTES, self._check_header(file.read(0, _HEADER_BYTES))
        reader = _Reader(self)
        while position < file.size:
            body = _read_group(file, position)
            if body is None:
                self._cut(file, position, synced)
                break
            try:
                reader.take(body)
            except (struct.error, UnicodeDecodeError, AssertionError) as error:
                raise CorruptFile(f"{self._path}: group at byte {position}: {error!r}") from error
            position += _GROUP.size + len(body)
        if not reader.started:
            raise CorruptFile(f"{self._path}: the first group is not there")
        if position < synced and not self.cut_bytes:
            raise CorruptFile(f"{self._path}: ends at byte {position}, {synced} were synced")
        self._make_durable(file, max(synced, _HEADER_BYTES))
        self.commit_index = max(self.base_index, min(self.commit_index, self.last_index))
        self.durable_index = self.last_index
        self._pending.clear()

    def _make_durable(self, file: File, synced: int) -> None:
        """A process that was killed may have left its last group, or the name of the file, in the
        kernel's memory only. After a failed sync the kernel never writes it, unless it is written
        again."""
        if synced < file.size:
            file.write_at(synced, file.read(synced, file.size - synced))
            file.sync()
        self._disk.sync_directory(self._directory)

    def _check_header(self, raw: bytes) -> int:
        if len(raw) < _HEADER_BYTES:
            raise CorruptFile(f"{self._path}: only {len(raw)} bytes")
        magic, version, _, crc = _HEADER.unpack_from(raw)
        if magic != _MAGIC or crc32c(raw[:12]) != crc:
            raise CorruptFile(f"{self._path}: the header fails its check")
        if version > _VERSION:
            raise UnknownFormat(f"{self._path}: format {version}; this is {_VERSION}")
        synced, crc = _MARK.unpack_from(raw, _HEADER.size)
        # A torn mark is no damage: it is a hint, and overwritten in place.
        return synced if crc32c(raw[_HEADER.size : _HEADER.size + 8]) == crc else 0

    def _cut(self, file: File, position: int, synced: int) -> None:
        if position < synced:
            raise CorruptFile(
                f"{self._path}: bad group at byte {position}, although {synced} bytes were synced;"
                " the disk has damaged it. Move this directory away and let the node fetch its"
                " state from the others while a majority of them is healthy"
            )
        after = _next_group(file, position + 1)
        if after is not None:
            raise CorruptFile(
                f"{self._path}: bad group at byte {position}, followed by a good one at {after};"
                " the disk has damaged it. Move this directory away and let the node fetch its"
                " state from the others while a majority of them is healthy"
            )
        self.cut_bytes = file.size - position
        file.truncate(position)
        file.sync()

    # The names by which pysyncobj reads its log.

    def __len__(self) -> int:
        return len(self.entries)

    @overload
    def __getitem__(self, key: int) -> Entry: ...
    @overload
    def __getitem__(self, key: Any) -> list[Entry]: ...
    def __getitem__(self, key: Any) -> Entry | list[Entry]:
        found: Entry | list[Entry] = self.entries[key]
        return found

    def _destroy(self) -> None:
        self.close()


class _Reader:
    """Rebuilds a journal's state from the bodies of its groups, in order."""

    def __init__(self, journal: RaftJournal) -> None:
        self._journal = journal
        self.started = False

    def take(self, body: bytes) -> None:
        journal, entries = self._journal, self._journal.entries
        position, end = 0, len(body)
        unpack, entry_bytes = _ENTRY.unpack_from, _ENTRY.size
        while position < end:
            kind = body[position]
            if kind == 69:  # 'E', by far the most frequent
                _, index, term, length = unpack(body, position)
                position += entry_bytes + length
                assert position <= end, "an entry is longer than its group"
                assert index == entries[-1][1] + 1, f"entry {index} after {entries[-1][1]}"
                entries.append((body[position - length : position], index, term))
            else:
                position = self._take_other(journal, body, position)

    def _take_other(self, journal: RaftJournal, body: bytes, position: int) -> int:
        kind = body[position : position + 1]
        if kind == b"T":
            _, journal.term, length = _TERM.unpack_from(body, position)
            end = position + _TERM.size + int(length)
            journal.vote = body[position + _TERM.size : end].decode() or None
            return end
        if kind == b"C":
            _, journal.commit_index = _ONE.unpack_from(body, position)
            return position + _ONE.size
        if kind == b"X":
            index: int = _ONE.unpack_from(body, position)[1]
            assert index > journal.base_index, f"cut at {index}, base {journal.base_index}"
            del journal.entries[index - journal.base_index :]
            return position + _ONE.size
        if kind == b"V":
            _, flag = _FLAG.unpack_from(body, position)
            journal.may_vote = bool(flag)
            return position + _FLAG.size
        assert kind == b"S", f"unknown operation {kind!r}"
        _, index, term = _PAIR.unpack_from(body, position)
        journal.entries[:] = [(b"", index, term)]
        self.started = True
        return position + _PAIR.size


def _read_group(file: File, position: int) -> bytes | None:
    raw = file.read(position, _GROUP.size)
    if len(raw) < _GROUP.size:
        return None
    magic, length, crc = _GROUP.unpack(raw)
    rest = file.size - position - _GROUP.size
    if magic != _GROUP_MAGIC or length > min(rest, _GROUP_BYTES_MAX):
        return None
    body = file.read(position + _GROUP.size, length)
    good = crc32c(body, crc32c(_POSITION.pack(position, length))) == crc
    return body if good else None


def _next_group(file: File, position: int) -> int | None:
    """Where the next valid group begins, if there is one."""
    data = file.read(position, file.size - position)
    found = data.find(_GROUP_MAGIC)
    while found >= 0:
        if _read_group(file, position + found) is not None:
            return position + found
        found = data.find(_GROUP_MAGIC, found + 1)
    return None
