"""Groups, receipts, delays and dead letters over HTTP, with a cluster that pretends."""

import asyncio
from datetime import UTC, datetime
from typing import Any

import pytest
from fake_http import NOW_MS, Answer, Rest, served
from fake_http_queues import as_record
from yarl import URL

from raftq.client.admin.results import DelayedRecord, DelaySums, QueueSums
from raftq.client.common.errors import (
    FencedGeneration,
    LeaseExpired,
    LeaseReplaced,
    NotLeader,
    Throttled,
)
from raftq.client.queue.leased import LeasedRecord
from raftq.client.queue.settling import Settlement
from raftq.client.wire.record import BatchRecord
from raftq.node.http.options import HttpOptions

QUICK = HttpOptions(topic_wait_ms=1)
NOBODY = "orders:0:7:1:5"


def record(offset: int, value: bytes = b"v") -> BatchRecord:
    return BatchRecord(offset, NOW_MS, b"k", value, {"h": b"1"}, 1)


async def joined(rest: Rest, mode: str = "queue", group: str = "g") -> str:
    await rest.make_topic("orders", 2)
    body = {"client_id": "c", "topics": ["orders"], "mode": mode}
    answer = await rest.post(f"/groups/{group}/join", body)
    assert answer.status == 200, answer.body
    return str(answer.body["member_id"])


async def leased(rest: Rest, count: int = 1) -> list[str]:
    member = await joined(rest)
    for offset in range(count):
        rest.cluster.deliver("orders", 0, record(offset))
    answer = await rest.get(f"/groups/g/poll?member_id={member}&timeout=0s")
    return [one["receipt_handle"] for one in answer.body["messages"]]


def refused(answer: Answer, status: int, code: str, *words: str) -> None:
    assert (answer.status, answer.body["code"]) == (status, code), answer.body
    assert all(word in answer.body["error"] for word in words), answer.body


