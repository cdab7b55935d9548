"""How much all HTTP requests together may hold. (Core.)"""

from raftq.node.http.errors import Refusal


class Budget:
    """Requests and their bytes under way; what does not fit is refused, and may come later."""

    __slots__ = ("bytes", "bytes_max", "requests", "requests_max")

    def __init__(self, requests_max: int, bytes_max: int) -> None:
        self.requests_max = requests_max
        self.bytes_max = bytes_max
        self.requests = 0
        self.bytes = 0


class Share:
    """What one request holds of a budget, until `close`."""

    __slots__ = ("_budget", "bytes")

    def __init__(self, budget: Budget) -> None:
        if budget.requests >= budget.requests_max:
            raise Refusal("THROTTLED", "too many requests are under way")
        budget.requests += 1
        self._budget = budget
        self.bytes = 0

    def hold(self, size: int) -> None:
        """Hold at least this much."""
        more = size - self.bytes
        if more <= 0:
            return
        if self._budget.bytes + more > self._budget.bytes_max:
            raise Refusal("THROTTLED", "the requests under way hold too much memory")
        self._budget.bytes += more
        self.bytes = size

    def close(self) -> None:
        self._budget.requests -= 1
        self._budget.bytes -= self.bytes
        self.bytes = 0
