"""Messages of REST become columns of records, or are refused by the name of the field."""

from types import MappingProxyType
from typing import Any

import pytest

from raftq.client import results
from raftq.client.common.errors import TooLarge
from raftq.client.wire.record import BatchRecord
from raftq.node.http.bodies import encode_json, encode_msgpack
from raftq.node.http.errors import Refusal
from raftq.node.http.messages import (
    KNOWN,
    MESSAGE_SCHEMA,
    RECORD_SCHEMA,
    Messages,
    Outgoing,
    write_records,
)

NOW_MS = 1_700_000_000_000
BODY = Messages(messages_max=5)


def many(*messages: Any) -> Outgoing:
    return BODY.read({"messages": list(messages)})


def test_one_message_needs_no_list() -> None:
    columns = BODY.read({"value": "v", "key": "k"})
    assert columns == Outgoing([b"v"], [b"k"])
    assert columns == many({"value": "v", "key": "k"})


def test_columns_that_nobody_uses_are_left_out() -> None:
    assert many({"value": "a"}, {"value": "b", "key": None}) == Outgoing([b"a", b"b"])


def test_columns_are_as_long_as_there_are_messages() -> None:
    columns = many(
        {"value": "a"},
        {"value": "b", "priority": "HIGH", "headers": {"x": "1"}},
        {"value": "c", "partition": 2, "key": "k", "priority": 4},
        {"value": "AAH/", "encoding": "base64", "key": "/w==", "key_encoding": "base64",
         "headers": {"y": "/g=="}, "headers_encoding": "base64"},
    )  # fmt: skip
    assert columns == Outgoing(
        values=[b"a", b"b", b"c", b"\x00\x01\xff"],
        keys=[None, None, b"k", b"\xff"],
        headers=[None, {"x": b"1"}, None, {"y": b"\xfe"}],
        partitions=[None, None, 2, None],
        priorities=[2, 1, 4, 2],
    )


def test_the_encoding_of_the_value_says_nothing_about_the_key() -> None:
    columns = many({"value": "AA==", "encoding": "base64", "key": "k"})
    assert columns == Outgoing([b"\x00"], [b"k"])


def test_binaries_are_taken_as_they_are() -> None:
    columns = many({"value": b"\xff", "key": b"\xfe", "headers": {"h": b"\xfd"}})
    assert columns == Outgoing([b"\xff"], [b"\xfe"], [{"h": b"\xfd"}])


def test_an_empty_key_is_a_key() -> None:
    assert many({"value": "", "key": ""}) == Outgoing([b""], [b""])


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({}, "value"),
        ({"value": None}, "value"),
        ({"value": 5}, "value"),
        ({"value": {"a": 1}}, "value"),
        ({"value": True}, "value"),
        ({"value": "\ud800"}, "value"),
        ({"value": "v", "key": 7}, "key"),
        ({"value": "v", "key": ["k"]}, "key"),
        ({"value": "v", "key": "\udfff"}, "key"),
        ({"value": "v", "colour": "red"}, "colour"),
        ({"value": "v", "c" * 500: "red"}, "ccc"),
        ({"value": "v", "encoding": "hex"}, "encoding"),
        ({"value": "v", "encoding": ["base64"]}, "encoding"),
        ({"value": "no base64!", "encoding": "base64"}, "value"),
        ({"value": "v", "key": "!", "key_encoding": "base64"}, "key"),
        ({"value": "v", "key_encoding": 1, "key": "k"}, "key_encoding"),
        ({"value": "v", "headers_encoding": "x"}, "headers_encoding"),
        ({"value": "v", "partition": "0"}, "partition"),
        ({"value": "v", "partition": -1}, "partition"),
        ({"value": "v", "partition": 1.5}, "partition"),
        ({"value": "v", "partition": True}, "partition"),
        ({"value": "v", "partition": 10**30}, "partition"),
        ({"value": "v", "priority": "urgent"}, "priority"),
        ({"value": "v", "priority": 5}, "priority"),
        ({"value": "v", "priority": True}, "priority"),
        ({"value": "v", "priority": []}, "priority"),
        ({"value": "v", "headers": []}, "headers"),
        ({"value": "v", "headers": {"a": 1}}, "headers.a"),
        ({"value": "v", "headers": {b"a": b"1"}}, "headers"),
        ({"value": "v", "headers": {"\ud800": "1"}}, "headers"),
        ({"value": "v", "headers": {"a": "!"}, "headers_encoding": "base64"}, "headers.a"),
        ({"value": "v", "delay": 5}, "delay"),
        ({"value": "v", "delay": "soon"}, "delay"),
        ({"value": "v", "delay": "-1s"}, "delay"),
        ({"value": "v", "deliverAt": "tomorrow"}, "deliverAt"),
        ({"value": "v", "deliverAt": 1}, "deliverAt"),
        ({"value": "v", "delay": "1s", "deliverAt": "2023-11-14T22:13:20Z"}, "deliverAt"),
        ({"value": "v", "ttl": "0s"}, "ttl"),
        ({"value": "v", "ttl": 5}, "ttl"),
    ],
)
def test_a_wrong_field_is_named_with_its_message(message: dict[Any, Any], place: str) -> None:
    with pytest.raises(Refusal, match=rf"^messages\[1\]\.{place}.*: ") as refused:
        many({"value": "fine"}, message)
    assert refused.value.code == "INVALID_ARGUMENT"
    assert len(str(refused.value)) < 300
    with pytest.raises(Refusal, match=rf"^{place}"):
        BODY.read(message)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "the body must be an object, not an array"),
        (None, "the body must be an object, not null"),
        ("text", "the body must be an object"),
        ({"messages": {}}, "messages: must be an array"),
        ({"messages": None}, "messages: must be an array"),
        ({"messages": []}, "messages: must have at least one"),
        ({"messages": ["v"]}, r"messages\[0\]: must be an object"),
        ({"messages": [{"value": "v"}], "value": "v"}, "value: is not a known field"),
        ({"messages": [{"value": "v"}] * 6}, "messages: more than 5"),
    ],
)
def test_a_body_of_another_shape_is_refused(body: object, problem: str) -> None:
    with pytest.raises(Refusal, match=problem):
        BODY.read(body)


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"value": b"x" * (16 * 1024 * 1024 + 1)}, "value"),
        ({"value": "v", "key": "k" * 65537}, "key"),
        ({"value": "v", "headers": {"h": "x" * 65536}}, "headers"),
    ],
)
def test_over_a_limit_of_records_is_too_large(message: dict[str, Any], place: str) -> None:
    with pytest.raises(TooLarge, match=rf"^messages\[0\]\.{place}: \d+ bytes, at most"):
        many(message)