def test_a_member_joins_stays_and_leaves() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        body = {"client_id": "c", "topics": ["orders", "orders"], "session_timeout": "10s"}
        member = (await rest.post("/groups/g/join", body)).body
        assert member == {
            "member_id": "c-0", "generation": 1, "leader": False, "rebalance_required": False,
            "assigned_partitions": [{"topic": "orders", "partition": 0}],
        }  # fmt: skip
        (wish,) = rest.cluster.groups["g"].members.values()
        assert (wish.topics, wish.session_ms, wish.mode) == (("orders",), 10_000, "queue")
        beat = {"member_id": "c-0", "generation": 1}
        answer = (await rest.post("/groups/g/heartbeat", beat)).body
        assert (answer["rebalance_required"], answer["state"]) == (False, "stable")
        rest.cluster.groups["g"].generation = 2
        rest.cluster.revoked = [("orders", 1)]
        answer = (await rest.post("/groups/g/heartbeat", beat)).body
        assert (answer["rebalance_required"], answer["state"]) == (True, "rebalancing")
        assert answer["revoked_partitions"] == [{"topic": "orders", "partition": 1}]
        assert (await rest.get("/groups")).body == {"groups": ["g"]}
        described = (await rest.get("/v1/groups/g")).body
        assert described["group_id"] == "g"
        assert (described["state"], described["protocol"]) == ("stable", "queue")
        assert described["members"][0]["client_id"] == "c"
        assert (described["lag"], described["partitions"][0]["position"]) == (7, 3)
        refused(await rest.call("DELETE", "/groups/g"), 409, "GROUP_NOT_EMPTY")
        assert (await rest.post("/groups/g/leave", {"member_id": "c-0"})).body == {"left": True}
        assert (await rest.post("/groups/g/leave", {"member_id": "c-0"})).body == {"left": False}
        refused(await rest.post("/groups/g/heartbeat", beat), 409, "FENCED_GENERATION")
        assert (await rest.call("DELETE", "/groups/g")).body == {"deleted": True, "group_id": "g"}
        refused(await rest.get("/groups/g"), 404, "UNKNOWN_GROUP")

    served(story, QUICK)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("join", {"topics": []}, "topics"),
        ("join", {"topics": "orders"}, "topics"),
        ("join", {"topics": [1]}, "topics[0]"),
        ("join", {"topics": ["a b"]}, "topics[0]"),
        ("join", {"topics": ["orders"], "session_timeout": 30}, "session_timeout"),
        ("join", {"topics": ["orders"], "session_timeout": "1ms"}, "session_timeout"),
        ("join", {"topics": ["orders"], "session_timeout": "9d"}, "session_timeout"),
        ("join", {"topics": ["orders"], "mode": "fast"}, "mode"),
        ("join", {"topics": ["orders"], "client_id": ""}, "client_id"),
        ("join", {"topics": ["orders"] * 101}, "topics"),
        ("join", {"topics": ["orders"], "colour": 1}, "colour"),
        ("join", {}, "topics"),
        ("heartbeat", {"generation": 1}, "member_id"),
        ("heartbeat", {"member_id": "m", "generation": -1}, "generation"),
        ("heartbeat", {"member_id": 5}, "member_id"),
        ("leave", {}, "member_id"),
        ("offsets", {}, "offsets"),
        ("offsets", {"offsets": {}}, "offsets"),
        ("offsets", {"offsets": {"orders": {}}}, "offsets.orders"),
        ("offsets", {"offsets": {"orders": {"0": -1}}}, "offsets.orders.0"),
        ("offsets", {"offsets": {"orders": {"x": 1}}}, "offsets.orders.x"),
        ("offsets", {"offsets": {"orders": {"0": 1, "00": 1}}}, "offsets.orders.00"),
        ("offsets", {"offsets": {"a b": {"0": 1}}}, "offsets.a b"),
        ("commit", {"offsets": {"orders": 5}}, "offsets.orders"),
        ("reset", {"topic": "orders"}, "to"),
        ("reset", {"topic": "orders", "to": "tomorrow"}, "to"),
        ("reset", {"topic": "orders", "to": True}, "to"),
        ("reset", {"topic": "orders", "to": -5}, "to"),
        ("reset", {"to": "latest"}, "topic"),
        ("ack", {}, "receipt_handle"),
        ("ack", {"receipt_handle": None}, "receipt_handle"),
        ("ack", {"receipt_handle": "x"}, "receipt_handle"),
        ("ack", {"receipt_handle": "orders:0:7:1"}, "receipt_handle"),
        ("ack", {"receipt_handle": NOBODY, "receipt_handles": [NOBODY]}, "receipt_handles"),
        ("ack", {"receipt_handles": []}, "receipt_handles"),
        ("ack", {"receipt_handles": [NOBODY] * 1001}, "receipt_handles"),
        ("ack", {"receipt_handle": NOBODY, "delay": "1s"}, "delay"),
        ("ack", {"receipt_handle": "orders:0:7:1:9999999999999999999"}, "receipt_handle"),
        ("nack", {"receipt_handle": NOBODY, "delay": "soon"}, "delay"),
        ("nack", {"receipt_handle": NOBODY, "delay": "9999d"}, "delay"),
    ],
)
def test_a_wrong_field_is_named(path: str, body: dict[str, Any], field: str) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        refused(await rest.post(f"/groups/g/{path}", body), 400, "INVALID_ARGUMENT", f"{field}: ")
        assert rest.cluster.groups == {}

    served(story, QUICK)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ("", "member_id"),
        ("member_id=", "member_id"),
        ("member_id=m&max_messages=0", "max_messages"),
        ("member_id=m&max_messages=1001", "max_messages"),
        ("member_id=m&timeout=31s", "timeout"),
        ("member_id=m&timeout=5", "timeout"),
        ("member_id=m&visibility=0s", "visibility"),
        ("member_id=m&member_id=n", "member_id"),
        ("member_id=m&colour=red", "colour"),
    ],
)
def test_a_wrong_field_of_a_poll_is_named(query: str, field: str) -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.get(f"/groups/g/poll?{query}")
        refused(answer, 400, "INVALID_ARGUMENT", f"{field}: ")

    served(story, QUICK)


def test_unknown_topics_and_partitions_are_told_apart() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        join = {"topics": ["nothing"]}
        refused(await rest.post("/groups/g/join", join), 404, "UNKNOWN_TOPIC", "nothing")
        commit = {"offsets": {"orders": {"0": 1, "7": 1}}}
        refused(await rest.post("/groups/g/offsets", commit), 404, "UNKNOWN_PARTITION")
        reset = {"topic": "orders", "to": "latest", "partition": 9}
        refused(await rest.post("/groups/g/reset", reset), 404, "UNKNOWN_PARTITION")

    served(story, QUICK)


