"""How far a log is durable, and the sync that moves that on. (Shell.)

One writer appends while another thread may sync. The writer publishes its head as one tuple, so a
ticket sees an end offset and a position that belong together, without a lock on the append path.
The head also has its generation. A truncation begins a new generation: heads published before it is
done belong to the old one, and a sync of those proves nothing any more. Bytes below the active
segment are durable already, because sealing syncs. A log that seals lazily is the exception: the
files of its sealed segments wait here for the next sync, which takes them first.

A failed sync is final: the kernel may have dropped the pages, and a second sync would report a
success that never happened. The log refuses writes until it is opened again.
"""

import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from raftq.client.common.disk import File, FileClosed
from raftq.client.common.errors import DiskFull, StorageError, StorageFailed
from raftq.node.storage.checkpoint import Checkpoint, CheckpointFile

_CLOSED = -1


@dataclass(slots=True)
class Head:
    """The end of a log: the active segment, its open file and what was written to it.

    `generation` counts the truncations before it.
    """

    end_offset: int
    segment_base: int
    position: int
    file: File
    generation: int


class SyncTicket:
    """One sync. What it covers is fixed when it is made; `run` may happen in any thread."""

    __slots__ = ("_durability", "_head")

    def __init__(self, durability: "Durability", head: Head) -> None:
        self._durability = durability
        self._head = head

    @property
    def end_offset(self) -> int:
        """The flushed offset once `run` has returned."""
        return self._head.end_offset

    def run(self) -> None:
        """Sync, then move the flushed offset on. StorageFailed also makes the log refuse writes."""
        self._durability.run(self._head)


