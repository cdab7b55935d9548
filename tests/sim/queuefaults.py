"""A queue directory worth damaging, and what must hold after the damage. (Test helper.)

`build` fills a queue whose four logs all have sealed and active segments, and leaves it as a clean
close or as the death of the process leaves it. `Harm`s change one file. `survey` opens the
directory with the clock far enough on for every delay to fire, takes everything out, puts something
new in, and opens it again.
"""

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from raftq.client.common.disk import File, RealDisk, RealFile
from raftq.client.wire.batch import decode
from raftq.node.queue.embedded import Queue
from raftq.node.queue.embedded.options import EmbeddedOptions

START = 1_700_000_000.0
LATER = START + 5000.0
OPTIONS = EmbeddedOptions(
    fsync="none", segment_bytes=4096, reserve_bytes=8192, max_deliveries=2, backoff=1.0,
    visibility_timeout=60.0, dedup_window=100_000.0, retention=None, dead_letter_retention=None,
)  # fmt: skip
LOGS = ("data", "delays", "dead", "ledger")


class QuickFile(RealFile):
    """A file whose syncs cost nothing: damage at rest does not depend on them."""

    def sync(self) -> None:
        pass


class QuickDisk(RealDisk):
    """The real disk without fsync."""

    def open(self, path: str, create: bool = False) -> File:
        file = RealDisk.open(self, path, create)
        assert isinstance(file, RealFile)
        twin = QuickFile(os.dup(file._fd), path)
        file.close()
        return twin

    def sync_directory(self, path: str) -> None:
        pass


class Clock:
    def __init__(self, now: float = START) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def open_queue(path: Path, now: float = START, options: EmbeddedOptions = OPTIONS) -> Queue:
    return Queue(path, options, disk=QuickDisk(), clock=Clock(now), keeper=False)


Pair = tuple[int, bytes]


@dataclass(slots=True)
class Survey:
    """What one look at a directory found."""

    default: list[Pair] = field(default_factory=list)
    audit: list[Pair] = field(default_factory=list)
    dead: list[Pair] = field(default_factory=list)
    attempts: dict[int, int] = field(default_factory=dict)
    damaged: int = 0
    ranges: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """Damaged offsets of each log, as the log names them."""
    problems: list[str] = field(default_factory=list)
    checkpoints: dict[str, int] = field(default_factory=dict)
    dedup_known: bool = False
    end_offset: int = 0

    @property
    def plain(self) -> dict[int, bytes]:
        """Messages that were in the data log when it was damaged, by offset."""
        return {offset: value for offset, value in self.default if value.startswith(b"plain")}

    @property
    def fired(self) -> list[bytes]:
        """Messages that became due during the survey."""
        return sorted(value for _, value in self.default if value.startswith(b"later"))


def build(path: Path, clean: bool) -> None:
    """Fill a queue; when not `clean`, leave the files as they are while it is open."""
    home = path if clean else path.with_name(path.name + "-open")
    queue = open_queue(home)
    clock = queue._clock
    assert isinstance(clock, Clock)
    queue.enqueue_batch([b"later %d" % n + b"." * 40 for n in range(4)], delay=1000.0)
    for number in range(70):
        queue.enqueue(b"plain %d" % number + b"." * 60)
    for number in range(70, 130, 20):
        queue.enqueue_batch([b"plain %d" % n + b"." * 60 for n in range(number, number + 20)])
    for number in range(4, 44):
        queue.enqueue(b"later %d" % number + b"." * 40, delay=1000.0 + number)
    queue.cancel("d1")
    for number in range(44, 48):
        queue.enqueue(b"later %d" % number, delay=10.0)
    for number in range(30):
        message = queue.dequeue()
        assert message is not None
        if number % 2:
            queue.reject(message, "bad", "x" * 50)
        else:
            queue.ack(message)
    queue.ack_batch(queue.dequeue_batch(3))
    returned = queue.dequeue()
    assert returned is not None
    queue.nack(returned, 5.0)
    queue.checkpoint("half")
    queue.enqueue(b"plain once", dedup_id="once")
    with queue.transaction() as tx:
        tx.enqueue(b"plain tx")
        tx.ack(queue.dequeue())  # type: ignore[arg-type]
    queue.ack_batch(queue.dequeue_batch(7, group="audit"))
    clock.now += 20.0
    queue.dequeue()  # in flight when the process ends; also fires what is due
    if clean:
        queue.close()
        return
    shutil.copytree(home, path)
    queue.close()
    shutil.rmtree(home)


