"""ObserverMetadata against voters that are real listeners over one decided order in memory."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from random import Random
from typing import Any

import pytest
from metadatafake import FakeLog, FakeMetadata

from raftq.client.common.errors import (
    ConfigError,
    ConsensusStopped,
    NoLeader,
    OutcomeUnknown,
    TopicExists,
)
from raftq.client.options import ConnectionOptions
from raftq.client.wire.node_messages import Propose, WatchMetadata, WatchMetadataReply
from raftq.cluster.metadata import copy as metadata_copy
from raftq.cluster.metadata.apply import Change, NodeChanged, dump
from raftq.cluster.metadata.commands import AllocateProducerIds, CreateTopic, RegisterNode
from raftq.cluster.metadata.handlers import MetadataHandlers
from raftq.cluster.metadata.observer import ObserverMetadata
from raftq.node.native.tcp import TcpServer


class Voter:
    """A node that answers proposals and watches; `answer_propose` may be replaced."""

    def __init__(self, log: FakeLog, node_id: int) -> None:
        self.metadata = FakeMetadata(log, node_id)
        self.handlers = MetadataHandlers(self.metadata, node_id)
        self.answer_propose: Callable[..., Awaitable[Any]] = self.handlers.propose
        self.answer_watch: Callable[..., Awaitable[Any]] = self.handlers.watch
        self.proposals: list[bytes] = []
        self.watches: asyncio.Queue[int] = asyncio.Queue()
        self.server = TcpServer(
            {Propose: self._propose, WatchMetadata: self._watch},
            node_id=node_id,
            cluster_id=log.cluster_id,
        )

    async def _propose(self, message: Propose, raw: memoryview, session: Any) -> Any:
        self.proposals.append(message.command_id)
        return await self.answer_propose(message, raw, session)

    async def _watch(self, message: WatchMetadata, raw: memoryview, session: Any) -> Any:
        self.watches.put_nowait(message.index or 0)
        return await self.answer_watch(message, raw, session)

    async def close(self, observer: ObserverMetadata) -> None:
        """Go away while the observer waits for news."""
        while await self.watches.get() < observer.index:
            pass
        await self.server.close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.port}"


Body = Callable[[list[Voter], ObserverMetadata], Awaitable[None]]


def run(body: Body, size: int = 2, log: FakeLog | None = None) -> None:
    async def main() -> None:
        made = log or FakeLog()
        async with asyncio.timeout(20), AsyncExitStack() as stack:
            voters = [Voter(made, one) for one in range(1, size + 1)]
            for voter in voters:
                await voter.metadata.start()
                await stack.enter_async_context(voter.server)
                await voter.server.start()
            observer = ObserverMetadata(
                "test",
                [voter.address for voter in voters],
                ConnectionOptions(role="node"),
                voters=made.voters,
                rng=Random(1),
            )
            stack.push_async_callback(observer.stop)
            await body(voters, observer)

    asyncio.run(main())


def registration(node_id: int, port: int = 1) -> RegisterNode:
    return RegisterNode(node_id, "127.0.0.1", port, 0, "", "", 5)


def followed(voters: list[Voter]) -> tuple[Voter, Voter]:
    """The voter that the observer follows, and the other one."""
    first, second = voters
    return (first, second) if first.server.connections else (second, first)


def test_an_observer_sees_its_own_proposal_and_those_of_others() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await voters[0].metadata.propose(registration(1))
        await observer.start()
        told: list[Change] = []
        observer.subscribe(told.extend)
        await observer.propose(registration(9))
        assert observer.state.nodes[9].alive
        assert told == [NodeChanged(1), NodeChanged(9)]
        made = await observer.propose(CreateTopic("orders", 2, 1))
        assert made["topic_id"] == observer.state.topics["orders"].topic_id
        with pytest.raises(TopicExists):
            await observer.propose(CreateTopic("orders", 2, 1))
        await voters[1].metadata.propose(CreateTopic("more", 1, 1))
        await observer._copy.has_reached(voters[1].metadata.index)
        assert dump(observer.state) == dump(voters[0].metadata.state)
        assert (observer.controller, observer.is_controller, observer.voters) == (
            1,
            False,
            (1, 2, 3),
        )

    run(body)


def test_an_observer_is_told_of_a_refusal_when_it_knows_what_it_was_refused_for() -> None:
    """Whoever acts on the refusal must not act on a state from before it."""

    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await voters[0].metadata.propose(registration(1))
        await observer.start()
        await observer.propose(registration(9))
        for voter in voters:
            hold, answer = asyncio.Event(), voter.answer_watch

            async def late(*args: Any, hold: asyncio.Event = hold, answer: Any = answer) -> Any:
                await hold.wait()
                return await answer(*args)

            voter.answer_watch = late
            asyncio.get_running_loop().call_later(0.3, hold.set)
        await voters[1].metadata.propose(CreateTopic("orders", 2, 1))
        with pytest.raises(TopicExists) as refused:
            await observer.propose(CreateTopic("orders", 2, 1))
        assert "orders" in observer.state.topics
        assert refused.value.details == {}

    run(body)


def test_an_observer_hears_of_a_new_controller_at_once() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        heard: asyncio.Queue[int | None] = asyncio.Queue()
        observer.on_controller(lambda controller, term: heard.put_nowait(controller))
        voters[0].metadata.log.lead(2)
        assert await heard.get() == 2
        assert observer.controller == 2

    run(body)


def test_when_its_voter_goes_away_an_observer_follows_another() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        gone, other = followed(voters)
        await gone.close(observer)
        await other.metadata.propose(registration(1))
        await observer._copy.has_reached(other.metadata.index)
        assert observer.state.nodes[1].alive
        assert await observer.propose(AllocateProducerIds(9, 5)) == 1

    run(body)


def test_a_proposal_whose_answer_was_lost_is_sent_again_and_applied_once() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        log = voters[0].metadata.log
        before = len(log.entries)
        broken, other = followed(voters)

        async def decide_and_break(message: Propose, raw: memoryview, session: Any) -> Any:
            broken.answer_propose = broken.handlers.propose
            await broken.handlers.propose(message, raw, session)
            session.cut("as if the network had failed")

        broken.answer_propose = decide_and_break
        assert await observer.propose(AllocateProducerIds(9, 5)) == 1
        assert len(log.entries) == before + 1
        sent = [*broken.proposals, *other.proposals][1:]
        assert len(sent) == 2
        assert len(set(sent)) == 1
        assert await observer.propose(AllocateProducerIds(9, 5)) == 6

    run(body)


def test_a_voter_that_hangs_is_left_and_the_proposal_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raftq.cluster.metadata.observer.TRY_S", 0.1)

    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        hung, other = followed(voters)

        async def hang(message: Any, raw: memoryview, session: Any) -> Any:
            await asyncio.get_running_loop().create_future()

        hung.answer_propose = hung.answer_watch = hang
        assert await observer.propose(AllocateProducerIds(9, 5)) == 1
        assert other.proposals

    run(body)


def test_a_voter_may_be_given_up_in_the_very_moment_in_which_a_watch_of_it_times_out() -> None:
    """The watch's time is over and its task has not run yet, when a proposal fails, too."""

    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        scope = observer._scope
        assert scope is not None
        scope.reschedule(asyncio.get_running_loop().time())
        while not scope.expired():
            await asyncio.sleep(0)
            observer._leave()
        await observer.propose(registration(10))

    run(body)


