"""The HTTP server over a cluster in memory: every path, and how requests are answered."""

import asyncio
import base64

import pytest
from fake_http import NOW_MS, Rest, served

from raftq.client.common.errors import (
    DiskFull,
    NotEnoughReplicas,
    RequestTimeout,
    Throttled,
    UnknownTopic,
)
from raftq.node.http.options import HttpOptions
from raftq.node.metrics.node_status import ReplicaStats

WHEN = "2023-11-14T22:13:20.000Z"
PREFIXES = ("", "/v1")
QUICK = HttpOptions(topic_wait_ms=1)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_health_says_that_the_node_is_there(prefix: str) -> None:
    async def story(rest: Rest) -> None:
        health = await rest.get(f"{prefix}/health")
        assert (health.status, health.body) == (200, {"status": "ok", "timestamp": WHEN})
        for path in ("/healthz", "/livez"):
            alive = await rest.get(prefix + path)
            assert alive.status == 200
            assert alive.body == {"status": "pass", "timestamp": WHEN, "uptime": "5.25s"}

    served(story)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_readiness_fails_with_any_check(prefix: str) -> None:
    async def story(rest: Rest) -> None:
        ready = await rest.get(f"{prefix}/readyz")
        assert ready.status == 200
        assert ready.body == {"status": "pass", "timestamp": WHEN, "uptime": "5.25s"}
        rest.facts.problems["disk"] = (False, "it is full")
        ready = await rest.get(f"{prefix}/readyz")
        assert ready.status == 503
        assert ready.headers["Retry-After"] == "1"
        assert ready.body["status"] == "fail"
        assert ready.body["message"] == "disk: it is full"
        assert "checks" not in ready.body

    served(story)


@pytest.mark.parametrize("query", ["verbose", "verbose=", "verbose=true", "verbose=1"])
def test_verbose_readiness_has_every_check(query: str) -> None:
    async def story(rest: Rest) -> None:
        rest.facts.problems["disk"] = (False, "it is full")
        rest.facts.stats = [ReplicaStats("t", 1, 0, "leader", 1, 0, 9, 9, 9, (1,), 1234)]
        ready = await rest.get(f"/readyz?{query}")
        checks = ready.body["checks"]
        assert checks["disk"] == {"status": "fail", "message": "it is full", "latency": "0ms"}
        assert checks["registered"]["status"] == "pass"
        assert ready.body["broker"] == {"node_id": 1, "topic_count": 0, "total_size": 1234}

    served(story)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_version_and_stats_describe_the_node(prefix: str) -> None:
    async def story(rest: Rest) -> None:
        version = (await rest.get(f"{prefix}/version")).body
        assert version["node_id"] == 1
        assert version["version"].count(".") == 2
        await rest.make_topic("t", 2)
        rest.facts.stats = [
            ReplicaStats("t", 1, 0, "leader", 1, 5, 9, 8, 9, (1, 2), 100),
            ReplicaStats("t", 1, 1, "follower", 1, 0, 9, 9, 9, (1, 2), 50),
        ]
        stats = (await rest.get(f"{prefix}/stats")).body
        assert stats == {
            "node_id": 1, "uptime": "5.25s", "topics": 1, "total_size_bytes": 150,
            "topic_stats": {
                "t": {"partitions": 2, "leading": 1, "messages": 12, "size_bytes": 150}
            },
        }  # fmt: skip

    served(story)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_topic_lives_and_dies(prefix: str) -> None:
    """1. create with defaults 2. again is a conflict 3. list 4. describe 5. delete 6. gone."""

    async def story(rest: Rest) -> None:
        created = await rest.post(f"{prefix}/topics", {"name": "orders"})
        assert created.status == 201
        assert created.body == {"name": "orders", "partitions": 3, "created": True}
        again = await rest.post(f"{prefix}/topics", {"name": "orders"})
        assert again.status == 409
        assert again.body["code"] == "TOPIC_EXISTS"
        assert again.body["retriable"] is False
        assert (await rest.get(f"{prefix}/topics")).body == {"topics": ["orders"]}
        described = await rest.get(f"{prefix}/topics/orders")
        assert described.status == 200
        assert described.body["partition_offsets"]["2"] == {"earliest": 0, "latest": 0}
        assert described.body["replicas"]["0"] == {
            "leader": 1, "replicas": [1, 2], "isr": [1, 2], "epoch": 1
        }  # fmt: skip
        assert described.body["config"]["retention_ms"] == 168 * 3_600_000
        deleted = await rest.call("DELETE", f"{prefix}/topics/orders")
        assert deleted.body == {"deleted": True, "name": "orders"}
        gone = await rest.call("DELETE", f"{prefix}/topics/orders")
        assert (gone.status, gone.body["code"]) == (404, "UNKNOWN_TOPIC")
        assert (await rest.get(f"{prefix}/topics/orders")).status == 404

    served(story, QUICK)


