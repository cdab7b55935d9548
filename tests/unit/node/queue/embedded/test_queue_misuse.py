"""The embedded queue given nonsense: always an error that names the problem, nothing written."""

import dataclasses
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raftq.client.common.errors import (
    ConfigError,
    InvalidArgument,
    LeaseForeign,
    OffsetOutOfRange,
    RaftqError,
    StorageError,
    TooLarge,
    UnknownCheckpoint,
)
from raftq.node.queue.embedded.options import EmbeddedOptions, OpenSettings
from raftq.node.queue.embedded.queue import Queue

NAN, INF = math.nan, math.inf
BAD_SECONDS = [NAN, INF, -INF, -1, "1", True, [1], 10**400, 1e300]
LONE_SURROGATE = "\ud800"

Call = Callable[[Queue], Any]


def held(queue: Queue) -> Any:
    queue.enqueue(b"held")
    message = queue.dequeue()
    assert message is not None
    return message


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda q: q.enqueue("text"), "bytes"),
        (lambda q: q.enqueue(None), "bytes"),
        (lambda q: q.enqueue(bytearray(b"x")), "bytes"),
        (lambda q: q.enqueue(5, key=b"k"), "bytes"),
        (lambda q: q.enqueue(b"x", key="text"), "bytes"),
        (lambda q: q.enqueue(b"x", priority="urgent"), "priority"),
        (lambda q: q.enqueue(b"x", priority=5), "priority"),
        (lambda q: q.enqueue(b"x", priority=-1), "priority"),
        (lambda q: q.enqueue(b"x", priority=2.0), "priority"),
        (lambda q: q.enqueue(b"x", priority=True), "priority"),
        (lambda q: q.enqueue(b"x", priority=None), "priority"),
        (lambda q: q.enqueue(b"x", priority=[1]), "priority"),
        (lambda q: q.enqueue(b"x", priority=[1], key=b"k"), "priority"),
        (lambda q: q.enqueue(b"x", headers="text"), "headers"),
        (lambda q: q.enqueue(b"x", headers=[("a", b"b")]), "headers"),
        (lambda q: q.enqueue(b"x", headers={"a": "text"}), "headers"),
        (lambda q: q.enqueue(b"x", headers={1: b"x"}), "headers"),
        (lambda q: q.enqueue(b"x", headers={LONE_SURROGATE: b"x"}), "header"),
        (lambda q: q.enqueue(b"x", dedup_id=""), "dedup_id"),
        (lambda q: q.enqueue(b"x", dedup_id=7), "dedup_id"),
        (lambda q: q.enqueue(b"x", dedup_id="x" * 1025), "dedup_id"),
        (lambda q: q.enqueue(b"x", dedup_id=LONE_SURROGATE), "dedup_id"),
        (lambda q: q.enqueue(b"x", delay=1, deliver_at=2), "not both"),
        (lambda q: q.enqueue(b"x", delay="1"), "delay"),
        (lambda q: q.enqueue(b"x", delay=True), "delay"),
        (lambda q: q.enqueue(b"x", delay=NAN), "delay"),
        (lambda q: q.enqueue(b"x", delay=INF), "delay"),
        (lambda q: q.enqueue(b"x", delay=10**400), "delay"),
        (lambda q: q.enqueue(b"x", deliver_at=NAN), "deliver_at"),
        (lambda q: q.enqueue(b"x", deliver_at=INF), "deliver_at"),
        (lambda q: q.enqueue(b"x", deliver_at="noon"), "deliver_at"),
        (lambda q: q.enqueue(b"x", deliver_at=10**400), "deliver_at"),
        (lambda q: q.enqueue(b"x", ttl=0), "ttl"),
        (lambda q: q.enqueue(b"x", ttl=-1), "ttl"),
        (lambda q: q.enqueue(b"x", ttl=NAN), "ttl"),
        (lambda q: q.enqueue(b"x", ttl=INF), "ttl"),
        (lambda q: q.enqueue(b"x", ttl="1"), "ttl"),
        (lambda q: q.enqueue(b"x", ttl=True), "ttl"),
        (lambda q: q.enqueue_batch(b"abc"), "list"),
        (lambda q: q.enqueue_batch("abc"), "list"),
        (lambda q: q.enqueue_batch(5), "list"),
        (lambda q: q.enqueue_batch(None), "list"),
        (lambda q: q.enqueue_batch(bytearray(b"abc")), "bytes"),
        (lambda q: q.enqueue_batch([b"a", "b"]), "number 1"),
        (lambda q: q.enqueue_batch([b"a", b"b"], keys=[b"k"]), "2 values but 1 keys"),
        (lambda q: q.enqueue_batch([b"a"], keys=[]), "1 values but 0 keys"),
        (lambda q: q.enqueue_batch([b"a", b"b"], keys=b"kk"), "keys"),
        (lambda q: q.enqueue_batch([b"a"], keys=5), "keys"),
        (lambda q: q.enqueue_batch([b"a"], keys=["k"]), "number 0"),
        (lambda q: q.enqueue_batch([b"a"], headers=[{}, {}]), "2 headers"),
        (lambda q: q.enqueue_batch([b"a"], headers={"a": b"b"}), "headers"),
        (lambda q: q.enqueue_batch([b"a"], headers=["text"]), "headers"),
        (lambda q: q.enqueue_batch([b"a"], headers=5), "headers"),
        (lambda q: q.enqueue_batch([b"a"], priority=9), "priority"),
        (lambda q: q.enqueue_batch([b"a"], delay=NAN), "delay"),
        (lambda q: q.enqueue_batch([b"a"], ttl=0), "ttl"),
    ],
)
def test_enqueue_refuses_nonsense_and_writes_nothing(queue: Queue, call: Call, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        call(queue)
    stats = queue.stats()
    assert (stats.total, stats.delayed) == (0, 0)
    assert queue.enqueue(b"fine") == "0"


def test_values_keys_and_headers_over_their_limits_are_refused(open_queue) -> None:
    queue = open_queue(value_bytes_max=100)
    for call in (
        lambda: queue.enqueue(bytes(101)),
        lambda: queue.enqueue(bytes(101), key=b"k"),
        lambda: queue.enqueue_batch([b"x", bytes(101)]),
        lambda: queue.enqueue(b"x", key=bytes(64 * 1024 + 1)),
        lambda: queue.enqueue(b"x", headers={"h": bytes(64 * 1024)}),
        lambda: queue.enqueue_batch([b"x"], keys=[bytes(64 * 1024 + 1)]),
        lambda: queue.enqueue(bytes(101), delay=5),
    ):
        with pytest.raises(TooLarge, match="over the limit of"):
            call()
    assert queue.stats().total == queue.stats().delayed == 0
    queue.enqueue(bytes(100), key=bytes(64 * 1024), headers={"h": bytes(64 * 1024 - 1)})
    message = queue.dequeue()
    assert (len(message.value), len(message.key)) == (100, 64 * 1024)


@pytest.mark.parametrize("seconds", BAD_SECONDS, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    "call",
    [
        lambda q, s: q.dequeue(s),
        lambda q, s: q.dequeue_batch(5, s),
        lambda q, s: q.dequeue(visibility_timeout=s),
        lambda q, s: q.nack(held(q), s),
        lambda q, s: q.postpone(held(q), s),
        lambda q, s: q.extend(held(q), s),
        lambda q, s: q.browse(0, timeout=s),
        lambda q, s: next(q.subscribe("g", timeout=s)),
        lambda q, s: next(q.subscribe("g", timeout=0, visibility_timeout=s)),
    ],
    ids=["dequeue", "batch", "visibility", "nack", "postpone", "extend", "browse", "sub", "sub-v"],
)
def test_a_duration_that_is_none_is_refused(queue: Queue, call: Any, seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match="seconds"):
        call(queue, seconds)


def test_no_duration_that_is_accepted_keeps_the_queue_from_opening_again(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b", b"c", b"d"])
    longest = 100 * 366 * 86400.0
    messages = queue.dequeue_batch(4, visibility_timeout=longest)
    queue.nack(messages[0], longest)
    queue.postpone(messages[1], longest)
    queue.extend(messages[2], longest)
    queue.enqueue(b"late", delay=longest, ttl=longest)
    queue.close()
    again = open_queue()
    assert again.stats().waiting == 4
    assert [each.value for each in again.delayed()] == [b"late"]


@pytest.mark.parametrize("count", [0, -1, 2.5, "2", None, True, 100_001, [1]])
@pytest.mark.parametrize("verb", ["dequeue_batch", "peek", "browse"])
def test_a_count_that_is_none_is_refused(queue: Queue, verb: str, count: Any) -> None:
    queue.enqueue_batch([b"a", b"b"])
    arguments = (0, count) if verb == "browse" else (count,)
    with pytest.raises(InvalidArgument, match="messages"):
        getattr(queue, verb)(*arguments)
    assert queue.stats().in_flight == 0


@pytest.mark.parametrize("group", ["", "g" * 250, None, 5, b"g", ["g"], LONE_SURROGATE])
@pytest.mark.parametrize(
    "call",
    [
        lambda q, g: q.dequeue(group=g),
        lambda q, g: q.dequeue_batch(3, group=g),
        lambda q, g: next(q.subscribe(g, timeout=0)),
        lambda q, g: q.replay_from(offset=0, group=g),
        lambda q, g: q.peek(group=g),
        lambda q, g: q.pause(group=g),
        lambda q, g: q.resume(group=g),
        lambda q, g: q.checkpoint("c", group=g),
        lambda q, g: q.delete_group(g),
    ],
    ids=["dequeue", "batch", "subscribe", "replay", "peek", "pause", "resume", "checkpoint", "del"],
)
def test_a_group_name_that_is_none_is_refused(queue: Queue, call: Any, group: Any) -> None:
    queue.enqueue(b"x")
    with pytest.raises(InvalidArgument, match="group"):
        call(queue, group)
    assert queue.groups() == ["default"]


def test_verbs_that_only_look_refuse_an_unknown_group(queue: Queue) -> None:
    for call in (queue.peek, queue.pause, queue.resume):
        with pytest.raises(InvalidArgument, match="no group 'nobody'"):
            call(group="nobody")
    assert queue.delete_group("nobody") is False
    with pytest.raises(InvalidArgument, match="default group"):
        queue.delete_group("default")


@pytest.mark.parametrize("thing", [None, "receipt", 5, b"x", object()])
@pytest.mark.parametrize(
    "call",
    [
        lambda q, m: q.ack(m),
        lambda q, m: q.ack_batch([m]),
        lambda q, m: q.nack(m),
        lambda q, m: q.postpone(m, 1),
        lambda q, m: q.reject(m, "bad"),
        lambda q, m: q.extend(m, 1),
    ],
    ids=["ack", "ack_batch", "nack", "postpone", "reject", "extend"],
)
def test_settling_what_is_no_message_is_refused(queue: Queue, call: Any, thing: Any) -> None:
    with pytest.raises(InvalidArgument, match="message"):
        call(queue, thing)


@pytest.mark.parametrize("things", [None, 5])
def test_ack_batch_of_no_list_is_refused(queue: Queue, things: Any) -> None:
    with pytest.raises(InvalidArgument, match="messages"):
        queue.ack_batch(things)


def test_ack_batch_takes_a_generator_that_uses_the_queue_itself(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b", b"c"])
    queue.ack_batch(m for m in iter(queue.dequeue, None))
    assert queue.stats().settled == 3


@pytest.mark.parametrize(
    ("reason", "error"),
    [(5, ""), (None, ""), ("r", 5), ("r", None), (b"r", ""), ("r", ValueError())],
)
def test_reject_refuses_facts_that_are_no_text_and_the_message_stays_held(
    queue: Queue, reason: Any, error: Any
) -> None:
    message = held(queue)
    with pytest.raises(InvalidArgument, match="text"):
        queue.reject(message, reason, error)
    queue.ack(message)
    assert queue.dead_letters() == []


def test_reject_takes_any_text_even_what_is_not_valid_unicode(queue: Queue) -> None:
    queue.reject(held(queue), "bad " + LONE_SURROGATE, "x" * 10_000)
    (letter,) = queue.dead_letters()
    assert letter.reason.startswith("bad ")
    assert letter.error == "x" * 4096


def test_messages_that_were_only_looked_at_cannot_be_settled(queue: Queue) -> None:
    queue.enqueue(b"x")
    for message in (queue.peek()[0], queue.browse(0)[0][0]):
        for call in (queue.ack, queue.nack, lambda m: queue.reject(m, "r")):
            with pytest.raises(LeaseForeign):
                call(message)
    assert queue.dequeue() is not None


@pytest.mark.parametrize("name", ["", "n" * 250, None, 5, b"n", LONE_SURROGATE])
def test_a_checkpoint_name_that_is_none_is_refused(queue: Queue, name: Any) -> None:
    with pytest.raises(InvalidArgument, match="checkpoint name"):
        queue.checkpoint(name)


@pytest.mark.parametrize(
    ("place", "error"),
    [
        ({}, InvalidArgument),
        ({"offset": 0, "timestamp": 1.0}, InvalidArgument),
        ({"offset": "0"}, InvalidArgument),
        ({"offset": 0.5}, InvalidArgument),
        ({"offset": True}, InvalidArgument),
        ({"offset": -1}, OffsetOutOfRange),
        ({"offset": 2}, OffsetOutOfRange),
        ({"timestamp": "noon"}, InvalidArgument),
        ({"timestamp": NAN}, InvalidArgument),
        ({"timestamp": INF}, InvalidArgument),
        ({"timestamp": 10**400}, InvalidArgument),
        ({"checkpoint": "nowhere"}, UnknownCheckpoint),
        ({"checkpoint": ["x"]}, InvalidArgument),
    ],
)
def test_replay_from_nowhere_is_refused(queue: Queue, place: Any, error: type[RaftqError]) -> None:
    queue.enqueue(b"x")
    with pytest.raises(error):
        queue.replay_from(**place)


@pytest.mark.parametrize("timestamp", [-5.0, 0, 1e12])
def test_replay_from_a_time_before_or_after_everything_works(queue: Queue, timestamp: Any) -> None:
    queue.enqueue(b"x")
    queue.ack(queue.dequeue())
    assert queue.replay_from(timestamp=timestamp) == (1 if timestamp > 5 else 0)


@pytest.mark.parametrize("limit", [-1, "1", 1.5, True])
@pytest.mark.parametrize(
    "call",
    [
        lambda q, n: q.redrive(limit=n),
        lambda q, n: q.dead_letters(limit=n),
        lambda q, n: q.delayed(limit=n),
    ],
    ids=["redrive", "dead_letters", "delayed"],
)
def test_a_limit_that_is_none_is_refused(queue: Queue, call: Any, limit: Any) -> None:
    queue.reject(held(queue), "r")
    with pytest.raises(InvalidArgument, match="limit"):
        call(queue, limit)
    assert queue.stats().dead == 1


@pytest.mark.parametrize("message_id", ["", "x", "d", "d-1", "-1", None, "d" + "9" * 20, b"d1"])
def test_cancel_refuses_what_is_no_id(queue: Queue, message_id: Any) -> None:
    with pytest.raises(InvalidArgument, match="not a message id"):
        queue.cancel(message_id)


def test_browse_refuses_an_offset_that_is_none(queue: Queue) -> None:
    queue.enqueue(b"x")
    for offset in ("0", None, 1.5, True):
        with pytest.raises(InvalidArgument, match="offset"):
            queue.browse(offset)  # type: ignore[arg-type]
    assert queue.browse(5) == ([], 5)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"fsync": "sometimes"}, "fsync"),
        ({"fsync": ["none"]}, "fsync"),
        ({"compression": "rar"}, "compression"),
        ({"compression": ["lz4"]}, "compression"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"max_deliveries": True}, "max_deliveries"),
        ({"max_deliveries": 2.5}, "max_deliveries"),
        ({"max_deliveries": "3"}, "max_deliveries"),
        ({"visibility_timeout": NAN}, "visibility_timeout"),
        ({"visibility_timeout": 0}, "visibility_timeout"),
        ({"visibility_timeout": "30"}, "visibility_timeout"),
        ({"backoff": -1}, "backoff"),
        ({"backoff": None}, "backoff"),
        ({"backoff_jitter": 1.5}, "backoff_jitter"),
        ({"in_flight_max": 1.5}, "in_flight_max"),
        ({"max_messages": 0}, "max_messages"),
        ({"max_messages": "5"}, "max_messages"),
        ({"max_messages": 1.5}, "max_messages"),
        ({"max_bytes": -1}, "max_bytes"),
        ({"max_bytes": True}, "max_bytes"),
        ({"retention": INF}, "retention"),
        ({"retention": "1"}, "retention"),
        ({"dead_letter_retention": NAN}, "dead_letter_retention"),
        ({"segment_bytes": 100}, "segment_bytes"),
        ({"segment_bytes": 4096.5}, "segment_bytes"),
        ({"reserve_bytes": -1}, "reserve_bytes"),
        ({"dead_letter_expired": "yes"}, "dead_letter_expired"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(
    tmp_path: Path, settings: Any, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Queue.open(tmp_path / "q", **settings)
    assert not (tmp_path / "q").exists()


def test_all_problems_of_the_settings_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        EmbeddedOptions(fsync="x", max_deliveries=0, max_bytes=-5)
    assert all(word in str(caught.value) for word in ("fsync", "max_deliveries", "max_bytes"))


@pytest.mark.parametrize("path", [None, 5, b"q", "", "a\0b", ["q"]])
def test_a_path_that_is_none_is_refused(tmp_path: Path, monkeypatch: Any, path: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="path"):
        Queue.open(path)
    assert os.listdir(tmp_path) == []


def test_a_path_that_leads_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for path in (tmp_path / "file", tmp_path / "file" / "q"):
        with pytest.raises(StorageError, match="file"):
            Queue.open(path)
    assert (tmp_path / "file").read_text() == "not a directory"


def test_a_transaction_checks_its_arguments_at_once(queue: Queue) -> None:
    for call in (
        lambda tx: tx.enqueue("text"),
        lambda tx: tx.enqueue(b"x", delay=NAN),
        lambda tx: tx.enqueue(b"x", priority=9),
        lambda tx: tx.enqueue(b"x", headers={"a": 1}),
        lambda tx: tx.enqueue_batch(b"abc"),
        lambda tx: tx.enqueue_batch(5),
        lambda tx: tx.ack(None),
        lambda tx: tx.ack_batch(7),
        lambda tx: tx.ack_batch(["x"]),
    ):
        with pytest.raises(InvalidArgument), queue.transaction() as tx:  # noqa: PT012
            tx.enqueue(b"first")
            call(tx)
    assert queue.stats().total == 0


def test_the_keywords_of_open_are_the_options() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(EmbeddedOptions)}
    assert OpenSettings.__annotations__ == fields
