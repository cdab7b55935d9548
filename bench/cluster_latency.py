"""Shell: how long single records take, one after the other: native clients and REST."""

import http.client
import json
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from typing import Any

from raftq.client.producer.producer import Producer as AsyncProducer
from raftq.client.sync.admin import Admin
from raftq.client.sync.producer import Producer
from raftq.client.wire.batch import encode
from raftq_bench.bare_socket import BareLatency, bare_nodes
from raftq_bench.cluster_flow import AsyncSide, Timed
from raftq_bench.cluster_runs import (
    NOW_MS,
    ClusterSettings,
    Line,
    Target,
    latency_results,
    target,
)
from raftq_bench.report import Bar, Result
from raftq_bench.runner import Side, interleave, make_values

NODES = 3
P50_MS, P99_MS = 0.5, 4.0
REST_P50_MS = 3.0
REPLY_S = 30.0


def one_by_one(send: Callable[[], object], samples: list[float]) -> Callable[[float], int]:
    def run(seconds: float) -> int:
        clock = time.perf_counter
        last = clock()
        until = last + seconds
        count = 0
        while last < until:
            before = last
            send()
            last = clock()
            samples.append(last - before)
            count += 1
        return count

    return run


def _in_turns(found: Target, ours: Side, samples: list[float], port: int) -> dict[str, list[float]]:
    """Runs both sides in turns; the first slice of each warms up and does not count."""
    bare = BareLatency(port, bytes(encode(make_values(1), timestamps=NOW_MS)))
    warm = {"raftq": samples, "bare": bare.samples}
    for side in (ours, bare):
        side.slice(found.settings.slice_s)
    for some in warm.values():
        some.clear()
    try:
        interleave(found.settings, {"raftq": ours, "bare": bare})
    finally:
        bare.close()
    return warm


def measure_latency(settings: ClusterSettings) -> list[Result]:
    """Blocking and asyncio, 3 nodes, acks=all, linger 0."""
    bars = {0.5: Bar("value", P50_MS, at_most=True), 0.99: Bar("value", P99_MS, at_most=True)}
    results: list[Result] = []
    with target(settings, NODES) as found, bare_nodes(found.directory, NODES) as port:
        topic = found.create("latency", 1, NODES)
        for kind, measure in (("blocking", _blocking), ("asyncio", _asyncio)):
            line = Line(
                figure="latency",
                title=f"3 nodes, acks=all, linger 0, one record at a time, {kind}",
            )
            results += latency_results(settings.base, line, measure(found, topic, port), bars)
    return results


def _blocking(found: Target, topic: str, port: int) -> dict[str, list[float]]:
    samples: list[float] = []
    (value,) = make_values(1)
    with Producer(found.bootstrap, acks="all", linger_ms=0) as producer:
        run = one_by_one(lambda: producer.send(topic, value).result(), samples)
        return _in_turns(found, Timed(run), samples, port)


def _asyncio(found: Target, topic: str, port: int) -> dict[str, list[float]]:
    samples: list[float] = []
    (value,) = make_values(1)

    async def begin(stack: AsyncExitStack) -> Any:
        producer = await stack.enter_async_context(
            AsyncProducer(found.bootstrap, acks="all", linger_ms=0)
        )

        async def work(seconds: float) -> int:
            clock = time.perf_counter
            last = clock()
            until = last + seconds
            count = 0
            while last < until:
                before = last
                await (await producer.send(topic, value))
                last = clock()
                samples.append(last - before)
                count += 1
            return count

        return work

    side = AsyncSide(begin)
    try:
        return _in_turns(found, side, samples, port)
    finally:
        side.close()


class RestClient:
    """Publishes one record per request over one kept connection."""

    def __init__(self, host: str, port: int, topic: str) -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=REPLY_S)
        self._path = f"/v1/topics/{topic}/messages"
        value = make_values(1, 512)[0].hex()  # 1 KiB of text
        self._body = json.dumps({"value": value})

    def publish(self) -> None:
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", self._path, self._body, headers)
        reply = self._connection.getresponse()
        text = reply.read()
        assert reply.status < 300, f"REST answered {reply.status}: {text[:200]!r}"

    def close(self) -> None:
        self._connection.close()


def measure_rest(settings: ClusterSettings) -> list[Result]:
    samples: list[float] = []
    with target(settings, NODES) as found, ExitStack() as stack:
        port = stack.enter_context(bare_nodes(found.directory, NODES))
        topic = found.create("rest", 1, NODES)
        with Admin(found.bootstrap) as admin:
            node = next(node for node in admin.nodes() if node.http_port)
        rest = RestClient(node.host, node.http_port, topic)
        stack.callback(rest.close)
        both = _in_turns(found, Timed(one_by_one(rest.publish, samples)), samples, port)
    line = Line(figure="rest", title="3 nodes, acks=all, REST, one record per request")
    bars = {0.5: Bar("value", REST_P50_MS, at_most=True), 0.99: None}
    return latency_results(settings.base, line, both, bars)
