"""Handlers of consumer groups: members, polls, offsets. (Shell.)"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from raftq.client.admin.groups import ResetTo
from raftq.client.admin.results import GroupDescription
from raftq.client.common.types import PartitionKey
from raftq.client.queue.leased import LeasedRecord
from raftq.node.http.context import Context
from raftq.node.http.errors import Refusal, invalid
from raftq.node.http.fields import (
    BOOLEAN,
    INTEGER,
    STRING,
    Field,
    Fields,
    Query,
    answer,
    array_of,
    map_of,
)
from raftq.node.http.kinds import (
    INTEGER_MAX,
    NAME_CHARACTERS_MAX,
    Choice,
    Duration,
    Kind,
    Listed,
    Schema,
    Table,
    Text,
    Time,
    Whole,
    or_null,
)
from raftq.node.http.messages import RECORD, RECORD_SOMETIMES, Readable, write_records
from raftq.node.http.paths import OFFSET, PARTITION, TOPIC
from raftq.node.http.routes import Call, HttpReply, Route

POLL_MS_MAX = 30_000
POLL_MESSAGES_MAX = 1000
SESSION_MS_MIN = 1_000
SESSION_MS_MAX = 600_000
LEASE_MS_MAX = 12 * 3_600_000
TOPICS_MAX = 100
PARTITIONS_MAX = 8_000
ERRORS = (404, 409, 503, 507)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

Offsets = dict[str, dict[int, int]]  # by topic and partition

MEMBER = Text(NAME_CHARACTERS_MAX)
JOIN = Fields((
    Field("client_id", MEMBER, "a name for people"),
    Field("topics", Listed(TOPIC, TOPICS_MAX), required=True),
    Field("session_timeout", Duration(SESSION_MS_MIN, SESSION_MS_MAX), default="30s"),
    Field(
        "mode", Choice(("queue", "stream")),
        "queue: every message is leased to one member and acknowledged; stream: every partition "
        "is read by one member, in order, and offsets are committed",
        default="queue",
    ),
))  # fmt: skip
HEARTBEAT = Fields((
    Field("member_id", MEMBER, required=True),
    Field("generation", Whole(0, INTEGER_MAX), "the one the member knows"),
))  # fmt: skip
LEAVE = Fields((Field("member_id", MEMBER, required=True),))
POLL = Query((
    Field("member_id", MEMBER, required=True),
    Field("max_messages", Whole(1, POLL_MESSAGES_MAX), default=100),
    Field(
        "timeout", Duration(0, POLL_MS_MAX), "for how long to wait for the first message",
        default="30s",
    ),
    Field(
        "visibility", Duration(1, LEASE_MS_MAX),
        "for how long the messages are this member's; without it, the topic's setting",
    ),
))  # fmt: skip
OFFSETS = Query((Field("topic", TOPIC, "this one only"),))
COMMIT = Fields((
    Field("member_id", MEMBER, "without it, partitions that a member owns are refused"),
    Field(
        "offsets", Table(TOPIC, Table(PARTITION, OFFSET, PARTITIONS_MAX), TOPICS_MAX),
        "where to go on, by topic and partition", required=True,
    ),
))  # fmt: skip


class ResetPlace(Kind):
    """earliest, latest, an offset (also as text) or a time."""

    _ends = Choice(("earliest", "latest"))
    _digits = Text(18, "[0-9]{1,18}")

    def schema(self) -> Schema:
        return {"anyOf": [one.schema() for one in (self._ends, OFFSET, self._digits, Time())]}

    def read(self, path: str, given: Any) -> ResetTo:
        if given in ("earliest", "latest"):
            return "earliest" if given == "earliest" else "latest"
        if isinstance(given, str):
            if given.isascii() and given.isdigit():
                return OFFSET.read_text(path, self._digits.read(path, given))
            return EPOCH + timedelta(milliseconds=Time().read(path, given))
        if type(given) in (int, float):
            return OFFSET.read(path, given)
        raise invalid(path, "must be earliest, latest, an offset or a time")


RESET = Fields((
    Field("topic", TOPIC, required=True),
    Field("partition", PARTITION, "this one only"),
    Field("to", ResetPlace(), "earliest, latest, an offset or a time", required=True),
))  # fmt: skip


class GroupHandlers:
    """Groups, their members, polls and stored offsets."""

    def __init__(self, context: Context) -> None:
        self._clients = context.clients
        self._topics = context.topics
        self._options = context.options
        self._polls = 0

    async def list_all(self, call: Call) -> HttpReply:
        groups = await self._clients.admin.list_groups()
        return HttpReply({"groups": [one.group for one in groups]})

    async def describe(self, call: Call) -> HttpReply:
        return HttpReply(_described(await self._clients.admin.describe_group(call.path["group"])))

    async def delete(self, call: Call) -> HttpReply:
        await self._clients.admin.delete_group(call.path["group"])
        return HttpReply({"deleted": True, "group_id": call.path["group"]})

    async def join(self, call: Call) -> HttpReply:
        body = call.body
        for name in body["topics"]:
            await self._topics.by_name(name)
        member = await self._clients.members.join(
            call.path["group"],
            list(dict.fromkeys(body["topics"])),
            mode=body["mode"],
            session_ms=body["session_timeout"],
            client_id=body["client_id"] or "",
        )
        return HttpReply(
            {
                "member_id": member.member_id,
                "generation": member.generation,
                "leader": False,
                "assigned_partitions": _partitions(member.assigned),
                "rebalance_required": member.pending,
            }
        )

    async def heartbeat(self, call: Call) -> HttpReply:
        known = call.body["generation"]
        member = await self._clients.members.heartbeat(
            call.path["group"], call.body["member_id"], known
        )
        news = bool(member.revoked) or (known is not None and known != member.generation)
        return HttpReply(
            {
                "rebalance_required": member.pending or news,
                "state": "rebalancing" if member.pending or member.revoked else "stable",
                "generation": member.generation,
                "assigned_partitions": _partitions(member.assigned),
                "revoked_partitions": _partitions(member.revoked),
            }
        )

    async def leave(self, call: Call) -> HttpReply:
        left = await self._clients.members.leave(call.path["group"], call.body["member_id"])
        return HttpReply({"left": left})

    async def poll(self, call: Call) -> HttpReply:
        group, query = call.path["group"], call.query
        members = self._clients.members
        lease_ms = query["visibility"]
        # Polls are parked for long: they must not take the room of everybody else's requests.
        if self._polls >= self._options.polls_max:
            raise Refusal("THROTTLED", "too many polls are waiting")
        self._polls += 1
        try:
            delivered = await members.poll(
                group,
                query["member_id"],
                query["max_messages"],
                query["timeout"] / 1000,
                None if lease_ms is None else lease_ms / 1000,
            )
        finally:
            self._polls -= 1
        if delivered and call.gone():
            await members.give_back(group, delivered)
        return HttpReply({"messages": _write(delivered, call.binary)})

    async def offsets(self, call: Call) -> HttpReply:
        topic = call.query["topic"]
        if topic is not None:
            await self._topics.by_name(topic)
        wanted = [one for one in self._topics.queued() if topic in (None, one)]
        found = await self._clients.admin.stored_offsets(call.path["group"], wanted)
        return HttpReply({"offsets": _offsets(found)})

    async def commit(self, call: Call) -> HttpReply:
        group, body = call.path["group"], call.body
        offsets: Offsets = body["offsets"]
        for name, partitions in offsets.items():
            topic = await self._topics.by_name(name)
            await self._topics.with_partition(topic, max(partitions), f"offsets.{name}")
        flat = {(name, at): to for name, parts in offsets.items() for at, to in parts.items()}
        await self._clients.members.commit(group, body["member_id"] or "", flat)
        return HttpReply({"committed": True, "offsets": _offsets(offsets)})

    async def reset(self, call: Call) -> HttpReply:
        body = call.body
        topic = await self._topics.by_name(body["topic"])
        if body["partition"] is not None:
            await self._topics.with_partition(topic, body["partition"], "partition")
        group = call.path["group"]
        admin = self._clients.admin
        found = await admin.reset_group(group, topic.name, body["to"], body["partition"])
        return HttpReply({"offsets": _offsets({topic.name: dict(found)})})


def _partitions(names: Iterable[PartitionKey]) -> list[dict[str, Any]]:
    return [{"topic": topic, "partition": number} for topic, number in sorted(names)]


def _offsets(offsets: Offsets) -> dict[str, dict[str, int]]:
    return {
        topic: {str(number): offset for number, offset in sorted(parts.items())}
        for topic, parts in sorted(offsets.items())
    }


def _described(found: GroupDescription) -> dict[str, Any]:
    return {
        "group_id": found.group,
        "state": found.state,
        "protocol": found.mode,
        "generation": found.generation,
        "coordinator": found.coordinator,
        "topics": sorted({one.topic for one in found.partitions}),
        "lag": found.lag,
        "members": [
            {
                "member_id": one.member_id,
                "client_id": one.client_id,
                "assigned_partitions": _partitions((at.topic, at.partition) for at in one.assigned),
            }
            for one in found.members
        ],
        "partitions": [
            {
                "topic": one.topic,
                "partition": one.partition,
                "position": one.position,
                "high_watermark": one.high_watermark,
                "lag": one.lag,
                "in_flight_count": one.in_flight,
                "waiting_count": one.waiting,
                "paused": one.paused,
            }
            for one in found.partitions
        ],
    }


def _write(delivered: Sequence[Readable], binary: bool) -> list[dict[str, Any]]:
    written = write_records(delivered, binary)
    for one, message in zip(delivered, written, strict=True):
        message["topic"] = one.topic
        message["partition"] = one.partition
        if isinstance(one, LeasedRecord):
            message["receipt_handle"] = one.receipt
            message["delivery_count"] = one.attempt
    return written


_PARTITION = answer({"topic": STRING, "partition": INTEGER})
_PARTITIONS = array_of(_PARTITION)
_OFFSETS = map_of(map_of(INTEGER))
_STATE: Schema = {"type": "string", "enum": ["empty", "rebalancing", "stable"]}
_MEMBER = answer({"member_id": STRING, "client_id": STRING, "assigned_partitions": _PARTITIONS})
_GROUP_PARTITION = answer(
    {
        "topic": STRING,
        "partition": INTEGER,
        "position": {
            **or_null(INTEGER),
            "description": "where readers go on, or up to where all is settled",
        },
        "high_watermark": INTEGER,
        "lag": INTEGER,
        "in_flight_count": INTEGER,
        "waiting_count": INTEGER,
        "paused": BOOLEAN,
    }
)
_DESCRIBED = answer(
    {
        "group_id": STRING,
        "state": _STATE,
        "protocol": {"type": "string", "enum": ["queue", "stream"]},
        "generation": INTEGER,
        "coordinator": or_null(INTEGER),
        "topics": array_of(STRING),
        "lag": INTEGER,
        "members": array_of(_MEMBER),
        "partitions": array_of(_GROUP_PARTITION),
    }
)
_JOINED = answer(
    {
        "member_id": STRING,
        "generation": INTEGER,
        "leader": {**BOOLEAN, "description": "always false: the cluster itself assigns"},
        "assigned_partitions": _PARTITIONS,
        "rebalance_required": {**BOOLEAN, "description": "more will be assigned; heartbeat soon"},
    }
)
_BEAT = answer(
    {
        "rebalance_required": BOOLEAN,
        "state": _STATE,
        "generation": INTEGER,
        "assigned_partitions": _PARTITIONS,
        "revoked_partitions": {
            **_PARTITIONS,
            "description": "to be let go of: the next heartbeat says that they are",
        },
    }
)
_DELIVERED = answer(
    {
        "topic": STRING,
        "partition": INTEGER,
        **RECORD,
        "receipt_handle": STRING,
        "delivery_count": INTEGER,
    },
    (*RECORD_SOMETIMES, "receipt_handle", "delivery_count"),
)


def group_routes(groups: GroupHandlers) -> tuple[Route, ...]:
    committed = answer({"committed": BOOLEAN, "offsets": _OFFSETS})
    storing = tuple(
        Route(
            method="POST", path=f"/groups/{{group}}/{word}", name=name, handler=groups.commit,
            summary="Say where the group goes on", answer=committed, body=COMMIT, errors=ERRORS,
        )
        for word, name in (("offsets", "store_offsets"), ("commit", "commit"))
    )  # fmt: skip
    return (
        Route(
            method="GET", path="/groups", name="list_groups", summary="The names of all groups",
            handler=groups.list_all, answer=answer({"groups": array_of(STRING)}), errors=(503,),
        ),
        Route(
            method="GET", path="/groups/{group}", name="describe_group", errors=ERRORS,
            summary="A group and its members", handler=groups.describe, answer=_DESCRIBED,
        ),
        Route(
            method="DELETE", path="/groups/{group}", name="delete_group", errors=ERRORS,
            summary="Forget a group that has no members", handler=groups.delete,
            answer=answer({"deleted": BOOLEAN, "group_id": STRING}),
        ),
        Route(
            method="POST", path="/groups/{group}/join", name="join_group", errors=ERRORS,
            summary="Become a member", handler=groups.join, answer=_JOINED, body=JOIN,
        ),
        Route(
            method="POST", path="/groups/{group}/heartbeat", name="heartbeat", errors=ERRORS,
            summary="Stay a member, and learn what to read", handler=groups.heartbeat,
            answer=_BEAT, body=HEARTBEAT,
        ),
        Route(
            method="POST", path="/groups/{group}/leave", name="leave_group", errors=ERRORS,
            summary="Be a member no longer", handler=groups.leave,
            answer=answer({"left": BOOLEAN}), body=LEAVE,
        ),
        Route(
            method="GET", path="/groups/{group}/poll", name="poll", wait_ms=POLL_MS_MAX,
            summary="Messages for a member; waits for the first ones", handler=groups.poll,
            answer=answer({"messages": array_of(_DELIVERED)}), query=POLL, errors=ERRORS,
        ),
        Route(
            method="GET", path="/groups/{group}/offsets", name="offsets", errors=ERRORS,
            summary="Where the group goes on", handler=groups.offsets,
            answer=answer({"offsets": _OFFSETS}), query=OFFSETS,
        ),
        *storing,
        Route(
            method="POST", path="/groups/{group}/reset", name="reset_group", errors=ERRORS,
            summary="Go on somewhere else", handler=groups.reset,
            answer=answer({"offsets": _OFFSETS}), body=RESET,
        ),
    )  # fmt: skip
