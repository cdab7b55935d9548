"""Messages: every one comes back as it was; every deviation is an error that names its field."""

import tracemalloc
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import fields

from raftq.client.common import errors
from raftq.client.common.errors import (
    LocalProtocolError,
    NotLeader,
    RaftqError,
    RemoteProtocolError,
    UnknownCode,
)
from raftq.client.wire import messages
from raftq.client.wire.frames import PREFIX, PREFIX_BYTES, Frame, FrameDecoder
from raftq.client.wire.messages import (
    ErrorReply,
    FetchedPartition,
    FetchReply,
    Hello,
    InitProducer,
    MetadataReply,
    PartitionInfo,
    Ping,
    PingReply,
    Produce,
    ProduceReply,
    TopicInfo,
    WireMessage,
    class_of,
    decode_message,
    encode_message,
    reply_kinds,
    request_kinds,
)

ALL = sorted(request_kinds() | reply_kinds())


def values(hint: Any) -> st.SearchStrategy[Any]:
    """Any value that an annotation allows."""
    rule: Any = None
    if get_origin(hint) is Annotated:
        hint, rule = get_args(hint)[0], get_args(hint)[-1]
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is bool:
        return st.booleans()
    if hint is int:
        return st.integers(rule.ge, rule.le)
    if hint is str:
        return st.text(st.characters(codec="utf-8"), max_size=min(rule.max_length, 20))
    if hint is bytes:
        return st.binary(max_size=rule.max_length)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin is tuple and arguments[-1] is not ...:
        return st.tuples(*map(values, arguments))
    if origin is tuple:
        return st.lists(values(arguments[0]), min_size=rule.min_length or 0, max_size=3).map(tuple)
    if isinstance(hint, type) and issubclass(hint, Struct):
        return instances(hint)
    if origin is Mapping:
        plain = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text("ab")
        return st.dictionaries(st.text("abc", max_size=9), plain, max_size=4)
    (inner,) = (one for one in arguments if one is not type(None))
    return st.none() | values(inner)


def instances(cls: type[Any]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{one.name: values(one.type) for one in fields(cls)})


def through_the_wire(message: WireMessage, raw: list[bytes]) -> tuple[WireMessage, bytes]:
    data = b"".join(encode_message(message, 7, raw))
    decoder = FrameDecoder([message.kind])
    while data:
        buffer = decoder.get_buffer()
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        decoder.received(count)
        data = data[count:]
        if frame := decoder.next_frame():
            return decode_message(frame), bytes(frame.raw)
    raise AssertionError("no frame")


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: class_of(kind).__name__)
def test_every_message_comes_back_as_it_was(kind: int) -> None:
    cls = class_of(kind)

    @settings(deadline=None, max_examples=25)
    @given(instances(cls))
    def round_trip(message: WireMessage) -> None:
        raw = [b"batch"] if isinstance(message, Produce) else []
        try:
            message.check(sum(map(len, raw)))
        except messages.Bad:
            with pytest.raises(LocalProtocolError):
                encode_message(message, 7, raw)
            return
        assert through_the_wire(message, raw) == (message, b"".join(raw))

    round_trip()


def header(message: WireMessage) -> dict[str, Any]:
    (packed,) = encode_message(message, 1, [b"x"] if message.carries_raw else [])
    size = int.from_bytes(packed[8:12], "little")
    unpacked: dict[str, Any] = msgpack.unpackb(packed[16 : 16 + size])
    return unpacked


def decode(cls: type[WireMessage], plain: dict[str, Any], raw: bytes = b"") -> WireMessage:
    return decode_message(Frame(cls.kind, 1, msgpack.packb(plain), memoryview(raw)))


def test_fields_of_a_newer_version_are_ignored() -> None:
    plain = header(Hello(1, 2, "node", "n")) | {"colour": "green", "nested": [{"a": 1}]}
    assert decode(Hello, plain) == Hello(1, 2, "node", "n")


def test_fields_that_have_their_defaults_are_not_sent() -> None:
    (front,) = encode_message(Produce("t", 5), 1, [b"x"])
    header_length = PREFIX.unpack_from(front)[4]
    header = msgpack.unpackb(front[PREFIX_BYTES : PREFIX_BYTES + header_length])
    assert header == {"topic": "t", "partition": 5}


