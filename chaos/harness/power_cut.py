"""Shell: takes away what a power cut would take from the files of a node.

Before each change, the node writes to a file beside its data how to undo it. A sync strikes out
what it made durable. The kernel keeps that file when the node is killed, so `lose` can restore the
data directory to what was synced.

    ["do", n, kind, path, ...]   n undoes a change of `path`; kinds below
    ["moved", old, new]          a file has another path now, and so have its undo entries
    ["drop", [n, ...]]           these changes are durable

    size    path, bytes              it was appended to: cut it
    bytes   path, position, hex      it was overwritten: write the old bytes
    cut     path, bytes, copy        it was truncated to `bytes`: append the copy
    create  path                     remove it
    rename  new, old, copy or null   move it back; the copy is the former file of the new name
    remove  path, copy               put the copy back

As on the simulated disk of the tests, a file's bytes are durable after its own sync, and names
after a sync of their directory. The changes of all files are undone in reverse order, so every
state in between has existed. Removing a whole directory counts as durable at once.
"""

import contextlib
import json
import os
import shutil
import threading
from random import Random
from typing import Any

JOURNAL = "journal"
COMPACT_LINES = 20_000
GARBAGE_BYTES = 16
_NAMES = ("create", "rename", "remove")


class Name:
    """The present path of a file, shared by everything that has it open."""

    __slots__ = ("noted", "path")

    def __init__(self, path: str) -> None:
        self.path = path
        self.noted = False
        """Whether an append since the start of the last sync has been noted; later appends add
        nothing."""