@pytest.mark.parametrize(
    ("raw", "name"),
    [
        ("a%7Bb%7D", "a{b}"),
        ("a%2Fb", "a/b"),
        ("50%25", "50%"),
        ("%C3%A9%20", "é "),
        ("%252F", "%2F"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_names_in_paths_are_decoded_once(raw: str, name: str, prefix: str) -> None:
    async def story(rest: Rest) -> None:
        url = URL(f"http://127.0.0.1:{rest.port}{prefix}/groups/{raw}", encoded=True)
        refused(await rest.call("GET", url), 404, "UNKNOWN_GROUP", repr(name))

    served(story, QUICK)


def test_a_poll_brings_messages_with_receipts() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest)
        rest.cluster.deliver("orders", 1, record(4, b"\xff"))
        path = f"/groups/g/poll?member_id={member}&max_messages=7&timeout=2s&visibility=1m"
        (message,) = (await rest.get(path)).body["messages"]
        receipt = message.pop("receipt_handle")
        assert receipt.startswith("orders:1:4:1:")
        assert message == {
            "topic": "orders", "partition": 1, "offset": 4, "key": "k", "value": "/w==",
            "encoding": "base64", "timestamp": "2023-11-14T22:13:20.000Z", "delivery_count": 1,
            "priority": "high", "headers": {"h": "1"},
        }  # fmt: skip
        (ask,) = rest.cluster.asked
        assert ask == (7, 2.0, 60.0)
        rest.cluster.deliver("orders", 1, record(5, b"\xff"))
        packed = await rest.get(path, headers={"Accept": "application/msgpack"})
        assert packed.body["messages"][0]["value"] == b"\xff"

    served(story, QUICK)


def test_a_stream_poll_has_no_receipts() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest, "stream")
        rest.cluster.deliver("orders", 1, record(4))
        (message,) = (await rest.get(f"/groups/g/poll?member_id={member}")).body["messages"]
        assert "receipt_handle" not in message
        assert message["offset"] == 4

    served(story, QUICK)


def test_a_poll_waits_for_the_first_message_and_an_empty_one_is_no_error() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest)
        path = f"/groups/g/poll?member_id={member}"
        assert (await rest.get(f"{path}&timeout=10ms")).body == {"messages": []}
        waiting = asyncio.ensure_future(rest.get(f"{path}&timeout=30s"))
        await rest.cluster.until_polled(2)
        rest.cluster.deliver("orders", 0, record(0))
        assert len((await waiting).body["messages"]) == 1

    served(story, HttpOptions(topic_wait_ms=1, request_ms=50))


def test_polls_that_wait_leave_room_for_others() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest)
        path = f"/groups/g/poll?member_id={member}"
        waiting = [asyncio.ensure_future(rest.get(path)) for _ in range(2)]
        await rest.cluster.until_polled(2)
        answer = await rest.get(path)
        refused(answer, 429, "THROTTLED")
        assert "Retry-After" in answer.headers
        assert (await rest.get("/groups")).status == 200
        rest.cluster.deliver("orders", 0, record(0))
        await asyncio.gather(*waiting)

    served(story, HttpOptions(topic_wait_ms=1, polls_max=2))


def test_what_a_caller_who_hung_up_would_have_got_is_given_back() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest)
        path = f"/groups/g/poll?member_id={member}"
        _, writer = await asyncio.open_connection("127.0.0.1", rest.port)
        writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        await rest.cluster.until_polled(1)
        writer.transport.abort()
        await asyncio.sleep(0.05)
        rest.cluster.deliver("orders", 0, record(0))
        await rest.cluster.gave_back.wait()
        (returned,) = rest.cluster.returned
        assert isinstance(returned, LeasedRecord)

    served(story, QUICK)


