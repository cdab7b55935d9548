"""Leases and retries through changes of leaders whose clocks do not agree."""

from random import Random

import pytest
from fake_queue import Cluster, pause, run, values

SKEWS_MS = (-60_000, 60_000)


async def first_lease_after(cluster: Cluster, seconds_max: float = 200.0) -> float:
    """When there is something to lease again, looked at ten times a second."""
    began = cluster.loop.time()
    while not await cluster.lease(holder="second"):
        await pause(0.1)
        assert cluster.loop.time() < began + seconds_max, "nothing to lease"
    return cluster.loop.time()


@pytest.mark.parametrize("skew_ms", SKEWS_MS)
def test_lease_ends_neither_early_nor_much_later_by_another_clock(skew_ms: int) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a")
        await pause(0.1)
        began = cluster.loop.time()
        assert values(await cluster.lease(lease_ms=30_000)) == [b"a"]
        await pause(12)
        cluster.fail_over(skew_ms=skew_ms)
        again = await first_lease_after(cluster)
        assert began + 30 <= again <= began + 36

    run(main())


@pytest.mark.parametrize("verb", ["nack", "postpone"])
@pytest.mark.parametrize("skew_ms", SKEWS_MS)
def test_retry_is_neither_early_nor_much_later_by_another_clock(skew_ms: int, verb: str) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a")
        await pause(0.1)
        held = await cluster.lease()
        began = cluster.loop.time()
        await cluster.settle(verb, held, delay_ms=20_000)
        await pause(7)
        cluster.fail_over(skew_ms=skew_ms)
        again = await first_lease_after(cluster)
        assert began + 20 <= again <= began + 27

    run(main())


@pytest.mark.parametrize("skew_ms", SKEWS_MS)
def test_extended_part_of_a_lease_and_a_snapshot_keep_their_times(skew_ms: int) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a", b"b")
        await pause(0.1)
        held = await cluster.lease(lease_ms=10_000)
        began = cluster.loop.time()
        await cluster.settle("extend", held[1], delay_ms=50_000)
        cluster.queue().engine.ledger.begin_snapshot()
        await pause(0.5)
        for step in range(3):
            cluster.fail_over(skew_ms=skew_ms * step)
            await pause(0.5)
        first = await cluster.lease(holder="second", wait_ms=30_000)
        assert (values(first), cluster.loop.time() >= began + 10) == ([b"a"], True)
        await cluster.settle("ack", first)
        second = await cluster.lease(holder="second", wait_ms=60_000)
        assert (values(second), cluster.loop.time() >= began + 50) == ([b"b"], True)
        assert cluster.loop.time() <= began + 60

    run(main())


@pytest.mark.parametrize("seed", range(20))
def test_many_changes_of_leaders_lengthen_a_lease_within_bounds(seed: int) -> None:
    """At least half of the time counts in which somebody led."""

    async def main() -> None:
        rng = Random(seed)
        cluster = Cluster(seed=seed)
        cluster.serve()
        cluster.publish(b"a")
        await pause(0.1)
        lease_s = rng.choice((5, 30, 300))
        began = cluster.loop.time()
        assert await cluster.lease(lease_ms=lease_s * 1000)
        led_s = 0.0
        while led_s <= 2 * lease_s + 5:
            reign_s = rng.uniform(2, lease_s / 2)
            await pause(reign_s)
            led_s += reign_s
            if await cluster.lease(holder="second"):
                assert cluster.loop.time() >= began + lease_s
                return
            settle_s = rng.choice((0.01, 1.0))
            cluster.fail_over(settle_s=settle_s, skew_ms=rng.randint(-3_600_000, 3_600_000) + 10**7)
            await pause(settle_s)
        raise AssertionError(f"held for {cluster.loop.time() - began} s, led for {led_s} s")

    run(main())


def test_ledger_is_told_the_time_seldom_when_nothing_is_due_soon() -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.serve()
        cluster.publish(b"a")
        await pause(0.1)
        await cluster.settle("nack", await cluster.lease(), delay_ms=24 * 3_600_000)
        log = cluster.partitions[0].logs["ledger"].log
        before = log.end_offset
        await pause(20 * 3600)
        assert 100 < log.end_offset - before < 200
        cluster.fail_over(skew_ms=0)
        await pause(4 * 3600 - 10)
        assert await cluster.lease() == []
        await pause(700)
        assert values(await cluster.lease()) == [b"a"]
        await cluster.settle("ack", await cluster.lease(group="other"), group="other")
        held = cluster.queue().engine.deliveries.groups["g"].core.leases
        assert len(held) == 1

    run(main())
