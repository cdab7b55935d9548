"""What clients did to a cluster and what they were told, and the checkers that judge it. (Pure.)

A history knows nothing of how the cluster runs, so the same checkers judge a simulated one and real
processes. Every record that is sent has a value of its own. A send ends

    ok        acknowledged, at an offset
    failed    it certainly did not happen
    unknown   it may have happened, or may happen later

`judge(history, final)` compares it with a full read of every partition after everything has healed
and names the anomalies. Retention may have cut off beginnings (`starts`), a topic may have been
deleted and created anew (`since`): what was sent to it earlier may be gone. And some records may be
there again (`repeats`), where that is promised to nobody.

    lost           acknowledged by all and not in the log
    misplaced      acknowledged at one offset and kept at another
    duplicated     in the log twice
    reordered      a producer's records of one partition are not in the order they were sent
    phantom        in the log and never sent
    revived        in the log though it certainly failed
    two values     different values were seen at one offset
    vanished       a reader saw it, and it is not in the log any more
    backwards      a reader got an offset twice, or a smaller one after a larger one
    skipped        a reader passed over an offset
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Partition = tuple[str, int]
Status = Literal["open", "ok", "failed", "unknown"]
Log = Sequence[tuple[int, bytes]]


@dataclass(slots=True)
class Send:
    """One record on its way."""

    producer: str
    partition: Partition
    value: bytes
    acks: str
    at: float
    status: Status = "open"
    offset: int | None = None
    ended: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" at {self.offset}"
        return (
            f"{self.value!r} of {self.partition[0]}/{self.partition[1]} sent at {self.at:.3f} with "
            f"acks={self.acks}: {self.status}{where} at {self.ended:.3f} {self.error}".rstrip()
        )


@dataclass(frozen=True, slots=True)
class Read:
    reader: str
    partition: Partition
    offset: int
    value: bytes
    at: float


@dataclass(frozen=True, slots=True)
class Anomaly:
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(slots=True)
class History:
    """All sends and reads, each in the order in which they began."""

    sends: list[Send] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)

    def send(self, producer: str, partition: Partition, value: bytes, acks: str, at: float) -> Send:
        one = Send(producer, partition, value, acks, at)
        self.sends.append(one)
        return one

    def ok(self, one: Send, offset: int, at: float) -> None:
        one.status, one.offset, one.ended = "ok", offset, at

    def failed(self, one: Send, outcome: Literal["failed", "unknown"], why: str, at: float) -> None:
        one.status, one.error, one.ended = outcome, why, at

    def read(self, one: Read) -> None:
        self.reads.append(one)

    def counts(self) -> dict[str, int]:
        found = {"ok": 0, "failed": 0, "unknown": 0, "open": 0}
        for one in self.sends:
            found[one.status] += 1
        return found | {"reads": len(self.reads)}


def judge(
    history: History,
    final: Mapping[Partition, Log],
    starts: Mapping[Partition, int] | None = None,
    since: Mapping[str, float] | None = None,
    repeats: Container[tuple[Partition, int]] = (),
) -> list[Anomaly]:
    """Every anomaly of the history, given what the partitions hold in the end.

    `starts`: the first offset of partitions that retention may have cut. `since`: of topics that
    were created anew, the time from which on what was sent must be there. `repeats`: places of
    records that may also be at an earlier offset.
    """
    starts, since = starts or {}, since or {}
    found = [*check_sends(history, final, starts, since), *check_logs(history, final, repeats)]
    return [*found, *check_reads(history, final, starts)]


def check_sends(
    history: History,
    final: Mapping[Partition, Log],
    starts: Mapping[Partition, int],
    since: Mapping[str, float],
) -> Iterator[Anomaly]:
    """Acknowledged records are where they were said to be; failed ones are nowhere."""
    places: dict[Partition, dict[bytes, list[int]]] = {}
    for partition, log in final.items():
        found = places.setdefault(partition, {})
        for offset, value in log:
            found.setdefault(value, []).append(offset)
    for one in history.sends:
        if one.at < since.get(one.partition[0], 0.0):
            continue
        kept = places.get(one.partition, {}).get(one.value, [])
        if not kept and one.offset is not None and one.offset < starts.get(one.partition, 0):
            continue
        if one.status == "ok" and one.acks == "all":
            if not kept:
                yield Anomaly("lost", str(one))
            elif one.offset not in kept:
                yield Anomaly("misplaced", f"{one}, kept at {kept}")
        elif one.status == "failed" and kept:
            yield Anomaly("revived", f"{one}, kept at {kept}")


def check_logs(
    history: History,
    final: Mapping[Partition, Log],
    repeats: Container[tuple[Partition, int]] = (),
) -> Iterator[Anomaly]:
    """What is in the log was sent, once, and in this order."""
    sent = {(one.partition, one.value): (at, one) for at, one in enumerate(history.sends)}
    for partition, log in final.items():
        seen: dict[bytes, int] = {}
        newest: dict[str, tuple[int, bytes]] = {}
        for offset, value in log:
            where = f"{value!r} at {offset} of {partition}"
            if value in seen:
                if (partition, offset) in repeats:
                    continue
                yield Anomaly("duplicated", f"{where}, first at {seen[value]}")
                continue
            seen[value] = offset
            known = sent.get((partition, value))
            if known is None:
                yield Anomaly("phantom", where)
                continue
            at, one = known
            if one.status == "unknown":
                continue  # it may happen later than whatever its producer sent after giving it up
            before = newest.get(one.producer)
            if before is not None and at < before[0]:
                yield Anomaly("reordered", f"{where} comes after {before[1]!r}")
            newest[one.producer] = (at, value)


def check_reads(
    history: History, final: Mapping[Partition, Log], starts: Mapping[Partition, int]
) -> Iterator[Anomaly]:
    """Readers saw what stays, every offset of it, once and in order."""
    kept = {(partition, offset): value for partition, log in final.items() for offset, value in log}
    seen: dict[tuple[Partition, int], bytes] = {}
    position: dict[tuple[str, Partition], int] = {}
    for one in history.reads:
        where = f"{one.reader} read {one.value!r} at {one.offset} of {one.partition}"
        key = (one.partition, one.offset)
        if seen.setdefault(key, one.value) != one.value:
            yield Anomaly("two values", f"{where}, another reader {seen[key]!r}")
        start = starts.get(one.partition)
        if start is not None and one.offset < start:
            continue
        if key not in kept:
            yield Anomaly("vanished", f"{where} at {one.at:.3f}")
        elif kept[key] != one.value:
            yield Anomaly("two values", f"{where}, the log has {kept[key]!r}")
        last = position.get((one.reader, one.partition))
        if last is not None and one.offset <= last:
            yield Anomaly("backwards", f"{where} after {last}")
        elif last is not None and one.offset > last + 1 and start is None:
            yield Anomaly("skipped", f"{where} after {last}")
        position[one.reader, one.partition] = one.offset
