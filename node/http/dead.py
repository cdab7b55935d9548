"""Handlers of dead letters: browse, send back, forget. (Shell.)"""

from typing import Any, Literal

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.results import LetterPlace, Swept
from raftq.client.common.names import DLQ_HEADER, DLQ_SUFFIX
from raftq.client.results import Record
from raftq.cluster.metadata.state import TopicState
from raftq.node.http.context import Context
from raftq.node.http.errors import invalid
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    TIME,
    Field,
    Fields,
    Query,
    answer,
    array_of,
)
from raftq.node.http.kinds import Choice, Kind, Number, Schema, Text, Time, Whole, or_null, parsed
from raftq.node.http.messages import RECORD, RECORD_SOMETIMES, write_records
from raftq.node.http.paths import GROUP, PARTITION
from raftq.node.http.routes import Call, HttpReply, Route
from raftq.node.http.settling import REASON_CHARACTERS_MAX
from raftq.node.http.values import format_time, parse_base64

LIMIT_MAX = 1000
SWEEP_MAX = 1_000_000
RATE_MIN, RATE_MAX = 0.1, 1_000_000.0
SWEEP_MS = 25_000
KEY_CHARACTERS_MAX = 65_536


class CursorText(Kind):
    """Where a page ended, as the answer said."""

    _text = Text(32, "[0-9]{1,9}:[0-9]{1,18}")

    def schema(self) -> Schema:
        return self._text.schema()

    def read(self, path: str, given: Any) -> LetterPlace:
        partition, offset = self._text.read(path, given).split(":")
        return LetterPlace(int(partition), int(offset))


class Key(Text):
    """Text, or in msgpack a binary."""

    def read(self, path: str, given: Any) -> Any:
        if isinstance(given, bytes) and len(given) <= self.most:
            return given
        return Text.read(self, path, given)


_FILTERS = (
    Field("group", GROUP, "whose letters"),
    Field("reason", Text(REASON_CHARACTERS_MAX), "why they failed"),
    Field("key", Key(KEY_CHARACTERS_MAX, least=0)),
    Field("key_encoding", Choice(("text", "base64"))),
    Field("since", Time(), "not older"),
    Field("until", Time(), "older"),
    Field("partition", PARTITION),
)
BROWSE = Query((
    *_FILTERS,
    Field("limit", Whole(1, LIMIT_MAX), default=100),
    Field("cursor", CursorText(), "next_cursor of the page before"),
))  # fmt: skip
_LIMIT = Field("limit", Whole(1, SWEEP_MAX), "the most letters of one call", default=SWEEP_MAX)
REDRIVE = Fields((
    *_FILTERS, _LIMIT, Field("rate", Number(RATE_MIN, RATE_MAX), "the most letters of one second"),
))  # fmt: skip
PURGE = Fields((*_FILTERS, _LIMIT))


class DeadHandlers:
    """Browses dead letters, sends them back, forgets them."""

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._topics = context.topics

    async def browse(self, call: Call) -> HttpReply:
        query = call.query
        topic = await self._letters_of(call)
        which = _filter(query)
        if topic is None:
            return HttpReply({"messages": [], "count": 0, "next_cursor": None})
        found = await self._clients.admin.letter_page(
            topic.name, which, query["cursor"], query["limit"]
        )
        written = write_records(found.records, call.binary)
        for record, message in zip(found.records, written, strict=True):
            message["partition"] = record.partition
            message |= _facts(record)
        more = found.next
        return HttpReply(
            {
                "messages": written,
                "count": len(written),
                "next_cursor": None if more is None else f"{more.partition}:{more.offset}",
            }
        )

    async def redrive(self, call: Call) -> HttpReply:
        done = await self._sweep(call, "redrive")
        return HttpReply({"redriven": done.count, "complete": done.complete})

    async def purge(self, call: Call) -> HttpReply:
        done = await self._sweep(call, "purge")
        return HttpReply({"purged": done.count, "complete": done.complete})

    async def _sweep(self, call: Call, verb: Literal["redrive", "purge"]) -> Swept:
        body = call.body
        which = _filter(body)
        topic = await self._letters_of(call)
        if topic is None:
            return Swept(0, True)
        rate = body.get("rate")
        admin = self._clients.admin
        return await admin.sweep_letters(topic.name, verb, which, body["limit"], rate)

    async def _letters_of(self, call: Call) -> TopicState | None:
        """The topic with the letters; None when the topic of the path never had one."""
        topic = await self._topics.by_name(call.path["topic"])
        if topic.name.endswith(DLQ_SUFFIX):
            return topic
        return self._topics.peek(topic.name + DLQ_SUFFIX)


