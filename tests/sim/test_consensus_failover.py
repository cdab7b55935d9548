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


def test_a_leader_that_abdicates_is_replaced_and_does_not_come_back_at_once() -> None:
    for seed in range(20):
        sim, leader = leading(seed)
        sim.nodes[leader].abdication_asked = True
        asked = sim.now
        while sim.leader() in (None, leader):
            assert sim.now < asked + 2.0, f"seed {seed}: nobody else leads"
            sim.run(0.02)
        sim.run(3.0, work=20)
        assert sim.leader() != leader, f"seed {seed}"
        sim.verdict()


def test_a_leader_that_abdicates_leads_again_when_nobody_else_can() -> None:
    """The other two do not see each other, and one has not got what the other has."""
    sim, leader = leading(3)
    near, far = sorted(sim.up - {leader})
    sim.crash(far, power=False)
    sim.run(2.0, work=20)
    assert sim.leader() == leader
    sim.crash(near, power=False)
    sim.start(far)
    sim.nodes[leader].abdication_asked = True
    began = sim.now
    sim.run(0.1)
    while sim.leader() is None:
        assert sim.now < began + 8.0, "nobody leads"
        sim.run(0.02)
    assert sim.leader() == leader
    assert sim.now - began > 4.0
    sim.verdict()


def test_one_that_does_not_lead_cannot_abdicate() -> None:
    sim, leader = leading(5)
    term = sim.nodes[leader].term_now
    for other in sorted(sim.up - {leader}):
        sim.nodes[other].abdication_asked = True
    sim.run(3.0, work=20)
    assert (sim.leader(), sim.nodes[leader].term_now) == (leader, term)
