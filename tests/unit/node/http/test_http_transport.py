"""What callers may do to the HTTP server: bodies, forms, limits, slowness, concurrency."""

import asyncio
import contextlib
import gzip
import json
import logging

import msgpack
import pytest
from fake_http import Answer, Rest, served

from raftq.client.common.errors import ConfigError
from raftq.client.wire.record import BatchRecord
from raftq.node.http.bodies import VALUES_MAX, decode_json, decode_msgpack, wants_msgpack
from raftq.node.http.errors import Refusal
from raftq.node.http.options import HttpOptions

MIB = 1024 * 1024
MSGPACK = "application/msgpack"
CLOSE = "Connection: close\r\n"


def head(method: str, path: str, *lines: str) -> bytes:
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: x", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"}", b"nul", b"'a'", b'{"name": "t"} x', b'{"name": "t",}', b"\xff\xfe", b"{\x00}",
        b'{"name": NaN}', b'{"name": -Infinity}', b'"\xed\xa0\x80"', b"[" * 100_000,
        b'{"a":' * 100_000, b"9" * 5000, b'{"num_partitions": ' + b"9" * 5000 + b"}", b"\x1f\x8b",
        b'{"name": "\n"}', b"01", b"",
    ],
)  # fmt: skip
def test_a_body_that_is_no_json_is_refused(body: bytes) -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.post("/topics", data=body)
        assert (answer.status, answer.body["code"]) == (400, "BAD_REQUEST")
        assert "body" in answer.body["error"]
        assert (await rest.get("/health")).status == 200

    served(story)


@pytest.mark.parametrize(
    "body",
    [
        b"\xc1", b"\x81", b"\xdf\xff\xff\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff",
        b"\x91" * 5000, b"\x81\xa1a" * 5000, b"\xa2\xff\xff", b"\xd6\xff\x00\x00\x00\x00",
        b"\x80\x80", b"\x81\x01\x02",
    ],
)  # fmt: skip
def test_a_body_that_is_no_msgpack_is_refused(body: bytes) -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.post("/topics", data=body, headers={"Content-Type": MSGPACK})
        assert answer.status == 400
        assert answer.body["code"] == "BAD_REQUEST"
        assert answer.headers["Content-Type"] == MSGPACK

    served(story)


def test_a_number_that_is_too_large_for_a_float_is_refused() -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.post("/topics", data=b'{"name": "t", "retention_hours": 1e999}')
        assert (answer.status, answer.body["code"]) == (400, "INVALID_ARGUMENT")

    served(story)


def test_few_bytes_cannot_become_many_values() -> None:
    nested = b"[" + b"[]," * VALUES_MAX + b"[]]"
    strings = b"[" + b'"ab",' * VALUES_MAX + b'"ab"]'
    for body in (nested, strings):
        with pytest.raises(Refusal, match="values") as refused:
            decode_json(body)
        assert refused.value.status == 413
    rows = msgpack.packb([[[]] * 15_000] * 50)
    with pytest.raises(Refusal, match="values"):
        decode_msgpack(rows)


def test_signs_inside_strings_do_not_count_as_values() -> None:
    value = ',[{\\"' * VALUES_MAX
    body = json.dumps({"value": value, "key": '"'}).encode()
    assert decode_json(body) == {"value": value, "key": '"'}


@pytest.mark.parametrize(
    ("accept", "content", "binary"),
    [
        ("", False, False), ("", True, True), ("*/*", True, True), ("*/*", False, False),
        (MSGPACK, False, True), ("application/x-msgpack", False, True),
        ("application/json", True, False), ("text/html, application/msgpack;q=0.9", False, True),
        ("application/json, application/msgpack", True, False),
        ("application/msgpack, application/json", False, True), ("text/html", False, False),
    ],
)  # fmt: skip
def test_the_form_of_the_answer_is_what_is_asked_for(
    accept: str, content: bool, binary: bool
) -> None:
    assert wants_msgpack(accept, content) is binary


def test_msgpack_is_taken_and_given_everywhere() -> None:
    async def story(rest: Rest) -> None:
        asked = {"Accept": MSGPACK}
        created = await rest.post("/topics", packed={"name": "t", "num_partitions": 1})
        assert created.status == 201
        assert created.headers["Content-Type"] == MSGPACK
        assert created.body == {"name": "t", "partitions": 1, "created": True}
        message = {"key": b"\xff", "value": b"\xfe", "headers": {"h": b"\xfd"}}
        published = await rest.post("/topics/t/messages", packed={"messages": [message]})
        assert published.body["results"][0]["offset"] == 0
        read = await rest.get("/topics/t/partitions/0/messages", headers=asked)
        first = read.body["messages"][0]
        assert (first["key"], first["value"], first["headers"]) == (
            b"\xff", b"\xfe", {"h": b"\xfd"}
        )  # fmt: skip
        for path in ("/health", "/readyz", "/version", "/stats", "/topics", "/topics/t",
                     "/admin/cluster", "/openapi.json", "/nowhere"):  # fmt: skip
            plain = await rest.get(path)
            packed = await rest.get(path, headers=asked)
            assert packed.headers["Content-Type"] == MSGPACK
            assert packed.body == plain.body
        mixed = await rest.post(
            "/topics/t/messages", packed={"value": b"v"}, headers={"Accept": "application/json"}
        )
        assert mixed.headers["Content-Type"] == "application/json"

    served(story, HttpOptions(topic_wait_ms=1))


