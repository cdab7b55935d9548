"""Fixtures of the queue's tests: a clock that stands still, and queues that are always closed."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import queuefaults as faults
from queuefaults import Survey

from raftq.client.common.disk import RealDisk, RealFile, storage_error
from raftq.node.queue.embedded.options import EmbeddedOptions
from raftq.node.queue.embedded.queue import Queue

START = 1_700_000_000.0


class FakeClock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = START

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float, *queues: Queue) -> None:
        """Let time pass, and let each queue do what its keeper's thread would do then."""
        self.now += seconds
        for queue in queues:
            with queue._lock:
                queue._keeper.tick(self.now)


class HastyFile(RealFile):
    """A real file that claims to be synced: no test here cuts the power."""

    __slots__ = ()

    def sync(self) -> None:
        if self._enter():
            self._leave()


class HastyDisk(RealDisk):
    """The real file system without its fsyncs, which would be nearly all the time a test takes."""

    def open(self, path: str, create: bool = False) -> HastyFile:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        try:
            return HastyFile(os.open(path, flags, 0o644), path)
        except OSError as error:
            raise storage_error(error, "open", path) from error

    def sync_directory(self, path: str) -> None:
        return


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_queue(tmp_path: Path, clock: FakeClock) -> Iterator[Callable[..., Queue]]:
    """Opens `tmp_path/q` (or `name`) on the fake clock, without a keeper's thread."""
    opened: list[Queue] = []

    def open_(name: str = "q", **settings: Any) -> Queue:
        settings = {"reserve_bytes": 0, "fsync": "none"} | settings
        options = EmbeddedOptions(**settings)
        queue = Queue(tmp_path / name, options, disk=HastyDisk(), clock=clock, keeper=False)
        opened.append(queue)
        return queue

    yield open_
    for queue in opened:
        queue.close()


@pytest.fixture
def queue(open_queue: Callable[..., Queue]) -> Queue:
    return open_queue()


@pytest.fixture(scope="module", params=["closed", "killed"])
def image(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a queue that was closed, or killed."""
    path = tmp_path_factory.mktemp("files") / request.param
    faults.build(path, clean=request.param == "closed")
    return path


@pytest.fixture(scope="module")
def healthy(image: Path) -> Survey:
    """What that queue contains if nothing is damaged."""
    return faults.survey(Path(shutil.copytree(image, image.with_name(image.name + "-healthy"))))


@pytest.fixture
def copy(image: Path, tmp_path: Path) -> Path:
    """A copy of that directory for the test to damage."""
    return Path(shutil.copytree(image, tmp_path / "queue"))