def test_a_node_that_is_no_voter_is_not_followed() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        assert await observer.propose(registration(9)) is None
        assert followed(voters)[0] is voters[0]
        assert not voters[1].proposals

    run(body, log=FakeLog(voters=(1, 3, 5)))


def test_an_observer_that_was_away_too_long_gets_the_whole_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata_copy, "KEPT_MAX", 3)

    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        gone, other = followed(voters)
        other.metadata.cut(False)
        replies: list[bool] = []

        async def note(message: WatchMetadata, raw: memoryview, session: Any) -> Any:
            answer = await other.handlers.watch(message, raw, session)
            assert isinstance(answer[0], WatchMetadataReply)
            replies.append(answer[0].dump)
            return answer

        other.answer_watch = note
        await gone.close(observer)
        for _ in range(10):
            await gone.metadata.propose(AllocateProducerIds(9, 1))
        other.metadata.cut(True)
        await observer._copy.has_reached(gone.metadata.index)
        assert dump(observer.state) == dump(gone.metadata.state)
        assert replies[0] or replies[1]

    run(body)


def test_a_voter_that_is_behind_does_not_set_the_observer_back() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        gone, behind = followed(voters)
        behind.metadata.cut(False)
        await observer.propose(registration(8))
        index = observer.index
        asked = asyncio.Event()

        async def note(message: WatchMetadata, raw: memoryview, session: Any) -> Any:
            asked.set()
            return await behind.handlers.watch(message, raw, session)

        behind.answer_watch = note
        await gone.close(observer)
        await asked.wait()
        assert observer.index == index
        behind.metadata.cut(True)
        await behind.metadata.propose(registration(7))
        await observer._copy.has_reached(behind.metadata.index)
        assert sorted(observer.state.nodes) == [7, 8, 9]

    run(body)


