"""Shell: the storage engine against bare system calls."""

from pathlib import Path

from raftq.client.common.disk import RealDisk
from raftq.client.wire.batch import encode
from raftq.node.storage.config import LogConfig
from raftq.node.storage.log import Log
from raftq_bench.bare import KEEP_BYTES, BareFiles
from raftq_bench.report import Bar, Result
from raftq_bench.runner import MIB, Settings, Side, interleave, make_batches, make_values

RATIO_MIN = 0.6
NOW_MS = 1_700_000_000_000


class Appender:
    """A log that gets the same batches over and over."""

    def __init__(self, directory: Path) -> None:
        self.log = Log.open(RealDisk(), str(directory), LogConfig(segment_age_ms=None), NOW_MS)
        self._batches = make_batches(make_values())
        self._encoded = [encode(values, timestamps=NOW_MS) for values in self._batches]

    @property
    def encoded(self) -> list[bytearray]:
        return self._encoded

    def append(self) -> int:
        """Appends all the batches once, encoded beforehand; returns the bytes."""
        append = self.log.append
        for batch in self._encoded:
            append(batch)
        return sum(map(len, self._encoded))

    def encode_and_append(self) -> int:
        append, size = self.log.append, 0
        for values in self._batches:
            batch = encode(values, timestamps=NOW_MS)
            append(batch)
            size += len(batch)
        return size

    def rest(self) -> None:
        """Writes everything to the disk before the next side starts, and limits what is kept on
        it."""
        self.log.sync()
        self.log.retain(NOW_MS, bytes_max=KEEP_BYTES, below=self.log.end_offset)


def bare_side(files: BareFiles, encoded: list[bytearray]) -> Side:
    size = sum(map(len, encoded))

    def step() -> int:
        for batch in encoded:
            files.append(batch)
        return size

    return Side(step, files.rest)


def measure(settings: Settings) -> list[Result]:
    with settings.scratch() as path:
        ready, fresh = Appender(path / "ready"), Appender(path / "fresh")
        bare = BareFiles(path / "bare")
        synced = BareFiles(path / "synced", sync_when_full=True)
        timings = interleave(
            settings,
            {
                "writev": bare_side(bare, ready.encoded),
                "append": Side(ready.append, ready.rest),
                "encode_append": Side(fresh.encode_and_append, fresh.rest),
                "writev_sync_when_full": bare_side(synced, ready.encoded),
            },
        )
        bare.close()
        synced.close()
        for appender in (ready, fresh):
            appender.log.close(clean=False)
    rates = {name: timing.rate / MIB for name, timing in timings.items()}
    detail = {name: timing.facts() for name, timing in timings.items()}
    about = {
        "append": ("Log.append of 1,000-record batches, encoded before", Bar("ratio", RATIO_MIN)),
        "encode_append": ("encode + Log.append of 1,000-record batches", None),
    }
    synced_text = (
        f"writev with fdatasync of each full file, as the log does: "
        f"{rates['writev_sync_when_full']:,.0f} MiB/s"
    )
    return [
        Result(
            figure="append",
            title=title,
            unit="MiB/s",
            value=rates[name],
            measured_s=timings[name].seconds,
            fsync="none (each full 64 MiB file is synced when it is sealed)",
            baseline_name="os.writev of the same bytes, same files and page cache, no sync at all",
            baseline=rates["writev"],
            bar=bar,
            notes=[synced_text],
            detail=detail,
        ).judge(settings)
        for name, (title, bar) in about.items()
    ]
