"""Open the directory of a log after whatever happened to it. (Shell.)

- A sealed segment with an index that fits is trusted without reading it. A missing or damaged index
  is rebuilt from the batches. A segment was durable before its successor was created, so anything
  unreadable in it is damage, never a torn write. In a log that seals lazily this holds up to the
  flushed offset. Above it a sealed segment may be torn like the last one, and then it becomes the
  last one.
- The last segment is read. Bad bytes at its end are a torn tail and are cut, but only where the log
  was not known to be durable. Otherwise they are damage.
- Damage never moves an offset. It becomes a DamagedRange, everything around it stays readable, and
  the log goes on after it.
- Bytes that may not be durable are written again and synced before the log calls them flushed:
  after a failed sync the kernel can hold pages that it will never write.
"""

from dataclasses import dataclass, field

from raftq.client.common.disk import Disk, File
from raftq.client.common.errors import CorruptFile, DiskFull, UnknownFormat
from raftq.node.storage.checkpoint import Checkpoint, CheckpointFile, open_checkpoint
from raftq.node.storage.config import LogConfig
from raftq.node.storage.damage import DamagedRange
from raftq.node.storage.index import SegmentIndex
from raftq.node.storage.index_file import summarize
from raftq.node.storage.scan import WINDOW_BYTES, scan
from raftq.node.storage.segment import Segment, Segments, read_summary, write_index_if_room

_NAME_DIGITS = 20
_OFFSET_MAX = (1 << 63) - 1


@dataclass(slots=True)
class RecoveryReport:
    """What opening a log found and did."""

    opened_ms: int = 0
    clean: bool = False
    """The log was closed in order, and nothing was written since."""
    scanned_bytes: int = 0
    rebuilt_indexes: int = 0
    removed_files: list[str] = field(default_factory=list)
    """Leftovers of interrupted work."""
    truncated_bytes: int = 0
    truncated_reason: str = ""
    rewritten_bytes: int = 0
    """Bytes of the tail that were made durable again."""
    damaged: list[DamagedRange] = field(default_factory=list)


@dataclass(slots=True)
class Recovered:
    """Everything a log starts from."""

    segments: Segments
    gaps: list[DamagedRange]
    start_offset: int
    checkpoint: CheckpointFile
    report: RecoveryReport
    slot: Checkpoint | None = None
    """The checkpoint, when a new one would say the same."""
    readable_offset: int = 0
    """What was readable according to the checkpoint. It may be above the present end."""
    named: bool = True
    """Whether the name of the active segment is known to be durable."""


def recover(disk: Disk, directory: str, config: LogConfig) -> Recovered:
    """Bring the directory into order and return what is in it."""
    disk.make_directory(directory)
    checkpoint, slot = open_checkpoint(disk, directory)
    try:
        return _Recovery(disk, directory, config, slot).run(checkpoint)
    except BaseException:
        checkpoint.close()
        raise


