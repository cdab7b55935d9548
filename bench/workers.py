"""Shell: worker processes for the figures of queues and groups, seen from the figure.

Each is `python -m raftq_bench.worker_main ROLE`. It gets its settings and its orders as lines of
JSON and answers each with a line. Workers and figure share one clock: CLOCK_MONOTONIC.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Self

from raftq.client.common.errors import InternalError
from raftq_bench.runner import Side

ANSWER_S = 120.0
END_S = 20.0


def clock() -> float:
    """Seconds that mean the same in every process of this machine."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class WorkerProcess:
    """One worker process."""

    def __init__(self, role: str, **settings: Any) -> None:
        command = [sys.executable, "-m", "raftq_bench.worker_main", role]
        self._role = role
        self._child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._child.pid
        self._send(settings)

    def order(self, verb: str, **facts: Any) -> None:
        """Sends an order; the answer is taken later."""
        self._send({"do": verb, **facts})

    def answer(self) -> dict[str, Any]:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise InternalError(f"a {self._role} process ended with {self._child.wait()}")
        found = json.loads(line)
        assert isinstance(found, dict)
        return found

    def ask(self, verb: str, **facts: Any) -> dict[str, Any]:
        self.order(verb, **facts)
        return self.answer()

    def kill(self) -> None:
        """Sends SIGKILL and waits until the process is gone."""
        self._child.kill()
        self._child.wait()

    def end(self) -> None:
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._child.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def _send(self, facts: dict[str, Any]) -> None:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(facts) + "\n")
        self._child.stdin.flush()


class WorkerProcesses:
    """Several worker processes of one role, ready when the constructor returns."""

    def __init__(self, count: int, role: str, **settings: Any) -> None:
        self.processes: list[WorkerProcess] = []
        try:
            for number in range(count):
                self.processes.append(WorkerProcess(role, number=number, **settings))
            for process in self.processes:
                process.answer()
        except BaseException:
            self.end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def all_do(self, verb: str, **facts: Any) -> list[dict[str, Any]]:
        """All workers do this at the same time."""
        for process in self.processes:
            process.order(verb, **facts)
        return [process.answer() for process in self.processes]

    def end(self) -> None:
        for process in self.processes:
            process.end()


class WorkersSide(Side):
    """A side whose slices are the work of worker processes; `answers` keeps their answers."""

    def __init__(
        self,
        workers: WorkerProcesses,
        verb: str,
        facts: dict[str, Any],
        rest: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(lambda: 0, rest)
        self._workers = workers
        self._verb = verb
        self._facts = facts
        self.answers: list[list[dict[str, Any]]] = []

    def slice(self, seconds: float) -> tuple[int, float]:
        start = time.perf_counter()
        answers = self._workers.all_do(self._verb, seconds=seconds, **self._facts)
        taken = time.perf_counter() - start
        self.answers.append(answers)
        return sum(int(answer["count"]) for answer in answers), taken

    def last_count(self) -> int:
        return sum(int(answer["count"]) for answer in self.answers[-1])

    def cpu_us(self) -> float:
        """Processor time of the workers per operation, in all slices."""
        every = [answer for answers in self.answers for answer in answers]
        cpu_s: float = sum(one["cpu_s"] for one in every)
        count: int = sum(one["count"] for one in every)
        return cpu_s / max(1, count) * 1e6


def lane_sums(answers: Sequence[Sequence[dict[str, Any]]]) -> list[int]:
    """Records by lane over all slices and workers."""
    return [
        sum(counts)
        for counts in zip(*(one["lanes"] for some in answers for one in some), strict=True)
    ]
