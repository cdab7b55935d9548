"""A process that consumes, to be killed: `group_process.py member|worker BOOTSTRAP TOPIC NAME`.

A member of a stream group prints its history, a line for each operation when it begins and again
when it ends. A worker prints what its handler begins and ends with.
"""

import asyncio
import json
import os
import sys
import time
from random import Random
from typing import Any

from raftq import Worker
from raftq.chaos.history import History, Operation, to_row
from raftq.chaos.members import StreamMember

WORK_S = 0.02


def say(row: dict[str, Any]) -> None:
    os.write(1, json.dumps(row).encode() + b"\n")  # whole lines, from whatever thread


class Printed(History):
    """Every operation is written down at once: what a killed process has seen counts."""

    def add(self, operation: Any) -> Any:
        super().add(operation)
        self._say(operation, len(self.operations) - 1)
        return operation

    def note(self, operation: Operation) -> None:
        found = [at for at, one in enumerate(self.operations) if one is operation]
        self._say(operation, found[0])

    def _say(self, operation: Operation, number: int) -> None:
        say({"number": number, "row": to_row(operation)})


def member(bootstrap: str, topic: str, name: str) -> None:
    async def run() -> None:
        made = StreamMember(
            bootstrap, Printed(), time.time, Random(name), name=name, group="readers",
            topics=[topic], session_ms=1500, heartbeat_ms=300, fetch_wait_ms=200,
        )  # fmt: skip
        await made.run()

    asyncio.run(run())


def worker(bootstrap: str, topic: str, name: str) -> None:
    def handler(record: Any) -> None:
        value = record.value.decode()
        row = {"worker": name, "value": value, "attempt": record.attempt}
        say({**row, "what": "begin", "at": time.time()})
        time.sleep(WORK_S)
        if value.startswith("poison"):
            raise ValueError(value)
        say({**row, "what": "end", "at": time.time()})

    Worker(
        bootstrap, group="workers", topics=[topic], handler=handler, concurrency=4,
        visibility_timeout=2.0, name=name,
    ).run()  # fmt: skip


if __name__ == "__main__":
    {"member": member, "worker": worker}[sys.argv[1]](*sys.argv[2:])
