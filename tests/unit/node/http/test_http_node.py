"""REST at one real node: groups, receipts, delays and dead letters, through its sockets."""

import asyncio
import json as json_module
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from real_node import connect, run, running

from raftq.client.wire.queue_messages import ReadOffset, ReadOffsets
from raftq.node.config import Address


class Caller:
    """Calls one node, and checks the status."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def call(self, method: str, path: str, json: Any = None, status: int = 200) -> Any:
        data = None if json is None else json_module.dumps(json)
        async with self._session.request(method, path, data=data) as response:
            body = await response.json()
            assert response.status == status, (path, response.status, body)
            return body

    async def get(self, path: str, status: int = 200) -> Any:
        return await self.call("GET", path, None, status)

    async def post(self, path: str, json: Any, status: int = 200) -> Any:
        return await self.call("POST", path, json, status)

    async def publish(self, *messages: dict[str, Any], topic: str = "orders") -> list[Any]:
        answer = await self.post(f"/topics/{topic}/messages", {"messages": list(messages)})
        return list(answer["results"])

    async def join(self, group: str, mode: str = "queue", **more: Any) -> str:
        body = {"client_id": "c", "topics": ["orders"], "mode": mode, **more}
        return str((await self.post(f"/groups/{group}/join", body))["member_id"])

    async def letter(self) -> Any:
        """The one dead letter, once it is there: the copy is made after the answer."""
        for _ in range(500):
            letters = (await self.get("/topics/orders/dlq"))["messages"]
            if letters:
                (letter,) = letters
                return letter
            await asyncio.sleep(0.02)
        raise AssertionError("no letter came")

    async def poll(self, group: str, member: str, wait: str = "5s") -> Any:
        path = f"/groups/{group}/poll?member_id={member}&timeout={wait}"
        return (await self.get(path))["messages"]


@asynccontextmanager
async def node(directory: Path) -> AsyncIterator[Caller]:
    async with running(directory, http=Address("127.0.0.1", 0)) as one:
        base = f"http://127.0.0.1:{one.http_port}"
        async with aiohttp.ClientSession(base) as session:
            caller = Caller(session)
            config = {"max_deliveries": 2, "backoff_ms": 10}
            body = {"name": "orders", "num_partitions": 2, "config": config}
            await caller.post("/topics", body, 201)
            yield caller


def story(directory: Path, scenario: Callable[[Caller], Awaitable[None]]) -> None:
    async def whole() -> None:
        async with asyncio.timeout(60), node(directory) as caller:
            await scenario(caller)

    run(whole)


def test_a_stream_member_goes_on_where_partitions_know_later_owners(tmp_path: Path) -> None:
    """A poll is refused once; by the next one the group has come to a later generation."""

    async def whole() -> None:
        async with (
            asyncio.timeout(60),
            running(tmp_path, http=Address("127.0.0.1", 0)) as one,
            aiohttp.ClientSession(f"http://127.0.0.1:{one.http_port}") as session,
            await connect(one) as connection,
        ):
            http = Caller(session)
            await http.post("/topics", {"name": "orders", "num_partitions": 1}, 201)
            await http.publish({"value": "a"})
            claim = ReadOffsets("g", "before", (ReadOffset("orders", 0, 70),))
            assert (await connection.request(claim)).message.offsets[0].error == ""
            member = await http.join("g", "stream")
            path = f"/groups/g/poll?member_id={member}&timeout=1s"
            await http.call("GET", path, status=409)
            assert [one["value"] for one in await http.poll("g", member)] == ["a"]

    run(whole)


def test_a_message_is_polled_acknowledged_and_gone(tmp_path: Path) -> None:
    async def scenario(http: Caller) -> None:
        body = {"client_id": "c", "topics": ["orders"]}
        joined = await http.post("/groups/g/join", body)
        both = [{"topic": "orders", "partition": 0}, {"topic": "orders", "partition": 1}]
        assert joined["assigned_partitions"] == both
        member = joined["member_id"]
        beat = await http.post("/groups/g/heartbeat", {"member_id": member})
        assert beat["assigned_partitions"] == both
        assert await http.poll("g", member, "0s") == []
        parked = asyncio.ensure_future(http.poll("g", member, "20s"))
        await asyncio.sleep(0.2)
        await http.publish({"value": "a", "key": "k", "headers": {"h": "1"}, "partition": 1})
        (message,) = await parked
        assert (message["value"], message["partition"], message["delivery_count"]) == ("a", 1, 1)
        assert message["headers"] == {"h": "1"}
        receipt = {"receipt_handle": message["receipt_handle"]}
        acked = await http.post("/messages/ack", receipt)
        assert acked == {"acknowledged": True, "committed_offset": 1, "in_flight_count": 0}
        again = await http.post("/messages/ack", receipt, 410)
        assert again["code"] == "ALREADY_SETTLED"
        foreign = await http.post("/groups/other/ack", receipt, 409)
        assert foreign["code"] == "LEASE_FOREIGN"
        assert (await http.get("/groups/g/offsets"))["offsets"]["orders"]["1"] == 1
        assert (await http.get("/groups"))["groups"] == ["g"]
        described = await http.get("/groups/g")
        assert (described["protocol"], described["state"]) == ("queue", "stable")
        stats = await http.get("/reliability/stats")
        assert (stats["acks_total"], stats["missing_partitions"]) == (1, 0)
        lanes = await http.get("/priority/stats")
        assert lanes["messages_by_priority"]["normal"] == 1
        await http.post("/groups/g/leave", {"member_id": member})
        await http.call("DELETE", "/groups/g")
        await http.get("/groups/g", 404)

    story(tmp_path, scenario)


def test_what_is_nacked_comes_again_and_then_goes_to_the_dead_letters(tmp_path: Path) -> None:
    async def scenario(http: Caller) -> None:
        member = await http.join("g")
        await http.publish({"value": "poison", "key": "k", "partition": 0})
        (first,) = await http.poll("g", member)
        body = {"receipt_handle": first["receipt_handle"], "delay": "50ms", "reason": "broken"}
        nacked = await http.post("/groups/g/nack", body)
        assert (nacked["action"], nacked["delivery_count"]) == ("requeued", 1)
        (second,) = await http.poll("g", member)
        assert second["delivery_count"] == 2
        old = await http.post("/messages/ack", {"receipt_handle": first["receipt_handle"]}, 410)
        assert old["code"] == "LEASE_REPLACED"
        longer = {"receipt_handle": second["receipt_handle"], "timeout": "2m"}
        assert (await http.post("/messages/visibility", longer))["extended"] is True
        nacked = await http.post("/messages/nack", {"receipt_handle": second["receipt_handle"]})
        assert (nacked["action"], nacked["next_visible_at"]) == ("dlq", None)
        letter = await http.letter()
        assert (letter["value"], letter["key"], letter["group"]) == ("poison", "k", "g")
        assert (letter["source_topic"], letter["source_offset"]) == ("orders", 0)
        assert letter["delivery_count"] == 2
        assert (await http.get("/reliability/stats"))["dlq_messages"] == 1
        assert (await http.get("/topics/orders/dlq?group=nobody"))["messages"] == []
        done = await http.post("/topics/orders/dlq/redrive", {"group": "g", "rate": 100})
        assert done == {"redriven": 1, "complete": True}
        (third,) = await http.poll("g", member)
        assert (third["value"], third["delivery_count"]) == ("poison", 1)
        body = {"receipt_handle": third["receipt_handle"], "reason": "hopeless"}
        assert (await http.post("/messages/reject", body))["action"] == "dlq"
        letter = await http.letter()
        assert letter["reason"] == "hopeless"
        stats = await http.get("/reliability/stats")
        assert (stats["rejects_total"], stats["visibility_extensions"]) == (1, 1)
        done = await http.post("/topics/orders/dlq/purge", {})
        assert done == {"purged": 1, "complete": True}
        assert (await http.get("/topics/orders/dlq"))["messages"] == []

    story(tmp_path, scenario)


def test_delayed_messages_are_seen_when_due_and_never_when_cancelled(tmp_path: Path) -> None:
    async def scenario(http: Caller) -> None:
        member = await http.join("g")
        results = await http.publish(
            {"value": "late", "delay": "400ms", "partition": 0},
            {"value": "never", "delay": "1h", "partition": 0},
            {"value": "now", "partition": 0},
            {"value": "short", "ttl": "1ms", "partition": 1},
        )
        assert [one["delayed"] for one in results] == [True, True, False, False]
        listed = await http.get("/topics/orders/delayed")
        assert listed["count"] == 2
        one = listed["messages"][1]
        found = await http.get(f"/topics/orders/delayed/{one['offset']}")
        assert found == one
        path = f"/topics/orders/delayed/{one['partition']}/{one['offset']}"
        assert await http.call("DELETE", path) == {"cancelled": True}
        assert await http.call("DELETE", path) == {"cancelled": True}
        await http.call("DELETE", "/topics/orders/delayed/0/77", status=404)
        values: list[str] = []
        while len(values) < 2:
            values += [one["value"] for one in await http.poll("g", member)]
        assert values == ["now", "late"]
        stats = await http.get("/delay/stats")
        assert (stats["pending_count"], stats["delivered_count"]) == (0, 1)
        assert stats["cancelled_count"] == 1

    story(tmp_path, scenario)


def test_a_stream_member_reads_its_partitions_and_commits(tmp_path: Path) -> None:
    async def scenario(http: Caller) -> None:
        member = await http.join("s", "stream")
        await http.publish({"value": "a", "partition": 0}, {"value": "b", "partition": 1})
        found: dict[str, int] = {}
        while len(found) < 2:
            messages = await http.poll("s", member)
            assert messages, "both are there, so a poll does not come back empty"
            assert all("receipt_handle" not in one for one in messages)
            for one in messages:
                found[one["value"]] = one["partition"]
                at = {"orders": {str(one["partition"]): one["offset"] + 1}}
                body = {"member_id": member, "offsets": at}
                assert (await http.post("/groups/s/offsets", body))["committed"] is True
        assert found == {"a": 0, "b": 1}
        assert (await http.get("/groups/s/offsets"))["offsets"] == {"orders": {"0": 1, "1": 1}}
        parked = asyncio.ensure_future(http.poll("s", member, "20s"))
        await asyncio.sleep(0.3)
        await http.publish({"value": "c", "partition": 1})
        (message,) = await parked
        assert (message["value"], message["offset"]) == ("c", 1)
        lost = {"member_id": "nobody", "offsets": {"orders": {"0": 1}}}
        await http.post("/groups/s/commit", lost, 409)
        outside = {"offsets": {"orders": {"0": 1}}}
        await http.post("/groups/s/commit", outside, 409)
        await http.post("/groups/s/leave", {"member_id": member})
        reset = await http.post("/groups/s/reset", {"topic": "orders", "to": "earliest"})
        assert reset["offsets"] == {"orders": {"0": 0, "1": 0}}

    story(tmp_path, scenario)


def test_members_share_partitions_of_a_stream_and_give_them_up(tmp_path: Path) -> None:
    async def scenario(http: Caller) -> None:
        first = await http.join("s", "stream")
        beat = await http.post("/groups/s/heartbeat", {"member_id": first, "generation": 0})
        assert len(beat["assigned_partitions"]) == 2
        second = await http.join("s", "stream")
        revoked: list[Any] = []
        generation = beat["generation"]
        owned: dict[str, list[Any]] = {}
        async with asyncio.timeout(20):
            while sum(map(len, owned.values())) != 2 or len(owned.get(second, [])) != 1:
                for member in (first, second):
                    body = {"member_id": member, "generation": generation}
                    beat = await http.post("/groups/s/heartbeat", body)
                    owned[member] = beat["assigned_partitions"]
                    revoked += beat["revoked_partitions"]
                generation = beat["generation"]
                await asyncio.sleep(0.05)
        assert len(revoked) == 1
        assert owned[first] != owned[second]

    story(tmp_path, scenario)