def test_offsets_are_stored_and_read() -> None:
    async def story(rest: Rest) -> None:
        member = await joined(rest, "stream")
        body = {"member_id": member, "offsets": {"orders": {"0": 5, "1": 9}}}
        answer = (await rest.post("/groups/g/offsets", body)).body
        assert answer == {"committed": True, "offsets": {"orders": {"0": 5, "1": 9}}}
        assert (await rest.post("/groups/g/commit", body)).body["committed"] is True
        offsets = {"offsets": {"orders": {"0": 5, "1": 9}}}
        assert (await rest.get("/groups/g/offsets")).body == offsets
        assert (await rest.get("/groups/g/offsets?topic=orders")).body == offsets
        refused(await rest.get("/groups/g/offsets?topic=x"), 404, "UNKNOWN_TOPIC")
        lost = {**body, "member_id": "somebody"}
        refused(await rest.post("/groups/g/offsets", lost), 409, "FENCED_GENERATION")

    served(story, QUICK)


@pytest.mark.parametrize(
    ("to", "meant"),
    [
        ("earliest", "earliest"),
        ("latest", "latest"),
        (17, 17),
        ("17", 17),
        ("2023-11-14T22:13:20Z", datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)),
    ],
)
def test_a_group_is_reset_to_an_end_an_offset_or_a_time(to: object, meant: object) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        answer = await rest.post("/groups/g/reset", {"topic": "orders", "to": to})
        assert set(answer.body["offsets"]["orders"]) == {"0", "1"}
        assert rest.cluster.resets == [meant]
        one = await rest.post("/groups/g/reset", {"topic": "orders", "to": to, "partition": 1})
        assert list(one.body["offsets"]["orders"]) == ["1"]

    served(story, QUICK)


def test_receipts_are_settled_one_by_one() -> None:
    async def story(rest: Rest) -> None:
        first, second, third, fourth = await leased(rest, 4)
        answer = await rest.post("/messages/ack", {"receipt_handle": first, "consumer_id": "c"})
        assert answer.body == {"acknowledged": True, "committed_offset": 1, "in_flight_count": 3}
        refused(await rest.post("/messages/ack", {"receipt_handle": first}), 410, "ALREADY_SETTLED")
        answer = await rest.post("/groups/g/nack", {"receipt_handle": second, "delay": "5s"})
        assert answer.body == {
            "action": "requeued", "delivery_count": 1,
            "next_visible_at": "2023-11-14T22:13:25.000Z",
        }  # fmt: skip
        assert rest.cluster.settlements[-1] == ("g", Settlement("nack", 5_000))
        more = {"receipt_handle": third, "timeout": "1m", "group": "g"}
        answer = await rest.post("/messages/visibility", more)
        assert answer.body["extended"] is True
        assert rest.cluster.settlements[-1] == ("g", Settlement("extend", 60_000))
        answer = await rest.post("/messages/reject", {"receipt_handle": fourth, "reason": "bad"})
        assert answer.body == {"action": "dlq", "delivery_count": 1, "dlq_topic": "orders.dlq"}
        assert rest.cluster.settlements[-1] == ("g", Settlement("reject", None, "bad"))

    served(story, QUICK)


def test_the_three_ways_to_lose_a_receipt_are_told_apart() -> None:
    async def story(rest: Rest) -> None:
        (receipt,) = await leased(rest)
        body = {"receipt_handle": receipt}
        refused(await rest.post("/groups/other/ack", body), 409, "LEASE_FOREIGN")
        for error, status, code in (
            (LeaseExpired("x"), 410, "LEASE_EXPIRED"),
            (LeaseReplaced("x"), 410, "LEASE_REPLACED"),
            (FencedGeneration("x"), 409, "FENCED_GENERATION"),
        ):
            rest.cluster.settle_errors[0] = error
            refused(await rest.post("/messages/ack", body), status, code)

    served(story, QUICK)


def test_several_receipts_have_a_result_each() -> None:
    async def story(rest: Rest) -> None:
        receipts = await leased(rest, 3)
        rest.cluster.settle_errors[1] = LeaseExpired("its time ran out")
        answer = await rest.post("/messages/ack", {"receipt_handles": receipts})
        assert answer.status == 200
        first, second, third = answer.body["results"]
        assert (first["receipt_handle"], first["acknowledged"]) == (receipts[0], True)
        assert (second["code"], second["retriable"]) == ("LEASE_EXPIRED", False)
        assert third["committed_offset"] == 3
        again = await rest.post("/messages/ack", {"receipt_handles": receipts})
        refused(again, 410, "ALREADY_SETTLED")
        assert len(again.body["results"]) == 3
        unavailable = NotLeader("nobody")
        rest.cluster.settle_errors = dict.fromkeys(range(3), unavailable)
        answer = await rest.post("/messages/nack", {"receipt_handles": receipts})
        refused(answer, 503, "NOT_LEADER")
        assert answer.headers["Retry-After"] == "1"

    served(story, QUICK)


