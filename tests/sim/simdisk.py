"""A disk in memory that loses, tears, flips and refuses, all from one seed. (Test fake of `Disk`.)

What a process sees and what a power loss leaves are kept apart:

    file        `content` is what reads return; `durable` is what is on the platter; `pending` are
                the writes and truncations since the last sync, in order.
    directory   the same with entries: creates, renames and removes are visible at once and pending
                until `sync_directory` of their directory. Syncing a file does not make its entry
                durable, and an entry can be durable while the file's bytes are not.

Faults
- `crash(rng)`: power loss. Synced bytes and entries always survive. Of each file's pending writes
  a prefix survives, independently of other files; the write after it may be torn at any byte, and
  where it would have grown the file may have left zeros instead. Of each directory's pending
  operations a prefix survives. A file without a durable entry is gone.
- `kill()`: the process dies, the machine does not: everything written is still there, but what was
  not synced still is not, so a crash after the kill can lose it.
- `crash_at = n`: operation n (1 is the first; reads and hints are not counted) and all later calls
  raise `SimCrash`, operation n before or in the middle of its effect.
- `capacity`: bytes that fit, every file costing `ENTRY_BYTES` more than its content. What does not
  fit raises DiskFull and changes nothing.
- `fail_sync = True`: every sync raises StorageFailed, and what it should have written counts as
  clean from then on, as on Linux: readable until a crash, never written by a later sync. `dropped`
  says that this has happened: a power loss may then leave a hole before what was written later.
- `full_overwrites = True`: also what only overwrites bytes raises DiskFull, as on file systems that
  copy on write or under a quota. `copies_on_write = True`: the same, while the disk is full.
- `fail_read = True`: reads of files raise StorageFailed.
- `flip_bit(path, bit)`: damage at rest.

`between`, when set, is called before each operation: other threads may work there (simthreads.py).

Not modelled: pending writes of one file reaching the platter out of order, and bytes that change
between two reads.
"""

from collections.abc import Callable, Sequence
from posixpath import dirname, normpath
from random import Random

from raftq.client.common.disk import FileClosed
from raftq.client.common.errors import DirectoryLocked, DiskFull, StorageError, StorageFailed
from raftq.client.common.types import Buffer

ENTRY_BYTES = 128

# (position, data): a write; (size, None): a truncation.
_Change = tuple[int, bytes | None]


class SimCrash(BaseException):
    """The machine stopped here. Not an Exception: nothing may catch it and carry on."""


class _Inode:
    """One file's bytes, whatever names it has."""

    __slots__ = ("content", "durable", "pending")

    def __init__(self, durable: bytes = b"") -> None:
        self.durable = bytearray(durable)
        self.content = bytearray(durable)
        self.pending: list[_Change] = []

    def change(self, position: int, data: bytes | None) -> None:
        self.pending.append((position, data))
        _apply(self.content, position, data)

    def harden(self, count: int) -> None:
        """The first `count` pending changes reach the platter."""
        for position, data in self.pending[:count]:
            _apply(self.durable, position, data)
        del self.pending[:count]

    def copy(self) -> "_Inode":
        twin = _Inode()
        twin.durable[:] = self.durable
        twin.content[:] = self.content
        twin.pending = list(self.pending)
        return twin

    def after_crash(self, rng: Random) -> bytes:
        kept = bytearray(self.durable)
        whole = rng.randint(0, len(self.pending))
        for position, data in self.pending[:whole]:
            _apply(kept, position, data)
        if whole < len(self.pending):
            position, data = self.pending[whole]
            if data is not None and rng.random() < 0.6:
                cut = rng.randint(0, len(data))
                grown = max(0, min(position + cut - len(kept), cut))
                torn = data[:cut]
                if grown and rng.random() < 0.25:
                    torn = data[: cut - grown] + bytes(grown)
                _apply(kept, position, torn)
        return bytes(kept)