class Unsynced:
    """Everything that is not durable yet, below one data directory. Safe for threads."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._lock = threading.RLock()
        self._pending: dict[int, list[Any]] = {}
        self._by_path: dict[str, dict[int, None]] = {}
        self._by_directory: dict[str, dict[int, None]] = {}
        self._names: dict[str, Name] = {}
        self._number = 0
        self._lines = 0
        self._journal: int | None = None
        os.makedirs(directory, exist_ok=True)
        path = os.path.join(directory, JOURNAL)
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                self._load(file.read())
        self._compact()

    @property
    def count(self) -> int:
        """The number of changes that are not durable."""
        return len(self._pending)

    def close(self) -> None:
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None

    # Changes that are about to happen.

    def name(self, path: str) -> Name:
        with self._lock:
            return self._names.setdefault(os.path.abspath(path), Name(os.path.abspath(path)))

    def creates(self, path: str) -> None:
        with self._lock:
            self._do("create", os.path.abspath(path))

    def appends(self, name: Name, size: int) -> None:
        if name.noted:
            return
        with self._lock:
            name.noted = True
            self._do("size", name.path, size)

    def overwrites(self, name: Name, position: int, old: bytes) -> None:
        with self._lock:
            self._do("bytes", name.path, position, old.hex())

    def truncates(self, name: Name, size: int, cut: bytes) -> None:
        with self._lock:
            name.noted = False
            copy = self._copy_path()
            with open(copy, "wb") as file:
                file.write(cut)
            self._do("cut", name.path, size, copy)

    def renames(self, old: str, new: str) -> None:
        old, new = os.path.abspath(old), os.path.abspath(new)
        with self._lock:
            copy = self._save(new)
            self._do("rename", new, old, copy)
            self._moved(old, new)

    def removes(self, path: str) -> None:
        path = os.path.abspath(path)
        with self._lock:
            copy = self._save(path)
            if copy is not None:
                self._do("remove", path, copy)

    def forgets(self, directory: str) -> None:
        """Notes that a whole directory is removed."""
        inside = os.path.abspath(directory) + os.sep
        with self._lock:
            gone = [n for n, change in self._pending.items() if change[1].startswith(inside)]
            self._drop(gone)
            for path in [name for name in self._names if name.startswith(inside)]:
                del self._names[path]

    # Changes that have become durable.

    def sync_begins(self, name: Name) -> list[int]:
        """The changes that this sync makes durable if it succeeds."""
        with self._lock:
            name.noted = False
            return list(self._by_path.get(name.path, ()))

    def directory_sync_begins(self, directory: str) -> list[int]:
        with self._lock:
            return list(self._by_directory.get(os.path.abspath(directory or "."), ()))

    def durable(self, numbers: list[int]) -> None:
        with self._lock:
            self._drop([number for number in numbers if number in self._pending])

    # State, changed by events that are written to the file first.

    def _do(self, kind: str, *what: Any) -> None:
        self._number += 1
        self._write(["do", self._number, kind, *what])

    def _moved(self, old: str, new: str) -> None:
        self._write(["moved", old, new])

    def _drop(self, numbers: list[int]) -> None:
        if numbers:
            copies = [copy for number in numbers if (copy := _copy_of(self._pending[number]))]
            self._write(["drop", numbers])
            for copy in copies:
                self._drop(list(self._by_path.get(copy, ())))
                with contextlib.suppress(FileNotFoundError):
                    os.remove(copy)

    def _write(self, event: list[Any]) -> None:
        assert self._journal is not None, "nothing is noted after the end"
        os.write(self._journal, json.dumps(event).encode() + b"\n")
        self._apply(event)
        self._lines += 1
        if self._lines > COMPACT_LINES + 2 * len(self._pending):
            self._compact()

    def _apply(self, event: list[Any]) -> None:
        match event:
            case ["do", number, *change]:
                self._pending[number] = change
                self._place(number, change)
            case ["moved", old, new]:
                self._move(old, new)
            case ["drop", numbers]:
                for number in numbers:
                    change = self._pending.pop(number)
                    table, key = self._table(change)
                    table[key].pop(number)
                    if not table[key]:
                        del table[key]

    def _place(self, number: int, change: list[Any]) -> None:
        table, key = self._table(change)
        table.setdefault(key, {})[number] = None

    def _table(self, change: list[Any]) -> tuple[dict[str, dict[int, None]], str]:
        kind, path = change[:2]
        if kind in _NAMES:
            return self._by_directory, os.path.dirname(path)
        return self._by_path, path

    def _move(self, old: str, new: str) -> None:
        for number in self._by_path.pop(old, ()):
            self._pending[number][1] = new
            self._by_path.setdefault(new, {})[number] = None
        name = self._names.pop(old, None)
        if name is not None:
            name.path = new
            self._names[new] = name

    def _save(self, path: str) -> str | None:
        """Links a second name to a file that loses its own, so that it can be restored."""
        if not os.path.exists(path):
            return None
        copy = self._copy_path()
        os.link(path, copy)
        self._moved(path, copy)
        return copy

    def _copy_path(self) -> str:
        return os.path.join(self._directory, f"copy-{self._number + 1}")

    def _load(self, text: str) -> None:
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                break  # the process was killed while it wrote this, and changed nothing more
            self._apply(event)
            self._lines += 1
            if event[0] == "do":
                self._number = max(self._number, event[1])

    def _compact(self) -> None:
        path = os.path.join(self._directory, JOURNAL)
        with open(path + ".new", "w", encoding="utf-8") as file:
            for number, change in sorted(self._pending.items()):
                file.write(json.dumps(["do", number, *change]) + "\n")
        os.replace(path + ".new", path)
        if self._journal is not None:
            os.close(self._journal)
        self._journal = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._lines = len(self._pending)

    # Undoing.

    def undo(self, tear: Random | None = None) -> int:
        """Undoes everything that is not durable. Returns the number of changes; see `lose`."""
        count = len(self._pending)
        for number in sorted(self._pending, reverse=True):
            kind, path, *what = self._pending[number]
            _UNDO[kind](self, path, what, tear)
            self._apply(["drop", [number]])
        return count

    def _undo_rename(self, new: str, what: list[Any], tear: Random | None) -> None:
        old, copy = what
        if os.path.exists(new):
            os.replace(new, old)
        self._move(new, old)
        if copy is not None:
            self._undo_remove(new, [copy], tear)

    def _undo_remove(self, path: str, what: list[Any], tear: Random | None) -> None:
        (copy,) = what
        with contextlib.suppress(FileExistsError, FileNotFoundError):
            os.link(copy, path)
        self._move(copy, path)

    def _undo_create(self, path: str, what: list[Any], tear: Random | None) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)

    def _undo_size(self, path: str, what: list[Any], tear: Random | None) -> None:
        (size,) = what
        with contextlib.suppress(FileNotFoundError):
            extra = os.path.getsize(path) - size
            if extra <= 0:
                return
            kept = 0 if tear is None else tear.randint(0, extra)
            os.truncate(path, size + kept)
            if tear is not None and kept:
                garbage = min(kept, GARBAGE_BYTES)
                with open(path, "r+b") as file:
                    file.seek(size + kept - garbage)
                    file.write(tear.randbytes(garbage))

    def _undo_bytes(self, path: str, what: list[Any], tear: Random | None) -> None:
        position, old = what
        with contextlib.suppress(FileNotFoundError), open(path, "r+b") as file:
            file.seek(position)
            file.write(bytes.fromhex(old))

    def _undo_cut(self, path: str, what: list[Any], tear: Random | None) -> None:
        size, copy = what
        if os.path.exists(copy) and os.path.exists(path) and os.path.getsize(path) >= size:
            os.truncate(path, size)
            with open(copy, "rb") as source, open(path, "ab") as file:
                shutil.copyfileobj(source, file)


_UNDO = {
    "size": Unsynced._undo_size,
    "bytes": Unsynced._undo_bytes,
    "cut": Unsynced._undo_cut,
    "create": Unsynced._undo_create,
    "rename": Unsynced._undo_rename,
    "remove": Unsynced._undo_remove,
}


def _copy_of(change: list[Any]) -> str | None:
    return change[-1] if change[0] in ("cut", "rename", "remove") else None


def lose(directory: str, tear: Random | None = None) -> int:
    """Takes away what was not synced, of a node that is down. Returns the number of changes.

    With `tear` a part of what was appended to each file stays, and ends in garbage."""
    if not os.path.isdir(directory):
        return 0
    unsynced = Unsynced(directory)
    try:
        return unsynced.undo(tear)
    finally:
        unsynced.close()
        shutil.rmtree(directory)
