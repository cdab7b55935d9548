"""The verdict of the demo's third story follows from what the workers said they did."""

from collections.abc import Callable

import pytest

from raftq.node.queue.core.lanes import WEIGHTS
from raftq_demo.group_checks import GroupStory, Handling, Letter, judge_group

LANE = 2_000
ORDINARY, POISON, DELAYED = 5 * LANE, 5 * LANE, 5 * LANE + 1
KILLED, JOINED = 1, 4


def story() -> GroupStory:
    """Two thousand records in each lane of one partition, given out as the weights say; worker 1 is
    killed while it has record 7, which worker 4 gets then."""
    told = GroupStory(
        ORDINARY, POISON, DELAYED, due=50.0, killed=KILLED, joined=JOINED, members=[3, 3],
        letters=[Letter(POISON, "max_deliveries", 3)], redriven=1, redriven_at=60.0,
        exits=[0, 0, 0],
    )  # fmt: skip
    for at, (number, lane) in enumerate(in_order()):
        began = at / 10_000
        told.handled.append(Handling(number, 1, lane, 0, 1 + at % 3, began, began + 0.001))
    lost = next(one for one in told.handled if one.worker == KILLED)
    lost.ended = None
    told.handled.append(Handling(lost.number, 2, lost.lane, 0, JOINED, 10.0, 10.1))
    for attempt in (1, 2, 3):
        told.handled.append(Handling(POISON, attempt, 0, 0, 2, attempt / 10))
    told.handled.append(Handling(POISON, 1, 0, 0, 3, 61.0, 61.1))
    told.handled.append(Handling(DELAYED, 1, 0, 0, 2, 50.01, 50.02))
    return told


def in_order() -> list[tuple[int, int]]:
    """(number, lane) as five lanes with a weight each give them out."""
    left = [list(range(lane * LANE, lane * LANE + LANE)) for lane in range(5)]
    found = []
    while any(left):
        for lane, weight in enumerate(WEIGHTS):
            taken, left[lane] = left[lane][:weight], left[lane][weight:]
            found += [(number, lane) for number in taken]
    return found


def failed(told: GroupStory) -> list[str]:
    return [check.claim.removeprefix("group: ") for check in judge_group(told) if not check.ok]


def test_a_story_in_which_all_is_handled_passes() -> None:
    assert failed(story()) == []
    assert sum(story().workers().values()) == ORDINARY + 2


def never_handled(told: GroupStory) -> None:
    told.handled = [one for one in told.handled if one.number != 500]


def handled_again(told: GroupStory) -> None:
    one = next(one for one in told.handled if one.worker == 2)
    told.handled.append(Handling(one.number, 2, 0, 0, 3, 20.0, 20.1))


def nobody_takes_over(told: GroupStory) -> None:
    one = next(one for one in told.handled if one.attempt == 2 and one.number < ORDINARY)
    one.attempt = 1


def the_newcomer_is_idle(told: GroupStory) -> None:
    for one in told.handled:
        if one.worker == JOINED:
            one.worker = 2


def a_member_too_many(told: GroupStory) -> None:
    told.members = [3, 4]


def an_attempt_is_lost(told: GroupStory) -> None:
    told.handled = [one for one in told.handled if (one.number, one.attempt) != (POISON, 2)]


def two_letters(told: GroupStory) -> None:
    told.letters = told.letters * 2


def redriven_in_vain(told: GroupStory) -> None:
    told.handled = [one for one in told.handled if one.number != POISON or one.began < 60]


def a_letter_stays(told: GroupStory) -> None:
    told.letters_left = 1


def early(told: GroupStory) -> None:
    told.due = 50.02


def delayed_twice(told: GroupStory) -> None:
    told.handled.append(Handling(DELAYED, 2, 0, 0, 3, 50.5, 50.6))


def lanes_alike(told: GroupStory) -> None:
    for one in told.handled:
        if one.number < ORDINARY:
            one.lane = one.number % 5


def a_worker_breaks(told: GroupStory) -> None:
    told.exits = [0, 1, 0]


@pytest.mark.parametrize(
    ("spoil", "claims"),
    [
        (never_handled, ["records that were never handled"]),
        (handled_again, ["acknowledged records that were handled again"]),
        (nobody_takes_over, ["records taken over from the killed worker"]),
        (the_newcomer_is_idle, ["records handled by the worker that joined"]),
        (a_member_too_many, ["members before the kill and at the end"]),
        (an_attempt_is_lost, ["attempts at the poisoned record"]),
        (two_letters, ["dead letters"]),
        (redriven_in_vain, ["redriven, then handled to the end"]),
        (a_letter_stays, ["dead letters after the redrive"]),
        (early, ["the delayed record came when due"]),
        (delayed_twice, ["the delayed record came when due"]),
        (lanes_alike, ["shares of the lanes while all are busy"]),
        (a_worker_breaks, ["exit codes of the workers that were stopped"]),
    ],
)
def test_whatever_goes_wrong_is_found(
    spoil: Callable[[GroupStory], None], claims: list[str]
) -> None:
    told = story()
    spoil(told)
    found = failed(told)
    assert [claim for claim in found if claim in claims] == claims
    assert len(found) <= 2


def test_what_the_killed_worker_had_finished_may_be_handled_again() -> None:
    """It died after its handler returned and before it could acknowledge."""
    told = story()
    one = [one for one in told.handled if one.worker == KILLED][5]
    told.handled.append(Handling(one.number, 2, one.lane, 0, 2, 12.0, 12.1))
    assert failed(told) == []
