"""Each known defect of pysyncobj 0.3.17 as one schedule by hand, and the adapter's answer to it."""

import msgpack
import pytest
from raftsim import DIRECTORY, SMALL, Bench, Machine, command
from simdisk import SimCrash, SimDisk

from raftq.client.common.errors import (
    ConsensusBroken,
    CorruptFile,
    DiskFull,
    NoLeader,
    OutcomeUnknown,
    QueueFull,
    RemoteProtocolError,
    UnknownFormat,
)
from raftq.cluster.raft import messages as raft_messages
from raftq.cluster.raft import snapshot
from raftq.cluster.raft.applied import NO_OP_ENTRY, id_of
from raftq.cluster.raft.config import RaftLimits, RaftTimes
from raftq.cluster.raft.journal import RaftJournal
from raftq.cluster.raft.library import FOLLOWER, LEADER, Library, Node
from raftq.cluster.raft.messages import AppendReply, RaftMessage, RequestVoteReply
from raftq.cluster.raft.replication import LeaderView, Replication


def entries(term: int, *numbers: int) -> list[list[object]]:
    return [[term, command(number)[1]] for number in numbers]


def kinds(sent: list[tuple[str, RaftMessage]]) -> list[object]:
    return [message.__struct_config__.tag for _, message in sent]


def test_raft_row_01_a_repeated_append_cuts_nothing_that_was_acknowledged() -> None:
    bench = Bench()
    bench.append("b", 1, (1, 0), entries(1, 1, 2, 3))
    assert bench.step()[-1][1].index == 4
    bench.append("b", 1, (1, 0), entries(1, 1))  # an old copy of the beginning
    assert bench.step()[-1][1] == AppendReply(1, True, 2)
    assert bench.node.journal.last_index == 4
    assert bench.restart().node.journal.last_index == 4


def test_raft_row_01_a_real_conflict_is_cut_but_never_at_or_below_the_commit_index() -> None:
    bench = Bench()
    bench.append("b", 1, (1, 0), entries(1, 1, 2, 3), commit=2)
    bench.step()
    bench.append("c", 2, (2, 1), entries(2, 9))
    bench.step()
    assert [term for _, _, term in bench.node.journal.entries] == [0, 1, 2]
    with pytest.raises(ConsensusBroken, match="up to 2 is committed"):
        bench.append("b", 3, (1, 0), entries(3, 8))


def test_raft_row_02_an_acknowledgement_of_an_earlier_term_counts_for_nothing() -> None:
    bench = Bench()
    old = bench.lead()
    bench.propose(1)
    bench.step()
    bench.give("c", "append_entries", term=old + 1, prev_index=1, prev_term=0, commit_index=1,
               entries=[])  # fmt: skip
    bench.step()
    bench.pass_time(1.5)
    new = bench.lead()
    assert new > old
    last = bench.node.journal.last_index
    bench.ack("b", old, last)
    bench.ack("c", old, last)
    bench.step()
    assert bench.node.commit == 1
    bench.ack("b", new, last)
    bench.step()
    assert bench.node.commit == last


def test_raft_row_02_a_match_index_never_goes_back() -> None:
    bench = Bench()
    term = bench.lead()
    bench.propose(1)
    bench.step()
    bench.ack("b", term, 3)
    bench.ack("b", term, 2)
    bench.ack("b", term, 1, success=False)
    replication = bench.node._replication
    assert replication is not None
    assert (replication.followers["b"].match, replication.followers["b"].next) == (3, 4)


def compacted(bench: Bench, count: int = 60) -> int:
    term = bench.lead()
    for number in range(1, count + 1):
        bench.propose(number)
        bench.step()
        bench.ack("b", term, bench.node.journal.last_index)
        bench.step()
    return term


def test_raft_row_03_the_log_after_a_snapshot_survives_a_kill_before_the_journal_is_cut() -> None:
    """Every operation of the round that compacts is the last one once."""
    reached = 0
    for crash_after in range(1, 40):
        bench = Bench(disk=SimDisk(crash_after))
        term = compacted(bench, 38)
        for number in (101, 102, 103):
            bench.propose(number)
        bench.step()
        last = bench.node.journal.last_index
        assert bench.node.journal.base_index == 1
        bench.disk.crash_at = bench.disk.operations + crash_after
        bench.ack("b", term, last)
        try:
            bench.step()
        except SimCrash:
            reached += 1
        again = bench.restart(bench.disk.kill())
        assert again.node.journal.last_index == last
        again.append("c", term + 1, (last, term), [], commit=last)
        again.step()
        assert [int(one) for one in again.machine.commands] == [*range(1, 39), 101, 102, 103]
    assert reached > 8


