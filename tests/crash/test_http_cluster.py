"""Every operation of the OpenAPI document at three real nodes: each call goes to another node, and
answers as the document says."""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests
from openapi_check import conforms, operations

from raftq.chaos.harness.local_cluster import LocalCluster

ERROR = {"$ref": "#/components/schemas/Error"}


class Walker:
    """Calls operations by name, at one node after the other, and remembers which."""

    def __init__(self, bases: list[str], first: int = 0) -> None:
        self._session = requests.Session()
        self._turn = itertools.count(first)
        self._bases = bases
        self.document = self._session.get(f"{bases[first]}/v1/openapi.json").json()
        self._places = {
            one["operationId"]: place for place, one in operations(self.document).items()
        }
        self.walked: dict[str, None] = {}

    @property
    def names(self) -> set[str]:
        return set(self._places)

    def call(self, name: str, body: Any = None, status: int = 200, **given: Any) -> Any:
        """The answer; names in the path are taken from what is given, the rest is the query."""
        place = self._places[name]
        method, path = place.split()
        for word in list(given):
            if f"{{{word}}}" in path:
                path = path.replace(f"{{{word}}}", str(given.pop(word)))
        base = self._bases[next(self._turn) % len(self._bases)]
        response = self._session.request(
            method, f"{base}/v1{path}", json=body, params=given, timeout=60
        )
        assert response.status_code == status, (name, base, response.status_code, response.text)
        documented = operations(self.document)[place]["responses"][str(status)]["content"]
        if "application/json" in documented:
            schema = documented["application/json"]["schema"]
            error = self.document["components"]["schemas"]["Error"]
            conforms(error if schema == ERROR else schema, response.json(), name)
            self.walked[name] = None
            return response.json()
        self.walked[name] = None
        return response.text

    def until(self, name: str, holds: Any, **given: Any) -> Any:
        """Call until the answer is as wanted."""
        for _ in range(400):
            answer = self.call(name, **given)
            if holds(answer):
                return answer
            time.sleep(0.05)
        raise AssertionError(f"{name} never answered as wanted: {answer}")


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    directory: Path = tmp_path_factory.mktemp("cluster")
    with LocalCluster(directory, 3) as cluster:
        yield [f"http://{cluster.addresses(one).http}" for one in cluster.ids]


def messages(walker: Walker, group: str, member: str, count: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(20):
        found += walker.call("poll", group=group, member_id=member, timeout="5s")["messages"]
        if len(found) >= count:
            return found
    raise AssertionError(f"only {len(found)} of {count} messages came")


@pytest.mark.parametrize(
    "first",
    [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)],
)
def test_every_operation_answers_as_documented_whichever_node_is_asked(
    bases: list[str], first: int
) -> None:
    walker = Walker(bases, first)
    topic, group, stream = f"orders-{first}", f"workers-{first}", f"readers-{first}"
    about_the_node(walker)
    about_topics(walker, topic)
    about_queues(walker, topic, group)
    about_streams(walker, topic, stream)
    about_delays(walker, topic)
    about_letters(walker, topic, group)
    about_figures(walker, topic, group)
    assert walker.call("delete_topic", topic=topic) == {"deleted": True, "name": topic}
    walker.call("describe_topic", topic="nothing", status=404)
    assert set(walker.walked) == walker.names


def about_the_node(walker: Walker) -> None:
    for name in ("health", "healthz", "livez", "version", "stats", "openapi", "list_topics"):
        walker.call(name)
    assert walker.call("readyz", verbose="true")["status"] == "pass"
    assert "raftq_ready 1" in walker.call("metrics")
    assert len(walker.call("cluster")["nodes"]) == 3
    assert walker.call("reassignment")["count"] == 0
    walker.call("keys")
    walker.call("acls")


def about_figures(walker: Walker, topic: str, group: str) -> None:
    """Each partition and group is told of by one node, its leader or coordinator."""
    text = "".join(walker.call("metrics") for _ in range(3))
    for number in range(3):
        lag = f'raftq_consumer_lag{{group="{group}",topic="{topic}",partition="{number}"}} '
        assert text.count(lag) == 1
        assert text.count(f'raftq_delayed_pending{{topic="{topic}",partition="{number}"}} ') == 1
    assert f'raftq_settlements_total{{group="{group}",topic="{topic}",outcome="acked"}} ' in text
    assert text.count(f'raftq_group_members{{group="{group}"}} ') == 1


