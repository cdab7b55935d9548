"""A voter that comes back with an empty disk while its leader goes on in the same term."""

from raftsim import Bench, Sim
from simdisk import SimDisk


def test_a_follower_that_lost_its_log_is_met_at_its_new_end() -> None:
    bench = Bench()
    term = bench.lead()
    bench.propose(1)
    bench.step()
    bench.ack("b", term, 3)
    bench.step()
    bench.node._SyncObj__onNodeDisconnected(bench.node.peers["b"])
    bench.ack("b", term, 2, success=False)
    replication = bench.node._replication
    assert replication is not None
    assert replication.followers["b"].next == 2, "what it once had does not count any more"
    assert bench.node.commit == 3, "what was committed stays committed"


def test_a_wiped_voter_is_brought_back_from_the_log_when_nothing_was_compacted() -> None:
    sim = Sim(3)
    sim.run(2.0, work=5)
    leader = sim.leader()
    assert leader is not None
    victim = next(one for one in sim.ids if one != leader)
    sim.crash(victim)
    sim.disks[victim] = SimDisk(3)
    sim.terms[victim] = 0
    sim.run(0.2)
    sim.start(victim)
    sim.run(2.0, work=5)
    assert sim.nodes[victim].journal.may_vote
    sim.verdict()