def test_without_any_voter_a_proposal_ends_in_time_and_says_that_it_failed() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        for voter in voters:
            await voter.server.close()
        await observer.start()
        with pytest.raises(NoLeader) as caught:
            await observer.propose(registration(9), timeout_s=0.2)
        assert caught.value.outcome == "failed"

    run(body)


def test_an_outcome_that_was_once_unknown_stays_unknown() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))

        async def unknown(message: Any, raw: memoryview, session: Any) -> Any:
            for voter in voters:
                voter.answer_propose = refuse
            raise OutcomeUnknown("no answer in time")

        async def refuse(message: Any, raw: memoryview, session: Any) -> Any:
            raise NoLeader("none")

        for voter in voters:
            voter.answer_propose = unknown
        with pytest.raises(OutcomeUnknown):
            await observer.propose(AllocateProducerIds(9, 1), timeout_s=0.3)

    run(body)


def test_a_stopped_observer_answers_its_open_proposals() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        await observer.start()
        await observer.propose(registration(9))
        arrived = asyncio.Event()

        async def hang(message: Any, raw: memoryview, session: Any) -> Any:
            arrived.set()
            await asyncio.get_running_loop().create_future()

        for voter in voters:
            voter.answer_propose = hang
        open_one = asyncio.ensure_future(observer.propose(AllocateProducerIds(9, 1)))
        await arrived.wait()
        await observer.stop()
        with pytest.raises(ConsensusStopped) as caught:
            await open_one
        assert caught.value.outcome == "unknown"

    run(body)


def test_an_observer_whose_settings_name_other_voters_ends_and_says_why() -> None:
    """Only one that is led knows the set for certain; a new voter may itself be wrong."""

    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        log = voters[0].metadata.log
        log.lead(None)
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        wrong = ObserverMetadata(
            "test",
            [voter.address for voter in voters],
            ConnectionOptions(role="node"),
            voters=(1, 2, 4),
            rng=Random(1),
            on_fatal=failed.set_result,
        )
        try:
            await wrong.start()
            for _ in range(2):  # the second is asked after the first answer was taken
                await voters[0].watches.get()
            assert not failed.done()
            log.lead(1)
            error = await failed
        finally:
            await wrong.stop()
        assert isinstance(error, ConfigError)
        assert "the settings name the voters 1, 2, 4, but the cluster's are 1, 2, 3" in str(error)

    run(body, size=1)


def test_an_observer_without_voters_in_its_settings_learns_them() -> None:
    async def body(voters: list[Voter], observer: ObserverMetadata) -> None:
        address = voters[0].address
        learns = ObserverMetadata("test", [address], ConnectionOptions(role="node"), rng=Random(1))
        try:
            await learns.start()
            await learns.propose(registration(9))
            assert learns.voters == (1, 2, 3)
        finally:
            await learns.stop()

    run(body, size=1)


@pytest.mark.parametrize("seed", ["", "here", "here:", ":80", "here:0", "here:99999", "here:x"])
def test_seeds_that_are_no_addresses_are_refused(seed: str) -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="host:port"):
            ObserverMetadata("test", [seed], ConnectionOptions())

    asyncio.run(main())