def test_missing_fields_get_their_defaults() -> None:
    assert decode(Produce, {"topic": "t", "partition": 0}, b"x") == Produce("t", 0)
    assert decode(Hello, {"version_min": 1, "version_max": 1, "role": "client"}) == Hello(
        1, 1, "client"
    )


def test_a_missing_field_without_default_is_named() -> None:
    with pytest.raises(
        RemoteProtocolError, match="Produce: Object missing required field `partition`"
    ):
        decode(Produce, {"topic": "t"}, b"x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"topic": 5}, r"Produce\.topic: Expected `str`, got `int`"),
        ({"topic": b"t"}, r"Produce\.topic: Expected `str`, got `bytes`"),
        ({"topic": "t" * 256}, r"Produce\.topic: Expected `str` of length <= 255"),
        ({"partition": -1}, r"Produce\.partition: Expected `int` >= 0"),
        ({"partition": True}, r"Produce\.partition: Expected `int`, got `bool`"),
        ({"partition": 1.0}, r"Produce\.partition: Expected `int`, got `float`"),
        ({"partition": None}, r"Produce\.partition: Expected `int`, got `None`"),
        ({"partition": 2**31}, r"Produce\.partition: Expected `int` <= 2147483647"),
        ({"epoch": 2**32}, r"Produce\.epoch"),
        ({"acks": "some"}, r"Produce\.acks: Invalid enum value 'some'"),
        ({"acks": 1}, r"Produce\.acks: Expected `str`, got `int`"),
        ({"timeout_ms": 600_001}, r"Produce\.timeout_ms"),
    ],
)
def test_a_field_that_breaks_its_rule_is_named(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        decode(Produce, header(Produce("t", 1)) | change, b"x")


def test_the_path_leads_into_nested_fields() -> None:
    good = PartitionInfo(0, 1, 5, (1, 2), (1,))
    plain = header(MetadataReply("c", (), (TopicInfo("t", (good, good)),)))
    plain["topics"][0]["partitions"][1]["isr"] = [1, "x"]
    with pytest.raises(
        RemoteProtocolError,
        match=r"MetadataReply\.topics\[0\]\.partitions\[1\]\.isr\[1\]: Expected",
    ):
        decode(MetadataReply, plain)


def test_what_is_wrong_here_is_not_sent() -> None:
    with pytest.raises(LocalProtocolError, match=r"Produce\.partition: Expected `int` >= 0"):
        encode_message(Produce("t", -1), 1, [b"x"])
    with pytest.raises(LocalProtocolError, match="ProduceReply"):
        encode_message(ProduceReply((2**63,)), 1)
    with pytest.raises(LocalProtocolError, match="surrogates"):
        encode_message(InitProducer("\ud800"), 1)
    with pytest.raises(LocalProtocolError, match=r"MetadataReply\.topics\[0\]: Object missing"):
        encode_message(MetadataReply("c", (), (PingReply(),)), 1)  # type: ignore[arg-type]


def test_only_messages_with_a_raw_part_are_followed_by_bytes() -> None:
    with pytest.raises(LocalProtocolError, match="Ping: 3 bytes follow"):
        encode_message(Ping(), 1, [b"abc"])
    with pytest.raises(RemoteProtocolError, match="Ping: 3 bytes follow"):
        decode(Ping, {}, b"abc")
    assert decode(Produce, {"topic": "t", "partition": 0}) == Produce("t", 0)  # only asks


def test_fetched_ranges_must_cover_the_raw_part_in_order() -> None:
    two = (
        FetchedPartition("t", 0, start=0, length=3),
        FetchedPartition("t", 1, error="not_leader"),
        FetchedPartition("t", 2, start=3, length=4),
    )
    assert through_the_wire(FetchReply(two), [b"abc", b"defg"]) == (FetchReply(two), b"abcdefg")
    for raw in (b"abcdef", b"abcdefgh", b""):
        with pytest.raises(LocalProtocolError, match=r"they cover 7 of"):
            encode_message(FetchReply(two), 1, [raw])
    for start in (2, 4, 0, 2**32 - 1):
        bad = (two[0], FetchedPartition("t", 1, start=start, length=4))
        with pytest.raises(LocalProtocolError, match=r"partitions\[1\]\.start"):
            encode_message(FetchReply(bad), 1, [b"abcdefg"])


def test_a_version_range_that_is_empty_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match=r"Hello\.version_min: 3 is over 2"):
        encode_message(Hello(3, 2, "client"), 1)