def test_raft_row_04_an_exception_in_a_callback_does_not_apply_a_command_again() -> None:
    bench = Bench()
    term = bench.lead()
    calls = []

    def explode(result: object, error: object) -> None:
        calls.append(result)
        raise RuntimeError("the caller's fault")

    bench.propose(1)
    bench.propose(2)
    bench.node.inbox[0].answer = explode
    bench.step()
    bench.ack("b", term, 4)
    bench.step()
    bench.step()
    assert calls == [1]
    assert bench.machine.commands == [b"1", b"2"]
    assert bench.answers[2] == (2, None)


class Refuser(Machine):
    def apply(self, command: bytes, index: int) -> object:
        if command == b"1":
            raise QueueFull("not this one")
        if command == b"13":
            raise ZeroDivisionError
        return super().apply(command, index)


def test_raft_row_05_a_refused_command_is_answered_and_the_next_one_applied() -> None:
    bench = Bench(machine=Refuser())
    term = bench.lead()
    bench.propose(1)
    bench.propose(2)
    bench.step()
    bench.ack("b", term, 4)
    bench.step()
    assert isinstance(bench.answers[1][1], QueueFull)
    assert bench.answers[2] == (1, None)


def test_raft_row_05_an_unexpected_exception_stops_the_node_and_names_the_command() -> None:
    bench = Bench(machine=Refuser())
    term = bench.lead()
    bench.propose(13)
    bench.step()
    bench.ack("b", term, 3)
    with pytest.raises(ConsensusBroken, match=r"entry 3 failed with ZeroDivisionError.*b'13'"):
        bench.step()
    assert bench.node.applied == 2


@pytest.mark.parametrize("bit", [3, 70, 200, 300, 900])
def test_raft_row_06_a_damaged_snapshot_refuses_to_start(bit: int) -> None:
    bench = Bench()
    compacted(bench)
    bench.disk.flip_bit(f"{DIRECTORY}/snapshot", bit)
    with pytest.raises((CorruptFile, UnknownFormat)):
        bench.restart()


def test_raft_row_07_a_journal_without_its_snapshot_refuses_to_start() -> None:
    bench = Bench()
    compacted(bench)
    assert bench.node.journal.base_index > 1
    bench.disk.remove(f"{DIRECTORY}/snapshot")
    with pytest.raises(CorruptFile, match="without a snapshot"):
        bench.restart()


def test_raft_row_07_a_snapshot_without_its_journal_refuses_to_start() -> None:
    bench = Bench()
    compacted(bench)
    bench.disk.remove(f"{DIRECTORY}/journal")
    with pytest.raises(CorruptFile, match="files are missing"):
        bench.restart()


def test_raft_row_08_nothing_is_acknowledged_before_it_is_synced() -> None:
    bench = Bench()
    bench.append("b", 1, (1, 0), entries(1, 1, 2))
    assert bench.sent == []  # the handler itself promises nothing
    syncs = sum(" sync " in line for line in bench.disk.trace)
    bench.append("b", 1, (3, 1), entries(1, 3))
    sent = bench.step()
    assert [message.index for _, message in sent] == [3, 4]
    assert sum(" sync " in line for line in bench.disk.trace) == syncs + 1  # one for both
    assert bench.restart(bench.disk.crash(bench.disk.rng)).node.journal.last_index == 4


def test_raft_row_08_a_leader_counts_itself_only_when_its_own_copy_is_durable() -> None:
    journal = RaftJournal.open(SimDisk(), DIRECTORY)
    replication = Replication(journal, SMALL, 0.1, lambda node, message: None, lambda: None)
    replication.begin(["b", "c"], 0.0)
    journal.append(NO_OP_ENTRY, 2, 1)
    replication.followers["b"].match = 2
    assert replication.majority_match() == 1
    journal.flush()
    assert replication.majority_match() == 2


