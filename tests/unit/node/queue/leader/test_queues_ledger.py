"""The ledger of a led partition: batches, snapshots and what a replay makes of a cut one."""

import asyncio
from collections.abc import Iterable
from random import Random

import pytest
from fake_partition_logs import FakePartition
from fake_queue import pause, run

from raftq.client.common.errors import CorruptFile, NotLeader, RequestTimeout
from raftq.node.queue.leader import ledger as ledger_module
from raftq.node.queue.leader.ledger import Ledger


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
        leadership = self.partition.leadership or self.partition.lead()
        self.numbers = Numbers()
        self.ledger = Ledger(leadership.ledger, leadership.loop, self.lost.append)
        self.ledger.set_sections({b"D": self.numbers})
        for _ in self.ledger.replay():
            pass

    def write(self, content: bytes, patient: bool = False) -> "asyncio.Future[None]":
        self.numbers.seen.append(content)
        return self.ledger.write([b"D" + content], patient)

    @property
    def batches(self) -> int:
        log = self.partition.logs["ledger"].log
        return len(list(log.batches(log.start_offset)))


def test_what_is_written_in_one_turn_is_one_batch() -> None:
    async def main() -> None:
        pending_delays = Book(FakePartition())
        first = pending_delays.write(b"1")
        assert pending_delays.write(b"2") is first
        await first
        assert pending_delays.batches == 1
        pending_delays.open()
        assert pending_delays.numbers.seen == [b"1", b"2"]

    run(main())


def test_the_patient_wait_for_the_batch_under_way_and_share_the_next() -> None:
    async def main() -> None:
        pending_delays = Book(FakePartition(lag_s=None))
        first = pending_delays.write(b"1", patient=True)
        await pause(0.01)
        assert pending_delays.batches == 1  # nothing was under way
        rest = []
        for number in range(5):
            rest.append(pending_delays.write(b"p%d" % number, patient=True))
            await pause(0.01)
        assert pending_delays.batches == 1
        pending_delays.partition.replicate()
        await first
        await pause(0.01)
        assert pending_delays.batches == 2
        pending_delays.write(b"patient", patient=True)
        pending_delays.write(b"urgent")  # takes along who waits, in order
        await pause(0.01)
        assert pending_delays.batches == 3
        pending_delays.partition.replicate()
        await asyncio.gather(*rest)
        pending_delays.open()
        assert pending_delays.numbers.seen[-2:] == [b"patient", b"urgent"]

    run(main())


def test_a_barrier_waits_for_everything_so_far() -> None:
    async def main() -> None:
        pending_delays = Book(FakePartition(lag_s=None))
        assert pending_delays.ledger.barrier().done()
        pending_delays.write(b"1")
        waiting = [pending_delays.ledger.barrier()]
        await pause(0.01)
        waiting.append(pending_delays.ledger.barrier())
        await pause(0.01)
        assert not any(one.done() for one in waiting)
        pending_delays.partition.replicate()
        await asyncio.gather(*waiting)

    run(main())


def test_an_answer_that_takes_too_long_is_unknown() -> None:
    async def main() -> None:
        pending_delays = Book(FakePartition(lag_s=None))
        with pytest.raises(RequestTimeout) as caught:
            await pending_delays.write(b"1")
        assert caught.value.outcome == "unknown"
        pending_delays.partition.end_epoch()
        with pytest.raises(NotLeader):
            await pending_delays.write(b"2")
        assert not pending_delays.lost

    run(main())


def test_a_long_record_is_cut_and_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "PIECE_BYTES", 1000)
    monkeypatch.setattr(ledger_module, "BATCH_BYTES", 2500)

    async def main() -> None:
        pending_delays = Book(FakePartition())
        contents = [b"a", bytes(5000), b"P", bytes(1000), b"z"]
        for content in contents:
            pending_delays.write(content)
        await pending_delays.ledger.barrier()
        assert pending_delays.batches > 2
        pending_delays.open()
        assert pending_delays.numbers.seen == contents

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
        pending_delays = Book(partition)
        told: list[bytes] = []
        number = 0
        for _ in range(60):
            for _ in range(rng.randint(1, 3)):
                number += 1
                pending_delays.write(b"%d" % number * rng.choice((1, 40)))
            await pause(0.001)
            if rng.random() < 0.6:
                partition.replicate()
                await pause(0.001)
                told = list(pending_delays.numbers.seen)
            if rng.random() < 0.2:
                partition.fail_over(rng).settle()
                pending_delays.open()
                seen = pending_delays.numbers.seen
                assert seen[: len(told)] == told
                told = list(seen)
        assert partition.logs["ledger"].log.start_offset > 0
        assert not pending_delays.lost

    run(main())


def test_a_ledger_without_its_beginning_is_refused() -> None:
    async def main() -> None:
        pending_delays = Book(FakePartition())
        for number in range(3):
            await pending_delays.write(b"%d" % number)
        pending_delays.partition.logs["ledger"].log.truncate_prefix(1)
        with pytest.raises(CorruptFile, match="no beginning"):
            pending_delays.open()

    run(main())
