"""Consensus with its thread and real sockets on loopback: proposals, failures, attackers."""

import asyncio
import os
import pickle
import socket
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from consensus_work import FAST, SECRET, Numbers, configs, run

from raftq.client.common.disk import RealDisk, RealFile
from raftq.client.common.errors import (
    ConfigError,
    ConsensusBroken,
    ConsensusStopped,
    CorruptFile,
    DirectoryLocked,
    InvalidArgument,
    NoLeader,
    OutcomeUnknown,
    QueueFull,
    StorageFailed,
    Throttled,
    TooLarge,
)
from raftq.cluster.raft.applied import Applied
from raftq.cluster.raft.config import ConsensusConfig, RaftLimits, RaftTimes
from raftq.cluster.raft.connection import VERSION
from raftq.cluster.raft.consensus import Change, Consensus
from raftq.cluster.raft.library import require_version


def test_one_node_applies_answers_and_tells_in_order(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)
    changes: list[Change] = []

    async def body(nodes: list[Consensus]) -> None:
        (node,) = nodes
        results = await asyncio.gather(*(node.propose(b"%d" % one) for one in range(50)))
        assert results == list(range(1, 51))
        await node.read_barrier()
        assert node.is_leader
        assert (node.leader_id, node.term) == ("n0", 1)

    run([Consensus(config, Numbers(), on_change=changes.append)], body)
    told = [one for one in changes if isinstance(one, Applied) and one.command]
    assert [one.command for one in told] == [b"%d" % one for one in range(50)]
    assert [one.index for one in told] == list(range(told[0].index, told[0].index + 50))
    machine = Numbers()

    async def again(nodes: list[Consensus]) -> None:
        await nodes[0].read_barrier()
        assert len(machine.commands) == 50

    run([Consensus(config, machine)], again)


def test_a_follower_hands_on_and_has_applied_what_it_answers(tmp_path: Path) -> None:
    machines = [Numbers() for _ in range(3)]

    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"first")
        follower = next(place for place, node in enumerate(nodes) if not node.is_leader)
        assert await nodes[follower].propose(b"second") == 2
        assert machines[follower].commands == [b"first", b"second"]
        name = nodes[follower].new_command_id()
        first = await nodes[follower].propose(b"third", command_id=name)
        for node in nodes:
            assert await node.propose(b"third", command_id=name) == first
        for node, machine in zip(nodes, machines, strict=True):
            await node.read_barrier()
            assert machine.commands == [b"first", b"second", b"third"]
        assert len({node.leader_id for node in nodes}) == 1

    made = configs(tmp_path, 3)
    run([Consensus(one, machine) for one, machine in zip(made, machines, strict=True)], body)


def test_another_node_leads_when_the_leader_stops(tmp_path: Path) -> None:
    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"before")
        leader = next(node for node in nodes if node.is_leader)
        # A node that never heard of a commit may not vote yet, so all must have heard of one.
        for node in nodes:
            await node.read_barrier(10)
        await leader.stop()
        rest = [node for node in nodes if node is not leader]
        assert await rest[0].propose(b"after", timeout=10) == 2
        with pytest.raises(ConsensusStopped):
            await leader.propose(b"too late")

    run([Consensus(one, Numbers()) for one in configs(tmp_path, 3)], body)


def test_a_node_alone_answers_that_no_leader_took_the_command(tmp_path: Path) -> None:
    async def body(nodes: list[Consensus]) -> None:
        with pytest.raises(NoLeader) as caught:
            await nodes[0].propose(b"alone", timeout=0.3)
        assert caught.value.outcome == "failed"
        with pytest.raises(NoLeader):
            await nodes[0].read_barrier(0.1)

    run([Consensus(configs(tmp_path, 3)[0], Numbers())], body)