def test_raft_row_09_a_follower_with_hundreds_of_other_entries_is_met_in_one_step() -> None:
    follower = Bench("b", ("a", "c"))
    follower.append("c", 2, (1, 0), entries(2, *range(1, 501)))
    follower.step()
    follower.append("a", 3, (500, 1), [])
    reply = follower.step()[-1][1]
    assert (reply.success, reply.index) == (False, 2)
    leader = Bench(limits=RaftLimits())
    leader.append("c", 1, (1, 0), entries(1, *range(1, 501)))
    leader.step()
    leader.pass_time(1.5)
    term = leader.lead()
    leader.ack("b", term, 2, success=False)
    sent = [message for target, message in leader.step() if target == "b"]
    assert [one.prev_index for one in sent] == [1]


def test_raft_row_10_the_set_of_voters_is_fixed() -> None:
    bench = Bench()
    for name in ("addNodeToCluster", "removeNodeFromCluster"):
        with pytest.raises(AssertionError, match="not used"):
            getattr(bench.node, name)("d")
    bench.give("d", "append_entries", term=9, prev_index=1, prev_term=0, commit_index=1,
               entries=[])  # fmt: skip
    assert bench.node.term_now == 0
    assert sorted(node.id for node in bench.node.otherNodes) == ["b", "c"]


def test_raft_row_11_rejections_of_pipelined_messages_only_lower_the_next_index() -> None:
    bench = Bench(limits=RaftLimits(batch_bytes=100))
    term = bench.lead()
    bench.ack("b", term, 1)
    for number in range(1, 31):
        bench.propose(number)
    sent = [message for target, message in bench.step() if target == "b"]
    assert len(sent) > 5, "several messages are under way"
    replication = bench.node._replication
    assert replication is not None
    seen = []
    for hint in (20, 8, 25, 8, 31, 5):
        bench.ack("b", term, hint, success=False)
        seen.append(replication.followers["b"].next)
    assert seen == [20, 8, 8, 8, 8, 5]
    again = [message for target, message in bench.step() if target == "b"]
    assert [one.prev_index for one in again] == [4], "one probe, not one per rejection"
    bench.ack("b", term, 32)
    assert replication.followers["b"].next == 33


def test_raft_row_12_an_isolated_leader_steps_down_after_about_the_election_timeout() -> None:
    bench = Bench()
    bench.lead()
    times = RaftTimes()
    bench.pass_time(times.fallback_ms / 1000 - 0.1)
    assert bench.node.state == LEADER
    bench.pass_time(0.2)
    assert bench.node.state == FOLLOWER
    assert bench.node.leader is None


def test_raft_row_13_a_node_that_rejoins_does_not_unseat_a_leader() -> None:
    alone = Bench("c", ("a", "b"))
    asked = kinds(alone.pass_time(30.0))
    assert "pre_vote" in asked
    assert "request_vote" not in asked
    assert alone.node.term_now == 0, "the term does not grow while nobody answers"
    follower = Bench("b", ("a", "c"))
    follower.append("a", 1, (1, 0), [])
    follower.step()
    follower.give("c", "pre_vote", term=2, last_index=9, last_term=1, ready=True)
    follower.give("c", "request_vote", term=9, last_index=9, last_term=1, ready=True)
    replies = [message for target, message in follower.step() if target == "c"]
    assert [getattr(one, "granted", None) for one in replies] == [False]
    assert follower.node.term_now == 1
    follower.now += 0.7
    follower.give("c", "pre_vote", term=2, last_index=9, last_term=1, ready=True)
    assert ("c", True) in [
        (target, getattr(one, "granted", None)) for target, one in follower.step()
    ]