def test_delayed_messages_are_listed_found_and_cancelled() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        rest.cluster.waiting["orders"] = [
            DelayedRecord("orders", 0, 5, NOW_MS + 2_000, 2),
            DelayedRecord("orders", 1, 3, NOW_MS + 1_000, 0),
        ]
        answer = (await rest.get("/topics/orders/delayed")).body
        assert answer["count"] == 2
        assert answer["messages"][0] == {
            "topic": "orders", "partition": 1, "offset": 3, "priority": "critical",
            "deliver_at": "2023-11-14T22:13:21.000Z",
        }  # fmt: skip
        answer = (await rest.get("/topics/orders/delayed?limit=1&skip=1")).body
        assert [one["offset"] for one in answer["messages"]] == [5]
        assert (await rest.get("/topics/orders/delayed/5")).body["partition"] == 0
        missing = await rest.get("/topics/orders/delayed/5?partition=1")
        refused(missing, 404, "OFFSET_OUT_OF_RANGE", "offset")
        path = "/topics/orders/delayed/0/5"
        assert (await rest.call("DELETE", path)).body == {"cancelled": True}
        refused(await rest.call("DELETE", path), 404, "OFFSET_OUT_OF_RANGE")
        refused(await rest.call("DELETE", "/topics/orders/delayed/7/5"), 404, "UNKNOWN_PARTITION")
        for query, field in (("limit=0", "limit"), ("skip=-1", "skip"), ("skip=8000", "skip")):
            answer = await rest.get(f"/topics/orders/delayed?{query}")
            refused(answer, 400, "INVALID_ARGUMENT", f"{field}: ")
        rest.cluster.delays = DelaySums(3, 4, 1, 6_000, 2)
        assert (await rest.get("/delay/stats")).body == {
            "pending_count": 3, "delivered_count": 4, "cancelled_count": 1, "avg_delay": "1.5s",
            "missing_partitions": 2,
        }  # fmt: skip

    served(story, QUICK)


def test_dead_letters_are_browsed_with_the_facts_of_their_failure() -> None:
    headers = {
        "x-dlq-reason": b"attempts", "x-dlq-topic": b"orders", "x-dlq-partition": b"1",
        "x-dlq-offset": b"17", "x-dlq-group": b"g", "x-dlq-attempts": b"3",
        "x-dlq-first-delivery": str(NOW_MS).encode(), "x-dlq-last-delivery": b"not a time",
    }  # fmt: skip

    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        empty = {"messages": [], "count": 0, "next_cursor": None}
        assert (await rest.get("/topics/orders/dlq")).body == empty
        done = {"redriven": 0, "complete": True}
        assert (await rest.post("/topics/orders/dlq/redrive", {})).body == done
        await rest.make_topic("orders.dlq", 2)
        letter = BatchRecord(0, NOW_MS, b"k", b"v", headers, 2)
        found = [(0, letter), (1, record(0)), (1, record(1))]
        rest.cluster.dead["orders.dlq"] = [as_record("orders.dlq", *one) for one in found]
        answer = (await rest.get("/topics/orders/dlq?limit=2")).body
        first, second = answer["messages"]
        assert (first["reason"], first["group"], first["source_topic"]) == (
            "attempts", "g", "orders",
        )  # fmt: skip
        assert (first["source_partition"], first["source_offset"]) == (1, 17)
        assert (first["delivery_count"], first["last_delivery"]) == (3, None)
        assert first["first_delivery"] == "2023-11-14T22:13:20.000Z"
        assert second["reason"] is None
        path = f"/topics/orders/dlq?cursor={answer['next_cursor']}"
        answer = (await rest.get(path)).body
        assert [one["offset"] for one in answer["messages"]] == [1]
        assert answer["next_cursor"] is None
        same = await rest.get("/topics/orders.dlq/dlq")
        assert same.body["count"] == 3

    served(story, QUICK)