def test_any_other_content_type_is_read_as_json() -> None:
    async def story(rest: Rest) -> None:
        for number, kind in enumerate(("text/plain", "application/x-www-form-urlencoded", "??")):
            body = json.dumps({"name": f"t{number}"}).encode()
            answer = await rest.post("/topics", data=body, headers={"Content-Type": kind})
            assert answer.status == 201

    served(story)


def test_what_is_not_served_is_not_found() -> None:
    async def story(rest: Rest) -> None:
        for path in ("/", "/v1", "/v1/", "/v2/health", "/v1/v1/health", "/topics/", "/topics//",
                     "/health/x", "/topics/t/partitions//messages", "//health", "/%2e%2e/x",
                     "/topics/t/x", "/TOPICS"):  # fmt: skip
            answer = await rest.talk(head("GET", path, "Connection: close"))
            assert answer.startswith(b"HTTP/1.1 404 "), path
            assert b'"NOT_FOUND"' in answer

    served(story)


def test_another_method_is_not_allowed_and_the_right_ones_are_named() -> None:
    async def story(rest: Rest) -> None:
        for path, allowed in (("/topics", "GET, POST"), ("/v1/topics/t", "DELETE, GET"),
                              ("/health", "GET"), ("/topics/t/batch", "POST")):  # fmt: skip
            for method in ("PUT", "PATCH", "OPTIONS"):
                answer = await rest.call(method, path)
                assert (answer.status, answer.body["code"]) == (405, "METHOD_NOT_ALLOWED")
                assert answer.headers["Allow"] == allowed

    served(story)


def test_head_is_answered_like_get_without_the_body() -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.call("HEAD", "/health")
        assert (answer.status, answer.raw) == (200, b"")
        assert int(answer.headers["Content-Length"]) > 0
        assert (await rest.call("HEAD", "/nowhere")).status == 404

    served(story)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x00\xa5\x01\x00\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n",
        head("GET", "/health", "Content-Length: x"), head("GET", "/health", "Content-Length: -1"),
        head("GET", "/" + "a" * 20_000), head("GET", "/health", "A: " + "b" * 20_000),
        head("GET", "/health", *(f"A{n}: 1" for n in range(500))),
        head("GET", "/health", "no line"),
        head("GET", "/health\x00"), b"\r\n" * 4 + b"\x00\x00\x00\x00\r\n\r\n",
        head("POST", "/topics", "Transfer-Encoding: chunked", "Content-Length: 5"),
    ],
)  # fmt: skip
def test_what_is_no_http_is_refused_in_json_and_ends_its_connection_only(sent: bytes) -> None:
    async def story(rest: Rest) -> None:
        answer = await rest.talk(sent)
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")), answer
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
        assert body["code"] == "BAD_REQUEST"
        assert "\n" not in body["error"]
        assert b"Traceback" not in answer
        assert (await rest.get("/health")).status == 200

    served(story)


def test_a_damaged_chunked_body_is_refused() -> None:
    async def story(rest: Rest) -> None:
        sent = head("POST", "/topics", "Transfer-Encoding: chunked") + b"zz\r\n{}\r\n0\r\n\r\n"
        answer = await rest.talk(sent)
        assert answer.startswith((b"HTTP/1.0 400 ", b"HTTP/1.1 400 ")), answer

    served(story)


def test_a_body_over_the_limit_is_refused_by_its_length_and_by_its_bytes() -> None:
    async def story(rest: Rest) -> None:
        async def chunks() -> object:
            for _ in range(100):
                yield b" " * 10_000

        for data in (b" " * 500_000, chunks()):
            answer = await rest.post("/topics", data=data)
            assert (answer.status, answer.body["code"]) == (413, "TOO_LARGE")
        assert (await rest.post("/topics", data=b" " * 99_000)).status == 400

    options = HttpOptions(body_bytes_max=100_000)
    served(story, options)