def test_refusals_bounds_and_bad_ids(tmp_path: Path) -> None:
    limits = RaftLimits(in_flight=2, command_bytes=100)
    (config,) = configs(tmp_path, 1, limits=limits)

    async def body(nodes: list[Consensus]) -> None:
        (node,) = nodes
        with pytest.raises(QueueFull, match="the machine refuses"):
            await node.propose(b"refuse")
        with pytest.raises(TooLarge):
            await node.propose(b"x" * 101)
        with pytest.raises(InvalidArgument):
            await node.propose(b"x", command_id=b"short")
        results = await asyncio.gather(
            *(node.propose(b"x") for _ in range(3)), return_exceptions=True
        )
        assert [type(one) for one in results] == [int, int, Throttled]

    run([Consensus(config, Numbers())], body)


def test_an_apply_that_breaks_is_fail_stop_with_every_proposal_answered(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)
    fatal: list[BaseException] = []

    async def body(nodes: list[Consensus]) -> None:
        (node,) = nodes
        await node.propose(b"good")
        results = await asyncio.gather(
            node.propose(b"break"), node.propose(b"good"), return_exceptions=True
        )
        assert isinstance(results[0], OutcomeUnknown)
        assert isinstance(results[1], OutcomeUnknown | ConsensusStopped), "taken yet or not"
        with pytest.raises(ConsensusStopped, match="ZeroDivisionError"):
            await node.propose(b"more")
        assert node.state == "failed"

    run([Consensus(config, Numbers(), on_fatal=fatal.append)], body)
    assert [type(one) for one in fatal] == [ConsensusBroken]


class FailingFile(RealFile):
    broken = False

    def sync(self) -> None:
        if FailingFile.broken:
            raise StorageFailed("the disk is gone")
        super().sync()


class FailingDisk(RealDisk):
    def open(self, path: str, create: bool = False) -> RealFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        return FailingFile(os.open(path, flags, 0o600), path)


def test_a_failed_sync_is_fail_stop_and_is_told(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)
    fatal: list[BaseException] = []

    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"good")
        FailingFile.broken = True
        with pytest.raises(OutcomeUnknown, match="the disk is gone"):
            await nodes[0].propose(b"never")

    try:
        run([Consensus(config, Numbers(), on_fatal=fatal.append, disk=FailingDisk())], body)
    finally:
        FailingFile.broken = False
    assert [type(one) for one in fatal] == [StorageFailed]


def test_the_watchdog_reports_a_stuck_thread_and_proposals_still_end(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)
    machine = Numbers()
    stuck: list[float] = []

    async def body(nodes: list[Consensus]) -> None:
        (node,) = nodes
        await node.propose(b"first")
        machine.gate.clear()
        with pytest.raises(OutcomeUnknown):
            await node.propose(b"second", timeout=0.3)
        assert node.stuck
        machine.gate.set()
        await node.propose(b"third")

    run([Consensus(config, machine, on_stuck=stuck.append)], body)
    assert len(stuck) == 1


def test_what_keeps_a_node_from_starting_is_raised_by_start(tmp_path: Path) -> None:
    (config,) = configs(tmp_path, 1)

    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"x")
        with pytest.raises(DirectoryLocked):
            await Consensus(config, Numbers()).start()

    run([Consensus(config, Numbers())], body)
    journal = Path(config.directory) / "journal"
    raw = bytearray(journal.read_bytes())
    raw[60] ^= 1
    journal.write_bytes(raw)
    with pytest.raises(CorruptFile):
        run([Consensus(config, Numbers())], body)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = configs(tmp_path / "other", 1, bind_address=address)[0]
        with pytest.raises(ConfigError, match="cannot listen"):
            run([Consensus(other, Numbers())], body)


def frame(body: bytes, length: int | None = None) -> bytes:
    return struct.pack("<I", 16 + len(body) if length is None else length) + bytes(16) + body


def hello(**changes: Any) -> bytes:
    parts = {"version": VERSION, "cluster": "raftq", "from": "n2", "to": "n0", "nonce": bytes(32)}
    voters = {"voters": ["n0", "n1", "n2"]}
    packed: bytes = msgpack.packb(list({**parts, **voters, **changes}.values()))
    return packed


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("bomb-went-off",)