def test_a_delay_of_nothing_and_a_time_in_the_past_mean_now() -> None:
    for when in ({"delay": "0s"}, {"deliverAt": "2001-01-01T00:00:00Z"}):
        assert many({"value": "v", **when}).times(NOW_MS) == [(0, 0)]
    assert many({"value": "v"}).times(NOW_MS) is None


def test_delays_and_ttls_become_columns() -> None:
    messages = [
        {"value": "a", "delay": "5s"},
        {"value": "b", "deliverAt": "2023-11-14T22:13:21Z"},
        {"value": "c", "ttl": "1h"},
    ]
    assert many(*messages).times(NOW_MS) == [
        (NOW_MS + 5000, 0), (NOW_MS + 1000, 0), (0, NOW_MS + 3_600_000),
    ]  # fmt: skip


def test_the_schema_knows_the_fields_that_are_read() -> None:
    every: dict[str, Any] = {
        "key": "aw==", "value": "dg==", "encoding": "base64", "key_encoding": "base64",
        "headers": {"h": "dg=="}, "headers_encoding": "base64", "partition": 0,
        "priority": "low", "delay": "0s", "deliverAt": None, "ttl": None,
    }  # fmt: skip
    assert set(every) == KNOWN == set(MESSAGE_SCHEMA["properties"])
    many(every)


def test_records_come_back_as_text_or_base64() -> None:
    plain = BatchRecord(3, NOW_MS, b"k", "größe".encode(), {"h": b"1"}, 1)
    binary = BatchRecord(4, NOW_MS, b"\xff", b"\xfe", {"h": b"\xfd", "i": b"x"}, 2)
    keyless = BatchRecord(5, NOW_MS, None, b"", {}, 4)
    texts = write_records([plain, binary, keyless], binary=False)
    when = "2023-11-14T22:13:20.000Z"
    assert texts[0] == {
        "offset": 3, "timestamp": when, "key": "k", "value": "größe", "priority": "high",
        "headers": {"h": "1"},
    }  # fmt: skip
    assert texts[1] == {
        "offset": 4, "timestamp": when, "key": "/w==", "key_encoding": "base64", "value": "/g==",
        "encoding": "base64", "priority": "normal", "headers": {"h": "/Q==", "i": "eA=="},
        "headers_encoding": "base64",
    }  # fmt: skip
    assert texts[2]["key"] is None
    assert texts[2]["headers"] == {}
    assert write_records([binary], binary=True)[0] == {
        "offset": 4, "timestamp": when, "key": b"\xff", "value": b"\xfe", "priority": "normal",
        "headers": {"h": b"\xfd", "i": b"x"},
    }  # fmt: skip
    for text in texts:
        assert set(text) <= set(RECORD_SCHEMA["properties"])


def test_headers_may_be_any_mapping() -> None:
    for headers in ({}, {"h": b"1"}):
        record = results.Record("t", 0, 7, None, b"v", NOW_MS, MappingProxyType(headers), 2)
        for binary, encode in ((True, encode_msgpack), (False, encode_json)):
            (written,) = write_records([record], binary)
            assert encode(written)
            assert len(written["headers"]) == len(headers)


def test_what_was_read_can_be_published_again() -> None:
    record = BatchRecord(0, NOW_MS, b"\xff", b"\xfe", {"h": b"\xfd"}, 3)
    for binary in (False, True):
        message = write_records([record], binary)[0]
        del message["offset"], message["timestamp"]
        assert many(message) == Outgoing([b"\xfe"], [b"\xff"], [{"h": b"\xfd"}], priorities=[3])
