"""How long a cluster is without a leader when its leader dies, and what a mere hiccup does."""

from raftsim import Sim


def leading(seed: int) -> tuple[Sim, str]:
    sim = Sim(seed)
    sim.run(3.0, work=20)
    leader = sim.leader()
    assert leader is not None
    return sim, leader


def test_a_dead_leader_is_replaced_long_before_the_election_timeout() -> None:
    found = []
    for seed in range(40):
        sim, leader = leading(seed)
        sim.crash(leader, power=False)
        died = sim.now
        while sim.leader() is None:
            assert sim.now < died + 5.0, f"seed {seed}: nobody leads"
            sim.run(0.02)
        found.append(sim.now - died)
    found.sort()
    assert found[len(found) // 2] < 0.25
    assert found[-1] < 1.5


def test_a_connection_that_only_broke_costs_neither_the_leader_nor_a_term() -> None:
    for seed in range(20):
        sim, leader = leading(seed)
        term = sim.nodes[leader].term_now
        follower = sorted(sim.up - {leader})[seed % 2]
        for _ in range(5):
            sim.disconnect(leader, follower)
            sim.run(0.15, work=20)
            sim.reconnect(leader, follower)
            sim.run(0.5, work=20)
        assert (sim.leader(), sim.nodes[leader].term_now) == (leader, term), f"seed {seed}"
        sim.verdict()