class _Recovery:
    """One recovery of one directory."""

    def __init__(
        self, disk: Disk, directory: str, config: LogConfig, slot: Checkpoint | None
    ) -> None:
        self._disk = disk
        self._directory = directory
        self._slot = slot
        self._flushed_offset = slot.flushed_offset if slot is not None else 0
        self._segments = Segments(disk, directory, config)
        self._gaps: list[DamagedRange] = []
        self._named = True
        self._report = RecoveryReport(clean=slot is not None and slot.clean)

    def run(self, checkpoint: CheckpointFile) -> Recovered:
        start = self._slot.start_offset if self._slot is not None else 0
        segments = self._segments
        try:
            bases = self._cut_torn(self._remove_old(self._tidy(), start, checkpoint))
            for number, base in enumerate(bases[:-1]):
                self._open_sealed(base, bases[number + 1])
            if bases:
                start = self._open_first(bases[0], start)
                self._open_last(bases[-1])
            else:
                self._start_empty(start)
            self._make_durable()
        except BaseException:
            segments.close()
            raise
        start = min(start, segments.active.facts.end_offset)
        self._gaps = [gap for gap in self._gaps if gap.end > start]
        damaged = [*self._gaps, *(damage for damage in segments.damaged() if damage.end >= start)]
        self._report.damaged = sorted(damaged, key=lambda damage: (damage.start, damage.position))
        slot = self._slot if self._is_settled(segments.active) else None
        readable = 0
        if self._slot is not None and self._slot.sure:
            # Otherwise a newer slot may be lost, about a truncation below what this slot says.
            readable = self._slot.readable_offset
        return Recovered(
            *(segments, self._gaps, start, checkpoint, self._report, slot, readable, self._named)
        )

    def _tidy(self) -> list[int]:
        """Remove leftovers, and return the base offsets of the segments that are there."""
        names = self._disk.list(self._directory)
        bases = [base for name in names if (base := _base_of(name, ".log")) is not None]
        known = dict.fromkeys(bases)
        for name in names:
            index_of = _base_of(name, ".index")
            if name.endswith(".tmp") or (index_of is not None and index_of not in known):
                self._remove(name)
        return bases

    def _remove(self, name: str) -> None:
        self._disk.remove(f"{self._directory}/{name}")
        self._report.removed_files.append(name)

    def _remove_old(self, bases: list[int], start: int, checkpoint: CheckpointFile) -> list[int]:
        """Finish an interrupted removal of segments below the start."""
        if self._slot is not None and len(bases) > 1 and bases[1] <= start:
            # The start may not be durable yet. Without it these segments would look lost.
            checkpoint.write(self._slot, sync=True)
        while len(bases) > 1 and bases[1] <= start:
            name = f"{bases.pop(0):020d}"
            if self._disk.exists(f"{self._directory}/{name}.index"):
                self._remove(f"{name}.index")
            self._remove(f"{name}.log")
        return bases

    def _cut_torn(self, bases: list[int]) -> list[int]:
        """End a log that seals lazily at the first sealed segment that is torn.

        The segments above the flushed offset are read, whatever their indexes say. Whole segments
        are made durable. Segments behind the first torn one have no history before them and are
        removed.
        """
        if self._slot is None or not self._slot.lazy:
            return bases
        for number, base in enumerate(bases[:-1]):
            following = bases[number + 1]
            if following <= self._flushed_offset:
                continue
            path = f"{self._directory}/{base:020d}.log"
            file = self._disk.open(path)
            try:
                index = self._segments.new_index(base)
                scan(file, path, index, file.size)
                self._report.scanned_bytes += file.size
                if self._flushed_offset <= index.end_offset < following:
                    self._remove_from(number + 1, bases)
                    return bases[: number + 1]
                self._rewrite(file, 0, file.size)
                file.sync()
            except UnknownFormat as error:
                raise UnknownFormat(f"{path}: {error}") from error
            finally:
                file.close()
        return bases

    def _remove_from(self, number: int, bases: list[int]) -> None:
        """Remove these segments, the newest first, durably before anything takes their place."""
        for base in reversed(bases[number:]):
            if self._disk.exists(f"{self._directory}/{base:020d}.index"):
                self._remove(f"{base:020d}.index")
            self._remove(f"{base:020d}.log")
        self._disk.sync_directory(self._directory)

    def _open_first(self, base: int, start: int) -> int:
        """Return the start of the log. A segment is dropped only after the checkpoint says so:
        any other missing segment is lost."""
        if start < base and self._slot is not None and self._slot.sure:
            self._add_gap(start, base, f"{self._directory}/{start:020d}.log")
            return start
        return max(start, base)

    def _open_sealed(self, base: int, next_base: int) -> None:
        segment = Segment(self._directory, base, self._segments.new_index(base))
        try:
            if self._slot is not None and self._slot.lazy and next_base > self._flushed_offset:
                raise CorruptFile(f"{segment.index_path} may be older than its segment")
            segment.facts = read_summary(self._disk, segment, self._segments.config.with_lanes)
        except CorruptFile:
            segment.facts = summarize(self._rebuild(segment, next_base))
        end = segment.facts.end_offset
        if end > next_base:
            raise CorruptFile(
                f"{segment.path} reaches offset {end}, into the next segment at {next_base}"
            )
        self._segments.add(segment)
        if end < next_base:
            self._add_gap(end, next_base, f"{self._directory}/{end:020d}.log")

    def _rebuild(self, segment: Segment, next_base: int) -> SegmentIndex:
        try:
            index = self._segments.rebuild(segment, next_base)
        except UnknownFormat as error:
            raise UnknownFormat(f"{segment.path}: {error}") from error
        finally:
            self._segments.forget(segment)
        self._report.rebuilt_indexes += 1
        self._report.scanned_bytes += index.size
        return index

    def _add_gap(self, start: int, end: int, path: str) -> None:
        self._gaps.append(DamagedRange(start, end, path, 0, 0, "no file holds these offsets"))

    def _open_last(self, base: int) -> None:
        index = self._segments.new_index(base)
        segment = Segment(self._directory, base, index)
        self._segments.add(segment)
        file = self._segments.file_of(segment)
        try:
            tail = scan(file, segment.path, index, file.size)
        except UnknownFormat as error:
            raise UnknownFormat(f"{segment.path}: {error}") from error
        self._report.scanned_bytes += file.size
        if index.end_offset >= self._flushed_offset:
            if tail is not None:
                self._report.truncated_bytes = file.size - tail.position
                self._report.truncated_reason = tail.reason
                file.truncate(tail.position)
            if self._disk.exists(segment.index_path):
                self._remove(f"{base:020d}.index")  # the segment may grow beyond that index
            return
        self._go_on_after_loss(segment, index, tail.reason if tail is not None else None)

    def _go_on_after_loss(self, segment: Segment, index: SegmentIndex, reason: str | None) -> None:
        """Handle durable offsets that are missing at the end: keep their numbers and start
        behind them."""
        file = self._segments.file_of(segment)
        if reason is None:
            self._add_gap(index.end_offset, self._flushed_offset, segment.path)
        else:
            index.add_damage(
                DamagedRange(
                    *(index.end_offset, self._flushed_offset, segment.path),
                    *(index.size, file.size, reason),
                )
            )
        file.sync()
        write_index_if_room(self._disk, segment, index)
        self._segments.create(self._flushed_offset)
        self._segments.summarize_sealed()

    def _start_empty(self, start: int) -> None:
        if start < self._flushed_offset:
            self._add_gap(start, self._flushed_offset, self._directory)
        self._segments.create(self._flushed_offset)

    def _make_durable(self) -> None:
        segment = self._segments.active
        slot, size = self._slot, segment.facts.size
        position = 0
        if slot is not None and slot.segment_base == segment.base_offset:
            position = min(slot.position, size)
        file = self._segments.file_of(segment)
        if position < size:
            self._rewrite(file, position, size)
        changed = position < size or self._report.truncated_bytes or not self._report.clean
        if changed and not self._is_settled(segment):
            file.sync()
            self._disk.sync_directory(self._directory)
            return
        if size or slot is None or not slot.lazy:
            return
        # A sync of the bytes of a segment also synced its name. This segment has no bytes yet.
        if self._segments.config.seal_sync:
            self._disk.sync_directory(self._directory)
        else:
            self._named = False  # left to the first sync: an idle log must not wait for a sync here

    def _is_settled(self, segment: Segment) -> bool:
        """Report whether the checkpoint covers all that is there, and nothing had to be done.

        Most logs of a killed node are idle like this: a thousand of them open without a sync.
        """
        slot, report = self._slot, self._report
        return (
            slot is not None
            and slot.sure
            and not slot.cutting
            and (slot.segment_base, slot.position) == (segment.base_offset, segment.facts.size)
            and slot.flushed_offset == segment.facts.end_offset
            and not report.truncated_bytes
            and not report.removed_files
        )

    def _rewrite(self, file: File, position: int, size: int) -> None:
        try:
            for start in range(position, size, WINDOW_BYTES):
                data = file.read(start, min(WINDOW_BYTES, size - start))
                file.write_at(start, data)
                self._report.rewritten_bytes += len(data)
        except DiskFull:
            # Only a file system that copies on write can say this here. The log must still open.
            return


def _base_of(name: str, suffix: str) -> int | None:
    digits = name.removesuffix(suffix)
    if digits == name or len(digits) != _NAME_DIGITS or not digits.isascii():
        return None
    return int(digits) if digits.isdigit() and int(digits) <= _OFFSET_MAX else None
