"""The set of voters: a directory keeps to its own, and nodes with different ones stay apart.

Two nodes with different sets count different majorities, and two of those need not meet.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from consensus_work import End, Numbers, configs, opened, ports, run, until

from raftq.client.common.errors import ConfigError, NoLeader
from raftq.cluster.raft.config import ConsensusConfig
from raftq.cluster.raft.consensus import Consensus


def with_voters(config: ConsensusConfig, *names: str) -> ConsensusConfig:
    """The same node, told of these voters; those it did not know get some address."""
    free = iter(ports(len(names)))
    known = config.voters
    return replace(config, voters={one: known.get(one, f"127.0.0.1:{next(free)}") for one in names})


def nodes_of(made: list[ConsensusConfig]) -> list[Consensus]:
    return [Consensus(one, Numbers()) for one in made]


async def begin(nodes: list[Consensus]) -> None:
    for node in nodes:
        await node.read_barrier()


async def nothing(nodes: list[Consensus]) -> None:
    """Start and stop."""


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.levelno >= logging.ERROR]


def test_a_directory_refuses_settings_with_other_voters_and_names_both_sets(tmp_path: Path) -> None:
    made = configs(tmp_path, 5)
    run(nodes_of(made), begin)
    fewer = with_voters(made[0], "n0", "n1", "n2")
    with pytest.raises(ConfigError) as caught:
        run(nodes_of([fewer]), nothing)
    text = str(caught.value)
    assert "n0, n1, n2, n3, n4" in text
    assert "the settings name n0, n1, n2:" in text
    assert "cannot be changed by editing the settings" in text
    run(nodes_of(made), begin)


def test_voters_may_move_to_other_addresses(tmp_path: Path) -> None:
    made = configs(tmp_path, 3)
    run(nodes_of(made), begin)
    moved = {name: f"127.0.0.1:{port}" for name, port in zip(made[0].voters, ports(3), strict=True)}
    run(nodes_of([replace(one, voters=moved) for one in made]), begin)


def test_settings_may_be_corrected_until_something_was_promised(tmp_path: Path) -> None:
    """A first start with a wrong set reaches nobody, so its directory is as good as new."""
    made = configs(tmp_path, 3)
    run(nodes_of([with_voters(made[0], "n0", "n1", "n7")]), nothing)
    run(nodes_of(made), begin)
    with pytest.raises(ConfigError, match="n0, n1, n2, but the settings name n0, n1, n7"):
        run(nodes_of([with_voters(made[0], "n0", "n1", "n7")]), nothing)


@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b'{"format": 1, "vo')])
def test_a_journal_whose_voters_are_not_known_is_refused(
    tmp_path: Path, harm: Callable[[Path], None]
) -> None:
    (config,) = configs(tmp_path, 1)
    run(nodes_of([config]), begin)
    harm(Path(config.directory) / "voters.json")
    with pytest.raises(ConfigError, match=r"voters\.json"):
        run(nodes_of([config]), nothing)


def test_a_voter_that_lost_its_disk_and_has_another_set_is_not_let_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """1. n2 comes back with an empty disk and five voters, of which n3 and n4 are new and agree
    with it: they would be a majority of five. 2. They learn nothing and elect nobody; n0 and n1 go
    on. 3. Whoever was refused and whoever refused says so, once for each other node. 4. With the
    set of the others n2 is let in."""
    made = configs(tmp_path, 3)
    run(nodes_of(made), begin)
    shutil.rmtree(made[2].directory)
    five = with_voters(made[2], "n0", "n1", "n2", "n3", "n4")
    wrong = [
        replace(five, node_id=one, directory=str(tmp_path / f"wrong-{one}"))
        for one in ("n2", "n3", "n4")
    ]

    async def apart(nodes: list[Consensus]) -> None:
        assert await nodes[0].propose(b"x") == 1
        with pytest.raises(NoLeader):
            await nodes[2].propose(b"y", timeout=1.5)
        assert [node.leader_id for node in nodes[2:]] == [None] * 3
        assert [node.applied_index for node in nodes[2:]] == [nodes[2].applied_index] * 3
        assert await nodes[1].propose(b"z") == 2

    run(nodes_of([*made[:2], *wrong]), apart)
    found = errors(caplog)
    for me, others in (("n0", "234"), ("n2", "01")):
        for other in others:
            told = [one for one in found if f"node={me} refuses peer node=n{other} " in one]
            assert len(told) == 1, found
            assert "n0, n1, n2, n3, n4" in told[0]
            assert "n0, n1, n2" in told[0].replace("n0, n1, n2, n3, n4", "")
    assert len(found) == 12
    run(nodes_of(made), begin)


def test_peers_with_other_voters_are_refused_on_both_sides_and_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = {name: f"127.0.0.1:{port}" for name, port in zip("abc", ports(3), strict=True)}
    second = {"a": first["a"], "b": first["b"], "d": first["c"]}
    a, b = End("a", first), End("b", second)
    with opened(a, b):
        for _ in range(200):
            for end in (a, b):
                end.now += 0.05
                end.turn()
        assert a.events == b.events == []
    found = errors(caplog)
    assert len(found) == 2, found
    assert all("a, b, c" in one and "a, b, d" in one for one in found)


def test_after_they_agreed_a_new_difference_is_told_again(caplog: pytest.LogCaptureFixture) -> None:
    first = {name: f"127.0.0.1:{port}" for name, port in zip("abc", ports(3), strict=True)}
    second = {"a": first["a"], "b": first["b"], "d": first["c"]}
    a = End("a", first)
    with opened(a):
        for voters, told in ((second, 1), (first, 1), (second, 2)):
            b = End("b", voters)
            with opened(b):
                for _ in range(50):
                    for end in (a, b):
                        end.now += 0.05
                        end.turn()
            assert (("up", "b") in a.events) is (told > 1 or voters is first)
            assert len([one for one in errors(caplog) if "node=a refuses" in one]) == told


def test_who_does_not_know_the_secret_cannot_make_a_node_say_that_voters_differ(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first = {name: f"127.0.0.1:{port}" for name, port in zip("abc", ports(3), strict=True)}
    second = {"a": first["a"], "b": first["b"], "d": first["c"]}
    a, b = End("a", first), End("b", second, secret=b"another secret here")
    with opened(a, b):
        for _ in range(100):
            for end in (a, b):
                end.now += 0.05
                end.turn()
    assert errors(caplog) == []


def test_seven_voters_with_the_longest_names_shake_hands() -> None:
    names = [f"{number}" * 200 for number in range(7)]
    voters = {name: f"127.0.0.1:{port}" for name, port in zip(names, ports(7), strict=True)}
    a, b = End(names[0], voters), End(names[1], voters)
    with opened(a, b):
        until(lambda: ("up", names[1]) in a.events and ("up", names[0]) in b.events, a, b)


def test_consensus_with_one_voter_does_not_become_three(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)
    run(nodes_of([config]), begin)

    async def main() -> None:
        with pytest.raises(ConfigError, match="belongs to the voters n0, but the settings name"):
            await Consensus(with_voters(config, "n0", "n1", "n2"), Numbers()).start()

    asyncio.run(main())
