"""Shell: the memory of a consumer that streams far more than fits in it."""

from raftq_bench.child import run_child
from raftq_bench.publish import data_files
from raftq_bench.reopen import cool_down
from raftq_bench.report import Bar, Result
from raftq_bench.runner import GIB, MIB, VALUE_BYTES, Settings

GROWTH_MB_MAX = 30.0


def measure(settings: Settings) -> list[Result]:
    size = settings.size(4 * GIB, 32 * MIB)
    sample = settings.size(256 * MIB, 4 * MIB)
    with settings.scratch() as path:
        directory = path / "queue"
        run_child("fill", str(directory), size)
        stored = sum(file.stat().st_size for file in data_files(directory))
        cool_down(directory)
        found = run_child("stream", str(directory), sample, settings.seconds)
    samples = found["rss_mb"]
    rate = found["bytes"] / VALUE_BYTES / found["seconds"]
    return [
        Result(
            figure="stream",
            title=f"memory growth of a consumer that streams {size / GIB:g} GiB",
            unit="MB",
            value=samples[-1] - samples[0],
            measured_s=found["seconds"],
            fsync="interval (1 s)",
            bar=Bar("value", GROWTH_MB_MAX, at_most=True),
            notes=[
                f"VmRSS every {sample // MIB} MiB: first {samples[0]:.0f} MB, "
                f"highest {max(samples):.0f} MB, last {samples[-1]:.0f} MB",
                f"{rate:,.0f} messages/s by dequeue_batch(500) + ack_batch, read from the disk "
                f"({stored / GIB:.2f} GiB of files, none in the page cache at the start)",
            ],
            detail={**found, "rate": round(rate, 1)},
        ).judge(settings)
    ]
