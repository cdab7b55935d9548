"""Handlers of receipts: ack, nack, reject, more time. (Shell.)

One receipt is answered with what happened, or refused with the status of its error. Several are
answered with a result each; the status is that of the first error when none succeeded.
"""

from collections.abc import Callable
from typing import Any

from raftq.client.common.errors import RaftqError
from raftq.node.http.context import Context
from raftq.node.http.errors import error_body, retry_after_s, status_of
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    TIME,
    Body,
    Field,
    Fields,
    OneOf,
    answer,
    array_of,
)
from raftq.node.http.groups import LEASE_MS_MAX, MEMBER
from raftq.node.http.kinds import Duration, Listed, Schema, Text, or_null
from raftq.node.http.paths import GROUP
from raftq.node.http.queue_gateway import SettleCall, Settled, Verb
from raftq.node.http.receipts import ReceiptHandle, ReceiptText
from raftq.node.http.routes import Call, Handler, HttpReply, Route
from raftq.node.http.values import format_time

RECEIPTS_MAX = 1000
DELAY_MS_MAX = 366 * 86_400_000
REASON_CHARACTERS_MAX = 1024
DEAD_SUFFIX = ".dlq"

_ERRORS = (404, 409, 410, 503, 507)
_RECEIPTS = (
    Field("receipt_handle", ReceiptHandle()),
    Field("receipt_handles", Listed(ReceiptHandle(), RECEIPTS_MAX), "several at once"),
    Field("consumer_id", MEMBER, "who asks; the receipt alone is what counts"),
)
_RULES = (OneOf(("receipt_handle", "receipt_handles")),)
_GROUP = Field("group", GROUP, "whose receipt it is; without it, the receipt tells")
_DELAY = Field(
    "delay", Duration(0, DELAY_MS_MAX), "until it is delivered again; without it, the backoff"
)
_REASON = Field("reason", Text(REASON_CHARACTERS_MAX))
_TIMEOUT = Field("timeout", Duration(1, LEASE_MS_MAX), "from now on", required=True)

Facts = Callable[[ReceiptText, Settled], dict[str, Any]]


def _acked(receipt: ReceiptText, settled: Settled) -> dict[str, Any]:
    return {
        "acknowledged": True,
        "committed_offset": settled.settled_offset,
        "in_flight_count": settled.in_flight,
    }


def _nacked(receipt: ReceiptText, settled: Settled) -> dict[str, Any]:
    return {
        "action": "dlq" if settled.dead else "requeued",
        "delivery_count": receipt.attempt,
        "next_visible_at": None if settled.dead else format_time(settled.next_visible),
    }


def _rejected(receipt: ReceiptText, settled: Settled) -> dict[str, Any]:
    return {
        "action": "dlq" if settled.dead else "requeued",
        "delivery_count": receipt.attempt,
        "dlq_topic": receipt.topic.removesuffix(DEAD_SUFFIX) + DEAD_SUFFIX,
    }


def _extended(receipt: ReceiptText, settled: Settled) -> dict[str, Any]:
    return {
        "extended": True,
        "delivery_count": receipt.attempt,
        "next_visible_at": format_time(settled.next_visible),
    }


_ACTION: Schema = {"type": "string", "enum": ["requeued", "dlq"]}
_ACKED = {"acknowledged": BOOLEAN, "committed_offset": INTEGER, "in_flight_count": INTEGER}
_NACKED = {"action": _ACTION, "delivery_count": INTEGER, "next_visible_at": or_null(TIME)}
_REJECTED = {"action": _ACTION, "delivery_count": INTEGER, "dlq_topic": STRING}
_EXTENDED = {"extended": BOOLEAN, "delivery_count": INTEGER, "next_visible_at": TIME}


class ReceiptHandlers:
    """See the module's docstring."""

    def __init__(self, context: Context) -> None:
        self._gateway = context.gateway
        self._topics = context.topics

    def settle(self, verb: Verb, facts: Facts) -> Handler:
        async def handler(call: Call) -> HttpReply:
            body = call.body
            one: ReceiptText | None = body["receipt_handle"]
            receipts = body["receipt_handles"] if one is None else [one]
            delay_ms = body.get("timeout") if verb == "extend" else body.get("delay")
            for topic in dict.fromkeys(receipt.topic for receipt in receipts):
                await self._topics.by_name(topic)
            settlement = SettleCall(
                verb=verb,
                receipts=receipts,
                group=call.path.get("group") or body.get("group"),
                delay_ms=delay_ms,
                reason=body.get("reason") or "",
            )
            results = await self._gateway.queues.settle(settlement)
            if one is not None:
                if isinstance(results[0], RaftqError):
                    raise results[0]
                return HttpReply(facts(one, results[0]))
            return _several(receipts, results, facts)

        return handler


def _several(
    receipts: list[ReceiptText], results: list[Settled | RaftqError], facts: Facts
) -> HttpReply:
    written: list[dict[str, Any]] = []
    failed: list[RaftqError] = []
    for receipt, result in zip(receipts, results, strict=True):
        if isinstance(result, RaftqError):
            failed.append(result)
            told = error_body(result)
        else:
            told = facts(receipt, result)
        written.append({"receipt_handle": receipt.show(), **told})
    if len(failed) < len(results):
        return HttpReply({"results": written})
    first = failed[0]
    reply = HttpReply({**error_body(first), "results": written}, status_of(first))
    if (wait_s := retry_after_s(first)) is not None:
        reply.headers["Retry-After"] = str(wait_s)
    return reply


def _answer(facts: dict[str, Schema]) -> Schema:
    error = {"error": STRING, "code": STRING, "retriable": BOOLEAN, "outcome": STRING}
    told = {"receipt_handle": STRING, **facts, **error}
    result = answer(told, (*facts, *error))
    return answer({**facts, "results": array_of(result)}, (*facts, "results"))


def receipt_routes(receipts: ReceiptHandlers) -> tuple[Route, ...]:
    table: tuple[tuple[str, Verb, str, tuple[Field, ...], Facts, dict[str, Schema]], ...] = (
        ("ack", "ack", "A message is done", (), _acked, _ACKED),
        ("nack", "nack", "A message has to be delivered again", (_DELAY, _REASON), _nacked,
         _NACKED),
        ("reject", "reject", "A message goes to the dead letters", (_REASON,), _rejected,
         _REJECTED),
        ("visibility", "extend", "More time for a message", (_TIMEOUT,), _extended, _EXTENDED),
    )  # fmt: skip
    found: list[Route] = []
    for word, verb, summary, more, facts, schema in table:
        handler = receipts.settle(verb, facts)
        plain: Body = Fields((*_RECEIPTS, _GROUP, *more), _RULES)
        found.append(
            Route(
                method="POST", path=f"/messages/{word}", name=word, summary=summary,
                handler=handler, answer=_answer(schema), body=plain, errors=_ERRORS,
            )
        )  # fmt: skip
        if word in ("ack", "nack"):
            named: Body = Fields((*_RECEIPTS, *more), _RULES)
            found.append(
                Route(
                    method="POST", path=f"/groups/{{group}}/{word}", name=f"{word}_in_group",
                    summary=summary, handler=handler, answer=_answer(schema), body=named,
                    errors=_ERRORS,
                )
            )  # fmt: skip
    return tuple(found)