def test_settings_of_a_new_topic_arrive() -> None:
    async def story(rest: Rest) -> None:
        body = {
            "name": "t", "num_partitions": 7, "retention_hours": 0.5, "replication_factor": 3,
            "min_insync": 2, "config": {"fsync": "always", "retention_bytes": 5000},
        }  # fmt: skip
        created = await rest.post("/topics", body)
        assert created.body["partitions"] == 7
        config = (await rest.get("/topics/t")).body["config"]
        assert config["retention_ms"] == 1_800_000
        assert config["min_insync"] == 2
        assert config["fsync"] == "always"
        assert config["retention_bytes"] == 5000
        forever = await rest.post("/topics", {"name": "u", "retention_hours": -1})
        assert forever.status == 201
        assert (await rest.get("/topics/u")).body["config"]["retention_ms"] == -1

    served(story)


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": 5}, "name"),
        ({"name": "a b"}, "name: must"),
        ({"name": "a/b"}, "name: must"),
        ({"name": ".."}, "name: must"),
        ({"name": "x" * 250}, "name: must"),
        ({"name": "x" * 5000}, "name"),
        ({"name": "t", "partitions": 3}, "partitions: is not a known field"),
        ({"name": "t", "num_partitions": "3"}, "num_partitions"),
        ({"name": "t", "num_partitions": -1}, "num_partitions"),
        ({"name": "t", "num_partitions": 1.5}, "num_partitions"),
        ({"name": "t", "num_partitions": True}, "num_partitions"),
        ({"name": "t", "num_partitions": 10**9}, "num_partitions"),
        ({"name": "t", "num_partitions": 10**400}, "num_partitions"),
        ({"name": "t", "retention_hours": "1h"}, "retention_hours"),
        ({"name": "t", "retention_hours": -0.5}, "retention_hours"),
        ({"name": "t", "retention_hours": 1e300}, "retention_hours"),
        ({"name": "t", "retention_hours": 1, "config": {"retention_ms": 5}}, "retention_hours"),
        ({"name": "t", "replication_factor": 999}, "replication_factor"),
        ({"name": "t", "min_insync": 0}, "min_insync"),
        ({"name": "t", "min_insync": 1, "config": {"min_insync": 1}}, "min_insync"),
        ({"name": "t", "config": []}, "config"),
        ({"name": "t", "config": {"fsync": []}}, "config.fsync"),
        ({"name": "t", "config": {"fsync": 1.5}}, "config.fsync"),
        ({"name": "t", "config": {"retention_ms": 10**30}}, "config.retention_ms"),
        ({"name": "t", "config": {"nonsense": 1}}, "config.nonsense: is not a known setting"),
        ({"name": "t", "config": {str(n): n for n in range(65)}}, "config"),
        ([], "the body must be an object"),
        ("text", "the body must be an object"),
        (5, "the body must be an object"),
    ],
)
def test_a_topic_with_bad_settings_is_refused_by_the_name_of_the_field(
    body: object, named: str
) -> None:
    async def story(rest: Rest) -> None:
        refused = await rest.post("/topics", body)
        assert refused.status == 400, refused.body
        assert refused.body["code"] == "INVALID_ARGUMENT"
        assert named in refused.body["error"]
        assert refused.body["retriable"] is False
        assert rest.cluster.logs == {}

    served(story)


def test_partitions_are_added() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 2)
        added = await rest.post("/v1/admin/topics/t/partitions", {"count": 4})
        assert added.body == {
            "success": True, "topic_name": "t", "old_partition_count": 2,
            "new_partition_count": 4, "partitions_added": [2, 3],
        }  # fmt: skip
        assert (await rest.post("/admin/topics/t/partitions", {"partitions": 5})).status == 200
        for body in ({}, {"count": 0}, {"count": "9"}, {"count": 8, "partitions": 9}, {"n": 1}):
            refused = await rest.post("/admin/topics/t/partitions", body)
            assert (refused.status, refused.body["code"]) == (400, "INVALID_ARGUMENT")
        assert (await rest.post("/admin/topics/u/partitions", {"count": 9})).status == 404

    served(story, QUICK)


@pytest.mark.parametrize("prefix", PREFIXES)
def test_the_cluster_is_described(prefix: str) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 2)
        body = (await rest.get(f"{prefix}/admin/cluster")).body
        assert body["controller"] == 1
        assert body["term"] == 3
        assert body["voters"] == [1, 2, 3]
        assert [node["status"] for node in body["nodes"]] == ["alive", "alive", "dead"]
        assert body["nodes"][0]["leading"] == 2
        assert body["nodes"][1]["replicas"] == 2
        assert (body["topics"], body["partitions"], body["leaderless"]) == (1, 2, 0)

    served(story)


