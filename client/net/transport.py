"""Shell: what both ends of a connection need from the event loop.

uvloop is used if it is installed, plain asyncio otherwise; the behaviour is the same.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from raftq.client.common.types import Buffer
from raftq.client.wire.buffers import Buffers
from raftq.client.wire.frames import SCRATCH_BYTES

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

T = TypeVar("T")

Write = Callable[[list[Buffer]], None]

_buffers: "WeakKeyDictionary[asyncio.AbstractEventLoop, Buffers]" = WeakKeyDictionary()
_scratches: "WeakKeyDictionary[asyncio.AbstractEventLoop, memoryview]" = WeakKeyDictionary()


def new_event_loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop() if uvloop is None else uvloop.new_event_loop()


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on the fastest available loop."""
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(main)


def loop_scratch(loop: asyncio.AbstractEventLoop) -> memoryview:
    """The buffer that all connections of a loop read into, one after the other (see FrameDecoder).

    There is one per loop, because loops run in different threads and read at the same time."""
    scratch = _scratches.get(loop)
    if scratch is None:
        scratch = _scratches[loop] = memoryview(bytearray(SCRATCH_BYTES))
    return scratch


def loop_buffers(loop: asyncio.AbstractEventLoop) -> Buffers:
    """The memory for big frames that all connections of a loop share."""
    buffers = _buffers.get(loop)
    if buffers is None:
        buffers = _buffers[loop] = Buffers()
    return buffers


def fragment_writer(transport: asyncio.WriteTransport) -> Write:
    """Returns a function that writes fragments to this transport without joining them.

    uvloop, and asyncio from Python 3.12 on, send the list as it is. Older versions of `writelines`
    copy everything into one buffer, so there each fragment is written by its own `write`."""
    if sys.version_info >= (3, 12) or type(transport).__module__.startswith("uvloop"):
        return transport.writelines

    write = transport.write

    def write_each(fragments: list[Buffer]) -> None:
        for fragment in fragments:
            write(fragment)

    return write_each
