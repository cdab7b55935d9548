"""The bytes of everything that a queue writes to its ledger and delays logs.

A directory of today must open with every later version, so these bytes never change.
"""

import asyncio

import pytest

from raftq.client.wire.batch import Batch
from raftq.node.queue.core import copy_ledger as copies
from raftq.node.queue.core import entries
from raftq.node.queue.core.codec import encode_stored
from raftq.node.queue.core.copy_ledger import CopyLedger
from raftq.node.queue.embedded import ledger as embedded
from raftq.node.queue.leader import delay_marks
from raftq.node.queue.leader.stored_offsets import StoredOffsets, StoredPosition

NONCE = (1 << 62) + 5

CLOCK = entries.ClockEntry(None, 3.0, -1.5)
ENTRIES: dict[str, tuple[entries.Entry, str]] = {
    "granted": (
        entries.GrantedEntry(
            "g",
            1700000000.5,
            "worker",
            (
                entries.GrantRow(2, 0, 10, 1, NONCE, 1700000030.5, 1700000000.5, True),
                entries.GrantRow(0, 12, 13, 2, 7, 31.0, 1.25, False),
            ),
        ),
        "919501a167cb41d954fc40200000a6776f726b6572929802000a01cf4000000000000005"
        "cb41d954fc47a00000cb41d954fc40200000c398000c0d0207cb403f000000000000cb3ff4000000000000c2",
    ),
    "settled": (
        entries.SettledEntry("g", entries.ACKED, ((NONCE, 0, 3), (0, 4, 70000))),
        "919402a167009293cf40000000000000050003930004ce00011170",
    ),
    "returned": (
        entries.ReturnedEntry(
            "g",
            entries.POSTPONED,
            (
                entries.ReturnRow(NONCE, 3, 5, 0, 12.5),
                entries.ReturnRow(9, 6, 7, 2, 1700000000.0),
            ),
        ),
        "919403a167019295cf4000000000000005030500cb40290000000000009509060702cb41d954fc40000000",
    ),
    "extended": (
        entries.ExtendedEntry("g", (entries.ExtendRow(NONCE, 5, 6, 99.0),)),
        "919304a1679194cf40000000000000050506cb4058c00000000000",
    ),
    "reset": (entries.ResetEntry("g", (1 << 63) - 1), "919305a167cf7fffffffffffffff"),
    "paused": (entries.PausedEntry("g", True), "919306a167c3"),
    "created": (entries.CreatedEntry("grüppe", 300), "919307a76772c3bc707065cd012c"),
    "deleted": (entries.DeletedEntry("g"), "919208a167"),
    "clipped": (entries.ClippedEntry(None, 65536), "919309c0ce00010000"),
    "snapshot": (
        entries.SnapshotEntry(
            "g",
            entries.GroupSnapshot(
                (7, ((0, b"\x00\x05"), (1, 3))),
                (20, 20, 20, 20, 128),
                False,
                (1, 2, 3, 4, 5, 6, 7, 8, 70000),
                (entries.WaitRow(2, 11, 12, 1, 5.5, 4.5),),
                (
                    entries.LeaseRow(
                        *(NONCE, "w", 2, 13, 17, 1, 4.5, 4.5, 34.5),
                        runs=((13, 14), (15, 17)),
                        deadlines=((15, 16, 99.5),),
                    ),
                ),
            ),
        ),
        "91930aa167969207929200c40200059201039514141414cc80c2990102030405060708ce00011170"
        "9196020b0c01cb4016000000000000cb4012000000000000"
        "919bcf4000000000000005a177020d1101cb4012000000000000cb4012000000000000"
        "cb404140000000000092920d0e920f1191930f10cb4058e00000000000",
    ),
    "clock": (CLOCK, "91940bc0cb4008000000000000cbbff8000000000000"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_a_delivery_entry_keeps_its_bytes(name: str) -> None:
    entry, golden = ENTRIES[name]
    assert entries.pack([entry]).hex() == golden
    assert entries.unpack(bytes.fromhex(golden)) == [entry]


TARGET = ("jobs.dlq", 3)
STREAM = copies.CopyStream(TARGET, epoch=2, sequence=40)
SENDING = copies.CopyStream(TARGET, open=copies.OpenBatch(5, 2, 40))
COPIES: dict[str, tuple[copies.CopyEntry, str]] = {
    "producer": (copies.CopyProducer(70000), "9205ce00011170"),
    "added": (
        copies.CopiesAdded(
            *TARGET,
            (
                copies.CopyRow(0, 10, 2, None),
                copies.CopyRow(
                    11, 12, 0, copies.Death("g", NONCE, 3, 1.5, 2.5, "max_deliveries", "boom")
                ),
            ),
        ),
        "9401a86a6f62732e646c71039294000a02c0940b0c0097a167cf400000000000000503"
        "cb3ff8000000000000cb4004000000000000ae6d61785f64656c69766572696573a4626f6f6d",
    ),
    "batch": (STREAM.next_batch(9), "9602a86a6f62732e646c7103090228"),
    "renumbered": (SENDING.renumbered(3), "9602a86a6f62732e646c7103050300"),
    "shortened": (SENDING.shortened(1), "9602a86a6f62732e646c7103010228"),
    "parked": (
        copies.CopiesParked(*TARGET, 1, "too_large"),
        "9506a86a6f62732e646c710301a9746f6f5f6c61726765",
    ),
    "unparked": (copies.CopiesUnparked(*TARGET), "9307a86a6f62732e646c7103"),
    "done": (copies.CopiesDone(*TARGET, 300), "9403a86a6f62732e646c7103cd012c"),
    "dropped": (copies.CopiesDropped(*TARGET), "9304a86a6f62732e646c7103"),
}


@pytest.mark.parametrize("name", COPIES)
def test_an_entry_about_copies_keeps_its_bytes(name: str) -> None:
    entry, golden = COPIES[name]
    assert encode_stored(entry).hex() == golden
    from_entry, from_bytes = CopyLedger(), CopyLedger()
    for ledger in (from_entry, from_bytes):
        ledger.apply(COPIES["added"][0])
    from_entry.apply(entry)
    from_bytes.replay(bytes.fromhex(golden))
    assert from_bytes.streams == from_entry.streams
    assert from_bytes.producer_id == from_entry.producer_id


def test_a_snapshot_of_copies_keeps_its_bytes() -> None:
    ledger = CopyLedger()
    for name in ("producer", "added", "batch", "parked"):
        ledger.apply(COPIES[name][0])
    content = list(ledger.snapshot())
    assert [record.hex() for record in content] == [
        "9205ce00011170",
        "9401a86a6f62732e646c710391940001" + "02c0",
        "9506a86a6f62732e646c710301a9746f6f5f6c61726765",
        "9401a86a6f62732e646c71039294010a02c0940b0c0097a167cf400000000000000503"
        "cb3ff8000000000000cb4004000000000000ae6d61785f64656c69766572696573a4626f6f6d",
        "9602a86a6f62732e646c7103000231",
    ]
    again = CopyLedger()
    for record in content:
        again.replay(record)
    assert list(again.snapshot()) == content


class KeptRecords:
    """A ledger that only keeps what is written to it."""

    def __init__(self) -> None:
        self.records: list[bytes] = []

    def write(self, records: list[bytes], patient: bool = False) -> "asyncio.Future[None] | None":
        self.records += records
        return None


def test_stored_offsets_keep_their_bytes() -> None:
    ledger = KeptRecords()
    offsets = StoredOffsets(ledger)  # type: ignore[arg-type]
    offsets.store("g", 70000, 3, "m-1", 9)
    offsets.store("h", 5, -1, "")
    offsets.forget("g")
    assert [record.hex() for record in ledger.records] == [
        "4f9196a167ce0001117003a36d2d31c309",
        "4f9196a16805ffa0c200",
        "4f9191a167",
    ]
    again = StoredOffsets(ledger)  # type: ignore[arg-type]
    for record in ledger.records[:2]:
        again.replay(record[1:])
    assert again.positions == {
        "g": StoredPosition(70000, 3, "m-1", True, 9),
        "h": StoredPosition(5, -1, "", False, 0),
    }
    snapshot = [record.hex() for record in again.snapshot()]
    assert snapshot == ["9296a167ce0001117003a36d2d31c30996a16805ffa0c200"]
    again.replay(ledger.records[2][1:])
    assert list(again.positions) == ["h"]


MARKS = {
    "cancelled": (
        delay_marks.cancelled([1, 300, 1 << 40]),
        "9201c41801000000000000002c010000000000000000000000010000",
    ),
    "fired": (
        delay_marks.fired([([1, 2], 10), ([3], 70000)]),
        "92029292c410010000000000000002000000000000000a92c4080300000000000000ce00011170",
    ),
    "seen": (delay_marks.seen(70000), "9203ce00011170"),
    "rewound": (delay_marks.rewound(5), "920405"),
}


@pytest.mark.parametrize("name", MARKS)
def test_a_mark_in_a_delays_log_keeps_its_bytes(name: str) -> None:
    batch, golden = MARKS[name]
    assert [value.hex() for value in Batch(bytes(batch)).values()] == [golden]


SHELL: dict[str, tuple[embedded.QueueEntry, str]] = {
    "checkpoint": (embedded.CheckpointMade("noon", 70000), "53919301a46e6f6f6ece00011170"),
    "forget": (embedded.GroupForgotten("g"), "53919202a167"),
    "dead_done": (embedded.DeadLettersDone([(0, 3), (5, 300)]), "53919203929200039205cd012c"),
    "intent": (
        embedded.IntentDecided(
            [("data", 8, 3, b"batch"), ("dead", 0, 1, b"")],
            entries.pack([CLOCK]),
            [("id", "12", 1700000000000), ("other", "d3", 5)],
            [(1, 2)],
        ),
        "539195049294a4646174610803c405626174636894a4646561640001c400"
        "c41691940bc0cb4008000000000000cbbff8000000000000"
        "9293a26964a23132cf0000018bcfe5680093a56f74686572a264330591920102",
    ),
    "opened": (
        embedded.QueueOpened({"data": 70000, "delays": 3, "dead": 0}),
        "5391920583a464617461ce00011170a664656c61797303a46465616400",
    ),
    "state": (
        embedded.QueueSnapshot(
            [("noon", 7)],
            [("id", "12", 1700000000000)],
            (7, ((0, b"\x00\x05"), (1, 3))),
        ),
        "539194069192a46e6f6f6e079193a26964a23132cf0000018bcfe568009207929200c4020005920103",
    ),
}


@pytest.mark.parametrize("name", SHELL)
def test_an_entry_of_an_embedded_queue_keeps_its_bytes(name: str) -> None:
    entry, golden = SHELL[name]
    assert embedded.pack_shell([entry]).hex() == golden
    assert embedded._decode(bytes.fromhex(golden)[1:]) == [entry]


def test_a_delivery_record_of_an_embedded_queue_keeps_its_bytes() -> None:
    golden = "4491940bc0cb4008000000000000cbbff8000000000000"
    assert embedded.pack_delivery([CLOCK]).hex() == golden