def test_a_value_of_sixteen_mebibytes_fits_as_base64() -> None:
    async def story(rest: Rest) -> None:
        config = {"value_bytes_max": 16 * MIB}
        await rest.post("/topics", {"name": "t", "num_partitions": 1, "config": config})
        value = "A" * (16 * MIB // 3 * 4)
        answer = await rest.post("/topics/t/messages", {"value": value, "encoding": "base64"})
        assert answer.status == 200, answer.body
        over = {"value": value + "AAAAAAAA", "encoding": "base64"}
        answer = await rest.post("/topics/t/messages", over)
        assert (answer.status, answer.body["code"]) == (413, "TOO_LARGE")

    served(story)


def test_a_packed_body_is_not_unpacked() -> None:
    async def story(rest: Rest) -> None:
        body = gzip.compress(b" " * MIB + b'{"name": "t"}')
        answer = await rest.post("/topics", data=body, headers={"Content-Encoding": "gzip"})
        assert (answer.status, answer.body["code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")

    served(story)


def test_a_caller_that_asks_first_is_invited_to_send_its_body() -> None:
    async def story(rest: Rest) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", rest.server.port)
        body = b'{"name": "t"}'
        lines = ("Expect: 100-continue", f"Content-Length: {len(body)}", "Connection: close")
        writer.write(head("POST", "/topics", *lines))
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 201 ")
        writer.close()
        await writer.wait_closed()

    served(story)


def test_a_page_of_another_site_cannot_change_anything() -> None:
    async def story(rest: Rest) -> None:
        elsewhere = {"Sec-Fetch-Site": "cross-site"}
        refused = await rest.post("/topics", {"name": "t"}, headers=elsewhere)
        assert (refused.status, refused.body["code"]) == (403, "CROSS_ORIGIN")
        assert (await rest.get("/topics", headers=elsewhere)).body == {"topics": []}
        here = await rest.post("/topics", {"name": "t"}, headers={"Sec-Fetch-Site": "same-origin"})
        assert here.status == 201

    served(story)


def test_a_mistake_of_ours_is_logged_with_the_id_that_the_caller_gets(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        rest.cluster.error = RuntimeError("a secret of the inside")
        with caplog.at_level(logging.ERROR):
            answer = await rest.post("/topics/t/messages", {"value": "v"})
        assert answer.status == 500
        assert answer.body["code"] == "INTERNAL"
        assert answer.body["retriable"] is False
        assert b"secret" not in answer.raw
        assert b"Traceback" not in answer.raw
        request_id = answer.headers["X-Request-Id"]
        assert request_id in answer.body["error"]
        (record,) = [one for one in caplog.records if one.exc_info]
        assert record.__dict__["request_id"] == request_id
        rest.cluster.error = None
        assert (await rest.post("/topics/t/messages", {"value": "v"})).status == 200

    served(story)


def test_every_answer_has_an_id_of_its_own() -> None:
    async def story(rest: Rest) -> None:
        answers = [await rest.get("/health") for _ in range(3)] + [await rest.get("/nowhere")]
        assert len({answer.headers["X-Request-Id"] for answer in answers}) == 4

    served(story)


def test_a_cluster_that_does_not_answer_is_a_timeout_of_unknown_outcome() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        rest.cluster.gate = asyncio.Event()
        answer = await rest.post("/topics/t/messages", {"value": "v"})
        assert (answer.status, answer.body["code"]) == (503, "REQUEST_TIMEOUT")
        assert answer.body["outcome"] == "unknown"
        assert answer.headers["Retry-After"] == "1"

    served(story, HttpOptions(request_ms=50))


def test_a_body_that_does_not_come_is_a_timeout() -> None:
    async def story(rest: Rest) -> None:
        sent = head("POST", "/topics", "Content-Length: 50") + b'{"name"'
        answer = await rest.talk(sent)
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b'"BODY_TIMEOUT"' in answer

    served(story, HttpOptions(body_ms=50, linger_ms=50))


def test_a_silent_caller_is_cut_off() -> None:
    async def story(rest: Rest) -> None:
        assert await rest.talk(b"") == b""
        assert await rest.talk(b"GET /health HTT") == b""

    served(story, HttpOptions(idle_ms=50))


def test_a_caller_that_does_not_read_its_answer_is_cut_off() -> None:
    """1. ask for much 2. read nothing 3. the answer's bytes are given back when it is cut."""

    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        value = b"x" * MIB
        rest.cluster.logs["t"][0] += [BatchRecord(n, 0, None, value, {}, 2) for n in range(24)]
        reader, writer = await asyncio.open_connection("127.0.0.1", rest.server.port, limit=1)
        writer.write(head("GET", "/topics/t/partitions/0/messages"))
        await rest.cluster.reading.wait()
        await rest.metrics.idle.wait()
        received = 0
        with contextlib.suppress(ConnectionError):
            while part := await reader.read(65536):
                received += len(part)
        assert received < 20 * MIB
        writer.close()
        assert (await rest.get("/health")).status == 200

    served(story, HttpOptions(write_ms=50))


def test_requests_beyond_the_limit_are_told_to_come_later() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        gate = rest.cluster.gate = asyncio.Event()
        held = [
            asyncio.ensure_future(rest.post("/topics/t/messages", {"value": "v"})) for _ in range(3)
        ]
        await rest.cluster.until_waiting(3)
        refused = await rest.get("/health")
        assert (refused.status, refused.body["code"]) == (429, "THROTTLED")
        assert refused.headers["Retry-After"] == "1"
        assert refused.body["retriable"] is True
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*held)} == {200}
        assert (await rest.get("/health")).status == 200

    served(story, HttpOptions(in_flight_max=3))


def test_bodies_beyond_the_limit_are_told_to_come_later() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        gate = rest.cluster.gate = asyncio.Event()
        message = {"value": "x" * 9_000}
        held = [asyncio.ensure_future(rest.post("/topics/t/messages", message)) for _ in range(2)]
        await rest.cluster.until_waiting(2)
        refused = await rest.post("/topics/t/messages", message)
        assert (refused.status, refused.body["code"]) == (429, "THROTTLED")
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*held)} == {200}
        assert (await rest.post("/topics/t/messages", message)).status == 200

    options = HttpOptions(body_bytes_max=10_000, read_bytes_max=10_000, in_flight_bytes_max=20_000)
    served(story, options)


