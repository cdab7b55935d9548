"""A node's clock goes on steadily, whatever is done to the machine's."""

import pytest

from raftq.node.steady_clock import SLEW, SteadyClock, elapsed_s

START_MS = 1_700_000_000_000
HOUR_MS = 3_600_000


class Machine:
    def __init__(self) -> None:
        self.elapsed = 5.0
        self.jump_ms = 0

    def wall_ms(self) -> int:
        return START_MS + int((self.elapsed - 5.0) * 1000) + self.jump_ms

    def elapsed_s(self) -> float:
        return self.elapsed


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def clock(machine: Machine) -> SteadyClock:
    return SteadyClock(machine.wall_ms, machine.elapsed_s)


def test_it_tells_the_wall_clock_while_nothing_jumps(machine: Machine, clock: SteadyClock) -> None:
    for _ in range(1000):
        machine.elapsed += 0.0137
        assert abs(clock() - machine.wall_ms()) <= 1


@pytest.mark.parametrize("jump_ms", [HOUR_MS, -HOUR_MS])
def test_a_jump_is_followed_by_a_hundredth_of_the_time_that_passes(
    machine: Machine, clock: SteadyClock, jump_ms: int
) -> None:
    machine.jump_ms = jump_ms
    before = clock()
    for _ in range(100):
        machine.elapsed += 0.1
        told = clock()
        assert told >= before
        before = told
    assert abs(told - (START_MS + 10_000)) <= 10_000 * SLEW + 1
    machine.jump_ms = 0
    machine.elapsed += 20.0
    assert abs(clock() - machine.wall_ms()) <= 1


def test_a_small_difference_is_made_up_and_not_exceeded(
    machine: Machine, clock: SteadyClock
) -> None:
    machine.jump_ms = 50
    machine.elapsed += 4.0
    assert clock() == pytest.approx(machine.wall_ms() - 10, abs=1)
    machine.elapsed += 60.0
    assert clock() == pytest.approx(machine.wall_ms(), abs=1)


def test_a_jump_is_told_once_in_a_while(
    machine: Machine, clock: SteadyClock, caplog: pytest.LogCaptureFixture
) -> None:
    machine.jump_ms = HOUR_MS
    for _ in range(10):
        machine.elapsed += 1.0
        clock()
    assert [one.message for one in caplog.records if "clock_jumped" in one.message] == [
        caplog.records[0].message
    ]


def test_elapsed_time_does_not_go_back() -> None:
    first = elapsed_s()
    assert elapsed_s() >= first