def test_raft_row_14_a_vote_is_on_disk_before_it_is_told_and_given_again_when_asked_again() -> None:
    bench = Bench()
    ask = {"term": 5, "last_index": 1, "last_term": 0, "ready": True}
    bench.give("b", "request_vote", **ask)
    assert bench.sent == []
    reply = ("b", RequestVoteReply(5, True))
    assert bench.step() == [reply]
    after = bench.restart(bench.disk.crash(bench.disk.rng))
    assert (after.node.term_now, after.node.voted_for) == (5, "b")
    after.give("c", "request_vote", **ask)
    after.give("b", "request_vote", **ask)
    sent = after.step()
    assert sent == [("c", RequestVoteReply(5, False)), reply]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x80\x04\x95cos\nsystem\n(S'true'\ntR.",
        b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.",
        msgpack.packb({"type": "append_entries"}),
        msgpack.packb({"type": "nonsense", "term": 1}),
        msgpack.packb({"type": "response_vote", "term": -1, "granted": True}),
        msgpack.packb({"type": "response_vote", "term": 1, "granted": 1}),
        msgpack.packb({"type": "response_vote", "term": True, "granted": True}),
        msgpack.packb({"type": "refuse_command", "ids": [1]}),
        msgpack.packb({"type": "apply_command", "commands": [b"x"] * 10_001}),
        msgpack.packb({"type": "append_entries", "term": 1, "prev_index": 1, "prev_term": 0,
                       "commit_index": 1, "entries": [[7, b""]]}),
        msgpack.packb([1, 2]),
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 5000,
    ],
    ids=repr,
)  # fmt: skip
def test_raft_row_15_only_checked_messages_are_decoded(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        raft_messages.decode(data)


def test_raft_row_16_a_retried_command_applies_once_and_answers_with_the_first_result() -> None:
    bench = Bench()
    term = bench.lead()
    bench.propose(1)
    bench.step()
    bench.ack("b", term, 3)
    bench.step()
    bench.give("b", "apply_command", commands=[command(1)[1], command(2)[1], command(1)[1]])
    bench.step()
    bench.ack("b", term, 6)
    bench.step()
    assert bench.machine.commands == [b"1", b"2"]
    assert [(one.result, one.repeated) for one in bench.changes] == [
        (1, False), (1, True), (2, False), (1, True)
    ]  # fmt: skip
    assert bench.answers == {1: (1, None)}


def test_raft_row_16_the_table_of_ids_is_in_the_snapshot_and_an_older_command_is_refused() -> None:
    limits = RaftLimits(compact_entries=20, keep_entries=2, recent_ids=10)
    bench = Bench(limits=limits)
    compacted(bench, 30)
    again = bench.restart(limits=limits)
    last, term = again.node.journal.last_index, again.node.journal.last_term
    retried = [[term + 1, command(number)[1]] for number in (25, 3)]
    again.append("b", term + 1, (last, term), retried, commit=last + 2)
    again.step()
    assert again.machine.commands == [b"%d" % number for number in range(1, 31)]
    first, second = again.changes[-2:]
    assert (first.result, first.error) == (25, None)
    assert isinstance(second.error, OutcomeUnknown)


def test_raft_row_17_every_proposal_is_answered_applied_refused_or_unknown() -> None:
    """1: no leader. 2: in the log of a leader that falls. 3: handed to a leader, which refuses."""
    bench = Bench()
    bench.propose(1, timeout=0.2)
    bench.pass_time(0.4)
    assert isinstance(bench.answers[1][1], NoLeader)
    assert bench.answers[1][1].outcome == "failed"
    term = bench.lead()
    bench.propose(2, timeout=1.0)
    bench.step()
    bench.append("b", term + 1, (1, 0), [[term + 1, NO_OP_ENTRY]])
    handed_on = [
        id_of(one) for _, message in bench.step() for one in getattr(message, "commands", ())
    ]
    assert handed_on == [command(2)[0]]
    bench.propose(3, timeout=1.0)
    bench.step()
    bench.give("b", "refuse_command", ids=[command(3)[0]])
    bench.node._become_follower(None)
    bench.pass_time(1.2)
    assert isinstance(bench.answers[2][1], OutcomeUnknown)
    assert bench.answers[2][1].outcome == "unknown"
    assert isinstance(bench.answers[3][1], NoLeader)


def test_raft_row_17_a_proposal_that_a_snapshot_carries_is_answered_from_it() -> None:
    leader = Bench()
    compacted(leader)
    follower = Bench("b", ("a", "c"))
    follower.append("a", 1, (1, 0), [])
    follower.propose(7)
    follower.step()
    file = leader.node.setup.snapshots.load()
    assert file is not None
    for offset in range(0, len(file.raw), 500):
        follower.give("a", "install_snapshot", term=1, index=file.index, total=len(file.raw),
                      offset=offset, data=file.raw[offset : offset + 500])  # fmt: skip
    assert follower.step()[-1][1].index == file.index
    assert follower.answers[7] == (7, None)
    assert follower.restart().machine.commands == leader.machine.commands[: file.index - 2]


def test_raft_row_18_a_proposal_leaves_at_once_and_after_a_pause_input_comes_first() -> None:
    bench = Bench()
    term = bench.lead()
    bench.ack("b", term, 2)
    bench.step()
    bench.propose(1)
    sent = [message for target, message in bench.step() if target == "b"]
    assert [len(one.entries) for one in sent] == [1]
    bench.ack("b", term, 3)
    assert [one.commit_index for target, one in bench.step() if target == "b"] == [3]
    assert bench.answers[1] == (1, None)
    paused = Bench("b", ("a", "c"))
    paused.append("a", 1, (1, 0), [])
    paused.step()
    assert "pre_vote" not in kinds(paused.step(60.0)), "it was the node itself that slept"


def test_raft_row_18_a_lost_connection_to_the_leader_is_a_hint_to_ask_around_soon() -> None:
    bench = Bench()
    bench.append("b", 1, (1, 0), [])
    bench.step()
    bench.node.transport._onNodeDisconnected(Node("b"))
    assert "pre_vote" in kinds(bench.pass_time(0.2))


def test_an_idle_node_sleeps_until_something_is_due() -> None:
    bench = Bench()
    bench.step()
    times = bench.node.setup.times
    assert bench.node.wait_s() == pytest.approx(0.1), "an election is further away"
    bench.now = bench.node.election_deadline - 0.03
    assert bench.node.wait_s() == pytest.approx(0.03)
    bench.now += 1.0
    assert bench.node.wait_s() == 0.0
    term = bench.lead()
    bench.ack("b", term, 2)
    bench.ack("c", term, 2)
    bench.step()
    bench.step(0.06)
    assert bench.node.wait_s() == pytest.approx(0.04)
    assert kinds(bench.step(bench.node.wait_s())) == ["append_entries"] * 2
    bench.propose(1)
    bench.step()
    assert bench.node.wait_s() == times.tick_ms / 1000, "its deadline is watched"
    bench.ack("b", term, 3)
    bench.step()
    bench.step(0.1)
    bench.node.transport.unsettled = True
    assert bench.node.wait_s() == times.tick_ms / 1000, "someone is to be connected to"


def test_the_library_does_not_run_its_own_protocol() -> None:
    overridden = [name for name in vars(Library) if getattr(Library, name) is Library._closed_off]
    assert "_SyncObj__sendAppendEntries" in overridden
    assert len(overridden) > 15


def test_a_voter_that_lost_its_disk_votes_for_nobody_until_a_leader_brought_it_up_to_date() -> None:
    wiped = Bench(ready=False)
    wiped.give("b", "request_vote", term=5, last_index=100, last_term=4, ready=True)
    assert [one.granted for _, one in wiped.step()] == [False]
    wiped.append("c", 6, (1, 0), entries(6, 1), commit=9)
    wiped.step()
    assert not wiped.node.journal.may_vote
    wiped.append("c", 6, (2, 6), entries(6, 2), commit=3)
    wiped.step()
    assert wiped.node.journal.may_vote
    assert wiped.restart().node.journal.may_vote


def test_a_view_names_the_term_and_commit_that_a_leader_speaks_of() -> None:
    journal = RaftJournal.open(SimDisk(), DIRECTORY)
    said = []
    replication = Replication(journal, SMALL, 0.1, lambda node, one: said.append(one), lambda: None)
    replication.begin(["b"], 0.0)
    replication.replicate("b", LeaderView(3, 1, 0.0), 0)
    assert (said[0].term, said[0].commit_index, said[0].entries) == (3, 1, [])


def test_a_snapshot_survives_its_own_encoding() -> None:
    made = snapshot.encode(7, 2, b"state")
    assert snapshot.decode(made.raw, "test") == made


def test_a_full_disk_stalls_a_node_with_clear_answers_and_it_goes_on_when_there_is_room() -> None:
    bench = Bench()
    term = bench.lead()
    bench.ack("b", term, 2)
    bench.step()
    bench.disk.capacity = bench.disk.used_bytes() + 20
    bench.propose(1, timeout=0.5)
    bench.step()
    assert bench.node.state == FOLLOWER
    bench.propose(2)
    bench.pass_time(0.6)
    assert isinstance(bench.answers[1][1], OutcomeUnknown), "its entry had left already"
    assert isinstance(bench.answers[2][1], DiskFull)
    bench.append("b", term + 1, (2, term), [])
    assert bench.step() == [], "it neither hears nor promises"
    bench.disk.capacity = None
    bench.pass_time(0.6)
    bench.append("b", term + 1, (2, term), entries(term + 1, 9), commit=3)
    assert bench.step()[-1][1].success
    assert bench.machine.commands == [b"9"]
    assert bench.restart().node.journal.last_index == 3