@pytest.mark.parametrize("prefix", PREFIXES)
@pytest.mark.parametrize("word", ["messages", "publish", "batch"])
def test_messages_are_published_and_read(prefix: str, word: str) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("orders", 1)
        path = f"{prefix}/topics/orders/{word}"
        one = await rest.post(path, {"key": "k", "value": "größe", "priority": "high"})
        assert one.status == 200
        assert one.body == {
            "results": [{"partition": 0, "offset": 0, "priority": "high", "delayed": False}]
        }
        binary = base64.b64encode(b"\xff\x00").decode()
        messages = [
            {"value": "b", "headers": {"h": "1"}},
            {"value": binary, "encoding": "base64", "partition": 0},
        ]
        many = await rest.post(path, {"messages": messages})
        assert [result["offset"] for result in many.body["results"]] == [1, 2]
        read = await rest.get(f"{prefix}/topics/orders/partitions/0/messages")
        assert read.status == 200
        assert read.body["next_offset"] == 3
        first, second, third = read.body["messages"]
        assert first == {
            "offset": 0, "timestamp": WHEN, "key": "k", "value": "größe", "priority": "high",
            "headers": {},
        }  # fmt: skip
        assert second["headers"] == {"h": "1"}
        assert (third["value"], third["encoding"]) == (binary, "base64")

    served(story)


def test_reading_goes_by_offset_time_and_limit() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        await rest.post("/topics/t/messages", {"messages": [{"value": str(n)} for n in range(9)]})
        path = "/topics/t/partitions/0/messages"

        async def offsets(query: str) -> list[int]:
            read = await rest.get(f"{path}?{query}")
            assert read.status == 200, read.body
            return [message["offset"] for message in read.body["messages"]]

        assert await offsets("offset=4&limit=2") == [4, 5]
        assert await offsets("limit=1000") == list(range(9))
        assert await offsets("offset=9") == []
        assert await offsets("from_time=2023-11-14T22:13:20Z&limit=1") == [0]
        assert await offsets("from_time=2024-11-14T22:13:20Z") == []
        rest.cluster.start_offset = 3
        assert await offsets("limit=1") == [3]
        beyond = await rest.get(f"{path}?offset=10")
        assert (beyond.status, beyond.body["code"]) == (404, "OFFSET_OUT_OF_RANGE")

    served(story)


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=1001", "limit=-1", "limit=x", "limit=1e3", "limit=", "limit=5&limit=6",
     "offset=-1", "offset=1.5", "offset=9223372036854775808", "offset=" + "9" * 500, "offset=%00",
     "from_time=yesterday", "from_time=5", "offset=0&from_time=2024-11-14T22:13:20Z", "page=1",
     "offset=%D9%A1", "&".join(f"a{n}=1" for n in range(40))],
)  # fmt: skip
def test_a_bad_query_is_refused(query: str) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        read = await rest.get(f"/topics/t/partitions/0/messages?{query}")
        assert read.status == 400, read.body
        assert read.body["code"] in {"INVALID_ARGUMENT", "BAD_REQUEST"}
        assert query[:4] in read.body["error"] or "query" in read.body["error"]

    served(story)


@pytest.mark.parametrize(
    ("partition", "status", "code"),
    [("3", 404, "UNKNOWN_PARTITION"), ("9999999999", 400, "INVALID_ARGUMENT"),
     ("-1", 400, "INVALID_ARGUMENT"), ("x", 400, "INVALID_ARGUMENT"),
     ("1.0", 400, "INVALID_ARGUMENT"), ("9" * 40, 400, "INVALID_ARGUMENT"),
     ("%D9%A1", 400, "INVALID_ARGUMENT")],
)  # fmt: skip
def test_a_bad_partition_is_refused(partition: str, status: int, code: str) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 3)
        read = await rest.get(f"/topics/t/partitions/{partition}/messages")
        assert (read.status, read.body["code"]) == (status, code)
        assert "partition" in read.body["error"]

    served(story, QUICK)


def test_publishing_to_a_partition_that_is_not_there_names_the_message() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 3)
        messages = [{"value": "a", "partition": 1}, {"value": "b", "partition": 3}]
        refused = await rest.post("/topics/t/messages", {"messages": messages})
        assert (refused.status, refused.body["code"]) == (404, "UNKNOWN_PARTITION")
        assert refused.body["error"].startswith("messages[1].partition: ")
        assert rest.cluster.published == []

    served(story, QUICK)


