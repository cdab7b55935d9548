"""Shell: how the admin client reaches dead letters.

Letters are browsed, sent back and forgotten partition by partition, in portions. A letter that was
sent back is gone, so a redrive that is asked for again goes on where it was.
"""

import asyncio
from math import inf
from typing import NamedTuple

from raftq.client.admin.letter_filter import LetterFilter
from raftq.client.admin.requests import AdminRequests, records_of
from raftq.client.admin.results import LetterPage, LetterPlace, LetterVerb, Swept
from raftq.client.common.errors import InvalidArgument, UnknownTopic
from raftq.client.common.names import letters_topic
from raftq.client.common.tasks import sleep
from raftq.client.results import Record
from raftq.client.wire.queue_messages import DeadLetters, DeadLettersReply

PORTION = 500
PORTIONS_A_SECOND = 5  # when there is a rate
LOOKS_MAX = 200  # portions that one page looks at


class Pace(NamedTuple):
    """At most `rate` letters a second, for at most about `seconds`."""

    rate: float | None
    seconds: float = inf


async def letters_topic_of(requests: AdminRequests, topic: str) -> str | None:
    """The dead-letter topic of a topic. None when it has none, because it has no dead letters."""
    name = letters_topic(topic)
    try:
        await requests.topic(name)
    except UnknownTopic:
        await requests.topic(topic)  # UnknownTopic when this topic does not exist either
        return None
    return name


async def page(
    requests: AdminRequests, topic: str, which: LetterFilter, place: LetterPlace | None, limit: int
) -> LetterPage:
    """Letters of a dead-letter topic from a place on."""
    numbers = await requests.partitions(topic, which.partition)
    found: list[Record] = []
    at: LetterPlace | None = place or LetterPlace(numbers[0])
    for _ in range(LOOKS_MAX):
        if at is None or at.partition not in numbers or len(found) >= limit:
            break
        key = topic, at.partition
        request = _request(topic, which, "browse", at, min(limit - len(found), PORTION))
        reply = await requests.ask_leader(key, request)
        offsets = dict.fromkeys(reply.message.offsets)
        found += [record for record in records_of(key, reply.raw) if record.offset in offsets]
        at = _after(at, reply.message, numbers)
    return LetterPage(found, at)


async def browse(
    requests: AdminRequests, topic: str, which: LetterFilter, limit: int
) -> list[Record]:
    """At most `limit` letters of a dead-letter topic."""
    _check_limit(limit)
    some = await page(requests, topic, which, None, limit)
    found = some.records
    while some.next is not None and len(found) < limit:
        some = await page(requests, topic, which, some.next, limit - len(found))
        found += some.records
    return found


async def sweep(
    requests: AdminRequests,
    topic: str,
    verb: LetterVerb,
    which: LetterFilter,
    limit: int | None,
    pace: Pace,
) -> Swept:
    """Redrive or purge letters of a dead-letter topic."""
    rate = pace.rate
    if limit is not None:
        _check_limit(limit)
    if rate is not None and not rate > 0:
        raise InvalidArgument(f"rate must be above 0, not {rate!r}")
    portion = PORTION if rate is None else max(1, min(PORTION, int(rate / PORTIONS_A_SECOND)))
    numbers = await requests.partitions(topic, which.partition)
    loop = asyncio.get_running_loop()
    began = loop.time()
    done = 0
    at: LetterPlace | None = LetterPlace(numbers[0])
    while at is not None and (limit is None or done < limit):
        count = portion if limit is None else min(portion, limit - done)
        request = _request(topic, which, verb, at, count)
        reply = (await requests.ask_leader((topic, at.partition), request)).message
        done += reply.count
        at = _after(at, reply, numbers)
        spent_s = loop.time() - began
        ahead_s = max(done / rate - spent_s, 0.0) if rate else 0.0
        if spent_s + ahead_s > pace.seconds:
            break
        if at is not None:
            await sleep(ahead_s)
    return Swept(done, at is None)


def _check_limit(limit: int) -> None:
    if type(limit) is not int or limit < 1:
        raise InvalidArgument(f"limit must be at least 1, not {limit!r}")


def _request(
    topic: str, which: LetterFilter, verb: LetterVerb, at: LetterPlace, limit: int
) -> DeadLetters:
    return DeadLetters(
        topic, at.partition, verb, at.offset, limit, which.group, which.reason, which.key,
        which.since_ms, which.until_ms,
    )  # fmt: skip


def _after(at: LetterPlace, reply: DeadLettersReply, numbers: list[int]) -> LetterPlace | None:
    """Where to go on: in the next partition when nothing is left to look at in this one."""
    if reply.next_offset > at.offset:
        return LetterPlace(at.partition, reply.next_offset)
    if at.partition + 1 not in numbers:
        return None
    return LetterPlace(at.partition + 1)
