"""Shell: the connections of one client, by address.

    none ──get──> connecting ──> open ──loss──> none
                       └──failed──> none, and every waiting caller gets the error

There is one connection per address, shared by all callers. Callers that come while it is being made
wait for the same attempt. Callers decide when to try again after a failure.
"""

import asyncio

from raftq.client.common.backoff import copy_error
from raftq.client.common.errors import ConnectionLost, RaftqError
from raftq.client.common.tasks import Tasks, resolve
from raftq.client.net.connection import Connection
from raftq.client.options import Address, ClientOptions


class Pool:
    """Connections to nodes."""

    def __init__(self, options: ClientOptions, tasks: Tasks) -> None:
        self._options = options.connection()
        self._tls = options.tls
        self._tasks = tasks
        self._open: dict[Address, Connection] = {}
        self._waiting: dict[Address, list[asyncio.Future[None]]] = {}
        self._failed: dict[Address, RaftqError] = {}
        self._closed = False

    def peek(self, address: Address) -> Connection | None:
        """The connection to an address, if there is one now."""
        connection = self._open.get(address)
        if connection is not None and connection.closed:
            del self._open[address]
            return None
        return connection

    async def get(self, address: Address) -> Connection:
        """Returns a connection, and makes it if there is none. Raises the error of the attempt."""
        while True:
            if self._closed:
                raise ConnectionLost("the client is closed").with_outcome("failed")
            connection = self.peek(address)
            if connection is not None:
                return connection
            done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            waiting = self._waiting.get(address)
            if waiting is None:
                self._waiting[address] = [done]
                self._tasks.spawn(self._connect(address))
            else:
                waiting.append(done)
            await done
            failed = self._failed.get(address)
            if failed is not None and self.peek(address) is None:
                raise copy_error(failed)

    async def _connect(self, address: Address) -> None:
        try:
            connection = await Connection.open(*address, self._options, self._tls)
            if self._closed:
                await connection.close()
                return
            self._open[address] = connection
            self._failed.pop(address, None)
        except RaftqError as error:
            self._failed[address] = error
        finally:
            for waiter in self._waiting.pop(address):
                resolve(waiter)

    def refuse(self) -> None:
        """Gives out no more connections, and ends the present ones."""
        self._closed = True
        for connection in self._open.values():
            connection.end()

    async def close(self) -> None:
        self.refuse()
        connections, self._open = self._open, {}
        for connection in connections.values():
            await connection.close()