class Durability:
    """The flushed offset, the start offset, and the checkpoint that remembers both.

    It also keeps `readable_offset` for the owner of the log: what was readable once stays readable,
    unless it is cut off. Only the thread that writes the log sets it.
    """

    __slots__ = (
        "_checkpoint",
        "_generation",
        "_lock",
        "_named",
        "_noted",
        "_sync_names",
        "_unnamed",
        "failure",
        "flushed_offset",
        "readable_offset",
        "start_offset",
        "unsynced",
    )

    def __init__(
        self,
        checkpoint: CheckpointFile,
        flushed_offset: int,
        start_offset: int,
        sync_names: Callable[[], None] | None = None,
        readable_offset: int = 0,
        named: bool = True,
    ) -> None:
        """With `sync_names`, which syncs the directory, the log seals lazily.

        Without `named`, the active segment was created without a sync of its name, by a process
        that ended before it needed one.
        """
        self._checkpoint = checkpoint
        self._sync_names = sync_names
        self.unsynced: tuple[tuple[int, File], ...] = ()
        """(base offset, file) of sealed segments not known to be durable, oldest first."""
        # How many segments were created without a sync of their names, and how many names are
        # synced.
        self._unnamed = 0 if named else 1
        self._named = 0
        self._lock = threading.Lock()
        # Only heads of this generation count: a sync that began before a truncation must not prove
        # anything about bytes that replaced the truncated ones.
        self._generation = 0
        self.flushed_offset = flushed_offset
        self.start_offset = start_offset
        self.readable_offset = readable_offset
        # The readable offset that the checkpoint has.
        self._noted = readable_offset
        self.failure: StorageError | None = None

    def check(self) -> None:
        """Raise when the log no longer accepts writes."""
        if self.failure is not None:
            raise StorageFailed(
                f"the log refuses writes until it is opened again: {self.failure}"
            ) from self.failure

    def fail(self, error: StorageError) -> None:
        if self.failure is None:
            self.failure = error

    def begin(self, head: Head) -> SyncTicket:
        self.check()
        return SyncTicket(self, head)

    def run(self, head: Head) -> None:
        if self._covered(head):
            return
        sealed, unnamed = self.unsynced, self._unnamed
        try:
            for entry in sealed:
                self._sync_sealed(entry)
            head.file.sync()
            if unnamed != self._named and self._sync_names is not None:
                self._sync_names()
        except FileClosed:
            if self._covered(head):
                return
            raise
        except StorageFailed as error:
            # This holds even if another sync covered it meanwhile: the kernel reports a lost page
            # to one of two concurrent syncs only, so the success of the other proves nothing.
            self.fail(error)
            raise
        with self._lock:
            if self._covered(head):
                return
            self.flushed_offset = head.end_offset
            self.unsynced = tuple(entry for entry in self.unsynced if entry not in sealed)
            self._named = max(self._named, unnamed)
            self._write(head)
        if sealed:
            # This is only a hint, but after an old one all later segments are read again.
            with suppress(FileClosed):
                self._checkpoint.sync()

    def _covered(self, head: Head) -> bool:
        """Report whether sealing, truncation or another ticket has made this sync unnecessary."""
        return head.generation != self._generation or head.end_offset <= self.flushed_offset

    def _sync_sealed(self, entry: tuple[int, File]) -> None:
        try:
            entry[1].sync()
        except FileClosed:
            if entry in self.unsynced:
                raise  # otherwise its segment was dropped meanwhile, and needs no sync

    def leave_unsynced(self, base_offset: int, file: File) -> None:
        """Note a segment that was sealed, and a next one that got its name, without any sync."""
        with self._lock:
            self.unsynced = (*self.unsynced, (base_offset, file))
            self._unnamed += 1

    def settle(self, head: Head) -> None:
        """Make every sealed segment durable and forget their files, which are about to change."""
        self.begin(head).run()
        if self._unnamed != self._named and self._sync_names is not None:
            try:
                self._sync_names()
            except StorageFailed as error:
                self.fail(error)
                raise
        with self._lock:
            self.unsynced = ()
            self._named = self._unnamed

    def release_below(self, offset: int) -> None:
        """Forget segments that start below the offset: they are about to be dropped."""
        with self._lock:
            self.unsynced = tuple(entry for entry in self.unsynced if entry[0] >= offset)

    def sealed(self, head: Head) -> None:
        """Note a new segment that starts at `head`: everything below it is durable."""
        with self._lock:
            self.flushed_offset = max(self.flushed_offset, head.end_offset)
            self._write(head)

    def cut(self, head: Head) -> None:
        """Promise durably that nothing at or above `head` is claimed any more.

        From here on only heads of its generation count, even when the promise could not be written.
        """
        with self._lock:
            self._generation = head.generation
            self.flushed_offset = min(self.flushed_offset, head.end_offset)
            self.readable_offset = min(self.readable_offset, head.end_offset)
            start_offset = self.start_offset
            self.start_offset = min(start_offset, head.end_offset)
            try:
                self._write(head, sync=True, cutting=True)
            except DiskFull:
                self.start_offset = start_offset
                raise

    def cut_done(self, head: Head) -> None:
        """Note that the log ends at `head`, durably: all of it is flushed."""
        with self._lock:
            self.flushed_offset = head.end_offset
            # The promise holds without this write. It only saves the next open a second check.
            with suppress(DiskFull):
                self._write(head, sync=True)

    def restart(self, offset: int) -> None:
        """Remember durably that the log is empty and goes on here. It has no segment now."""
        with self._lock:
            self.start_offset = self.flushed_offset = offset
            self._noted = self.readable_offset = min(self.readable_offset, offset)
            self.unsynced = ()
            slot = Checkpoint(
                segment_base=offset,
                flushed_offset=offset,
                start_offset=offset,
                readable_offset=self._noted,
                lazy=self._sync_names is not None,
                cutting=True,
            )
            self._checkpoint.write(slot, sync=True)

    def move_start(self, start_offset: int, head: Head) -> None:
        """Remember durably that the log starts here. `start_offset` must be flushed."""
        with self._lock:
            before, self.start_offset = self.start_offset, start_offset
            try:
                self._write(head, sync=True)
            except DiskFull:
                self.start_offset = before
                raise

    def remember(self, head: Head, clean: bool = False, sync: bool = False) -> None:
        with self._lock:
            self._write(head, clean=clean, sync=sync)

    @property
    def has_unnoted(self) -> bool:
        """Whether more is readable than the checkpoint has."""
        return self._noted < self.readable_offset and self.failure is None

    def note_readable(self, head: Head) -> None:
        """Write the readable offset as a hint, which a crash may lose. Any thread may call it."""
        with self._lock:
            if head.generation != self._generation:
                return  # a truncation is under way and writes it, or the log is closed
            try:
                self._write(head)
            except StorageFailed as error:
                self.fail(error)
                raise

    def _write(
        self, head: Head, clean: bool = False, sync: bool = False, cutting: bool = False
    ) -> None:
        flushed, readable = self.flushed_offset, self.readable_offset
        position = head.position if flushed == head.end_offset else 0
        slot = Checkpoint(
            segment_base=head.segment_base,
            position=position,
            flushed_offset=flushed,
            start_offset=self.start_offset,
            readable_offset=readable,
            clean=clean,
            lazy=self._sync_names is not None,
            cutting=cutting,
        )
        try:
            self._checkpoint.write(slot, sync=sync)
            self._noted = readable
        except DiskFull:
            if sync:
                raise  # a hint may be lost, but not a promise

    def close(self) -> None:
        with self._lock:  # a sync that ends now finds the log closed, not a reused descriptor
            self._generation = _CLOSED
            self._checkpoint.close()