def _apply(image: bytearray, position: int, data: bytes | None) -> None:
    if data is None:
        if len(image) > position:
            del image[position:]
        else:
            image.extend(bytes(position - len(image)))
        return
    if position > len(image):
        image.extend(bytes(position - len(image)))
    image[position : position + len(data)] = data


# (name, inode): the name now means that inode; (name, None): the name is gone.
_Entry = tuple[str, _Inode | None]


class _Directory:
    """Names of one directory. A rename is one pending operation of two entries."""

    __slots__ = ("durable", "pending", "visible")

    def __init__(self) -> None:
        self.visible: dict[str, _Inode] = {}
        self.durable: dict[str, _Inode] = {}
        self.pending: list[tuple[_Entry, ...]] = []

    def change(self, *entries: _Entry) -> None:
        self.pending.append(entries)
        _rename(self.visible, entries)

    def harden(self, count: int) -> None:
        for entries in self.pending[:count]:
            _rename(self.durable, entries)
        del self.pending[:count]


def _rename(names: dict[str, _Inode], entries: tuple[_Entry, ...]) -> None:
    for name, inode in entries:
        if inode is None:
            names.pop(name, None)
        else:
            names[name] = inode


class SimFile:
    """An open file of a `SimDisk`; follows its inode through renames and removal."""

    __slots__ = ("_closed", "_disk", "_inode", "_path", "size")

    def __init__(self, disk: "SimDisk", path: str, inode: _Inode) -> None:
        self._disk = disk
        self._path = path
        self._inode = inode
        self._closed = False
        self.size = len(inode.content)

    def _check_open(self) -> None:
        if self._closed:
            raise FileClosed(f"{self._path} is closed")

    def append(self, buffers: Sequence[Buffer]) -> None:
        self._write("append", self.size, b"".join(buffers))
        self.size = len(self._inode.content)

    def write_at(self, position: int, data: Buffer) -> None:
        self._write("write_at", position, bytes(data))
        self.size = len(self._inode.content)

    def _write(self, name: str, position: int, data: bytes) -> None:
        self._check_open()
        disk, inode = self._disk, self._inode
        if disk.step(name, f"{self._path} {position}+{len(data)}"):
            inode.change(position, data[: disk.rng.randint(0, len(data))])
            raise SimCrash
        if disk.full_overwrites and position < len(inode.content):
            raise DiskFull(f"{self._path}: no space left on the simulated disk to overwrite bytes")
        grown = position + len(data) - len(inode.content)
        disk.need(len(data) if disk.copies_on_write else grown, self._path)
        inode.change(position, data)

    def read(self, position: int, length: int) -> bytes:
        self._disk.check_alive()
        self._check_open()
        self._disk.check_readable(self._path)
        return bytes(self._inode.content[position : position + length])

    def truncate(self, size: int) -> None:
        self._check_open()
        torn = self._disk.step("truncate", f"{self._path} {size}")
        self._inode.change(size, None)
        if torn:
            raise SimCrash
        self.size = size

    def sync(self) -> None:
        self._check_open()
        disk, inode = self._disk, self._inode
        torn = disk.step("sync", self._path)
        if torn or disk.fail_sync:
            inode.harden(disk.rng.randint(0, len(inode.pending)))
        if torn:
            raise SimCrash
        if disk.fail_sync:
            disk.dropped = disk.dropped or bool(inode.pending)
            inode.pending.clear()
            raise StorageFailed(f"{self._path}: sync failed: simulated I/O error")
        inode.harden(len(inode.pending))

    def write_behind(self, start: int, end: int) -> None:
        """A hint; what it writes is not durable without a sync, so nothing happens here."""

    def drop_cache(self, start: int, end: int) -> None:
        """A hint; reads look the same with and without a cache."""

    def close(self) -> None:
        self._closed = True


class SimLock:
    __slots__ = ("_disk", "_path")

    def __init__(self, disk: "SimDisk", path: str) -> None:
        self._disk = disk
        self._path = path

    def release(self) -> None:
        self._disk.locked.discard(self._path)


