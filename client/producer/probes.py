"""Shell: finds out when stuck partitions can be written again.

While a partition is stuck, records without a key go elsewhere, so no record would show that it has
recovered. Probes ask instead: a leader answers a Produce without a batch exactly as it would answer
one with a batch. So a stuck partition costs no record its delivery time.

    stuck ──pause──> asked ──answered, or refused for good──> not stuck
      └<──no leader, no connection, refused for now──┘

The pauses grow up to `PROBE_MS_MAX`. A partition with records in flight is not probed: their own
attempts show its state. A refusal for good also ends the probing: the next record then gets that
error at once.
"""

from raftq.client.common.backoff import Backoff
from raftq.client.common.errors import NotLeader, RaftqError
from raftq.client.common.tasks import Tasks, sleep
from raftq.client.net.pool import Pool
from raftq.client.net.routes import Routes
from raftq.client.options import ProducerOptions
from raftq.client.producer.outbox import Outbox
from raftq.client.wire.messages import Produce

PROBE_MS_MAX = 2_000


class Probes:
    """Probes stuck partitions, each until it is not stuck any more."""

    def __init__(self, options: ProducerOptions, routes: Routes, pool: Pool, tasks: Tasks) -> None:
        self._options = options
        self._routes = routes
        self._pool = pool
        self._tasks = tasks
        self._watched: dict[Outbox, None] = {}

    def watch(self, outbox: Outbox) -> None:
        """Nothing is to be sent there; probes the partition if it is stuck."""
        if outbox.stuck and not outbox.window and outbox not in self._watched:
            self._watched[outbox] = None
            self._tasks.spawn(self._watch(outbox))

    async def _watch(self, outbox: Outbox) -> None:
        options = self._options
        backoff = Backoff(options.retry_backoff_ms, PROBE_MS_MAX, options.rng)
        while outbox.stuck and outbox.gone is None:
            await sleep(backoff.next_s())
            if outbox.stuck and not outbox.window and await self._takes_records(outbox):
                outbox.stuck = False
        del self._watched[outbox]

    async def _takes_records(self, outbox: Outbox) -> bool:
        options = self._options
        where = outbox.topic, outbox.partition
        # The leader and the disk are the same for delayed records, and a plain topic stays plain.
        request = Produce(*where, acks=options.acks, timeout_ms=options.request_ms)
        try:
            found = self._routes.leader(*where)
            if found is None:
                raise NotLeader(f"no leader is known for {outbox.label}")
            connection = await self._pool.get(found[1])
            await connection.request(request, timeout_s=options.request_ms / 1000)
        except RaftqError as error:
            if error.refresh_route:
                self._routes.hint(*where, error)
                self._routes.request_refresh()
            return not error.retriable
        return True