def classes(cls: type[RaftqError] = RaftqError) -> list[type[RaftqError]]:
    return [one for one in RaftqError.registry.values() if one.__module__ == errors.__name__]


@pytest.mark.parametrize("cls", classes(), ids=lambda cls: cls.__name__)
def test_every_error_crosses_the_wire_as_its_class(cls: type[RaftqError]) -> None:
    sent = cls("what happened").with_details(leader=3, hint="x", known=True, other=None)
    sent.with_outcome("failed" if cls.outcome == "unknown" else "unknown")
    reply, _ = through_the_wire(ErrorReply.from_error(sent), [])
    assert isinstance(reply, ErrorReply)
    error = reply.to_error()
    assert type(error) is cls
    assert str(error) == "what happened"
    assert error.details == {"leader": 3, "hint": "x", "known": True, "other": None}
    assert error.outcome == sent.outcome != cls.outcome
    assert (error.retriable, error.refresh_route) == (cls.retriable, cls.refresh_route)


def test_an_error_of_a_newer_version_keeps_its_decision() -> None:
    error = ErrorReply("out_of_coffee", "try tea", "failed", True, True, {"left": 0}).to_error()
    assert type(error) is UnknownCode
    assert (error.retriable, error.refresh_route, error.outcome) == (True, True, "failed")
    assert error.details == {"left": 0, "code": "out_of_coffee"}


def test_an_endless_or_unprintable_error_text_is_cut_to_fit() -> None:
    for text in ("x" * 100_000, "\ud800" * 5_000):
        reply, _ = through_the_wire(ErrorReply.from_error(NotLeader(text)), [])
        assert isinstance(reply, ErrorReply)
        assert reply.message.startswith(("xxx", "???"))


def test_details_are_plain_and_few() -> None:
    for details in ({"a": 1.5}, {"a": [1]}, {"x" * 65: 1}, {str(n): n for n in range(33)}):
        with pytest.raises(LocalProtocolError, match=r"ErrorReply\.details"):
            encode_message(ErrorReply("x", "y", details=details), 1)  # type: ignore[arg-type]


def test_any_mapping_can_be_sent_and_an_empty_one_is() -> None:
    details = MappingProxyType({"leader": 3})
    assert header(ErrorReply("x", "y", details=details))["details"] == {"leader": 3}
    assert header(ErrorReply("x", "y"))["details"] == {}


@pytest.mark.parametrize(
    "claim",
    [
        b"\x81\xacbase_offsets\xdd\xff\xff\xff\xff",
        b"\x81\xacbase_offsets\xdc\x20\x01" + bytes(8193),
        b"\x81\xa7unknown" + b"\xdd\x00\x0f\x00\x00" * 200_000,
        b"\x81\xa7unknown\xdf\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x81\xa7unknown" + b"\x91" * 100_000,
    ],
)
def test_a_claimed_length_takes_no_memory(claim: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="ProduceReply"):
            decode_message(Frame(ProduceReply.kind, 1, claim))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_kinds_pair_requests_with_replies() -> None:
    for kind in request_kinds():
        assert class_of(kind + 1).__name__ == class_of(kind).__name__ + "Reply"
    assert reply_kinds() == {kind + 1 for kind in request_kinds()} | {0}


def test_a_repeated_or_misplaced_kind_is_refused() -> None:
    for kind in (Ping.kind, 256, -1, 201):
        wrong = type("Wrong", (WireMessage,), {"kind": kind})
        with pytest.raises(TypeError, match="Wrong"):
            messages.register(wrong)


def test_an_unregistered_message_is_not_sent() -> None:
    class Stray(WireMessage):
        kind: ClassVar[int] = 250

    with pytest.raises(LocalProtocolError, match="not a registered"):
        encode_message(Stray(), 1)
