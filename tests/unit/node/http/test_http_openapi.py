"""The OpenAPI document and the routes that are served are the same thing."""

from fake_http import Rest, served
from openapi_check import conforms, operations

from raftq.node.http.errors import REFUSALS, STATUS
from raftq.node.http.openapi import ERROR_SCHEMA
from raftq.node.http.options import HttpOptions
from raftq.node.metrics.node_status import ReplicaStats

# Every path of REST.md that this version serves.
SURFACE = {
    "GET /health", "GET /healthz", "GET /livez", "GET /readyz", "GET /version", "GET /stats",
    "GET /metrics", "GET /openapi.json", "POST /topics", "GET /topics", "GET /topics/{topic}",
    "DELETE /topics/{topic}", "POST /topics/{topic}/messages", "POST /topics/{topic}/publish",
    "POST /topics/{topic}/batch", "GET /topics/{topic}/partitions/{partition}/messages",
    "POST /admin/topics/{topic}/partitions", "GET /admin/cluster", "GET /admin/reassignment",
    "GET /admin/keys", "GET /admin/acls", "GET /topics/{topic}/delayed",
    "GET /topics/{topic}/delayed/{offset}", "DELETE /topics/{topic}/delayed/{partition}/{offset}",
    "GET /delay/stats", "GET /groups", "GET /groups/{group}", "DELETE /groups/{group}",
    "POST /groups/{group}/join", "POST /groups/{group}/heartbeat", "POST /groups/{group}/leave",
    "GET /groups/{group}/poll", "GET /groups/{group}/offsets", "POST /groups/{group}/offsets",
    "POST /groups/{group}/commit", "POST /groups/{group}/reset", "POST /groups/{group}/ack",
    "POST /groups/{group}/nack", "POST /messages/ack", "POST /messages/nack",
    "POST /messages/reject", "POST /messages/visibility", "GET /reliability/stats",
    "GET /priority/stats", "GET /topics/{topic}/dlq", "POST /topics/{topic}/dlq/redrive",
    "POST /topics/{topic}/dlq/purge",
}  # fmt: skip


VALUES = {"topic": "t", "group": "g", "partition": "0", "offset": "0"}


def test_every_route_is_in_the_document_and_the_other_way_round() -> None:
    async def story(rest: Rest) -> None:
        document = (await rest.get("/openapi.json")).body
        assert document["openapi"].startswith("3.")
        assert [server["url"] for server in document["servers"]] == ["/v1", "/"]
        described = operations(document)
        assert set(described) == {f"{one.method} {one.path}" for one in rest.server.routes}
        assert set(described) == SURFACE
        names = [operation["operationId"] for operation in described.values()]
        assert len(set(names)) == len(names)
        assert (await rest.get("/v1/openapi.json")).body == document

    served(story)


def test_every_documented_operation_is_really_served() -> None:
    async def story(rest: Rest) -> None:
        document = (await rest.get("/openapi.json")).body
        for name in operations(document):
            method, path = name.split()
            for parameter, given in (
                ("topic", "t"),
                ("group", "g"),
                ("partition", "0"),
                ("offset", "0"),
            ):
                path = path.replace(f"{{{parameter}}}", given)
            for prefix in ("", "/v1"):
                answer = await rest.call(method, prefix + path)
                code = (answer.body or {}).get("code")
                assert code not in {"NOT_FOUND", "METHOD_NOT_ALLOWED", "INTERNAL"}, name
                assert str(answer.status) in operations(document)[name]["responses"], name

    served(story, HttpOptions(topic_wait_ms=1))


def test_every_operation_has_schemas_for_what_it_takes_and_gives() -> None:
    async def story(rest: Rest) -> None:
        document = (await rest.get("/openapi.json")).body
        for name, operation in operations(document).items():
            success = [code for code in operation["responses"] if code.startswith("2")]
            assert len(success) == 1
            content = operation["responses"][success[0]]["content"]
            if name != "GET /metrics":
                assert set(content) == {"application/json", "application/msgpack"}
            assert all("schema" in one for one in content.values())
            if name.startswith("POST"):
                taken = operation["requestBody"]["content"]
                assert set(taken) == {"application/json", "application/msgpack"}
            assert "400" in operation["responses"]
            for status in ("429", "503"):
                if status in operation["responses"]:
                    assert "Retry-After" in operation["responses"][status]["headers"]
        assert document["components"]["schemas"]["Error"] == ERROR_SCHEMA

    served(story)


def test_real_answers_have_the_documented_shape() -> None:
    async def story(rest: Rest) -> None:
        described = operations((await rest.get("/openapi.json")).body)
        rest.facts.stats = [ReplicaStats("t", 1, 0, "leader", 1, 0, 9, 9, 9, (1,), 1234)]
        message = {"value": "v", "key": "k", "headers": {"a": "b"}}
        for name, path, body in (
            ("POST /topics", "/topics", {"name": "t", "num_partitions": 1}),
            ("POST /topics/{topic}/messages", "/topics/t/messages", {"messages": [message]}),
            ("POST /topics/{topic}/publish", "/topics/t/publish", message),
            ("GET /topics/{topic}/partitions/{partition}/messages",
             "/topics/t/partitions/0/messages", None),
            ("GET /topics", "/topics", None),
            ("GET /topics/{topic}", "/topics/t", None),
            ("POST /admin/topics/{topic}/partitions", "/admin/topics/t/partitions", {"count": 2}),
            ("GET /admin/cluster", "/admin/cluster", None),
            ("GET /health", "/health", None),
            ("GET /readyz", "/readyz?verbose", None),
            ("GET /livez", "/livez", None),
            ("GET /version", "/version", None),
            ("GET /stats", "/stats", None),
            ("DELETE /topics/{topic}", "/topics/t", None),
        ):  # fmt: skip
            answer = await rest.call(name.split()[0], path, body)
            documented = described[name]["responses"][str(answer.status)]
            schema = documented["content"]["application/json"]["schema"]
            assert schema["properties"], name
            conforms(schema, answer.body, name)
        refused = await rest.post("/topics", {})
        conforms(ERROR_SCHEMA, refused.body, "error")

    served(story)


def test_statuses_of_errors_are_statuses() -> None:
    assert all(400 <= status < 600 for status in (*STATUS.values(), *REFUSALS.values()))
