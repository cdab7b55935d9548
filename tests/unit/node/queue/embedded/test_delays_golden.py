"""The bytes of the control records in an embedded queue's delays log."""

from raftq.client.wire.batch import FLAG_CONTROL, encode
from raftq.node.queue.embedded.delays import SEEN_RECORDS


def controls(queue):
    log = queue._files.delays
    found = []
    for batch in log.batches(log.start_offset):
        if batch.flags & FLAG_CONTROL and batch.count:
            found += [value.hex() for value in batch.values()]
    return found


def test_marks_of_an_embedded_delays_log_keep_their_bytes(open_queue, clock):
    queue = open_queue()
    ids = [queue.enqueue(b"x", delay=delay) for delay in (1, 1, 1, 100, 100)]
    queue.cancel(ids[0])
    queue.cancel(ids[4])
    clock.advance(2, queue)
    assert controls(queue) == [
        "92019100",
        "92019104",
        "9202919292010202",
    ]
    queue._files.data.append(encode([b""] * (SEEN_RECORDS + 1)))
    queue._engine.delays._mark_seen()
    assert controls(queue)[-1] == "9203cd2713"


def test_marks_of_an_embedded_delays_log_are_read_again(open_queue, clock):
    queue = open_queue()
    for _ in range(4):
        queue.enqueue(b"x", delay=50)
    log = queue._files.delays
    for golden in ("92019100", "9202919292010202", "920302"):
        log.append(encode([bytes.fromhex(golden)], control=True))
    queue._files.data.append(encode([b"one", b"two"]))
    queue.close()
    again = open_queue()
    assert again._engine.delays.schedule.pending_count == 1