def test_letters_are_chosen_by_filters() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 2)
        await rest.make_topic("orders.dlq", 2)
        found = [as_record("orders.dlq", 0, record(number)) for number in range(2)]
        rest.cluster.dead["orders.dlq"] = found
        query = "group=g&reason=rejected&key=aw==&key_encoding=base64&partition=1"
        query += "&since=2023-11-14T22:13:20Z&until=2023-11-14T22:13:21Z"
        assert (await rest.get(f"/topics/orders/dlq?{query}")).status == 200
        (which,) = rest.cluster.filters
        assert (which.group, which.reason, which.key, which.partition) == ("g", "rejected", b"k", 1)
        assert (which.since, which.until) == (NOW_MS, NOW_MS + 1_000)
        await rest.post("/topics/orders/dlq/purge", packed={"key": b"\xff"})
        assert rest.cluster.filters.pop().key == b"\xff"
        body = {"reason": "rejected", "limit": 1, "rate": 10}
        answer = (await rest.post("/topics/orders/dlq/redrive", body)).body
        assert answer == {"redriven": 1, "complete": True}
        rest.cluster.complete = False
        answer = (await rest.post("/topics/orders/dlq/purge")).body
        assert answer == {"purged": 2, "complete": False}
        for body, field in (
            ({"rate": 0}, "rate"),
            ({"limit": 0}, "limit"),
            ({"key": "!", "key_encoding": "base64"}, "key"),
            ({"since": "yesterday"}, "since"),
            ({"since": "2024-01-01T00:00:00Z", "until": "2023-01-01T00:00:00Z"}, "until"),
            ({"colour": 1}, "colour"),
        ):
            answer = await rest.post("/topics/orders/dlq/redrive", body)
            refused(answer, 400, "INVALID_ARGUMENT", f"{field}: ")

    served(story, QUICK)


def test_figures_of_deliveries_are_sums_by_name() -> None:
    async def story(rest: Rest) -> None:
        counters = {"acked": 5, "nacked": 2, "dead": 1}
        rest.cluster.totals = QueueSums(counters, [10, 0, 4, 0, 0], [1_000, 0, 8, 0, 0], 3, 7, 1)
        answer = (await rest.get("/reliability/stats")).body
        assert (answer["acks_total"], answer["nacks_total"], answer["dead_total"]) == (5, 2, 1)
        assert (answer["dlq_messages"], answer["in_flight_count"]) == (7, 3)
        answer = (await rest.get("/priority/stats")).body
        assert answer["messages_by_priority"]["critical"] == 10
        assert answer["avg_wait_time_by_priority"] == {
            "critical": "100ms", "high": "0ms", "normal": "2ms", "low": "0ms", "background": "0ms",
        }  # fmt: skip
        assert answer["missing_partitions"] == 1

    served(story, QUICK)


def test_back_pressure_says_when_to_come_back() -> None:
    async def story(rest: Rest) -> None:
        rest.cluster.error = Throttled("busy").with_details(wait_ms=2_500)
        answer = await rest.get("/groups")
        refused(answer, 429, "THROTTLED")
        assert answer.headers["Retry-After"] == "3"

    served(story, QUICK)


def test_delayed_messages_tell_when_they_are_delivered() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 1)
        messages = [
            {"value": "a", "delay": "5s"}, {"value": "b", "deliverAt": "2023-11-14T22:13:19Z"},
            {"value": "c", "ttl": "1m"},
        ]  # fmt: skip
        results = (await rest.post("/topics/orders/messages", {"messages": messages})).body[
            "results"
        ]
        assert [one["delayed"] for one in results] == [True, False, False]
        assert results[0]["deliverAt"] == "2023-11-14T22:13:25.000Z"
        (published,) = rest.cluster.published
        assert published["times"] == [(NOW_MS + 5_000, 0), (0, 0), (0, NOW_MS + 60_000)]
        late = {"value": "v", "deliverAt": "9000-01-01T00:00:00Z"}
        answer = await rest.post("/topics/orders/messages", late)
        refused(answer, 400, "INVALID_ARGUMENT", "deliverAt: ")

    served(story, QUICK)
