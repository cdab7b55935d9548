"""How much all HTTP requests together may hold. (Core.)"""

from raftq.node.http.errors import Refusal


class Budget:
    """Requests and their bytes under way; what does not fit is refused, and may come later."""

    __slots__ = ("_bytes_max", "_requests_max", "bytes", "requests")

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self.requests = 0
        self.bytes = 0

    def open(self) -> "Share":
        if self.requests >= self._requests_max:
            raise Refusal("THROTTLED", "too many requests are under way")
        self.requests += 1
        return Share(self)

    def take(self, size: int) -> None:
        if self.bytes + size > self._bytes_max:
            raise Refusal("THROTTLED", "the requests under way hold too much memory")
        self.bytes += size


class Share:
    """What one request holds; given back with `close`, once."""

    __slots__ = ("_budget", "bytes")

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self.bytes = 0

    def hold(self, size: int) -> None:
        """Hold at least this much."""
        if size > self.bytes:
            self._budget.take(size - self.bytes)
            self.bytes = size

    def close(self) -> None:
        self._budget.requests -= 1
        self._budget.bytes -= self.bytes
        self.bytes = 0
