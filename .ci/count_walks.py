"""Counts the functions and files that three calls go through, for ARCHITECTURE.md.

    python .ci/count_walks.py            the counts
    python .ci/count_walks.py --list     also every function, in the order of its first entry

Three real nodes and the clients run in this process, each node in a thread of its own. A function
of the product counts once, if it is entered in every repetition of the call and in no pause between
them. Those of pauses (heartbeats, parked fetches, frames) have a star in the list.
"""

import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import CodeType, FrameType

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "fakes"))

from real_node import FAST, SECRET, free_port  # noqa: E402 - a helper of the tests

from raftq import Admin, Consumer, Producer  # noqa: E402
from raftq.client.common.disk import RealDisk  # noqa: E402
from raftq.node.app import Node, wall_ms  # noqa: E402
from raftq.node.config import Address, NodeConfig  # noqa: E402

REPEATS = 5
IDLE_S = 1.0
REACTION_S = 0.3
SETTLE_S = 2.0
entered: dict[CodeType, None] = {}


def note(frame: FrameType, event: str, _: object) -> None:
    if event == "call":
        entered.setdefault(frame.f_code)


def during(call: Callable[[], object]) -> list[CodeType]:
    """The named functions of the product that are entered meanwhile, and until all have reacted."""
    entered.clear()
    call()
    time.sleep(REACTION_S)
    return [one for one in list(entered) if "/raftq/" in one.co_filename and one.co_name[0] != "<"]


def file_of(code: CodeType) -> str:
    return code.co_filename.rpartition("/raftq/")[2]


def start_node(node_id: int, voters: dict[int, str], directory: str, nodes: list[Node]) -> None:
    async def serve() -> None:
        config = NodeConfig(
            node_id=node_id,
            secret=SECRET,
            data_dir=f"{directory}/{node_id}",
            native=Address("127.0.0.1", 0),
            http=Address("127.0.0.1", 0),
            raft=Address.parse(voters[node_id]),
            voters=voters,
            raft_times=FAST,
        )
        node = Node(config, disk=RealDisk(), rng=random.Random(node_id), wall_ms=wall_ms)
        await node.start()
        nodes.append(node)
        await asyncio.Event().wait()

    threading.Thread(target=lambda: asyncio.run(serve()), daemon=True).start()


def start_cluster(directory: str) -> list[Node]:
    nodes: list[Node] = []
    voters = {number: f"127.0.0.1:{free_port()}" for number in (1, 2, 3)}
    for node_id in voters:
        start_node(node_id, voters, directory, nodes)
    while len(nodes) < len(voters):
        time.sleep(0.1)
    return nodes


def report(name: str, call: Callable[[], object]) -> None:
    """What every repetition enters and no pause does: the rest is by chance."""
    always, idle = dict.fromkeys(during(call)), set[CodeType]()
    for _ in range(REPEATS):
        idle |= set(during(lambda: time.sleep(IDLE_S)))
        found = set(during(call))
        always = {one: None for one in always if one in found}
    own = [one for one in always if one not in idle]
    print(f"{name}: {len(own)} functions in {len({file_of(one) for one in own})} files")
    if "--list" in sys.argv:
        for one in always:
            print(f"  {'*' if one in idle else ' '} {file_of(one)} {one.co_qualname}")


def main() -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    nodes = start_cluster(tempfile.mkdtemp())
    bootstrap = ",".join(f"127.0.0.1:{node.native_port}" for node in nodes)
    url = f"http://127.0.0.1:{nodes[0].http_port}/v1/topics/orders/publish"
    admin = Admin(bootstrap)
    admin.create_topic("orders", partitions=1, replication=3)
    producer = Producer(bootstrap, linger_ms=0)
    consumer = Consumer(bootstrap)  # of no group: the heartbeats of a group are records, too
    consumer.assign([("orders", 0)])

    numbers = count()

    def send() -> None:
        producer.send("orders", b"pay 17").result(timeout=10)
        while not consumer.poll(timeout=5):
            continue

    def publish() -> None:
        body = json.dumps({"value": "pay 17"}).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
            answer.read()

    def create() -> None:
        admin.create_topic(f"payments-{next(numbers)}", partitions=1, replication=3)

    for warm_up in (send, publish, send, publish):
        warm_up()
    time.sleep(SETTLE_S)
    report("send to poll", send)
    report("REST publish", publish)
    report("create topic", create)
    sys.stdout.flush()
    os._exit(0)  # the nodes' threads never end


if __name__ == "__main__":
    main()
