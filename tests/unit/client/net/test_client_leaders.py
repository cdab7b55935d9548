"""What becomes of a request that is repeated at another leader."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any

import pytest

from raftq.client.common.errors import FencedGeneration, RaftqError
from raftq.client.net.leaders import Leaders
from raftq.client.options import ClientOptions
from raftq.client.wire.messages import PartitionInfo, TopicInfo

WHERE = ("t", 0)


class Routes:
    """One partition, whose leader answers with these codes, one after the other."""

    def __init__(self, *codes: str) -> None:
        self.codes = list(codes)

    async def topic(self, name: str) -> TopicInfo:
        return TopicInfo(name, (PartitionInfo(0, 1, 1, (1,), (1,)),))

    def leader(self, topic: str, partition: int) -> tuple[int, tuple[str, int]]:
        return 1, ("host", 1)

    def hint(self, *args: Any) -> None: ...

    def request_refresh(self) -> None: ...

    async def get(self, address: Any) -> Any:
        """The pool."""

        async def request(message: Any, timeout_s: float) -> Any:
            return SimpleNamespace(message=self.codes.pop(0))

        return SimpleNamespace(request=request)


def ask(*codes: str) -> RaftqError | str:
    async def main() -> Any:
        routes = Routes(*codes)
        options = ClientOptions(rng=random.Random(1), retry_backoff_ms=1, retry_backoff_ms_max=2)
        leaders = Leaders(routes, routes, options)  # type: ignore[arg-type]
        found = await leaders.ask_each(
            [WHERE],
            lambda keys: None,  # type: ignore[arg-type,return-value]
            lambda code: [(WHERE, code, "done")],
            5.0,
        )
        return found[WHERE]

    return asyncio.run(main())


def test_a_repetition_that_is_answered_is_an_answer() -> None:
    assert ask("leader_lost", "") == "done"


@pytest.mark.parametrize(
    ("codes", "outcome"),
    [
        (("fenced_generation",), "failed"),
        (("not_leader", "fenced_generation"), "failed"),
        (("leader_lost", "fenced_generation"), "unknown"),
        (("leader_lost", "not_leader", "fenced_generation"), "unknown"),
    ],
)
def test_what_an_earlier_attempt_may_have_done_is_not_denied(
    codes: tuple[str, ...], outcome: str
) -> None:
    """A position that a leader had written when it was replaced was read by the next owner, while
    its writer was told that it had certainly failed."""
    error = ask(*codes)
    assert isinstance(error, FencedGeneration)
    assert error.outcome == outcome