def about_topics(walker: Walker, topic: str) -> None:
    config = {"max_deliveries": 2, "backoff_ms": 10}
    walker.call("create_topic", {"name": topic, "num_partitions": 2, "config": config}, 201)
    walker.call("create_topic", {"name": topic}, 409)
    walker.call("add_partitions", {"count": 3}, topic=topic)
    for name in ("publish", "publish_one", "publish_batch"):
        body = {"value": name, "key": "k", "partition": 2, "priority": "high"}
        (result,) = walker.call(name, body, topic=topic)["results"]
        assert result["partition"] == 2
    page = walker.call("read", topic=topic, partition=2)
    assert [one["value"] for one in page["messages"]] == ["publish", "publish_one", "publish_batch"]
    assert walker.call("describe_topic", topic=topic)["total_messages"] == 3


def about_queues(walker: Walker, topic: str, group: str) -> None:
    """Joined at one node, polled at the next, settled at a third."""
    join = {"client_id": "c", "topics": [topic]}
    member = walker.call("join_group", join, group=group)["member_id"]
    assert group in walker.call("list_groups")["groups"]
    walker.call("heartbeat", {"member_id": member, "generation": 0}, group=group)
    first, second, third = messages(walker, group, member, 3)
    assert (first["topic"], first["delivery_count"]) == (topic, 1)
    receipts = [one["receipt_handle"] for one in (first, second, third)]
    walker.call("visibility", {"receipt_handle": receipts[0], "timeout": "1m"})
    walker.call("ack", {"receipt_handle": receipts[0]})
    walker.call("ack", {"receipt_handle": receipts[0]}, 410)
    walker.call("ack_in_group", {"receipt_handles": receipts[1:2]}, group=group)
    walker.call("nack", {"receipt_handle": receipts[2], "delay": "10ms"})
    (again,) = messages(walker, group, member, 1)
    assert again["delivery_count"] == 2
    walker.call("ack", {"receipt_handle": receipts[2]}, 410)
    answer = walker.call("nack_in_group", {"receipt_handle": again["receipt_handle"]}, group=group)
    assert answer["action"] == "dlq"
    assert walker.call("reliability_stats")["acks_total"] >= 2
    assert walker.call("priority_stats")["messages_by_priority"]["high"] >= 3
    assert walker.call("describe_group", group=group)["protocol"] == "queue"
    walker.call("delete_group", group=group, status=409)
    assert walker.call("poll", group=group, member_id=member, timeout="10ms") == {"messages": []}
    walker.call("leave_group", {"member_id": member}, group=group)
    walker.call("poll", group=group, member_id=member, status=409)


def about_streams(walker: Walker, topic: str, group: str) -> None:
    join = {"client_id": "c", "topics": [topic], "mode": "stream"}
    member = walker.call("join_group", join, group=group)["member_id"]
    found = messages(walker, group, member, 3)
    assert [one["offset"] for one in found] == [0, 1, 2]
    body = {"member_id": member, "offsets": {topic: {"2": 2}}}
    walker.call("store_offsets", body, group=group)
    (last,) = messages(walker, group, member, 1)
    assert last["offset"] == 2
    body["offsets"][topic]["2"] = 3
    walker.call("commit", body, group=group)
    assert walker.call("offsets", group=group, topic=topic)["offsets"][topic]["2"] == 3
    walker.call("commit", {"offsets": {topic: {"2": 0}}}, 409, group=group)
    walker.call("leave_group", {"member_id": member}, group=group)
    reset = walker.call("reset_group", {"topic": topic, "to": "earliest"}, group=group)
    assert reset["offsets"][topic] == {"0": 0, "1": 0, "2": 0}
    walker.call("delete_group", group=group)
    walker.call("describe_group", group=group, status=404)


