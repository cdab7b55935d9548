"""Random requests: whatever comes, the answer is an error with a code or a success, never a 500."""

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgpack
import pytest
from fake_http import Answer, Rest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from raftq.client.common.errors import RaftqError
from raftq.node.http.bodies import decode_json, decode_msgpack
from raftq.node.http.errors import Refusal
from raftq.node.http.messages import KNOWN, Messages
from raftq.node.http.options import HttpOptions

BODY = Messages(messages_max=50)
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
MANY = settings(max_examples=100, deadline=None)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20),
    st.sampled_from(["1s", "base64", "AA==", "high", "2024-01-01T00:00:00Z", "t", "\ud800", "0"]),
)  # fmt: skip
values = st.one_of(
    scalars,
    scalars,
    st.lists(scalars, max_size=3),
    st.dictionaries(st.text(max_size=5), scalars, max_size=3),
)
names = st.sampled_from(sorted(KNOWN))
messages = st.dictionaries(st.one_of(names, names, names, st.text(max_size=5)), values, max_size=6)
settings_of_topics = st.dictionaries(
    st.sampled_from(
        ["name", "num_partitions", "retention_hours", "replication_factor", "min_insync", "config"]
    ),
    values,
    max_size=6,
)
bodies = st.one_of(
    values, messages, settings_of_topics, st.builds(lambda m: {"messages": m}, st.lists(messages)),
    st.dictionaries(st.sampled_from(["count", "partitions"]), values),
    st.dictionaries(
        st.sampled_from(
            ["member_id", "generation", "offsets", "topics", "topic", "to", "receipt_handle",
             "receipt_handles", "timeout", "delay", "rate", "limit", "since", "session_timeout"]
        ),
        values,
    ),
)  # fmt: skip


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def rest(loop: asyncio.AbstractEventLoop) -> Iterator[Rest]:
    rest = Rest(HttpOptions(topic_wait_ms=1, body_bytes_max=100_000, linger_ms=1))
    loop.run_until_complete(rest.__aenter__())
    loop.run_until_complete(rest.make_topic("t", 2))
    yield rest
    loop.run_until_complete(rest.__aexit__(None, None, None))


def check(answer: Answer) -> None:
    assert answer.status < 500, answer.body
    if answer.status >= 400:
        assert {"error", "code", "retriable"} <= set(answer.body)
        assert len(answer.raw) < 10_000


PATHS = (
    "/topics", "/topics/t/messages", "/v1/topics/t/batch", "/admin/topics/t/partitions",
    "/groups/g/join", "/groups/g/heartbeat", "/groups/g/offsets", "/groups/g/reset",
    "/groups/g/nack", "/messages/ack", "/messages/visibility", "/topics/t/dlq/redrive",
    "/v1/topics/t/dlq/purge",
)  # fmt: skip


@FEW
@given(path=st.sampled_from(PATHS), body=bodies, packed=st.booleans())
def test_random_bodies_are_never_a_failure_of_the_node(
    rest: Rest, loop: asyncio.AbstractEventLoop, path: str, body: Any, packed: bool
) -> None:
    headers = {}
    if packed:
        try:
            data = msgpack.packb(body, unicode_errors="surrogatepass")
        except OverflowError:
            return
        headers = {"Content-Type": "application/msgpack"}
    else:
        data = json.dumps(body).encode()
    check(loop.run_until_complete(rest.post(path, data=data, headers=headers)))


@FEW
@given(path=st.sampled_from(PATHS), data=st.binary(max_size=200), packed=st.booleans())
def test_random_bytes_are_never_a_failure_of_the_node(
    rest: Rest, loop: asyncio.AbstractEventLoop, path: str, data: bytes, packed: bool
) -> None:
    headers = {"Content-Type": "application/msgpack" if packed else "application/json"}
    check(loop.run_until_complete(rest.post(path, data=data, headers=headers)))


@FEW
@given(
    parts=st.lists(
        st.one_of(
            st.text(max_size=6, alphabet=st.characters(exclude_categories=["Cs"])),
            st.sampled_from(
                [
                    "topics",
                    "t",
                    "partitions",
                    "0",
                    "messages",
                    "v1",
                    "..",
                    "admin",
                    "groups",
                    "poll",
                    "delayed",
                    "dlq",
                    "offsets",
                ]
            ),
        ),
        max_size=7,
    ),
    query=st.dictionaries(
        st.sampled_from(["offset", "limit", "from_time", "verbose", "x"]),
        st.one_of(
            st.integers().map(str),
            st.text(max_size=8, alphabet=st.characters(exclude_categories=["Cs"])),
        ),
    ),
    method=st.sampled_from(["GET", "POST", "PUT", "HEAD"]),
)
def test_random_paths_are_never_a_failure_of_the_node(
    rest: Rest,
    loop: asyncio.AbstractEventLoop,
    parts: list[str],
    query: dict[str, str],
    method: str,
) -> None:
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    fields = "&".join(f"{name}={quote(value, safe='')}" for name, value in query.items())
    url = URL(f"http://127.0.0.1:{rest.port}{path}?{fields}", encoded=True)
    answer = loop.run_until_complete(rest.call(method, url))
    if method != "HEAD" and "metrics" not in path:
        check(answer)
    assert answer.status < 500


@FEW
@given(data=st.binary(min_size=1, max_size=100))
def test_random_bytes_on_the_port_end_their_own_connection_only(
    rest: Rest, loop: asyncio.AbstractEventLoop, data: bytes
) -> None:
    loop.run_until_complete(rest.talk(b"GET /health HTTP/1.1\r\n" + data + b"\r\n\r\n\x00\r\n\r\n"))
    assert loop.run_until_complete(rest.get("/health")).status == 200


@MANY
@given(body=bodies)
def test_the_reader_of_messages_refuses_or_gives_whole_columns(body: Any) -> None:
    try:
        columns = BODY.read(body)
    except (Refusal, RaftqError):
        return
    count = len(columns.values)
    assert count
    assert set(map(type, columns.values)) == {bytes}
    for name in (
        "keys",
        "headers",
        "partitions",
        "priorities",
        "ttls_ms",
        "delays_ms",
        "deliver_at",
    ):
        column = getattr(columns, name)
        assert column is None or len(column) == count


@MANY
@given(data=st.binary(max_size=300))
def test_decoders_refuse_or_decode(data: bytes) -> None:
    for decode in (decode_json, decode_msgpack):
        with contextlib.suppress(Refusal):
            decode(data)