def survey(path: Path, now: float = LATER) -> Survey:
    """Open, take everything out, work on, reopen: a queue that survived does all of this."""
    found = Survey()
    queue = open_queue(path, now)
    try:
        found.checkpoints = queue.checkpoints()
        found.dedup_known = queue.enqueue(b"again", dedup_id="once") != str(
            queue.stats().end_offset - 1
        )
        found.default = drain(queue, "default", found.attempts)
        found.audit = drain(queue, "audit", {})
        found.dead = [(letter.dead_offset, letter.value) for letter in queue.dead_letters()]
        found.problems = queue.verify()
        found.damaged = queue.stats().damaged
        found.ranges = damaged_ranges(queue)
        works_on(queue)
        found.end_offset = queue.stats().end_offset
    finally:
        queue.close()
    with open_queue(path, now) as again:
        assert drain(again, "default", {}) == [], "what was acked after the damage came back"
        assert again.stats().end_offset == found.end_offset
        works_on(again)
    return found


def damaged_ranges(queue: Queue) -> dict[str, list[tuple[int, int]]]:
    return {
        name: [(one.start, one.end) for one in log.damaged]
        for name, log in queue._files.logs.items()
    }


def drain(queue: Queue, group: str, attempts: dict[int, int]) -> list[Pair]:
    pairs = []
    for _ in range(1000):
        messages = queue.dequeue_batch(7, group=group)
        if not messages:
            return pairs
        pairs += [(message.offset, message.value) for message in messages]
        attempts.update((message.offset, message.attempt) for message in messages)
        queue.ack_batch(messages)
    raise AssertionError("the queue never becomes empty")


def works_on(queue: Queue) -> None:
    """A message goes in, comes out, and is gone."""
    end = queue.stats().end_offset
    assert queue.enqueue(b"after") == str(end)
    message = queue.dequeue()
    assert message is not None
    assert (message.offset, message.value) == (end, b"after")
    queue.ack(message)
    assert queue.dequeue() is None


Harm = Callable[[Path], None]


def flip(position: Callable[[int], int], bit: int = 0) -> Harm:
    """Flip a bit at a place that is computed from the size of the file."""

    def harm(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position(len(data))] ^= 1 << bit
        path.write_bytes(data)

    return harm


def cut(size: Callable[[int], int]) -> Harm:
    def harm(path: Path) -> None:
        os.truncate(path, size(path.stat().st_size))

    return harm


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def delete(path: Path) -> None:
    path.unlink()


def noise(path: Path) -> None:
    path.write_bytes(b"\xffRQ\x01" * (path.stat().st_size // 4 + 1))


HARMS: dict[str, Harm] = {
    "first bit flipped": flip(lambda size: 0),
    "bit of a header flipped": flip(lambda size: min(6, size - 1), bit=7),
    "bit of a body flipped": flip(lambda size: min(100, size - 1), bit=3),
    "bit in the middle flipped": flip(lambda size: size // 2, bit=5),
    "last bit flipped": flip(lambda size: size - 1, bit=7),
    "emptied": cut(lambda size: 0),
    "cut in half": cut(lambda size: size // 2),
    "one byte cut off": cut(lambda size: max(size - 1, 0)),
    "deleted": delete,
    "zeros": zeros,
    "noise": noise,
}


def segment_files(path: Path, log: str) -> list[Path]:
    return sorted((path / log).glob("*.log"))


def batch_positions(file: Path) -> list[tuple[int, int, int]]:
    """(byte position, base offset, end offset) of each batch of a segment."""
    data, at, found = file.read_bytes(), 0, []
    while at < len(data):
        batch = decode(data, at)
        found.append((at, batch.base_offset, batch.end_offset))
        at += batch.length
    return found