def about_delays(walker: Walker, topic: str) -> None:
    body = {"messages": [{"value": "later", "delay": "1h"}]}
    (result,) = walker.call("publish", body, topic=topic)["results"]
    assert result["delayed"] is True
    listed = walker.call("list_delayed", topic=topic)
    assert listed["count"] == 1
    place = {"partition": result["partition"], "offset": result["offset"]}
    assert walker.call("find_delayed", topic=topic, **place)["topic"] == topic
    walker.call("cancel_delayed", topic=topic, **place)
    assert walker.call("list_delayed", topic=topic)["count"] == 0
    assert walker.call("delay_stats")["cancelled_count"] >= 1


def about_letters(walker: Walker, topic: str, group: str) -> None:
    found = walker.until("browse_dead_letters", lambda one: one["count"] == 1, topic=topic)
    (letter,) = found["messages"]
    assert (letter["group"], letter["source_topic"]) == (group, topic)
    done = walker.call("redrive", {"group": group}, topic=topic)
    assert done == {"redriven": 1, "complete": True}
    member = walker.call("join_group", {"topics": [topic]}, group=group)["member_id"]
    (again,) = messages(walker, group, member, 1)
    walker.call("reject", {"receipt_handle": again["receipt_handle"], "reason": "bad"})
    walker.until("browse_dead_letters", lambda one: one["count"] == 1, topic=topic)
    assert walker.call("purge_dead_letters", {}, topic=topic) == {"purged": 1, "complete": True}


def test_members_polls_and_receipts_outlive_a_node_that_is_killed(tmp_path: Path) -> None:
    """1. A member that joined at node 1 leases a record there.
    2. The node that leads the record's partition is killed.
    3. The member heartbeats, acknowledges and polls at the nodes that are left: its membership and
       its receipt still hold, and a poll that was waiting when it happened gets the next record.
    """
    with LocalCluster(tmp_path, 3) as cluster:
        http = {one: f"http://{cluster.addresses(one).http}" for one in cluster.ids}
        first = Walker([http[1]])
        first.call("create_topic", {"name": "orders", "num_partitions": 1}, 201)
        join = {"topics": ["orders"], "session_timeout": "30s"}
        member = first.call("join_group", join, group="g")["member_id"]
        first.call("publish", {"value": "a"}, topic="orders")
        (leased,) = messages(first, "g", member, 1)
        place = first.call("describe_topic", topic="orders")["replicas"]["0"]
        leader = place["leader"]
        left = [one for one in cluster.ids if one != leader]
        waiting, others = Walker([http[left[0]]]), Walker([http[one] for one in left])
        with ThreadPoolExecutor(1) as pool:
            poll = pool.submit(messages, waiting, "g", member, 1)
            time.sleep(0.5)
            cluster.kill(leader)
            acked = others.call("ack", {"receipt_handle": leased["receipt_handle"]})
            assert acked["committed_offset"] == 1
            others.call("heartbeat", {"member_id": member}, group="g")
            others.call("publish", {"value": "b"}, topic="orders")
            (message,) = poll.result(60)
        assert (message["value"], message["delivery_count"]) == ("b", 1)
        body = {"receipt_handle": message["receipt_handle"], "group": "g"}
        assert others.call("ack", body)["committed_offset"] == 2


@pytest.mark.full
def test_what_other_leaders_bring_too_late_is_given_back(bases: list[str]) -> None:
    """A poll waits at three leaders, and a record comes to each at once: the poll ends with the
    first, and the others are delivered soon, none of their attempts spent."""
    walker = Walker(bases)
    walker.call("create_topic", {"name": "spread", "num_partitions": 3}, 201)
    leaders = walker.call("describe_topic", topic="spread")["replicas"].values()
    assert len({one["leader"] for one in leaders}) == 3
    member = walker.call("join_group", {"topics": ["spread"]}, group="late")["member_id"]
    began = time.perf_counter()
    for _ in range(5):
        waiting = Walker(bases[:1])
        with ThreadPoolExecutor(1) as pool:
            poll = pool.submit(messages, waiting, "late", member, 3)
            time.sleep(0.3)
            each = [{"value": str(number), "partition": number} for number in range(3)]
            walker.call("publish", {"messages": each}, topic="spread")
            found = poll.result(60)
        assert sorted(one["value"] for one in found) == ["0", "1", "2"]
        assert {one["delivery_count"] for one in found} == {1}
        receipts = [one["receipt_handle"] for one in found]
        walker.call("ack", {"receipt_handles": receipts})
    assert time.perf_counter() - began < 20
