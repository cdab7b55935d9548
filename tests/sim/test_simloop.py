"""Virtual time, and processes that stop and die."""

import asyncio

import pytest
from simloop import START_S, SimStuck
from simworld import World

# Time.


def test_time_passes_without_waiting() -> None:
    world = World()

    async def main() -> float:
        await asyncio.sleep(86_400)
        return world.loop.time()

    assert world.run(main(), 100_000) == pytest.approx(START_S + 86_400)


def test_a_program_that_waits_for_ever_is_stuck() -> None:
    with pytest.raises(SimStuck, match="no timer is set"):
        World().run(asyncio.Event().wait())


def test_a_simulation_ends_at_its_bounds() -> None:
    async def main() -> None:
        while True:
            await asyncio.sleep(1)
            await asyncio.sleep(0)

    with pytest.raises(SimStuck, match="virtual time"):
        World().run(main())
    world = World()
    with pytest.raises(SimStuck, match="turns"):
        world.loop.run(main(), turns_max=100)
    world.loop.end()


def test_an_executor_runs_at_once() -> None:
    world = World()

    async def main() -> int:
        with pytest.raises(ZeroDivisionError):
            await world.loop.run_in_executor(None, lambda: 1 // 0)
        return await asyncio.to_thread(sum, (1, 2))

    assert world.run(main()) == 3


# Processes.


class Counter:
    """Counts every 10 ms through a task, a timer and a callback chain."""

    def __init__(self) -> None:
        self.of_task = self.of_timer = self.closed = 0

    async def run(self) -> None:
        self.tick()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self.child())
        finally:
            self.closed += 1
            asyncio.get_running_loop().call_soon(self.tick)

    async def child(self) -> None:
        while True:
            await asyncio.sleep(0.01)
            self.of_task += 1

    def tick(self) -> None:
        self.of_timer += 1
        asyncio.get_running_loop().call_later(0.01, self.tick)

    def values(self) -> tuple[int, int]:
        return self.of_task, self.of_timer


def test_nothing_of_a_killed_process_runs_again() -> None:
    world = World()
    counter = Counter()

    async def main() -> None:
        process = world.process("a")
        process.spawn(counter.run())
        await asyncio.sleep(0.1)
        world.kill(process)
        before = counter.values()
        assert counter.closed == 1
        assert min(before) >= 8
        await asyncio.sleep(1)
        assert counter.values() == before

    world.run(main())


def test_a_task_that_never_began_dies_without_a_word() -> None:
    world = World()

    async def main() -> None:
        process = world.process("a")
        process.spawn(asyncio.sleep(1))
        world.kill(process)
        await asyncio.sleep(2)

    world.run(main())
    assert world.loop.unhandled == []


def test_other_processes_do_not_feel_a_kill() -> None:
    world = World()
    first, second = Counter(), Counter()

    async def main() -> None:
        process, other = world.process("a"), world.process("b")
        process.spawn(first.run())
        other.spawn(second.run())
        await asyncio.sleep(0.1)
        world.kill(process)
        await asyncio.sleep(0.1)
        assert min(second.values()) >= 18

    world.run(main())


def test_a_paused_process_goes_on_where_it_was() -> None:
    """
    1. Pause: nothing runs for a second.
    2. Resume: the timers that ran out ring once, and everything goes on at its pace.
    """
    world = World()
    counter = Counter()

    async def main() -> None:
        process = world.process("a")
        process.spawn(counter.run())
        await asyncio.sleep(0.105)
        process.pause()
        before = counter.values()
        await asyncio.sleep(1)
        assert counter.values() == before
        process.resume()
        await asyncio.sleep(0.1)
        task, timer = counter.values()
        assert 9 <= task - before[0] <= 12
        assert 9 <= timer - before[1] <= 12

    world.run(main())


def test_a_timer_cancelled_while_paused_does_not_ring() -> None:
    world = World()
    rung: list[str] = []

    async def program() -> None:
        loop = asyncio.get_running_loop()
        late = loop.call_later(0.2, rung.append, "cancelled")

        def cancel() -> None:
            rung.append("first")
            late.cancel()

        loop.call_later(0.1, cancel)
        await asyncio.Event().wait()

    async def main() -> None:
        process = world.process("a")
        process.spawn(program())
        await asyncio.sleep(0.05)
        process.pause()
        await asyncio.sleep(1)
        process.resume()
        await asyncio.sleep(1)

    world.run(main())
    assert rung == ["first"]


def test_killed_while_paused_stays_dead() -> None:
    world = World()
    counter = Counter()

    async def main() -> None:
        process = world.process("a")
        process.spawn(counter.run())
        await asyncio.sleep(0.1)
        process.pause()
        await asyncio.sleep(0.1)
        before = counter.values()
        world.kill(process)
        process.resume()
        await asyncio.sleep(1)
        assert counter.values() == before

    world.run(main())


def test_an_error_in_a_callback_is_kept_as_a_failure_of_its_process() -> None:
    world = World()

    async def main() -> None:
        process = world.process("a")
        process.call(world.loop.call_soon, lambda: 1 // 0)
        await asyncio.sleep(1)
        assert [type(one) for one in process.failures] == [ZeroDivisionError]
        process.failures.clear()

    world.run(main())
