"""Shell: the third part of the demo: a group of workers on the cluster.

A topic has records in five lanes, one of them poisoned. Three worker processes begin, one is
killed, a fourth joins. The poisoned record becomes a dead letter; the workers are repaired, it is
sent back, and is handled. Meanwhile a delayed record becomes due. group_checks.py judges the
result.
"""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from raftq import Admin, Producer
from raftq.client.common.errors import RaftqError
from raftq.node.queue.core.lanes import LANES
from raftq_demo.group_checks import ATTEMPTS, GroupStory, Letter
from raftq_demo.group_worker import GROUP, TOPIC, GroupWorker

PARTITIONS = 3
LANE_RECORDS = 600
"""The number of records of each lane in each partition."""
ORDINARY = LANE_RECORDS * LANES * PARTITIONS
POISON, DELAYED = ORDINARY, ORDINARY + 1
DELAY_S = 1.5
BACKOFF_MS = 100
KILL_PART = 0.25
"""The share of all records after which the first worker is killed."""
WAIT_S = 60.0
POLL_S = 0.01
PADDING = "." * 100
SETTINGS = {"max_deliveries": ATTEMPTS, "backoff_ms": BACKOFF_MS}


class Rest:
    """What an operator asks any node; here the last one."""

    def __init__(self, admin: Admin) -> None:
        self._node = admin.nodes()[-1]

    def members(self) -> int:
        return len(self._ask("GET", f"/v1/groups/{GROUP}")["members"])

    def letters(self) -> list[Letter]:
        return [
            Letter(int(one["value"].split(":")[0]), one["reason"], one["delivery_count"])
            for one in self._ask("GET", f"/v1/topics/{TOPIC}/dlq")["messages"]
        ]

    def redrive(self) -> int:
        return int(self._ask("POST", f"/v1/topics/{TOPIC}/dlq/redrive")["redriven"])

    def _ask(self, method: str, path: str) -> dict[str, Any]:
        link = http.client.HTTPConnection(self._node.host, self._node.http_port, timeout=WAIT_S)
        try:
            body = "{}" if method == "POST" else None
            link.request(method, path, body, {"Content-Type": "application/json"})
            reply = link.getresponse()
            text = reply.read()
        finally:
            link.close()
        if reply.status >= 300:
            raise RaftqError(f"{method} {path} was answered {reply.status}: {text[:200]!r}")
        answer = json.loads(text)
        assert isinstance(answer, dict)
        return answer


def run_group_story(bootstrap: str, say: Callable[[str], None]) -> GroupStory:
    began = time.perf_counter()
    workers = [GroupWorker(bootstrap, number) for number in (1, 2, 3, 4)]
    try:
        with Admin(bootstrap) as admin, Producer(bootstrap) as producer:
            admin.create_topic(TOPIC, PARTITIONS, 3, SETTINGS)
            rest = Rest(admin)
            _fill(producer)
            say(f"8. a topic gets {ORDINARY} records in {LANES} lanes, and one that is poisoned")
            story = GroupStory(ORDINARY, POISON, DELAYED, killed=1, joined=4)
            _work(rest, story, workers, say)
            story.due = _delay(producer)
            _redrive(rest, story, workers, say)
        story.exits = [worker.finish(WAIT_S) for worker in workers[1:]]
    finally:
        for worker in workers:
            worker.end()
    story.handled = [one for worker in workers for one in worker.handled]
    story.seconds = time.perf_counter() - began
    return story


def _fill(producer: Producer) -> None:
    number = 0
    for partition in range(PARTITIONS):
        for lane in range(LANES):
            values = [_value(number + at) for at in range(LANE_RECORDS)]
            producer.send_many(TOPIC, values, priority=lane, partition=partition)
            number += LANE_RECORDS
    producer.send(TOPIC, _value(POISON), headers={"poison": b"1"}, priority="critical")
    producer.flush()


def _delay(producer: Producer) -> float:
    """Sends a delayed record. Returns the time at which it is due."""
    sent = producer.send(TOPIC, _value(DELAYED), delay=DELAY_S, priority="critical").result()
    assert sent.deliver_at is not None, "a delayed record has a time at which it is due"
    return sent.deliver_at / 1000


def _value(number: int) -> bytes:
    return f"{number}:{PADDING}".encode()


def _work(
    rest: Rest, story: GroupStory, workers: Sequence[GroupWorker], say: Callable[[str], None]
) -> None:
    """Three workers work, the first is killed, the fourth joins, everything is handled."""
    say("9. three processes work as one group")
    for worker in workers[:3]:
        worker.tell("join")
    _wait(
        lambda: sum(worker.ended for worker in workers) >= KILL_PART * ORDINARY,
        "records are handled",
    )
    story.members.append(rest.members())
    _wait(lambda: workers[0].is_at_work, "the worker that is to be killed has work in hand")
    workers[0].kill()
    workers[3].tell("join")
    say(f"   kill -9 of worker 1 after {workers[0].ended} records; worker 4 joins")
    _wait(lambda: _all_handled(story, workers), "all records are handled")
    _wait(lambda: len(rest.letters()) > 0, "the poisoned record is a dead letter")


def _redrive(
    rest: Rest, story: GroupStory, workers: Sequence[GroupWorker], say: Callable[[str], None]
) -> None:
    """The cause is gone, and the dead letter is sent back."""
    story.letters = rest.letters()
    letters = ", ".join(
        f"{letter.reason} after {letter.attempts} attempts" for letter in story.letters
    )
    say(f"10. dead letter: {letters}; a record is sent that is due in {DELAY_S:g} s")
    for worker in workers[1:]:
        worker.tell("mend")
    story.redriven_at = time.time()  # noqa: TID251 - compared with times of other processes
    story.redriven = rest.redrive()
    say(f"    the handlers are mended; redriven: {story.redriven}")
    _wait(lambda: _has_ended(POISON, workers), "the poisoned record is handled")
    _wait(lambda: _has_ended(DELAYED, workers), "the delayed record is handled")
    _wait(lambda: rest.members() <= story.members[0], "the killed worker is no member any more")
    story.members.append(rest.members())
    story.letters_left = len(rest.letters())


def _all_handled(story: GroupStory, workers: Sequence[GroupWorker]) -> bool:
    if sum(worker.ended for worker in workers) < story.ordinary:
        return False
    ended = {one.number for worker in workers for one in list(worker.handled) if one.ended}
    return all(number in ended for number in range(story.ordinary))


def _has_ended(number: int, workers: Sequence[GroupWorker]) -> bool:
    return any(one.number == number and one.ended
               for worker in workers for one in list(worker.handled))  # fmt: skip


def _wait(holds: Callable[[], bool], what: str) -> None:
    ends_at = time.perf_counter() + WAIT_S
    while not holds():
        if time.perf_counter() > ends_at:
            raise RaftqError(f"after {WAIT_S:g} s it is not so that {what}")
        time.sleep(POLL_S)