ATTACKS = {
    "nothing_but_noise": b"\x00" * 3000,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "absurd_length": struct.pack("<I", 0xFFFFFFFF),
    "length_over_the_handshake_limit": struct.pack("<I", 5000),
    "length_too_small": struct.pack("<I", 3) + b"abc",
    "pickle_bomb": frame(pickle.dumps(Bomb())),
    "library_frame_with_a_pickle": struct.pack("i", 60) + pickle.dumps(Bomb()),
    "deep_msgpack": frame(b"\x91" * 900),
    "other_cluster": frame(hello(cluster="other")),
    "other_target": frame(hello(to="n1")),
    "other_version": frame(hello(version=99)),
    "no_voters": frame(hello(voters=None)),
    "voters_that_are_no_names": frame(hello(voters=[1, 2, 3])),
    "other_voters_without_proof": frame(hello(voters=["n0"])) + frame(msgpack.packb([bytes(32)])),
    "short_nonce": frame(hello(nonce=b"x")),
    "map_instead_of_list": frame(msgpack.packb({})),
    "wrong_proof": frame(hello()) + frame(msgpack.packb([bytes(32)])),
    "response_first": frame(msgpack.packb([bytes(32)])),
    "message_without_handshake": frame(hello()) + frame(
        msgpack.packb({"type": "request_vote", "term": 99, "last_index": 9, "last_term": 9,
                       "ready": True})),
}  # fmt: skip


async def attack(address: str, data: bytes) -> bytes:
    """Everything the node answers until it closes the connection."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(data)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


def test_attackers_without_the_secret_are_refused_and_the_node_works_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = configs(tmp_path, 3)

    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"before")
        term = nodes[0].term
        address = made[0].voters["n0"]
        answers = await asyncio.gather(*(attack(address, data) for data in ATTACKS.values()))
        for name, answer in zip(ATTACKS, answers, strict=True):
            assert len(answer) < 200, f"{name} was told {answer!r}"
            assert SECRET not in answer
        silent = [await asyncio.open_connection(*address.split(":")) for _ in range(100)]
        assert await nodes[0].propose(b"after") == 2
        for _, writer in silent:
            writer.close()
        assert nodes[0].term == term, "nobody could disturb the leader"
        assert all(node.state == "running" for node in nodes)

    run([Consensus(one, Numbers()) for one in made], body)
    assert not (tmp_path / "bomb-went-off").exists()


def test_a_node_with_a_wrong_secret_takes_no_part_and_cannot_hurt(tmp_path: Path) -> None:
    made = configs(tmp_path, 3)
    wrong = ConsensusConfig(
        node_id="n2",
        voters=made[2].voters,
        directory=made[2].directory,
        secret=b"not the right secret",
        times=FAST,
    )

    async def begin(nodes: list[Consensus]) -> None:
        for node in nodes:
            await node.read_barrier()

    run([Consensus(one, Numbers()) for one in made], begin)
    nodes = [Consensus(one, Numbers()) for one in (*made[:2], wrong)]

    async def body(nodes: list[Consensus]) -> None:
        await nodes[0].propose(b"x")
        before = nodes[2].applied_index
        with pytest.raises(NoLeader):
            await nodes[2].propose(b"y", timeout=0.6)
        assert nodes[2].applied_index == before < nodes[0].applied_index
        assert nodes[2].leader_id is None
        assert await nodes[1].propose(b"z") == 2

    run(nodes, body)


def test_settings_that_make_no_sense_are_all_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        ConsensusConfig(
            node_id="x",
            voters={"a": "nowhere", "b": "host:1"},
            directory="",
            secret=b"short",
            times=RaftTimes(election_ms_min=100, election_ms_max=50, append_ms=50),
            limits=RaftLimits(frame_bytes=10),
        )
    for word in ("name this node", "1, 3, 5", "host:port", "directory", "16 bytes",
                 "election_ms_max", "append_ms", "frame_bytes"):  # fmt: skip
        assert word in str(caught.value)


def test_another_version_of_the_library_is_refused_by_name() -> None:
    with pytest.raises(ImportError, match=r"needs pysyncobj 0\.3\.17 exactly.*found 0\.3\.18"):
        require_version("0.3.18")


def test_a_config_does_not_show_its_secret(tmp_path: Path) -> None:
    assert "secret" not in repr(configs(tmp_path, 1)[0])
