"""Taking messages from the embedded queue: leases, receipts, retries, backoff, ttl."""

import pytest

from raftq import Queue
from raftq.client.common.errors import (
    AlreadySettled,
    LeaseExpired,
    LeaseForeign,
    LeaseLost,
    LeaseReplaced,
)


def values(messages) -> list[bytes]:
    return [message.value for message in messages]


def take(queue: Queue, **how):
    message = queue.dequeue(**how)
    assert message is not None
    return message


def settling_verbs(queue: Queue):
    return [
        queue.ack,
        lambda m: queue.ack_batch([m]),
        queue.nack,
        lambda m: queue.postpone(m, 1),
        lambda m: queue.reject(m, "r"),
        lambda m: queue.extend(m, 1),
    ]


def test_an_empty_queue_gives_none_and_an_empty_list(queue: Queue) -> None:
    assert queue.dequeue() is None
    assert queue.dequeue(timeout=0.001) is None
    assert queue.dequeue_batch(10) == []
    assert queue.dequeue(group="new") is None


def test_a_message_is_hidden_while_it_is_leased(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    first = take(queue)
    clock.advance(29.9, queue)
    assert queue.dequeue() is None
    clock.advance(0.1, queue)
    again = take(queue)
    assert (again.id, again.attempt) == (first.id, 2)
    assert again.receipt != first.receipt


def test_a_visibility_timeout_of_one_call_overrides_the_queue_s(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    take(queue, visibility_timeout=5)
    clock.advance(5, queue)
    assert take(queue).attempt == 2


def test_dequeue_does_not_wait_for_the_keeper_to_end_a_lease(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    take(queue)
    clock.advance(30)
    assert take(queue).attempt == 2


def test_extend_counts_from_now(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    message = take(queue)
    clock.advance(20, queue)
    queue.extend(message, 30)
    clock.advance(29.9, queue)
    queue.ack(message)
    assert queue.stats().settled == 1


def test_extend_can_shorten_and_covers_only_its_own_message(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"a", b"b"])
    first, second = queue.dequeue_batch(2)
    queue.extend(first, 1)
    clock.advance(2, queue)
    assert values(queue.dequeue_batch(5)) == [b"a"]
    queue.ack(second)


# Receipts


def test_an_expired_receipt_is_refused_as_expired(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    message = take(queue)
    clock.advance(30)
    for settle in settling_verbs(queue):
        with pytest.raises(LeaseExpired):
            settle(message)
    clock.advance(0, queue)
    for settle in settling_verbs(queue):
        with pytest.raises(LeaseExpired):
            settle(message)
    assert queue.stats().counters["acked"] == 0


def test_a_replaced_receipt_is_refused_as_replaced_and_the_new_holder_keeps_it(
    queue: Queue, clock
) -> None:
    queue.enqueue(b"a")
    old = take(queue)
    clock.advance(30, queue)
    new = take(queue)
    for settle in settling_verbs(queue):
        with pytest.raises(LeaseReplaced):
            settle(old)
    queue.ack(new)


def test_a_settled_receipt_is_refused_as_settled(queue: Queue) -> None:
    queue.enqueue(b"a")
    message = take(queue)
    queue.ack(message)
    for settle in settling_verbs(queue):
        with pytest.raises(AlreadySettled):
            settle(message)
    assert queue.stats().counters["acked"] == 1


def test_a_receipt_given_back_is_refused(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    first, second = queue.dequeue_batch(2)
    queue.nack(first, 10)
    queue.postpone(second, 10)
    for message in (first, second):
        with pytest.raises(LeaseExpired):
            queue.ack(message)


def test_a_receipt_counts_only_for_its_own_group(queue: Queue) -> None:
    queue.enqueue(b"a")
    mine, yours = take(queue), take(queue, group="other")
    queue.ack(mine)
    assert queue.stats().groups["other"]["in_flight"] == 1
    queue.ack(yours)
    assert queue.stats().groups["other"]["acked"] == 1


def test_messages_of_another_queue_are_refused_as_foreign(open_queue) -> None:
    here, there = open_queue("here"), open_queue("there")
    there.enqueue(b"a")
    here.enqueue(b"b")
    message = take(there)
    mine = take(here)
    for settle in settling_verbs(here):
        with pytest.raises(LeaseForeign, match="there"):
            settle(message)
    with pytest.raises(LeaseForeign):
        here.ack_batch([mine, message])
    here.ack(mine)


def test_messages_of_another_queue_of_the_same_name_settle_nothing(open_queue) -> None:
    here, there = open_queue("a/q"), open_queue("b/q")
    for queue in (here, there):
        queue.enqueue(b"x")
    message, mine = take(there), take(here)
    for settle in settling_verbs(here):
        with pytest.raises(LeaseForeign, match="b/q"):
            settle(message)
    here.ack(mine)
    there.ack(message)


def test_messages_of_a_deleted_group_are_refused_as_foreign(queue: Queue) -> None:
    queue.enqueue(b"a")
    message = take(queue, group="g")
    assert queue.delete_group("g") is True
    with pytest.raises(LeaseForeign, match="deleted"):
        queue.ack(message)


def test_a_receipt_from_before_a_reopen_is_refused(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    a, b = queue.dequeue_batch(2)
    queue.ack(b)
    queue.close()
    queue = open_queue()
    with pytest.raises(LeaseLost):
        queue.ack(a)
    with pytest.raises(AlreadySettled):
        queue.ack(b)
    new = take(queue)
    assert (new.value, new.attempt) == (b"a", 1)
    with pytest.raises(LeaseReplaced):
        queue.ack(a)
    queue.ack(new)


def test_ack_batch_with_one_lost_lease_acks_none(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"a", b"b", b"c"])
    a = take(queue, visibility_timeout=1)
    rest = queue.dequeue_batch(2)
    clock.advance(2, queue)
    for batch in ([a, *rest], [*rest, a], [rest[0], a, rest[1]]):
        with pytest.raises(LeaseLost):
            queue.ack_batch(batch)
    assert queue.stats().counters["acked"] == 0
    queue.ack_batch(rest)
    assert values(queue.dequeue_batch(5)) == [b"a"]


def test_ack_batch_of_nothing_and_of_the_same_message_twice(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    queue.ack_batch([])
    a, b = queue.dequeue_batch(2)
    queue.ack_batch([b, a, b])
    assert queue.stats().counters["acked"] == 2


def test_ack_batch_across_groups_and_grants_out_of_order(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(20)])
    mine = queue.dequeue_batch(7) + queue.dequeue_batch(13)
    yours = queue.dequeue_batch(20, group="g")
    mixed = [*reversed(mine[::2]), *yours[5:], *mine[1::2], *yours[:5]]
    queue.ack_batch(mixed)
    stats = queue.stats()
    assert (stats.settled_offset, stats.groups["g"]["settled_offset"]) == (20, 20)


# Retries


def test_backoff_doubles_from_one_second_to_its_cap(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=12, backoff=1.0, backoff_max=60.0)
    queue.enqueue(b"a")
    waits = []
    for attempt in range(1, 10):
        message = take(queue)
        assert message.attempt == attempt
        queue.nack(message)
        waits.append(queue._keeper.next_deadline() - clock.now)
        clock.advance(waits[-1] - 0.001, queue)
        assert queue.dequeue() is None
        clock.advance(0.001, queue)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]


def test_jitter_spreads_the_waits_within_its_share(open_queue, clock) -> None:
    queue = open_queue(backoff=10, backoff_jitter=0.5)
    queue.enqueue_batch([b"x"] * 50)
    for message in queue.dequeue_batch(50):
        queue.nack(message)
    waiting = queue._engine.group("default").state.waiting
    due = sorted(wait.due - clock.now for wait in waiting)
    assert 5 <= due[0] < due[-1] <= 15
    assert len(set(due)) > 40


def test_nack_with_a_delay_of_its_own(queue: Queue, clock) -> None:
    queue.enqueue(b"a")
    queue.nack(take(queue), delay=100)
    clock.advance(99.9, queue)
    assert queue.dequeue() is None
    clock.advance(0.1, queue)
    message = take(queue)
    assert message.attempt == 2
    queue.nack(message, 0)
    assert take(queue).attempt == 3


def test_mistake_03_a_nacked_message_comes_back_and_blocks_nobody(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"a", b"b", b"c"])
    queue.nack(take(queue))
    assert values(queue.dequeue_batch(10)) == [b"b", b"c"]
    clock.advance(1, queue)
    assert values(queue.dequeue_batch(10)) == [b"a"]


def test_postpone_spends_no_attempt(open_queue, clock) -> None:
    queue = open_queue(max_deliveries=2)
    queue.enqueue(b"a")
    for _ in range(10):
        message = take(queue)
        assert message.attempt == 1
        queue.postpone(message, 7)
        clock.advance(6.9, queue)
        assert queue.dequeue() is None
        clock.advance(0.1, queue)
    queue.ack(take(queue))
    assert queue.dead_letters() == []


def test_retries_survive_reopen_with_their_time_and_attempt(open_queue, clock) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    queue.nack(take(queue), 50)
    queue.close()
    queue = open_queue()
    found = take(queue)
    assert (found.value, found.attempt) == (b"b", 1)
    queue.ack(found)
    clock.advance(49, queue)
    assert queue.dequeue_batch(5) == []
    clock.advance(1, queue)
    found = take(queue)
    assert (found.value, found.attempt) == (b"a", 2)


def test_a_clean_close_gives_back_what_is_in_flight_without_an_attempt(open_queue) -> None:
    for _ in range(5):
        queue = open_queue(max_deliveries=2)
        if queue.stats().total == 0:
            queue.enqueue(b"a")
        assert take(queue).attempt == 1
        queue.close()


def test_in_flight_max_holds_back_until_something_is_settled(open_queue) -> None:
    queue = open_queue(in_flight_max=3)
    queue.enqueue_batch([b"%d" % n for n in range(5)])
    found = queue.dequeue_batch(10)
    assert len(found) == 3
    assert queue.dequeue() is None
    queue.ack(found[1])
    assert values(queue.dequeue_batch(10)) == [b"3"]


def test_pause_stops_delivery_but_not_settling_and_survives_reopen(open_queue) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b"])
    message = take(queue)
    queue.pause()
    assert queue.stats().paused
    assert queue.dequeue() is None
    assert queue.dequeue(group="other") is not None
    queue.enqueue(b"c")
    queue.ack(message)
    queue.close()
    queue = open_queue()
    assert queue.dequeue() is None
    queue.resume()
    queue.resume()
    assert values(queue.dequeue_batch(9)) == [b"b", b"c"]


# Named mistakes


def test_mistake_04_acks_move_the_group_s_progress(queue: Queue) -> None:
    queue.enqueue_batch([b"%d" % n for n in range(10)])
    messages = queue.dequeue_batch(10)
    for message in reversed(messages[1:]):
        queue.ack(message)
    assert queue.stats().settled_offset == 0
    queue.ack(messages[0])
    assert queue.stats().settled_offset == 10


def test_mistake_05_what_is_in_flight_in_one_group_is_free_in_another(queue: Queue) -> None:
    queue.enqueue(b"a")
    take(queue, group="one")
    assert take(queue, group="two").value == b"a"
    assert queue.dequeue(group="one") is None
    assert take(queue).value == b"a"


def test_mistake_06_a_dead_letter_does_not_block_the_prefix(queue: Queue) -> None:
    queue.enqueue_batch([b"a", b"b"])
    a, b = queue.dequeue_batch(2)
    queue.ack(b)
    queue.reject(a, "bad")
    assert queue.stats().settled_offset == 2


def test_mistake_07_a_message_that_was_not_acked_is_found_again_when_others_went_past_it(
    open_queue, clock
) -> None:
    queue = open_queue()
    queue.enqueue_batch([b"a", b"b", b"c"])
    queue.enqueue(b"late", delay=10)
    _, *rest = queue.dequeue_batch(3)
    queue.ack_batch(rest)
    queue.enqueue_batch([b"%d" % n for n in range(100)])
    queue.ack_batch(queue.dequeue_batch(100))
    queue.close()
    queue = open_queue()
    clock.advance(10, queue)
    assert sorted(values(queue.dequeue_batch(10))) == [b"a", b"late"]


def test_mistake_16_a_message_that_was_dequeued_and_not_acked_comes_back(
    queue: Queue, clock
) -> None:
    queue.enqueue(b"a")
    take(queue)
    clock.advance(30, queue)
    assert take(queue).value == b"a"


def test_mistake_17_leases_are_reclaimed_without_anybody_asking(queue: Queue, clock) -> None:
    queue.enqueue_batch([b"x"] * 1000)
    for _ in range(10):
        queue.dequeue_batch(100)
    assert queue.stats().in_flight == 1000
    clock.advance(30, queue)
    stats = queue.stats()
    assert (stats.in_flight, stats.pending) == (0, 1000)


# Time to live


def test_an_expired_message_is_never_delivered_and_is_counted(queue: Queue, clock) -> None:
    queue.enqueue(b"short", ttl=10)
    queue.enqueue(b"long", ttl=20)
    queue.enqueue(b"ever")
    clock.advance(10, queue)
    assert values(queue.dequeue_batch(10)) == [b"long", b"ever"]
    stats = queue.stats()
    assert (stats.counters["ttl_expired"], stats.dead) == (1, 0)


def test_a_message_just_inside_its_ttl_is_delivered(queue: Queue, clock) -> None:
    queue.enqueue(b"a", ttl=10)
    clock.advance(9.99, queue)
    message = take(queue)
    assert message.expires_at == pytest.approx(clock.now + 0.01)


def test_a_message_without_ttl_has_no_expiry(queue: Queue) -> None:
    queue.enqueue(b"a")
    assert take(queue).expires_at is None


def test_a_retry_past_the_ttl_is_not_delivered(queue: Queue, clock) -> None:
    queue.enqueue(b"a", ttl=10)
    queue.nack(take(queue), 20)
    clock.advance(20, queue)
    assert queue.dequeue() is None
    assert queue.stats().counters["ttl_expired"] == 1
    assert queue.stats().settled_offset == 1


def test_an_expired_message_can_become_a_dead_letter(open_queue, clock) -> None:
    queue = open_queue(dead_letter_expired=True)
    queue.enqueue_batch([b"a", b"b", b"c"], ttl=5, headers=[{"h": b"1"}, None, None])
    queue.enqueue(b"d")
    clock.advance(5, queue)
    assert values(queue.dequeue_batch(10)) == [b"d"]
    letters = queue.dead_letters(reason="expired")
    assert [(letter.value, letter.offset) for letter in letters] == [
        (b"a", 0),
        (b"b", 1),
        (b"c", 2),
    ]
    assert letters[0].headers == {"h": b"1"}
    assert queue.redrive() == 3
    assert values(queue.dequeue_batch(10)) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("count", [1, 7])
def test_any_number_of_expired_messages_in_front_hides_nothing_behind(
    queue: Queue, clock, count: int
) -> None:
    queue.enqueue_batch([b"x"] * 3000, ttl=1)
    queue.enqueue_batch([b"a", b"b", b"c"])
    clock.advance(2)
    found = []
    while messages := queue.dequeue_batch(count):
        assert len(messages) <= count
        assert {message.attempt for message in messages} == {1}
        found += values(messages)
    assert found == [b"a", b"b", b"c"]
    assert queue.stats().counters["ttl_expired"] == 3000
    assert queue.stats().in_flight == 3


def test_ttl_of_a_delayed_message_counts_from_when_it_is_due(queue: Queue, clock) -> None:
    queue.enqueue(b"a", delay=100, ttl=10)
    queue.enqueue(b"b", delay=100, ttl=30)
    clock.advance(120, queue)
    assert values(queue.dequeue_batch(5)) == [b"b"]
