"""Three `consensus_process` children on loopback, their history, and the verdict over it."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHILD = str(Path(__file__).with_name("consensus_process.py"))
IDS = ("a", "b", "c")


def free_ports(count: int) -> list[int]:
    socks = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [sock.getsockname()[1] for sock in socks]
    for sock in socks:
        sock.close()
    return ports


class Cluster:
    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory = directory
        ports = free_ports(len(IDS))
        self.voters = {one: f"127.0.0.1:{port}" for one, port in zip(IDS, ports, strict=True)}
        self.limits = settings.get("limits", {})
        self.times = settings.get("times", {})
        self.payload = settings.get("payload", 0)
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self.buffers: dict[str, bytes] = {}
        self.starts = 0
        self.acknowledged: dict[int, int] = {}
        self.unknown = 0
        self.said: list[tuple[str, list[str]]] = []
        self.leader: tuple[int, str] = (0, "")
        self.leader_at = 0.0

    def start(self, one: str) -> None:
        self.starts += 1
        settings = {
            "node_id": one,
            "voters": self.voters,
            "directory": str(self.directory / one),
            "secret": "00" * 16,
            "first_number": self.starts << 32,
            "payload": self.payload,
            "limits": self.limits,
            "times": self.times,
        }
        with open(self.directory / f"{one}.{self.starts}.err", "wb") as errors:
            child = subprocess.Popen(
                [sys.executable, CHILD, json.dumps(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert child.stdout is not None
        os.set_blocking(child.stdout.fileno(), False)
        self.children[one] = child
        self.buffers[one] = b""

    def tell(self, one: str, line: str) -> None:
        child = self.children[one]
        assert child.stdin is not None
        child.stdin.write(line.encode() + b"\n")
        child.stdin.flush()

    def kill(self, one: str) -> None:
        child = self.children.pop(one)
        child.send_signal(signal.SIGKILL)
        child.send_signal(signal.SIGCONT)
        child.wait()
        self.read_child(one, child)
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                continue

    def signal(self, one: str, number: int) -> None:
        self.children[one].send_signal(number)

    def close(self) -> None:
        for one in list(self.children):
            self.kill(one)

    def read_child(self, one: str, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        data = self.buffers[one] + (child.stdout.read() or b"")
        *lines, self.buffers[one] = data.split(b"\n")
        for line in lines:
            self.heard(one, line.decode().split())

    def heard(self, one: str, words: list[str]) -> None:
        if words[0] == "ok":
            number, place = int(words[1]), int(words[2])
            assert self.acknowledged.setdefault(number, place) == place
        elif words[0] == "unknown":
            self.unknown += 1
        elif words[0] == "leader":
            term = int(words[1])
            assert term != self.leader[0] or one == self.leader[1], f"two leaders of term {term}"
            if term > self.leader[0]:
                self.leader = (term, one)
                self.leader_at = time.monotonic()
        else:
            assert words[0] != "fatal", f"{one}: {words}"
            self.said.append((one, words))

    def poll(self, seconds: float) -> None:
        """Read what the children say for so long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self.read_some(left)

    def read_some(self, seconds: float) -> None:
        pipes = {child.stdout: one for one, child in self.children.items()}
        ready, _, _ = select.select(list(pipes), [], [], seconds)
        for pipe in ready:
            one = pipes[pipe]
            if self.children[one].poll() is not None:
                raise AssertionError(f"{one} ended by itself: {self.errors(one)}")
            self.read_child(one, self.children[one])

    def errors(self, one: str) -> str:
        files = sorted(self.directory.glob(f"{one}.*.err"), key=lambda path: path.stat().st_mtime)
        return files[-1].read_text()[-3000:]

    def wait_for(self, word: str, count: int, seconds: float) -> list[list[str]]:
        """Until so many children have said it."""
        end = time.monotonic() + seconds
        while True:
            found = [words for _, words in self.said if words[0] == word]
            if len(found) >= count:
                self.said = [one for one in self.said if one[1][0] != word]
                return found
            left = end - time.monotonic()
            assert left > 0, f"{len(found)} of {count} said {word!r} in {seconds} s"
            self.read_some(left)

    def wait_for_leader(self, after_term: int, seconds: float) -> float:
        """Seconds on this machine's clock at which a leader of a later term spoke up."""
        end = time.monotonic() + seconds
        while self.leader[0] <= after_term:
            left = end - time.monotonic()
            assert left > 0, f"no leader after term {after_term} in {seconds} s"
            self.read_some(left)
        return self.leader_at

    def start_all(self) -> None:
        for one in IDS:
            if one not in self.children:
                self.start(one)

    def verdict(self) -> int:
        """How many commands were applied; fails when one is lost, twice, or replicas differ."""
        self.poll(0.5)
        self.said.clear()
        for one in IDS:
            self.tell(one, f"dump {self.directory / one}.dump")
        self.wait_for("dumped", len(IDS), 30.0)
        states = [(self.directory / f"{one}.dump").read_bytes() for one in IDS]
        assert states[0] == states[1] == states[2], "the replicas differ"
        state = states[0]
        numbers = [int.from_bytes(state[at : at + 8], "big") for at in range(0, len(state), 8)]
        assert len(set(numbers)) == len(numbers), "a command was applied twice"
        lost = [one for one, place in self.acknowledged.items() if numbers[place - 1] != one]
        assert not lost, f"{len(lost)} acknowledged commands are lost, such as {lost[:5]}"
        return len(numbers)
