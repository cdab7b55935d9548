"""Handlers of receipts: ack, nack, reject, more time. (Shell.)

One receipt is answered with what happened, or refused with the status of its error. Several are
answered with a result each; the status is that of the first error when none succeeded.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from raftq.client.common.errors import LeaseForeign, LeaseLost, RaftqError
from raftq.client.common.names import DLQ_SUFFIX
from raftq.client.queue.leased import Receipt
from raftq.client.queue.one_shot import Settled
from raftq.client.queue.settling import Settlement, Verb
from raftq.node.http.context import Context
from raftq.node.http.errors import error_body, invalid
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
from raftq.node.http.kinds import INTEGER_MAX, Duration, Kind, Listed, Schema, Text, or_null
from raftq.node.http.paths import GROUP
from raftq.node.http.routes import Call, Handler, HttpReply, Route, reply_with_results
from raftq.node.http.values import format_time
from raftq.node.queue.core.leases import TAG_SHIFT, group_tag

RECEIPTS_MAX = 1000
DELAY_MS_MAX = 366 * 86_400_000
REASON_CHARACTERS_MAX = 1024
GROUPS_MAX = 10_000  # whose marks are remembered
RECEIPT_PATTERN = r"[A-Za-z0-9._-]{1,249}:[0-9]{1,9}:[0-9]{1,18}:[0-9]{1,9}:[0-9]{1,19}"


class ReceiptHandle(Kind):
    """A receipt as text: `topic:partition:offset:deliveryCount:nonce`."""

    _text = Text(320, RECEIPT_PATTERN)

    def schema(self) -> Schema:
        return self._text.schema()

    def read(self, path: str, given: Any) -> Receipt:
        topic, partition, offset, attempt, nonce = self._text.read(path, given).split(":")
        if int(nonce) > INTEGER_MAX:
            raise invalid(path, "is no receipt")
        return Receipt(topic, int(partition), int(offset), int(nonce), int(attempt))


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

Facts = Callable[[Receipt, Settled], dict[str, Any]]


def _acked(receipt: Receipt, settled: Settled) -> dict[str, Any]:
    return {
        "acknowledged": True,
        "committed_offset": settled.settled_offset,
        "in_flight_count": settled.in_flight,
    }


def _nacked(receipt: Receipt, settled: Settled) -> dict[str, Any]:
    return {
        "action": "dlq" if settled.dead else "requeued",
        "delivery_count": receipt.attempt,
        "next_visible_at": None if settled.dead else format_time(settled.next_visible),
    }


def _rejected(receipt: Receipt, settled: Settled) -> dict[str, Any]:
    return {
        "action": "dlq" if settled.dead else "requeued",
        "delivery_count": receipt.attempt,
        "dlq_topic": receipt.topic.removesuffix(DLQ_SUFFIX) + DLQ_SUFFIX,
    }


def _extended(receipt: Receipt, settled: Settled) -> dict[str, Any]:
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
    """Settles receipts.

    A receipt does not name its group, only a mark of it. When the caller does not name the group
    either, the groups of the partition are searched for that mark; what is found is remembered.
    """

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._topics = context.topics
        self._groups: OrderedDict[tuple[str, int, int], tuple[str, ...]] = OrderedDict()

    def settle(self, verb: Verb, facts: Facts) -> Handler:
        async def handler(call: Call) -> HttpReply:
            body = call.body
            one: Receipt | None = body["receipt_handle"]
            receipts = body["receipt_handles"] if one is None else [one]
            for topic in dict.fromkeys(receipt.topic for receipt in receipts):
                await self._topics.by_name(topic)
            why = body.get("reason") or ""
            said = Settlement(
                verb,
                body.get("timeout") if verb == "extend" else body.get("delay"),
                why if verb == "reject" else "",
                why if verb == "nack" else "",
            )
            group = call.path.get("group") or body.get("group")
            results = await self._settle(receipts, group, said)
            if one is not None:
                if isinstance(results[0], RaftqError):
                    raise results[0]
                return HttpReply(facts(one, results[0]))
            return _several(receipts, results, facts)

        return handler

    async def _settle(
        self, receipts: list[Receipt], group: str | None, said: Settlement
    ) -> list[Settled | RaftqError]:
        results: dict[int, Settled | RaftqError] = {}
        together: dict[tuple[str, ...], list[int]] = {}
        for at, receipt in enumerate(receipts):
            try:
                groups = await self._candidates(receipt) if group is None else (group,)
            except RaftqError as error:
                results[at] = error
            else:
                together.setdefault(groups, []).append(at)
        for groups, left in together.items():
            for name in groups:
                part = [receipts[at] for at in left]
                found = await self._clients.members.settle(name, part, said)
                results |= zip(left, found, strict=True)
                left = [at for at in left if isinstance(results[at], LeaseLost)]
                if not left:
                    break
            for at in left:
                # Groups come and go; the next receipt is looked for again.
                self._groups.pop(_mark(receipts[at]), None)
        return [results[at] for at in range(len(receipts))]

    async def _candidates(self, receipt: Receipt) -> tuple[str, ...]:
        """The groups that can have given the receipt; a few groups share their mark."""
        mark = _mark(receipt)
        found = self._groups.get(mark)
        if found is None:
            names = await self._clients.admin.queue_groups(receipt.topic, receipt.partition)
            found = tuple(name for name in names if group_tag(name) == mark[2])
            if not found:
                place = f"{receipt.topic}/{receipt.partition}"
                raise LeaseForeign(f"no group of {place} has given this receipt")
            self._groups[mark] = found
            if len(self._groups) > GROUPS_MAX:
                self._groups.popitem(last=False)
        self._groups.move_to_end(mark)
        return found


def _mark(receipt: Receipt) -> tuple[str, int, int]:
    """The partition of a receipt and the mark of its group."""
    return receipt.topic, receipt.partition, receipt.nonce >> TAG_SHIFT


def _several(
    receipts: list[Receipt], results: list[Settled | RaftqError], facts: Facts
) -> HttpReply:
    written: list[dict[str, Any]] = []
    failed: list[RaftqError] = []
    for receipt, result in zip(receipts, results, strict=True):
        if isinstance(result, RaftqError):
            failed.append(result)
            written.append({"receipt_handle": receipt.text, **error_body(result)})
        else:
            written.append({"receipt_handle": receipt.text, **facts(receipt, result)})
    return reply_with_results(written, failed)


def _answer(facts: dict[str, Schema]) -> Schema:
    error = {"error": STRING, "code": STRING, "retriable": BOOLEAN, "outcome": STRING}
    result = answer({"receipt_handle": STRING, **facts, **error}, (*facts, *error))
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