def _filter(given: dict[str, Any]) -> LetterFilter:
    key = given["key"]
    if isinstance(key, str):
        base64 = given["key_encoding"] == "base64"
        key = parsed(parse_base64, key, "key") if base64 else key.encode()
    since, until = (given[name] and max(0, given[name]) for name in ("since", "until"))
    which = LetterFilter(
        given["group"] or "", given["reason"] or "", key, since, until, given["partition"]
    )
    if which.since_ms > which.until_ms:
        raise invalid("until", "is before since")
    return which


def _facts(record: Record) -> dict[str, Any]:
    """What the headers say of the failure. They are what some writer put there: anything that does
    not read as it should is left out."""

    def text(name: str) -> str | None:
        found = record.headers.get(DLQ_HEADER + name)
        return None if found is None else found.decode(errors="replace")

    def number(name: str) -> int | None:
        found = text(name)
        good = found is not None and found.isascii() and found.isdigit() and len(found) < 19
        return int(found) if good and found is not None else None

    def time(name: str) -> str | None:
        found = number(name)
        return None if found is None else format_time(found)

    return {
        "reason": text("reason"),
        "error_message": text("error"),
        "group": text("group"),
        "source_topic": text("topic"),
        "source_partition": number("partition"),
        "source_offset": number("offset"),
        "delivery_count": number("attempts"),
        "first_delivery": time("first-delivery"),
        "last_delivery": time("last-delivery"),
    }


def dead_routes(dead: DeadHandlers) -> tuple[Route, ...]:
    facts = {
        "reason": or_null(STRING),
        "error_message": or_null(STRING),
        "group": or_null(STRING),
        "source_topic": or_null(STRING),
        "source_partition": or_null(INTEGER),
        "source_offset": or_null(INTEGER),
        "delivery_count": or_null(INTEGER),
        "first_delivery": or_null(TIME),
        "last_delivery": or_null(TIME),
    }
    letter = answer({**RECORD, "partition": INTEGER, **facts}, RECORD_SOMETIMES)
    page = {"messages": array_of(letter), "count": INTEGER, "next_cursor": or_null(STRING)}
    complete = {
        **BOOLEAN,
        "description": "whether all that matched are done; if not, call again",
    }
    path = "/topics/{topic}/dlq"
    return (
        Route(
            method="GET", path=path, name="browse_dead_letters", errors=(404, 503),
            summary="Messages that were given up, and why", handler=dead.browse,
            answer=answer(page), query=BROWSE,
        ),
        Route(
            method="POST", path=f"{path}/redrive", name="redrive", errors=(404, 503, 507),
            summary="Send dead letters back to where they came from", handler=dead.redrive,
            answer=answer({"redriven": INTEGER, "complete": complete}), body=REDRIVE,
            wait_ms=SWEEP_MS,
        ),
        Route(
            method="POST", path=f"{path}/purge", name="purge_dead_letters", errors=(404, 503),
            summary="Forget dead letters", handler=dead.purge,
            answer=answer({"purged": INTEGER, "complete": complete}), body=PURGE,
            wait_ms=SWEEP_MS,
        ),
    )  # fmt: skip
