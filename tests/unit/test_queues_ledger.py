"""The ledger of a led partition: batches, snapshots and what a replay makes of a cut one."""

import asyncio
from collections.abc import Iterable
from random import Random

import pytest
from fakestrands import FakePartition
from queuefakes import pause, run

from raftq.client.wire.errors import CorruptFile, NotLeader, RequestTimeout
from raftq.node.queues import ledger as ledger_module
from raftq.node.queues.ledger import Ledger


class Numbers:
    """A chapter: a list of what was written. A snapshot is the list in one record."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def replay(self, content: bytes) -> None:
        if content.startswith(b"="):
            self.seen = content[1:].split(b",")
        else:
            self.seen.append(content)

    def snapshot(self) -> Iterable[bytes]:
        yield b"=" + b",".join(self.seen)


class Book:
    """A ledger with one chapter, through its leaders."""

    def __init__(self, partition: FakePartition) -> None:
        self.partition = partition
        self.lost: list[BaseException] = []
        self.open()

    def open(self) -> None:
        led = self.partition.led or self.partition.lead()
        self.numbers = Numbers()
        self.ledger = Ledger(led.ledger, led.loop, self.lost.append)
        self.ledger.keep({b"D": self.numbers})
        for _ in self.ledger.replay():
            pass

    def write(self, content: bytes, patient: bool = False) -> "asyncio.Future[None]":
        self.numbers.seen.append(content)
        return self.ledger.write([b"D" + content], patient)

    @property
    def batches(self) -> int:
        log = self.partition.strands["ledger"].log
        return len(list(log.batches(log.start_offset)))


def test_what_is_written_in_one_turn_is_one_batch() -> None:
    async def main() -> None:
        book = Book(FakePartition())
        first = book.write(b"1")
        assert book.write(b"2") is first
        await first
        assert book.batches == 1
        book.open()
        assert book.numbers.seen == [b"1", b"2"]

    run(main())


def test_the_patient_wait_for_the_batch_under_way_and_share_the_next() -> None:
    async def main() -> None:
        book = Book(FakePartition(lag_s=None))
        first = book.write(b"1", patient=True)
        await pause(0.01)
        assert book.batches == 1  # nothing was under way
        rest = []
        for number in range(5):
            rest.append(book.write(b"p%d" % number, patient=True))
            await pause(0.01)
        assert book.batches == 1
        book.partition.replicate()
        await first
        await pause(0.01)
        assert book.batches == 2
        book.write(b"patient", patient=True)
        book.write(b"urgent")  # takes along who waits, in order
        await pause(0.01)
        assert book.batches == 3
        book.partition.replicate()
        await asyncio.gather(*rest)
        book.open()
        assert book.numbers.seen[-2:] == [b"patient", b"urgent"]

    run(main())


def test_a_barrier_waits_for_everything_so_far() -> None:
    async def main() -> None:
        book = Book(FakePartition(lag_s=None))
        assert book.ledger.barrier().done()
        book.write(b"1")
        waiting = [book.ledger.barrier()]
        await pause(0.01)
        waiting.append(book.ledger.barrier())
        await pause(0.01)
        assert not any(one.done() for one in waiting)
        book.partition.replicate()
        await asyncio.gather(*waiting)

    run(main())


def test_an_answer_that_takes_too_long_is_unknown() -> None:
    async def main() -> None:
        book = Book(FakePartition(lag_s=None))
        with pytest.raises(RequestTimeout) as caught:
            await book.write(b"1")
        assert caught.value.outcome == "unknown"
        book.partition.end_epoch()
        with pytest.raises(NotLeader):
            await book.write(b"2")
        assert not book.lost

    run(main())


def test_a_long_record_is_cut_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(ledger_module, "BATCH_BYTES", 2500)

    async def main() -> None:
        book = Book(FakePartition())
        contents = [b"a", bytes(5000), b"P", bytes(1000), b"z"]
        for content in contents:
            book.write(content)
        await book.ledger.barrier()
        assert book.batches > 2
        book.open()
        assert book.numbers.seen == contents

    run(main())


@pytest.mark.parametrize("seed", range(30))
def test_a_ledger_cut_anywhere_says_what_was_replicated(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long records, snapshots that are cut short, leaders that change in between."""
    monkeypatch.setattr(ledger_module, "PIECE_BYTES", 50)
    monkeypatch.setattr(ledger_module, "BATCH_BYTES", 150)
    monkeypatch.setattr(ledger_module, "SNAPSHOT_RECORDS", 12)

    async def main() -> None:
        rng = Random(seed)
        partition = FakePartition(lag_s=None, segment_bytes=4096)
        book = Book(partition)
        told: list[bytes] = []
        number = 0
        for _ in range(60):
            for _ in range(rng.randint(1, 3)):
                number += 1
                book.write(b"%d" % number * rng.choice((1, 40)))
            await pause(0.001)
            if rng.random() < 0.6:
                partition.replicate()
                await pause(0.001)
                told = list(book.numbers.seen)
            if rng.random() < 0.2:
                partition.fail_over(rng).settle()
                book.open()
                seen = book.numbers.seen
                assert seen[: len(told)] == told
                told = list(seen)
        assert partition.strands["ledger"].log.start_offset > 0
        assert not book.lost

    run(main())


def test_a_ledger_without_its_beginning_is_refused() -> None:
    async def main() -> None:
        book = Book(FakePartition())
        for number in range(3):
            await book.write(b"%d" % number)
        book.partition.strands["ledger"].log.truncate_prefix(1)
        with pytest.raises(CorruptFile, match="no beginning"):
            book.open()

    run(main())