def test_a_value_over_the_limit_of_its_topic_is_refused_before_it_is_sent() -> None:
    async def story(rest: Rest) -> None:
        await rest.post("/topics", {"name": "t", "config": {"value_bytes_max": 10}})
        messages = [{"value": "a"}, {"value": "b" * 11}]
        refused = await rest.post("/topics/t/messages", {"messages": messages})
        assert (refused.status, refused.body["code"]) == (413, "TOO_LARGE")
        assert refused.body["error"].startswith("messages[1].value: 11 bytes")
        assert rest.cluster.published == []

    served(story)


@pytest.mark.parametrize("name", ["a%20b", "a%2Fb", "%FF", "..%2f..", "x" * 250, "%00"])
def test_a_bad_topic_name_in_the_path_is_refused(name: str) -> None:
    async def story(rest: Rest) -> None:
        for path in (f"/topics/{name}", f"/topics/{name}/partitions/0/messages"):
            refused = await rest.talk(
                f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
            )
            assert refused.startswith(b"HTTP/1.1 400 "), refused
            assert b'"INVALID_ARGUMENT"' in refused

    served(story)


def test_an_unknown_topic_is_not_found() -> None:
    async def story(rest: Rest) -> None:
        for answer in (
            await rest.get("/topics/none"),
            await rest.get("/topics/none/partitions/0/messages"),
            await rest.post("/topics/none/messages", {"value": "v"}),
            await rest.call("DELETE", "/topics/none"),
        ):
            assert (answer.status, answer.body["code"]) == (404, "UNKNOWN_TOPIC")
            assert "none" in answer.body["error"]

    served(story, QUICK)


def test_a_topic_that_turns_up_meanwhile_is_found() -> None:
    async def story(rest: Rest) -> None:
        rest.cluster.logs["late"] = [[], []]
        rest.metadata.looked.clear()
        asked = asyncio.ensure_future(
            rest.post("/topics/late/messages", {"value": "v", "partition": 1})
        )
        await rest.metadata.looked.wait()
        assert not asked.done()
        rest.metadata.put("early", 1, {})
        rest.metadata.put("late", 1, {})
        rest.metadata.put("late", 2, {})
        answer = await asked
        assert answer.status == 200
        assert answer.body["results"][0]["partition"] == 1

    served(story, HttpOptions(topic_wait_ms=10_000))


def test_results_tell_the_failed_messages_from_the_others() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        rest.cluster.failing[1] = NotEnoughReplicas("one is missing")
        messages = {"messages": [{"value": "a"}, {"value": "b"}, {"value": "c"}]}
        answer = await rest.post("/topics/t/messages", messages)
        assert answer.status == 200
        first, second, third = answer.body["results"]
        assert (first["offset"], third["offset"]) == (0, 1)
        assert second == {
            "error": "one is missing", "code": "NOT_ENOUGH_REPLICAS", "retriable": True
        }  # fmt: skip

    served(story)


def test_when_every_message_failed_the_status_says_so() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        rest.cluster.failing = {0: RequestTimeout("late"), 1: NotEnoughReplicas("missing")}
        answer = await rest.post("/topics/t/messages", {"messages": [{"value": "a"}] * 2})
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "1"
        assert answer.body["code"] == "REQUEST_TIMEOUT"
        assert answer.body["outcome"] == "unknown"
        codes = [result["code"] for result in answer.body["results"]]
        assert codes == ["REQUEST_TIMEOUT", "NOT_ENOUGH_REPLICAS"]

    served(story)


@pytest.mark.parametrize(
    ("error", "status", "wait"),
    [
        (Throttled("slow down").with_details(wait_ms=2500), 429, "3"),
        (NotEnoughReplicas("too few"), 503, "1"),
        (DiskFull("no space"), 507, None),
        (UnknownTopic("gone"), 404, None),
    ],
)
def test_errors_of_the_cluster_become_answers(
    error: Exception, status: int, wait: str | None
) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        rest.cluster.error = error
        for answer in (
            await rest.get("/topics/t"),
            await rest.post("/topics/t/messages", {"value": "v"}),
            await rest.get("/topics/t/partitions/0/messages"),
            await rest.post("/topics", {"name": "u"}),
            await rest.call("DELETE", "/topics/t"),
            await rest.post("/admin/topics/t/partitions", {"count": 9}),
        ):
            assert answer.status == status
            assert answer.headers.get("Retry-After") == wait
            assert set(answer.body) - {"results"} == {"error", "code", "retriable"}

    served(story)


def test_the_clock_of_the_node_is_what_answers_show() -> None:
    async def story(rest: Rest) -> None:
        rest.now_ms = NOW_MS + 1234
        assert (await rest.get("/health")).body["timestamp"] == "2023-11-14T22:13:21.234Z"

    served(story)