class SimDisk:
    """A disk in memory that can lose power and damage files. `operations` counts, `trace` lists
    what was done so far."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.rng = Random(seed)
        self.operations = 0
        self.trace: list[str] = []
        self.crash_at: int | None = None
        self.crashed = False
        self.capacity: int | None = None
        self.fail_sync = False
        self.full_overwrites = False
        self.copies_on_write = False
        self.fail_read = False
        self.dropped = False
        self.between: Callable[[], None] | None = None
        self.locked: set[str] = set()
        self._directories: dict[str, _Directory] = {"/": _Directory()}

    # What a machine or a test does to the disk.

    def crash(self, rng: Random) -> "SimDisk":
        """The disk as it would be after a power loss now; this one stays as it is."""
        disk = SimDisk(rng.getrandbits(32))
        disk.capacity, disk.dropped = self.capacity, self.dropped
        for path, directory in self._directories.items():
            names = dict(directory.durable)
            for entries in directory.pending[: rng.randint(0, len(directory.pending))]:
                _rename(names, entries)
            survivor = disk._directories[path] = _Directory()
            survivor.visible = {name: _Inode(names[name].after_crash(rng)) for name in names}
            survivor.durable = dict(survivor.visible)
        return disk

    def kill(self) -> "SimDisk":
        """The disk as the next process would find it if this one died now."""
        disk = SimDisk(self.seed + self.operations)
        disk.capacity, disk.dropped = self.capacity, self.dropped
        twins: dict[int, _Inode] = {}

        def twin(inode: _Inode) -> _Inode:
            if id(inode) not in twins:
                twins[id(inode)] = inode.copy()
            return twins[id(inode)]

        for path, directory in self._directories.items():
            copy = _Directory()
            copy.visible = {name: twin(inode) for name, inode in directory.visible.items()}
            copy.durable = {name: twin(inode) for name, inode in directory.durable.items()}
            copy.pending = [
                tuple((name, inode and twin(inode)) for name, inode in entries)
                for entries in directory.pending
            ]
            disk._directories[path] = copy
        return disk

    def flip_bit(self, path: str, bit: int) -> None:
        inode = self._inode(path)
        for image in (inode.content, inode.durable):
            if bit // 8 < len(image):
                image[bit // 8] ^= 1 << bit % 8

    def durable_bytes(self, path: str) -> int:
        """How much of the file is on the platter."""
        return len(self._inode(path).durable)

    def used_bytes(self) -> int:
        return sum(
            ENTRY_BYTES + len(inode.content)
            for directory in self._directories.values()
            for inode in directory.visible.values()
        )

    # What files and the disk itself share.

    def check_alive(self) -> None:
        if self.crashed:
            raise SimCrash

    def step(self, name: str, detail: str) -> bool:
        """Count an operation. True: crash in the middle of it. Raises to crash before it."""
        self.check_alive()
        if self.between is not None:
            self.between()
            self.check_alive()
        self.operations += 1
        self.trace.append(f"{self.operations} {name} {detail}")
        if self.crash_at is None or self.operations < self.crash_at:
            return False
        self.crashed = True
        if self.rng.random() < 0.5:
            return True
        raise SimCrash

    def check_readable(self, path: str) -> None:
        if self.fail_read:
            raise StorageFailed(f"{path}: read failed: simulated I/O error")

    def need(self, size: int, path: str) -> None:
        if self.capacity is not None and size > 0 and self.used_bytes() + size > self.capacity:
            raise DiskFull(f"{path}: no space left on the simulated disk for {size} bytes")

    # The `Disk` protocol.

    def open(self, path: str, create: bool = False) -> SimFile:
        self.check_alive()
        directory, name = self._split(path)
        inode = directory.visible.get(name)
        if inode is None:
            if not create:
                raise StorageFailed(f"{path}: no such file")
            torn = self.step("create", path)
            try:
                self.need(ENTRY_BYTES, path)
            except DiskFull:
                if torn:
                    raise SimCrash from None  # a machine that stopped reports nothing
                raise
            inode = _Inode()
            directory.change((name, inode))
            if torn:
                raise SimCrash
        return SimFile(self, path, inode)

    def exists(self, path: str) -> bool:
        self.check_alive()
        path = normpath(path)
        if path in self._directories:
            return True
        directory = self._directories.get(dirname(path))
        return directory is not None and path.rpartition("/")[2] in directory.visible

    def size(self, path: str) -> int:
        self.check_alive()
        return len(self._inode(path).content)

    def list(self, directory: str) -> list[str]:
        self.check_alive()
        prefix = normpath(directory).rstrip("/") + "/"
        children = [
            path[len(prefix) :]
            for path in self._directories
            if path.startswith(prefix) and path != "/" and "/" not in path[len(prefix) :]
        ]
        return sorted([*self._directories[normpath(directory)].visible, *children])

    def make_directory(self, path: str) -> None:
        """Durable at once, like the real one, which syncs the parents of what it makes."""
        path = normpath(path)
        missing = []
        while path not in self._directories:
            missing.append(path)
            path = dirname(path)
        for path in reversed(missing):
            torn = self.step("make_directory", path)
            self._directories[path] = _Directory()
            if torn:
                raise SimCrash

    def rename(self, source: str, target: str) -> None:
        directory, old = self._split(source)
        other, new = self._split(target)
        assert directory is other, "renames between directories are not simulated"
        inode = self._inode(source)
        torn = self.step("rename", f"{source} {target}")
        directory.change((old, None), (new, inode))
        if torn:
            raise SimCrash

    def remove(self, path: str) -> None:
        directory, name = self._split(path)
        self._inode(path)
        torn = self.step("remove", path)
        directory.change((name, None))
        if torn:
            raise SimCrash

    def remove_directory(self, path: str) -> None:
        """Each directory goes at once and durably: what is in the middle is a matter of files."""
        path = normpath(path)
        inside = [one for one in self._directories if one == path or one.startswith(path + "/")]
        for one in sorted(inside, reverse=True):
            torn = self.step("remove_directory", one)
            del self._directories[one]
            if torn:
                raise SimCrash

    def sync_directory(self, path: str) -> None:
        torn = self.step("sync_directory", path)
        entries = self._directories[normpath(path)]
        if torn:
            entries.harden(self.rng.randint(0, len(entries.pending)))
            raise SimCrash
        if self.fail_sync:
            raise StorageFailed(f"{path}: sync failed: simulated I/O error")
        entries.harden(len(entries.pending))

    def free_bytes(self, directory: str) -> int:
        self.check_alive()
        return 1 << 40 if self.capacity is None else max(0, self.capacity - self.used_bytes())

    def lock(self, path: str) -> SimLock:
        self.check_alive()
        if path in self.locked:
            raise DirectoryLocked(f"{path} is held by this simulated process")
        self.locked.add(path)
        return SimLock(self, path)

    def read_file(self, path: str, bytes_max: int) -> bytes:
        self.check_alive()
        self.check_readable(path)
        content = self._inode(path).content
        if len(content) > bytes_max:
            raise StorageFailed(f"{path} has {len(content)} bytes, over the limit of {bytes_max}")
        return bytes(content)

    def write_file_atomic(self, path: str, data: Buffer) -> None:
        temporary = path + ".tmp"
        file = self.open(temporary, create=True)
        try:
            file.truncate(0)
            file.append([data])
            file.sync()
        except StorageError:
            self.remove(temporary)
            raise
        self.rename(temporary, path)
        self.sync_directory(dirname(path))

    def _split(self, path: str) -> tuple[_Directory, str]:
        parent, _, name = normpath(path).rpartition("/")
        directory = self._directories.get(parent or "/")
        if directory is None:
            raise StorageFailed(f"{path}: no such directory")
        return directory, name

    def _inode(self, path: str) -> _Inode:
        directory, name = self._split(path)
        inode = directory.visible.get(name)
        if inode is None:
            raise StorageFailed(f"{path}: no such file")
        return inode
