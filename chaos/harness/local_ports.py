"""Shell: free ports for processes that are about to start.

A port is tried by binding it and is free again when the call returns, so its user must be ready to
find it taken. Ports come from below the range that the kernel uses for outgoing connections. In
that range a client that keeps trying to reach a dead node can get the node's own port, and the node
then cannot start again.

For the same reason a port is not given out twice while its node is not up yet, or down for a while.
This process claims the newest ports by sockets that have the port's number as a name. Other
clusters on this machine see these claims. They end with the process.
"""

import atexit
import contextlib
import random
import socket
import sys
from collections import deque

from raftq.client.common.errors import ConfigError

LEAST = 10_000
TRIES_MAX = 1_000
CLAIMS_MAX = 400
_RANGE_FILE = "/proc/sys/net/ipv4/ip_local_port_range"
_claims: deque[socket.socket] = deque()


def free_ports(host: str, count: int, rng: random.Random | None = None) -> list[int]:
    """Different ports that were free a moment ago."""
    chance = random.SystemRandom() if rng is None else rng
    most = _outgoing_from()
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for _ in range(TRIES_MAX):
            if len(found) == count:
                return found
            port = chance.randrange(LEAST, most) if most > LEAST + TRIES_MAX else 0
            bound = _bound(host, port)
            if bound is not None:
                held.enter_context(bound)
                if _claim(bound.getsockname()[1]):
                    found.append(bound.getsockname()[1])
    raise ConfigError(f"no {count} free ports on {host}")


def _claim(port: int) -> bool:
    """Claims the port; says whether no process on this machine has given it out lately."""
    if not sys.platform.startswith("linux"):
        return True  # other systems have no such names
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.bind(f"\0raftq-port-{port}")
    except OSError:
        one.close()
        return False
    _claims.append(one)
    while len(_claims) > CLAIMS_MAX:
        _claims.popleft().close()
    return True


@atexit.register
def _give_up_claims() -> None:
    while _claims:
        _claims.popleft().close()


def is_free(host: str, port: int) -> bool:
    bound = _bound(host, port)
    if bound is None:
        return False
    bound.close()
    return True


def _bound(host: str, port: int) -> socket.socket | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As listeners do it: lingering connections of a dead process do not count.
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, port))
        one.listen(1)  # with SO_REUSEADDR two sockets may bind, but only one may listen
    except OSError:
        one.close()
        return None
    return one


def _outgoing_from() -> int:
    try:
        with open(_RANGE_FILE, encoding="ascii") as file:
            return int(file.read().split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