def test_an_answer_that_there_is_no_room_for_can_be_had_later() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        log = rest.cluster.logs["t"][0]
        log += [BatchRecord(n, 0, None, b"x" * 70_000, {}, 2) for n in range(3)]
        read = await rest.get("/topics/t/partitions/0/messages")
        assert (read.status, read.body["code"]) == (429, "THROTTLED")
        assert (await rest.get("/topics/t/partitions/0/messages?limit=1")).status == 200
        assert (await rest.get("/topics/t/partitions/0/messages?limit=1")).status == 200

    options = HttpOptions(body_bytes_max=9_000, read_bytes_max=9_000, in_flight_bytes_max=80_000)
    served(story, options)


def test_connections_beyond_the_limit_are_closed() -> None:
    async def story(rest: Rest) -> None:
        streams = []
        for _ in range(2):
            streams.append(await asyncio.open_connection("127.0.0.1", rest.server.port))
            streams[-1][1].write(head("GET", "/health"))
            assert (await streams[-1][0].readline()).startswith(b"HTTP/1.1 200")
        reader, writer = await asyncio.open_connection("127.0.0.1", rest.server.port)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
        for _, one in [*streams, (reader, writer)]:
            one.close()

    served(story, HttpOptions(connections_max=2))


def test_many_callers_at_once_get_their_own_answers() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)

        async def publish(number: int) -> Answer:
            return await rest.post("/topics/t/messages", {"value": str(number)})

        answers = await asyncio.gather(*map(publish, range(300)))
        log = rest.cluster.logs["t"][0]
        for number, answer in enumerate(answers):
            offset = answer.body["results"][0]["offset"]
            assert log[offset].value == str(number).encode()
        assert sorted(record.offset for record in log) == list(range(300))
        assert rest.metrics.http["publish"].count == 300
        assert rest.metrics.http_statuses[("publish", 200)] == 300

    served(story)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def story(rest: Rest) -> None:
        sent = head("GET", "/health") * 20 + head("GET", "/nowhere", "Connection: close")
        answer = await rest.talk(sent)
        assert answer.count(b"HTTP/1.1 200 ") == 20
        assert answer.rfind(b"HTTP/1.1 200 ") < answer.find(b"HTTP/1.1 404 ")

    served(story)


def test_stopping_lets_a_request_finish_and_closes_the_clients() -> None:
    async def story(rest: Rest) -> None:
        await rest.make_topic("t", 1)
        gate = rest.cluster.gate = asyncio.Event()
        asked = asyncio.ensure_future(rest.post("/topics/t/messages", {"value": "v"}))
        await rest.cluster.until_waiting(1)
        stopping = asyncio.ensure_future(rest.server.stop())
        gate.set()
        assert (await asked).status == 200
        await stopping
        assert rest.cluster.closed
        with pytest.raises(ConnectionError):
            await asyncio.open_connection("127.0.0.1", rest.port)

    served(story)


def test_settings_that_contradict_each_other_are_reported_together() -> None:
    with pytest.raises(ConfigError, match=r"body_ms.*in_flight_bytes_max"):
        HttpOptions(body_ms=0, in_flight_bytes_max=5)
