"""VoterMetadata: three voters with their Raft threads on loopback, and the loop's copies."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import msgpack
import pytest
from msgspec.structs import replace

from raftq.client.common.errors import (
    ConsensusBroken,
    InvalidArgument,
    NoLeader,
    OutcomeUnknown,
    TopicExists,
)
from raftq.cluster.metadata import copy as metadata_copy
from raftq.cluster.metadata.apply import Change, NodeChanged, TopicChanged, TopicDeleted, dump, load
from raftq.cluster.metadata.commands import (
    AllocateProducerIds,
    CreateTopic,
    DeleteTopic,
    RegisterNode,
    encode_command,
)
from raftq.cluster.metadata.copy import MetadataCopy
from raftq.cluster.metadata.voter import MetadataMachine, VoterMetadata
from raftq.cluster.raft.config import ConsensusConfig, RaftLimits, RaftTimes

FAST = RaftTimes(
    election_ms_min=150, election_ms_max=300, append_ms=40, tick_ms=10, fallback_ms=450,
    reconnect_ms=50, connection_ms=1000, stuck_ms=2000,
)  # fmt: skip


def ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return found


def configs(tmp_path: Path, size: int = 3, **limits: int) -> list[ConsensusConfig]:
    voters = {str(one): f"127.0.0.1:{port}" for one, port in enumerate(ports(size), 1)}
    return [
        ConsensusConfig(
            node_id=one,
            voters=voters,
            directory=str(tmp_path / one),
            secret=b"a secret of the tests",
            times=FAST,
            limits=RaftLimits(**limits),
        )
        for one in voters
    ]


def voter(config: ConsensusConfig) -> VoterMetadata:
    return VoterMetadata(config, "test")


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await body()

    asyncio.run(main())


class Running:
    """Voters that are stopped whatever happens."""

    def __init__(self, made: Sequence[ConsensusConfig]) -> None:
        self.nodes = [voter(one) for one in made]

    async def __aenter__(self) -> list[VoterMetadata]:
        for node in self.nodes:
            await node.start()
        return self.nodes

    async def __aexit__(self, *why: object) -> None:
        for node in self.nodes:
            await node.stop()


def registration(node_id: int, incarnation: int = 7) -> RegisterNode:
    return RegisterNode(node_id, "127.0.0.1", 7070 + node_id, 0, "", "", incarnation)


async def all_reach(nodes: Sequence[VoterMetadata], index: int) -> None:
    for node in nodes:
        await node._copy.has_reached(index)


async def controller_of(node: VoterMetadata, but: int | None = None) -> int:
    while node.controller in (None, but):
        await node._copy.moved()
    assert node.controller is not None
    return node.controller


def test_a_proposal_of_a_follower_is_in_its_own_copy_when_it_returns(tmp_path: Path) -> None:
    async def body() -> None:
        async with Running(configs(tmp_path)) as nodes:
            leader = await controller_of(nodes[0])
            assert [node.voters for node in nodes] == [(1, 2, 3)] * 3
            follower = next(node for node in nodes if node._node_id != leader)
            told: list[Change] = []
            follower.subscribe(told.extend)
            for node_id in (1, 2, 3):
                await follower.propose(registration(node_id))
                assert told[-1] == NodeChanged(node_id)
                assert follower.state.nodes[node_id].alive
            made = await follower.propose(CreateTopic("orders", 4, 3))
            topic = follower.state.topics["orders"]
            assert made == {"topic_id": topic.topic_id, "partitions": 4, "replication": 3}
            assert TopicChanged("orders", topic.topic_id) in told
            await all_reach(nodes, follower.index)
            assert len({dump(node.state) for node in nodes}) == 1
            assert nodes[0].state is not nodes[1].state
            assert sum(node.is_controller for node in nodes) == 1
            assert len({node.term for node in nodes}) == 1

    run(body)


def test_a_refused_command_changes_nothing_and_a_repeated_one_applies_once(tmp_path: Path) -> None:
    async def body() -> None:
        async with Running(configs(tmp_path, 1)) as (node,):
            await node.propose(registration(1))
            await node.propose(CreateTopic("orders", 1, 1))
            before = dump(node.state)
            with pytest.raises(TopicExists):
                await node.propose(CreateTopic("orders", 1, 1))
            assert dump(node.state) == before
            name = node.new_command_id()
            first = await node.propose(AllocateProducerIds(1, 10), command_id=name)
            assert await node.propose(AllocateProducerIds(1, 10), command_id=name) == first
            assert await node.propose(AllocateProducerIds(1, 10)) == first + 10

    run(body)


def test_without_a_majority_a_proposal_ends_in_time_as_not_applied(tmp_path: Path) -> None:
    async def body() -> None:
        async with Running(configs(tmp_path)[:1]) as (node,):
            with pytest.raises(NoLeader):
                await node.propose(registration(1), timeout_s=0.2)
            assert node.controller is None

    run(body)


def test_restarted_voters_know_what_they_knew(tmp_path: Path) -> None:
    made = configs(tmp_path)

    async def body() -> None:
        async with Running(made) as nodes:
            for node_id in (1, 2, 3):
                await nodes[1].propose(registration(node_id))
            await nodes[1].propose(CreateTopic("orders", 2, 3))
            await all_reach(nodes, nodes[1].index)
            before = dump(nodes[1].state)
        async with Running(made) as nodes:
            # The proposal is refused, so it changes nothing, but it comes after everything else.
            with pytest.raises(TopicExists):
                await nodes[0].propose(CreateTopic("orders", 2, 3))
            assert dump(nodes[0].state) == before

    run(body)


def test_a_voter_that_missed_too_much_takes_over_a_snapshot_and_tells_the_differences(
    tmp_path: Path,
) -> None:
    """
    1. all three know the topic "old"; the third one stops
    2. the others delete it and make so many changes that the log is compacted
    3. the third one comes back: its copy is the same as theirs, and it was told what is different
    4. it restarts from the snapshot that it was given
    """
    made = configs(tmp_path, compact_entries=40, keep_entries=5)

    async def body() -> None:
        async with Running(made[:2]) as nodes:
            third = voter(made[2])
            await third.start()
            try:
                for node_id in (1, 2, 3):
                    await nodes[0].propose(registration(node_id))
                await nodes[0].propose(CreateTopic("old", 1, 1))
                await third._copy.has_reached(nodes[0].index)
                old = third.state.topics["old"].topic_id
            finally:
                await third.stop()
            await nodes[0].propose(DeleteTopic("old"))
            for _ in range(100):
                await nodes[0].propose(AllocateProducerIds(1, 1))
            await nodes[0].propose(CreateTopic("new", 1, 1))
            for _ in range(2):
                await check_snapshot(made[2], nodes[0], old)

    run(body)


async def check_snapshot(config: ConsensusConfig, other: VoterMetadata, old: int) -> None:
    third = voter(config)
    told: list[Change] = []
    third.subscribe(told.extend)
    await third.start()
    try:
        await third._copy.has_reached(other.index)
        assert dump(third.state) == dump(other.state)
        assert third._copy._forgotten > 1, "it began with a dump"
        new = third.state.topics["new"].topic_id
        assert TopicChanged("new", new) in told
        assert "old" not in third.state.topics
        created = TopicChanged("old", old) in told
        assert created == (TopicDeleted("old", old) in told)
        # Nothing is left over between the threads.
        assert not third._machine.dumps
        await third.propose(AllocateProducerIds(1, 1))
    finally:
        await third.stop()


def test_subscribers_hear_of_a_new_controller_soon_after_the_old_one_stopped(
    tmp_path: Path,
) -> None:
    async def body() -> None:
        async with Running(configs(tmp_path)) as nodes:
            leader = await controller_of(nodes[0])
            await nodes[0].propose(registration(1))
            rest = [node for node in nodes if node._node_id != leader]
            told: list[tuple[int | None, int]] = []
            rest[0].on_controller(lambda controller, term: told.append((controller, term)))
            before = rest[0].term
            await next(node for node in nodes if node._node_id == leader).stop()
            found = await controller_of(rest[0], but=leader)
            assert told[-1] == (found, rest[0].term)
            assert found in {node._node_id for node in rest}
            assert rest[0].term > before

    run(body)


def test_a_copy_that_cannot_apply_what_was_decided_stops_the_node(tmp_path: Path) -> None:
    async def body() -> None:
        fatal: list[BaseException] = []
        node = VoterMetadata(configs(tmp_path, 1)[0], "test", on_fatal=fatal.append)
        await node.start()
        try:
            await node.propose(registration(1))
            # As if the two copies had come apart: here the topic exists already.
            other = MetadataCopy("test")
            other.applied(node.index + 1, encode_command(registration(1)))
            other.applied(node.index + 2, encode_command(CreateTopic("orders", 1, 1)))
            node._copy.state = other.state
            await node.propose(CreateTopic("orders", 1, 1))
            assert isinstance(fatal[0], ConsensusBroken)
            with pytest.raises(ConsensusBroken):
                await node.propose(AllocateProducerIds(1, 1))
        finally:
            await node.stop()

    run(body)


# The copy itself.


def fill(copy: MetadataCopy, count: int) -> None:
    for _ in range(count):
        copy.applied(copy.index + 1, encode_command(AllocateProducerIds(1, 1)))


def registered() -> MetadataCopy:
    copy = MetadataCopy("test")
    copy.applied(1, encode_command(registration(1)))
    return copy


def test_a_watcher_gets_what_came_after_its_index_and_waits_when_there_is_nothing() -> None:
    async def body() -> None:
        copy = registered()
        fill(copy, 3)
        found = await copy.watch(2, 1.0)
        assert (found.index, [index for index, _ in found.commands]) == (4, [3, 4])
        nothing = await copy.watch(4, 0.01)
        assert (nothing.index, nothing.commands, nothing.dump) == (4, (), None)
        waiting = asyncio.ensure_future(copy.watch(4, 10.0))
        await asyncio.sleep(0)
        copy.applied(7, None)
        assert (await waiting).index == 7, "a refused command is news too: someone may wait for it"
        waiting = asyncio.ensure_future(copy.watch(7, 10.0))
        await asyncio.sleep(0)
        copy.set_controller(2, 5)
        assert (await waiting).index == 7
        ahead = await copy.watch(99, 0.01)
        assert ahead.index == 99, "this node is behind the watcher, and must not set it back"

    run(body)


def test_a_watcher_that_is_new_or_too_far_behind_gets_a_dump(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_copy, "KEPT_MAX", 5)

    async def body() -> None:
        copy = registered()
        fill(copy, 10)
        whole = await copy.watch(None, 1.0)
        assert whole.dump is not None
        assert (whole.index, load(whole.dump)) == (11, copy.state)
        assert (await copy.watch(5, 1.0)).dump is not None
        assert [index for index, _ in (await copy.watch(6, 1.0)).commands] == [7, 8, 9, 10, 11]

    run(body)


def test_an_answer_to_a_watcher_is_bounded_and_says_how_far_it_goes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = len(encode_command(AllocateProducerIds(1, 1)))
    monkeypatch.setattr(metadata_copy, "WATCHED_BYTES_MAX", 3 * size)

    async def body() -> None:
        copy = registered()
        fill(copy, 10)
        seen: list[int] = []
        index = 1
        while index < copy.index:
            part = await copy.watch(index, 1.0)
            assert 1 <= len(part.commands) <= 3
            seen += [one for one, _ in part.commands]
            index = part.index
            assert index == seen[-1]
        assert seen == list(range(2, 12))

    run(body)


def test_subscribers_hear_once_of_what_came_together_and_one_that_fails_hurts_nobody() -> None:
    async def body() -> None:
        copy = MetadataCopy("test")
        calls: list[list[Any]] = []

        def fails(changes: Sequence[Change]) -> None:
            raise ZeroDivisionError

        copy.subscribe(fails)
        copy.subscribe(lambda changes: calls.append(list(changes)))
        copy.applied(1, encode_command(registration(1)))
        successor = replace(registration(1, incarnation=8), before=7, silent=7)
        copy.applied(2, encode_command(successor))
        copy.applied(3, encode_command(registration(2)))
        assert calls == []
        await copy.has_reached(3)
        assert calls == [[NodeChanged(1), NodeChanged(2)]]

    run(body)


def test_a_command_of_a_newer_version_stops_a_voter_instead_of_being_refused() -> None:
    """Nodes that know the command apply it: who refused it would hold another state for ever."""
    machine = MetadataMachine("c")
    with pytest.raises(RuntimeError, match="newer version"):
        machine.apply(msgpack.packb([99, 1]), 7)
    with pytest.raises(InvalidArgument):
        machine.apply(b"\xc1", 8)


def test_a_proposal_that_may_have_been_taken_is_not_called_failed_by_a_later_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first try is taken and not answered; the next one finds no leader until the time ends."""

    async def body() -> None:
        (only,) = configs(tmp_path, size=1)
        node = voter(only)
        errors = [OutcomeUnknown("no answer"), NoLeader("nobody")]

        async def propose(encoded: bytes, timeout_s: float, name: bytes) -> None:
            raise errors.pop(0) if len(errors) > 1 else errors[0]

        monkeypatch.setattr(node.consensus, "propose", propose)
        with pytest.raises(OutcomeUnknown):
            await node.propose(DeleteTopic("orders"), timeout_s=0.2)

    run(body)
